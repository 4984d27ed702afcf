"""How soon the first token comes, when a long prefix was asked before: mlxd beside mlx-lm's own server, and others.

    python -m tests.bench.prefix_bench [--repeats N] [--prompt-tokens N] [--model FOLDER] [--picture]
        [--peer NAME=COMMAND]…

One run, one machine, the same model folder, the same BLAS for all, one server at a time, in turn. A prompt is a
document of its own in each repeat, with a question; it is asked cold, with another question, and again word for word.
Then every process is killed, the server is started again and asked a third question; then it is stopped cleanly,
started and asked a fourth. What keeps nothing on disk has its last two figures measured once, not in every repeat.

The model is loaded before anything is timed (mlxd loads it with the first request). Time to first token is from sending
the request to the first text of the stream, as a user of the openai SDK sees it.
"""

import argparse
import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import openai
from msgspec import Struct
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.bench.measuring import print_head, print_table, save_bars, spread, versions
from tests.bench.servers import BenchFailed, Mlxd, Server, mlx_lm_server, models_cache, peer_server
from worker import demo_model

PICTURE = Path(__file__).parent / "pictures" / "prefix.png"
MAX_TOKENS = 24
REQUEST_SECONDS = 300.0

SYSTEM = "Answer the question about this report in one sentence.\n\n"
PEOPLE = ("The engineer", "A visitor", "The night watch", "Our supplier", "The new tenant", "The gardener")
DEEDS = ("repaired", "measured", "painted over", "asked about", "photographed", "moved", "forgot", "replaced")
THINGS = ("the boiler", "a window", "the east stairs", "two lamps", "the old pump", "a fence", "the archive", "a door")
TIMES = ("in the morning", "after lunch", "before the storm", "twice", "without a permit", "on a Sunday")
QUESTIONS = (
    "Who is mentioned first?",
    "What was repaired?",
    "Was there a storm?",
    "What happened on a Sunday?",
)

Moment = Literal["cold", "other question", "same prompt", "after SIGKILL", "after a stop"]
MOMENTS: tuple[Moment, ...] = ("cold", "other question", "same prompt", "after SIGKILL", "after a stop")


class Answer(Struct, frozen=True, kw_only=True):
    """One streamed completion."""

    first_token_seconds: float
    text: str
    prompt_tokens: int
    cached_tokens: int


class Prompts:
    """Prompts of a known length in tokens, chat template included."""

    def __init__(self, folder: Path, prompt_tokens: int) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)  # pyright: ignore
        self._prompt_tokens = prompt_tokens

    def ask(self, document: str, question: str) -> list[ChatCompletionMessageParam]:
        """The longest beginning of the document's lines with which the prompt has no more than the wanted tokens."""
        lines = document.splitlines(keepends=True)
        low, high = 1, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(_messages("".join(lines[:middle]), QUESTIONS[0])) <= self._prompt_tokens:
                low = middle
            else:
                high = middle - 1
        return _messages("".join(lines[:low]), question)

    def _count(self, messages: list[ChatCompletionMessageParam]) -> int:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # pyright: ignore
        return len(self._tokenizer.encode(text, add_special_tokens=False))  # pyright: ignore


def report(seed: int, lines: int) -> str:
    """A document that shares no beginning with that of another seed."""
    draw = random.Random(seed)
    told = (
        f"{draw.choice(PEOPLE)} {draw.choice(DEEDS)} {draw.choice(THINGS)} {draw.choice(TIMES)}." for _ in range(lines)
    )
    return f"Report {draw.randrange(10**8)}\n" + "".join(f"{number}. {line}\n" for number, line in enumerate(told, 1))


def ask(server: Server, messages: Sequence[ChatCompletionMessageParam], max_tokens: int = MAX_TOKENS) -> Answer:
    """Stream one completion. Raises BenchFailed when no text came."""
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=REQUEST_SECONDS) as client:
        started = time.perf_counter()
        first_token_seconds: float | None = None
        texts: list[str] = []
        prompt_tokens = cached_tokens = 0
        for chunk in client.chat.completions.create(
            model=server.model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first_token_seconds = first_token_seconds or time.perf_counter() - started
                texts.append(text)
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
                details = chunk.usage.prompt_tokens_details
                cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    if first_token_seconds is None:
        raise BenchFailed(f"{server.name} sent no text: look into its log")
    return Answer(
        first_token_seconds=first_token_seconds,
        text="".join(texts),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def start_and_load(server: Server) -> None:
    """Started, its model loaded, its kernels compiled."""
    server.start()
    ask(server, [{"role": "user", "content": "Say hello."}], max_tokens=2)


def one_repeat(
    server: Server, prompts: Prompts, document: str, restarts: Literal["with restarts", "without"]
) -> Mapping[Moment, Answer]:
    """From a fresh start to a stopped server."""
    answers: dict[Moment, Answer] = {}
    asked = [prompts.ask(document, question) for question in QUESTIONS]
    start_and_load(server)
    answers["cold"] = ask(server, asked[0])
    answers["other question"] = ask(server, asked[1])
    answers["same prompt"] = ask(server, asked[0])
    if restarts == "with restarts":
        server.settle()
        server.kill()
        start_and_load(server)
        answers["after SIGKILL"] = ask(server, asked[2])
        server.stop()
        start_and_load(server)
        answers["after a stop"] = ask(server, asked[3])
    server.stop()
    return answers


@contextlib.contextmanager
def all_servers(folder: Path, peers: Sequence[str]) -> Generator[list[Server]]:
    """Not started, mlxd first; nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory, contextlib.ExitStack() as stack:
        mlxd = Mlxd(folder)
        stack.callback(mlxd.close)
        others = [
            mlx_lm_server(folder, Path(directory)),
            *(peer_server(peer, folder, Path(directory)) for peer in peers),
        ]
        for other in others:
            stack.callback(other.close)
        print(f"BLAS for all: {others[0].blas}", flush=True)
        yield [mlxd, *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2040)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND with {model} and {port}; repeatable")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"time to first token, prompt of {arguments.prompt_tokens} tokens, model {folder.name}")
    prompts = Prompts(folder, arguments.prompt_tokens)
    taken: dict[str, dict[Moment, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    began = time.monotonic()
    with all_servers(folder, arguments.peer) as servers:
        for repeat in range(arguments.repeats):
            # Seeds differ from run to run on purpose: nothing that an earlier run left anywhere can help.
            document = report(random.SystemRandom().randrange(2**32), lines=arguments.prompt_tokens // 5)
            for server in servers:
                restarts = "with restarts" if server.name == "mlxd" or repeat == 0 else "without"
                try:
                    answers = one_repeat(server, prompts, document, restarts)
                except (BenchFailed, openai.OpenAIError) as why:
                    if server.name == "mlxd":
                        raise
                    print(f"repeat {repeat + 1}, {server.name} failed: {why}", flush=True)
                    server.kill()
                    continue
                for moment, answer in answers.items():
                    taken[server.name][moment].append(answer)
                print(f"repeat {repeat + 1}, {server.name}: {time.monotonic() - began:.0f} s", flush=True)
    _print(taken)
    if arguments.picture:
        series = {
            name: [spread([answer.first_token_seconds for answer in answers[moment]]).median for moment in MOMENTS]
            for name, answers in taken.items()
        }
        title = f"Time to first token, {arguments.prompt_tokens} tokens, {folder.name}"
        save_bars(PICTURE, title, "seconds (less is better)", MOMENTS, series, versions())


def _print(taken: Mapping[str, Mapping[Moment, Sequence[Answer]]]) -> None:
    rows = [
        [
            name,
            *(
                f"{spread([answer.first_token_seconds for answer in answers[moment]]).text()} "
                f"[{min(answer.cached_tokens for answer in answers[moment])}]"
                for moment in MOMENTS
            ),
        ]
        for name, answers in taken.items()
    ]
    print_table("seconds to first token, median (least-most) [fewest cached tokens]", ["", *MOMENTS], rows)
    ours = taken["mlxd"]
    for name, answers in taken.items():
        if name == "mlxd":
            continue
        pairs = [
            (one.text, other.text)
            for moment in MOMENTS
            for one, other in zip(ours[moment], answers[moment], strict=False)
        ]
        equal = sum(one == other for one, other in pairs)
        print(f"greedy texts of mlxd and {name} that are equal, letter for letter: {equal} of {len(pairs)}")
    lengths = {answer.prompt_tokens for answers in taken.values() for one in answers.values() for answer in one}
    print(f"prompt tokens as the servers count them: {min(lengths)} to {max(lengths)}")


def _messages(document: str, question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "system", "content": SYSTEM + document}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main()
