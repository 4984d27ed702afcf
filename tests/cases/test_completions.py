"""The legacy route as editors and benchmarks use it: several prompts, echo, suffixes, answers that do not stop."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.cases.conftest import MODEL
from tests.fakes.http_answers import CHAT, COMPLETIONS, ask, body
from tests.fakes.live_service import LiveService
from tests.fakes.script_model import CONTEXT_TOKENS, said_by

PROMPTS = ["<|SC04|>", "<|SC01|>"]


def texts_of(client: httpx.Client, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """The texts by index, the same in both modes, and the bill."""
    request = {"model": MODEL, "max_tokens": 100, **fields}
    whole = client.post(COMPLETIONS, json=request).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    streamed = [""] * len(texts)
    asked = {**request, "stream": True, "stream_options": {"include_usage": True}}
    *lines, done = client.post(COMPLETIONS, json=asked).text.split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key]
    return texts, whole["usage"]


def test_several_prompts_answer_in_order(client: httpx.Client) -> None:
    """Prompt by prompt, n answers each, and each prompt is billed once."""
    texts, usage = texts_of(client, prompt=PROMPTS, n=2)
    assert texts == [said_by("SC04")] * 2 + [said_by("SC01")] * 2
    alone = [texts_of(client, prompt=prompt)[1] for prompt in PROMPTS]
    assert usage["prompt_tokens"] == sum(bill["prompt_tokens"] for bill in alone)
    assert usage["completion_tokens"] == 2 * sum(bill["completion_tokens"] for bill in alone)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_bad_prompt_is_refused_before_the_status_line(client: httpx.Client, at: int) -> None:
    """B08: whichever of several prompts does not fit, both modes say so, and no half answer is sent."""
    prompts = ["<|SC04|>"] * 3
    prompts[at] = "y" * (CONTEXT_TOKENS + 1)
    answer = ask(client, body(MODEL, prompt=prompts), path=COMPLETIONS)
    assert answer.status == 400
    assert answer.error is not None
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", "prompt")


def test_echo_gives_the_prompts_back(client: httpx.Client) -> None:
    """Each answer begins with its prompt, in both modes."""
    texts, _ = texts_of(client, prompt=PROMPTS, echo=True)
    assert texts == ["<|SC04|>" + said_by("SC04"), "<|SC01|>" + said_by("SC01")]


def test_a_suffix_needs_a_model_that_fills_in(client: httpx.Client) -> None:
    """The script model has no such tokens: an honest 400 in both modes, never an answer that ignored the suffix."""
    answer = ask(client, body(MODEL, prompt="<|SC04|>", suffix="end"), path=COMPLETIONS)
    assert answer.status == 400
    assert answer.error is not None
    assert (answer.error["param"], answer.error["code"]) == ("suffix", "unsupported")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ignore_eos_goes_on(client: httpx.Client, path: str) -> None:
    """Benchmarks count tokens: the model's own end is none then, and the text before it is the same."""
    prompt: dict[str, Any] = {"prompt": "<|SC04|>"} if path == COMPLETIONS else {"said": "SC04"}
    answer = ask(client, body(MODEL, max_tokens=40, ignore_eos=True, **prompt), path=path)
    assert (answer.completion_tokens, answer.finish) == (40, "length")
    assert answer.text.startswith(said_by("SC04"))


def test_the_sdk_asks_for_several(service: LiveService, client: httpx.Client) -> None:
    """As lm-eval and others do through the SDK: lists of prompts, best_of as many as n."""
    del client  # afterwards the service must still serve
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="any", max_retries=0) as sdk:
        answer = sdk.completions.create(model=MODEL, prompt=PROMPTS, n=2, best_of=2, max_tokens=100, logprobs=0)
    assert [choice.text for choice in answer.choices] == [said_by("SC04")] * 2 + [said_by("SC01")] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == said_by("SC04")
