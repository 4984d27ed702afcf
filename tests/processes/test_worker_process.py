"""Real worker processes, over the real socket: what they say, what they stop doing, and how they end."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.blocks import BlockRequest, Forget, Forgotten, Found, Lookup, Publish, Stage, Staged
from protocol.failures import FailureKind
from protocol.generation import (
    Cancel,
    ChatMessage,
    ChatPrompt,
    Drain,
    Failed,
    Finished,
    FinishReason,
    ForgetHot,
    LastWords,
    Loading,
    Prefilling,
    Queued,
    Ready,
)
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.ids import LeaseId, RequestId
from protocol.sampling import Sampling
from tests.fakes.fake_store import Answer, FakeStore
from tests.fakes.script_model import said_by
from tests.processes.running_worker import Start, WorkerProcess

# --- what it says ---------------------------------------------------------------------------------------------------


def test_a_life(start: Start, script_model: Path) -> None:
    """Hello first, progress, Ready with limits; then answers, stops, lengths, refusals; a drain, and exit 0."""
    worker = start(script_model, context_tokens=1000, max_rows=3)
    hello, ready = worker.events[0], worker.events[-1]
    assert isinstance(hello, Hello)
    assert (hello.protocol_version, hello.pid) == (PROTOCOL_VERSION, worker.process.pid)
    assert isinstance(ready, Ready)
    assert (ready.context_tokens, ready.max_rows, ready.prefix_reuse.available) == (1000, 3, True)
    assert any(isinstance(event, Loading) for event in worker.events)
    worker.send(Welcome())

    for tag in ("SC01", "SC02", "SC04", "SC07", "SC15"):
        assert worker.ask(tag, f"say {tag}") == said_by(tag)
    assert worker.ask("stopped", "SC04", stop=("beta gamma",)) == "alpha "
    end = worker.end("stopped")
    assert isinstance(end, Finished)
    assert (end.reason, end.matched_stop) == (FinishReason.STOP, "beta gamma")
    assert worker.ask("long", "SC19", stop=("t005 t006",)) == " t000 t001 t002 t003 t004 "
    worker.ask("cut", "SC19", max_tokens=5)
    end = worker.end("cut")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 5)

    worker.send({"no": 1})
    worker.generate("too long", [1] * 1000)
    refused = worker.end("too long")
    assert isinstance(refused, Failed)
    assert refused.failure.kind is FailureKind.CONTEXT_LENGTH_EXCEEDED
    assert not any(isinstance(event, Queued) for event in worker.of("too long"))

    worker.send(Drain(deadline_seconds=5.0))
    assert worker.exit_code() == 0
    assert "malformed_command" in worker.log


def test_many_at_once(start: Start, script_model: Path) -> None:
    """H02: twelve scripts with their own stops, temperatures and lengths on four rows, each as alone."""
    worker = start(script_model, max_rows=4)
    tags = ["SC01", "SC02", "SC04", "SC07", "SC08", "SC09", "SC10", "SC12", "SC13", "SC15", "SC18", "SC21"]
    for i, tag in enumerate(tags):
        sampling = Sampling(temperature=0.2 * (i % 3), seed=i)
        worker.generate(tag, f"{'x' * 40 * i} {tag}", sampling=sampling, top_logprobs=0 if i % 4 == 0 else None)
    worker.ends(tags)

    assert {tag: worker.text(tag) for tag in tags} == {tag: said_by(tag) for tag in tags}


def test_nothing_private_is_logged(start: Start, script_model: Path) -> None:
    """S02: prompt, answer and template errors are in no log line, also at debug level; nor in argv."""
    worker = start(script_model, log_level="debug")
    worker.ask("fine", "MARKER-1 SC04")
    prompt = ChatPrompt(
        messages=(ChatMessage(role="tool", content="MARKER-2"),), template_arguments={"tools": "MARKER-3"}
    )
    worker.generate("refused", prompt)
    worker.end("refused")
    worker.send({"MARKER-4": 4})
    arguments = " ".join(worker.process.args)  # pyright: ignore
    worker.send(Drain(deadline_seconds=1.0))

    assert worker.exit_code() == 0
    assert "MARKER" not in worker.log
    assert "alpha" not in worker.log
    assert str(script_model) not in arguments


def test_what_is_forgotten_while_a_drained_worker_writes_is_not_written(
    start: Start, script_model: Path, runtime_directory: Path, tmp_path: Path
) -> None:
    """It is in no row any more and on its way out, but hears that it shall forget, and answers when it has."""
    may_write = threading.Event()

    def answer(request: BlockRequest) -> Answer:
        match request:
            case Lookup(call_id=call_id):
                return Found(call_id=call_id, blocks=())
            case Stage(call_id=call_id):
                assert may_write.wait(20)
                return Staged(call_id=call_id, path=str(tmp_path / "staged"), lease=LeaseId(1))
            case Forget(call_id=call_id):
                return Forgotten(call_id=call_id, blocks=0, file_bytes=0)
            case _:
                return None

    store = FakeStore(runtime_directory, answer)
    try:
        worker = start(script_model)
        worker.ask("kept", [65] * 600, max_tokens=1)
        worker.send(Drain(deadline_seconds=5.0))
        store.next(Stage)
        worker.send(ForgetHot())
        assert worker.pong().hot_cache_blocks == 0
        may_write.set()
        assert worker.exit_code() == 0
    finally:
        may_write.set()
        store.close()
    assert not {type(store.requests.get()) for _ in range(store.requests.qsize())} & {Stage, Publish}


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_a_cancel_frees_row_and_memory_at_once(start: Start, script_model: Path) -> None:
    """B07, H01: in mid-decode, in mid-prefill and while queued; the other row goes on."""
    worker = start(script_model, max_rows=2, hot_cache_bytes=0, context_tokens=4000)
    worker.ask("warm", "SC04")
    worker.ask("warm too", [65] * 300, max_tokens=2)
    base = worker.until(lambda pong: pong.running_rows == 0).active_bytes

    worker.generate("other", "SC20", max_tokens=100_000)
    worker.generate("decoding", "SC20", max_tokens=100_000)
    while not worker.text("decoding"):
        worker.receive()
    worker.generate("queued", [66] * 3000)
    assert_cancelled_soon(worker, "decoding")
    while not any(isinstance(event, Prefilling) and event.done_tokens for event in worker.of("queued")):
        worker.receive()
    worker.generate("behind", [67] * 3000)
    assert_cancelled_soon(worker, "behind")
    assert_cancelled_soon(worker, "queued")

    said = len(worker.text("other"))
    while len(worker.text("other")) < said + 20:
        worker.receive()
    assert_cancelled_soon(worker, "other")
    assert set(worker.text("other").replace(" la", "")) == set()
    pong = worker.until(lambda pong: pong.running_rows == 0 and pong.waiting_requests == 0)
    assert pong.active_bytes <= base + 200_000
    assert pong.hot_cache_bytes == 0


def assert_cancelled_soon(worker: WorkerProcess, name: str) -> None:
    asked = time.monotonic()
    worker.send(Cancel(request_id=RequestId(name)))
    end = worker.end(name)
    assert isinstance(end, Failed)
    assert end.failure.kind is FailureKind.CANCELLED
    assert time.monotonic() - asked < 5.0  # one step or slice; CI machines stutter


# --- ends -----------------------------------------------------------------------------------------------------------


def test_sigterm_lets_a_stream_finish(start: Start, script_model: Path) -> None:
    """E04: what runs is finished, then exit 0."""
    worker = start(script_model, persist="off")
    worker.generate("r", "SC19")
    while not worker.text("r"):
        worker.receive()
    worker.process.send_signal(signal.SIGTERM)
    worker.process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole group and is the gateway's to answer

    end = worker.end("r")
    assert isinstance(end, Finished), end
    assert worker.text("r") == said_by("SC19")
    assert worker.exit_code() == 0


def test_a_parents_death_is_the_workers_end(start: Start, script_model: Path) -> None:
    """E05: end-of-file on standard input; an endless stream is ended with its reason, then exit 0."""
    worker = start(script_model, persist="off")
    worker.generate("r", "SC20", max_tokens=100_000)
    while not worker.text("r"):
        worker.receive()
    assert worker.process.stdin is not None
    worker.process.stdin.close()

    end = worker.end("r")
    assert isinstance(end, Failed)
    assert end.failure.kind is FailureKind.SHUTTING_DOWN
    assert worker.exit_code() == 0


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_a_refused_worker_exits_with_78(start: Start, script_model: Path, when: str) -> None:
    """EX_CONFIG: starting again cannot help. Whatever its threads are doing at that moment."""
    worker = start(script_model, until=Hello if when == "loading" else Ready)
    if when == "ready":
        worker.generate("r", "SC20", max_tokens=100_000)
        while not worker.text("r"):
            worker.receive()
    worker.send(Refused(reason="another protocol"))

    assert worker.exit_code() == 78
    assert "another protocol" in worker.log


def breaks(folder: Path, how: str) -> None:
    match how:
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "cut weights":
            with (folder / "model.safetensors").open("rb+") as file:
                file.truncate(1000)
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "unknown kind":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize("how", ["bad config", "no weights", "cut weights", "unknown kind"])
def test_a_broken_folder_ends_in_last_words(start: Start, script_model: Path, tmp_path: Path, how: str) -> None:
    """E06: why, in words, then exit 1; no hub is asked for what is missing."""
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in script_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    breaks(folder, how)
    worker = start(folder, until=LastWords)

    words = worker.events[-1]
    assert isinstance(words, LastWords)
    assert words.failure.message
    assert worker.exit_code() == 1


# --- a real model ---------------------------------------------------------------------------------------------------

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about rain.",
    "List three primes and explain why.",
    "Tell me a story about a fox.",
    "How do I sort a list in Python?",
    "Explain photosynthesis simply.",
    "Name five animals.",
    "What is 17 times 23?",
)
ANSWER_TOKENS = 10

REFERENCE = """
import json, sys
from mlx_lm import generate, load
model, tokenizer = load(sys.argv[1])
questions, count = json.load(sys.stdin)
def answer(question):
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return generate(model, tokenizer, prompt, max_tokens=count)
print(json.dumps([answer(question) for question in questions]))
"""


def test_greedy_text_is_mlx_lms_letter_for_letter(start: Start, smollm2: Path, environment: dict[str, str]) -> None:
    """K02, H02: alone, four and eight at once, and again on a warm prefix."""
    given = json.dumps([QUESTIONS, ANSWER_TOKENS]).encode()
    command = [sys.executable, "-P", "-c", REFERENCE, str(smollm2)]
    said = subprocess.run(command, input=given, env=environment, capture_output=True, check=True).stdout
    expected = dict(zip(QUESTIONS, json.loads(said), strict=True))
    worker = start(smollm2)

    def ask_at_once(label: str, questions: Sequence[str]) -> list[int]:
        names = [f"{label}{i}" for i in range(len(questions))]
        for name, question in zip(names, questions, strict=True):
            worker.generate(name, question, max_tokens=ANSWER_TOKENS)
        ends = worker.ends(names)
        assert {q: worker.text(n) for n, q in zip(names, questions, strict=True)} == {q: expected[q] for q in questions}
        return [end.usage.cached_tokens for end in ends.values() if isinstance(end, Finished)]

    assert ask_at_once("alone", QUESTIONS[:1]) == [0]
    ask_at_once("four", QUESTIONS[1:5])
    ask_at_once("eight", QUESTIONS)
    warm = ask_at_once("warm", QUESTIONS[::-1])

    prompt_tokens = [event.prompt_tokens for event in worker.events if isinstance(event, Queued)][-8:]
    assert warm == [tokens - 1 for tokens in prompt_tokens]
