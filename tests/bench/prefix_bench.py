"""How soon the first token comes, when a long prefix was asked before: mlxd beside mlx-lm's own server.

    python -m tests.bench.prefix_bench [--repeats N] [--prompt-tokens N] [--model FOLDER] [--picture]

One run, one machine, the same model folder, the same BLAS for both, one server at a time, in turn. A prompt is a
document of its own in each repeat, with a question; it is asked cold, with another question, and again word for word.
Then every process is killed, the server is started again and asked a third question; then it is stopped cleanly,
started and asked a fourth. mlx-lm's server keeps nothing on disk: its last two figures are measured once, not in every
repeat.

The model is loaded before anything is timed (mlxd loads it with the first request). Time to first token is from sending
the request to the first text of the stream, as a user of the openai SDK sees it.
"""

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, Protocol

import openai
import psutil
from msgspec import Struct
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gateway.blas import worker_environment
from tests.bench.measuring import print_head, print_table, save_bars, spread, versions
from tests.fakes.live_service import LiveService, until
from worker import demo_model

PICTURE = Path(__file__).parent / "pictures" / "prefix.png"
MODEL_NAME = "bench"
MAX_TOKENS = 24
START_SECONDS = 120.0
SETTLE_SECONDS = 30.0
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


class BenchFailed(Exception):
    """A server did not do what the benchmark needs. Says what, and where its log is."""


class Answer(Struct, frozen=True, kw_only=True):
    """One streamed completion."""

    first_token_seconds: float
    text: str
    prompt_tokens: int
    cached_tokens: int


class Server(Protocol):
    """A server that can be started, stopped and killed, again and again, with all that it keeps."""

    @property
    def name(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @abstractmethod
    def start(self) -> None:
        """Until it listens."""
        ...

    @abstractmethod
    def settle(self) -> None:
        """Until it writes nothing more."""
        ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL to every process of it, as when the power goes."""
        ...


class Mlxd:
    """`mlxd serve` with a home of its own and its default settings."""

    name = "mlxd"
    model = MODEL_NAME

    def __init__(self, folder: Path) -> None:
        self._service = LiveService({MODEL_NAME: folder}, "")

    @property
    def base_url(self) -> str:
        return f"{self._service.base_url}/v1"

    def start(self) -> None:
        self._service.start()

    def settle(self) -> None:
        """Until the number of durable blocks stays the same for a second."""
        last, since = -1, time.monotonic()

        def stays() -> bool:
            nonlocal last, since
            stored = self._service.stored_blocks()
            if stored != last:
                last, since = stored, time.monotonic()
            return time.monotonic() - since > 1.0

        until("mlxd writes nothing more", stays, seconds=SETTLE_SECONDS)

    def stop(self) -> None:
        self._service.stop()

    def kill(self) -> None:
        self._service.kill_everything()

    def close(self) -> None:
        self._service.end()


class MlxLm:
    """`python -m mlx_lm server` with its default settings and the environment of mlxd's workers."""

    name = "mlx-lm"

    def __init__(self, folder: Path, directory: Path) -> None:
        self._folder = folder
        found = worker_environment({**os.environ, "HF_HUB_OFFLINE": "1"}, directory / "blas")
        self._environment = found.environment
        self.blas = found.description
        self._log_path = directory / "mlx_lm.log"
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def model(self) -> str:
        return str(self._folder)

    def start(self) -> None:
        self._log = self._log_path.open("ab")
        command = [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self._port)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until("mlx-lm's server listens", self._is_listening, seconds=START_SECONDS)

    def settle(self) -> None:
        """It keeps nothing on disk."""

    def stop(self) -> None:
        for process in self._processes():
            process.terminate()
        self._ended()

    def kill(self) -> None:
        for process in self._processes():
            process.kill()
        self._ended()

    def close(self) -> None:
        self.kill()

    def _is_listening(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            last = self._log_path.read_text(errors="replace")[-1000:]
            raise BenchFailed(f"mlx-lm's server ended at its start; its last lines:\n{last}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False

    def _processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _ended(self) -> None:
        if self._process is not None:
            self._process.wait(SETTLE_SECONDS)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


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
def both_servers(folder: Path) -> Generator[tuple[Mlxd, MlxLm]]:
    """Not started; nothing of them is left at the end."""
    with tempfile.TemporaryDirectory(prefix="mlxdb") as directory:
        mlxd, mlx_lm = Mlxd(folder), MlxLm(folder, Path(directory))
        try:
            yield mlxd, mlx_lm
        finally:
            mlxd.close()
            mlx_lm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2040)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    parser.add_argument("--picture", action="store_true", help=f"also write {PICTURE.name} under pictures/")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        _models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"time to first token, prompt of {arguments.prompt_tokens} tokens, model {folder.name}")
    prompts = Prompts(folder, arguments.prompt_tokens)
    taken: dict[str, dict[Moment, list[Answer]]] = {"mlxd": defaultdict(list), "mlx-lm": defaultdict(list)}
    began = time.monotonic()
    with both_servers(folder) as (mlxd, mlx_lm):
        print(f"BLAS for both: {mlx_lm.blas}", flush=True)
        for repeat in range(arguments.repeats):
            # Seeds differ from run to run on purpose: nothing that an earlier run left anywhere can help.
            document = report(random.SystemRandom().randrange(2**32), lines=arguments.prompt_tokens // 5)
            for server in (mlxd, mlx_lm):
                keeps_on_disk = server is mlxd
                restarts = "with restarts" if keeps_on_disk or repeat == 0 else "without"
                for moment, answer in one_repeat(server, prompts, document, restarts).items():
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
    rows: list[list[str]] = []
    for moment in MOMENTS:
        seconds = {
            name: spread([answer.first_token_seconds for answer in answers[moment]]) for name, answers in taken.items()
        }
        cached = {name: min(answer.cached_tokens for answer in answers[moment]) for name, answers in taken.items()}
        ratio = seconds["mlx-lm"].median / seconds["mlxd"].median
        rows.append(
            [
                moment,
                seconds["mlxd"].text(),
                str(cached["mlxd"]),
                seconds["mlx-lm"].text(),
                str(cached["mlx-lm"]),
                f"{ratio:.1f}x",
            ]
        )
    columns = ["", "mlxd, s", "cached", "mlx-lm, s", "cached", "mlx-lm / mlxd"]
    print_table("time to first token, median (least-most); cached: fewest cached tokens", columns, rows)
    pairs = [
        (one.text, other.text)
        for moment in MOMENTS
        for one, other in zip(taken["mlxd"][moment], taken["mlx-lm"][moment], strict=False)
    ]
    equal = sum(one == other for one, other in pairs)
    print(f"greedy texts that are equal, letter for letter: {equal} of {len(pairs)}")
    lengths = {answer.prompt_tokens for answers in taken.values() for one in answers.values() for answer in one}
    print(f"prompt tokens as the servers count them: {min(lengths)} to {max(lengths)}")


def _messages(document: str, question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "system", "content": SYSTEM + document}, {"role": "user", "content": question}]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _models_cache() -> Path:
    """Where the tests keep the models they build."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        return Path(configured) / "mlxd-tests"
    is_mac = sys.platform == "darwin"
    return Path.home() / ("Library/Caches" if is_mac else ".cache") / "mlxd-tests"


if __name__ == "__main__":
    main()
