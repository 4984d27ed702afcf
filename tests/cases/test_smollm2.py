"""A real model behind the real service: the openai SDK, and greedy texts that equal mlx-lm's letter for letter."""

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import Struct
from openai.types.chat import ChatCompletion

from gateway.blas import worker_environment
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS
from tests.fakes.http_answers import CHAT, ask, ask_whole, body, open_stream, user
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.reference_generation import reference_texts

MODEL = "smollm2"
MAX_TOKENS = 10
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "What do bees make?",
    "Say hello in Spanish.",
    "What is two plus two?",
    "Why is the sky blue? Answer in few words.",
)
RULES = "\n".join(
    f"Rule {number}: when a visitor asks for room {number * 7 % 40}, send them to floor {number * 3 % 9} first."
    for number in range(1, 25)
)
"""The long part of a prompt, some six hundred tokens."""

PREFIXED = ("Which rule is about floor 3?", "Summarize the rules in five words.")


class References(Struct, frozen=True, kw_only=True):
    """What mlx-lm says to each question, and to each question behind the rules."""

    plain: dict[str, str]
    prefixed: dict[str, str]


def prefixed(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": RULES}, *user(question)]


@pytest.fixture(scope="module")
def references(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    environment = worker_environment({**os.environ, "HF_HUB_OFFLINE": "1"}, tmp_path_factory.mktemp("blas")).environment
    asked = [(user(question), MAX_TOKENS) for question in QUESTIONS]
    asked += [(prefixed(question), MAX_TOKENS) for question in PREFIXED]
    texts = reference_texts(smollm2, asked, environment)
    return References(
        plain=dict(zip(QUESTIONS, texts, strict=False)),
        prefixed=dict(zip(PREFIXED, texts[len(QUESTIONS) :], strict=True)),
    )


@pytest.fixture(scope="module")
def service(smollm2: Path) -> Iterator[LiveService]:
    with live_service({MODEL: smollm2}) as live:
        yield live


def sdk(service: LiveService) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0, timeout=120)


def complete(client: openai.OpenAI, messages: Any) -> ChatCompletion:
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0)


def stream(client: openai.OpenAI, messages: Any) -> str:
    """The joined text of a stream, as any user of the SDK would join it."""
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _stream_question(client: openai.OpenAI, question: str) -> str:
    return stream(client, user(question))


def text_of(completion: ChatCompletion) -> str:
    return completion.choices[0].message.content or ""


def cached_of(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def test_the_sdk_completes_and_streams_what_mlx_lm_says(service: LiveService, references: References) -> None:
    """One at a time, whole and streamed: the text is mlx_lm.generate's, letter for letter."""
    with sdk(service) as client:
        for question in QUESTIONS[:2]:
            assert text_of(complete(client, user(question))) == references.plain[question]
            assert stream(client, user(question)) == references.plain[question]


@pytest.mark.parametrize("rows", [4, 8])
def test_a_batch_says_what_each_row_says_alone(service: LiveService, references: References, rows: int) -> None:
    """Rows that decode together say what mlx-lm says to each alone."""
    questions = QUESTIONS[-rows:]
    with sdk(service) as client, concurrent.futures.ThreadPoolExecutor(rows) as threads:
        texts = list(threads.map(partial(_stream_question, client), questions))
    assert dict(zip(questions, texts, strict=True)) == {question: references.plain[question] for question in questions}


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_real_model_keeps_to_a_schema_and_calls_what_it_must(service: LiveService) -> None:
    """A model of 135 M parameters that was never told of tools: forced calls and schemas hold, whole and streamed."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
    said = "What will the weather be in Paris for the next three days?"
    with service.client() as client:
        common = {"said": said, "temperature": 0, "max_tokens": 60}
        call = ask(client, body(MODEL, tools=[tool], tool_choice="required", parallel_tool_calls=False, **common))
        (made,) = call.calls
        assert (made.name, call.finish, call.text) == ("get_weather", "tool_calls", "")
        named = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
        answer = ask(client, body(MODEL, response_format=named, **common))
        for text in (made.arguments, answer.text):
            value = json.loads(text)
            assert value["city"] in ("Oslo", "Paris")
            assert value["days"] in range(1, 10)


def test_streams_go_on_while_a_long_prompt_is_read(service: LiveService, references: References) -> None:
    """Rows that ride along in the passes of a prompt of six hundred tokens say what they said before, and the prompt is
    answered with what mlx-lm says."""
    questions = QUESTIONS[2:4]

    def told(client: openai.OpenAI, question: str, seen: list[str]) -> str:
        chunks = client.chat.completions.create(
            model=MODEL, messages=user(question), max_tokens=40, temperature=0, stream=True
        )
        seen.extend(chunk.choices[0].delta.content or "" for chunk in chunks)
        return "".join(seen)

    with sdk(service) as client, concurrent.futures.ThreadPoolExecutor(2) as threads:
        before = [told(client, question, []) for question in questions]
        seen: list[list[str]] = [[] for _ in questions]
        streams = [threads.submit(told, client, *each) for each in zip(questions, seen, strict=True)]
        until("both stream", lambda: all(any(texts) for texts in seen), seconds=20)
        at_first = sum(map(len, seen))
        answer = complete(client, prefixed(PREFIXED[0]))
        at_last = sum(map(len, seen))
        after = [stream.result(timeout=60) for stream in streams]

    assert text_of(answer) == references.prefixed[PREFIXED[0]]
    assert cached_of(answer) < 100, "the long part was not read beside the streams"
    assert at_last - at_first > 10
    assert after == before


def test_b07_iii_leaving_during_a_long_prefill(service: LiveService) -> None:
    """B07 iii: a client that leaves while its prompt is read stops that within two seconds, in both modes."""
    long = "".join(f"Line {number}: {RULES[number * 7 : number * 7 + 60]}\n" for number in range(120))
    with service.client() as client, sdk(service) as short:
        assert complete(short, user("Hi")).choices
        with open_stream(client, body(MODEL, said=long)) as opened:
            next(opened.chunks())
            assert service.model(MODEL).open_requests == 1
        service.until_idle(MODEL, seconds=2.5)
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=body(MODEL, said=f"Again: {long}"), timeout=httpx.Timeout(20.0, read=0.5))
        service.until_idle(MODEL, seconds=2.5)
        left = time.monotonic()
        assert ask_whole(client, body(MODEL, said="Hi", max_tokens=4)).status == 200
        assert time.monotonic() - left < 5.0


def test_a_prefix_outlives_everything(smollm2: Path, references: References) -> None:
    """A long prefix is computed once: asked again it is reused from RAM, after the worker's SIGKILL, after a restart
    of the service and after SIGKILL of everything, at least nine tenths of it each time, and the greedy text stays
    mlx-lm's."""
    first, second = PREFIXED
    with live_service({MODEL: smollm2}) as service:
        with sdk(service) as client:
            cold = complete(client, prefixed(first))
            assert (text_of(cold), cached_of(cold)) == (references.prefixed[first], 0)
            assert cold.usage is not None
            least = cold.usage.prompt_tokens * 9 // 10
            assert cold.usage.prompt_tokens % 256 > cold.usage.prompt_tokens // 10, "whole blocks alone would be enough"

            def warm(question: str, where: str) -> None:
                answer = complete(client, prefixed(question))
                assert cached_of(answer) >= least, f"{where}: {cached_of(answer)} of {least}"
                assert text_of(answer) == references.prefixed[question], where

            warm(first, "in RAM")
            warm(second, "in RAM")
            until("the prefix is durable", lambda: service.stored_blocks() >= 3, seconds=20)

            os.kill(service.worker_pid(MODEL), signal.SIGKILL)
            warm(first, "after the worker's death")
        service.stop()

        service.start()
        with sdk(service) as client:
            warm(first, "after a restart")
            assert stream(client, prefixed(first)) == references.prefixed[first]
        service.kill_everything()

        service.start()
        with sdk(service) as client:
            warm(first, "after SIGKILL of everything")
            warm(second, "after SIGKILL of everything")


EDGES = tuple(blocks * BLOCK_TOKENS + more for blocks in (1, 2) for more in (-1, 0, 1))
"""How long prompts are that end just before, with and just after a block."""


def _of_length(tokenizer: Any, tokens: int) -> list[dict[str, Any]]:
    """A conversation whose prompt has exactly so many tokens."""

    def padded(words: int) -> list[dict[str, Any]]:
        return user(f"{RULES[: tokens * 2]}{' sea' * words}\n{PREFIXED[0]}")

    def length(messages: list[dict[str, Any]]) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    messages = padded(tokens - length(padded(0)))
    assert length(messages) == tokens
    return messages


@contextlib.contextmanager
def _decoding(client: openai.OpenAI) -> Generator[list[str]]:
    """A row that goes on decoding until it is left; what it said so far. It must not have ended by then."""
    seen: list[str] = []
    messages: Any = user(QUESTIONS[2])
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    leaves, ended = threading.Event(), threading.Event()

    def read() -> None:
        for chunk in chunks:
            seen.append(chunk.choices[0].delta.content or "")
            if leaves.is_set():
                chunks.close()
                return
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        until("it decodes", lambda: any(seen), seconds=20)
        yield seen
        assert not ended.is_set(), "the row ended before it was left"
    finally:
        leaves.set()
        reader.join(20)


def test_a_hit_at_the_edge_of_a_block_says_what_the_cold_run_said(smollm2: Path) -> None:
    """From RAM, from RAM beside a row that decodes meanwhile, and from disk after a restart: all of the prompt but its
    last token is reused (from disk: all its whole grains), and the greedy text is that of the run that computed it.

    Such texts forgive much: they stay the same when a block's KV is that of the tokens one before. The logarithms of
    its tokens' probabilities do not, while sums in another order move them by less than a hundredth.
    """
    from mlx_lm.utils import load_tokenizer

    tokenizer: Any = load_tokenizer(smollm2)
    asked: dict[int, Any] = {length: _of_length(tokenizer, length) for length in EDGES}

    def said(client: openai.OpenAI, length: int, cached: int) -> tuple[str, list[float]]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=asked[length],
            max_tokens=MAX_TOKENS,
            temperature=0,
            logprobs=True,
            extra_body={"cache_salt": f"for {length}"},  # else a cold run would reuse what it shares with another's
        )
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, cached_of(answer)) == (length, cached)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        return text_of(answer), [token.logprob for token in logprobs.content or ()]

    def is_said_again(client: openai.OpenAI, length: int, cached: int) -> None:
        text, logprobs = said(client, length, cached)
        assert text == cold[length][0], length
        assert logprobs == pytest.approx(cold[length][1], abs=0.01), length

    with live_service({MODEL: smollm2}) as service:
        with sdk(service) as client:
            cold = {length: said(client, length, 0) for length in EDGES}
            assert all(len(logprobs) == MAX_TOKENS for _, logprobs in cold.values())
            for length in EDGES:
                is_said_again(client, length, length - 1)
            with _decoding(client) as beside:
                for length in EDGES:
                    before = len(beside)
                    is_said_again(client, length, length - 1)
                    assert len(beside) - before >= MAX_TOKENS // 2, "the other row did not decode meanwhile"
        service.stop()
        service.start()
        with sdk(service) as client:
            for length in EDGES:
                on_disk = min(length // GRAIN_TOKENS * GRAIN_TOKENS, length - 1)
                is_said_again(client, length, on_disk)
