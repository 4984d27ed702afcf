"""What a worker, and the service around it, answers while the weights are still loading."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from gateway.dispatch import Dispatch
from protocol.failures import FailureKind
from protocol.generation import (
    ChatMessage,
    ChatPrompt,
    Check,
    Checked,
    Detokenize,
    Detokenized,
    Failed,
    Finished,
    Queued,
    Ready,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenizerReady,
)
from protocol.ids import ModelName, RequestId
from tests.processes.running_worker import Start, WorkerProcess
from tests.processes.serving import DEADLINE_SECONDS, generate, serving, settings_for, status_of, submit, until

SLOW_WORKER = (str(Path(__file__).parent / "slow_loading_worker.py"),)


@pytest.fixture
def slow_folder(script_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "slow"
    shutil.copytree(script_model, folder)
    os.mkfifo(folder / "may_load")
    return folder


def tokenize(worker: WorkerProcess, name: str, prompt: ChatPrompt | TextPrompt) -> Tokenized:
    worker.send(Tokenize(request_id=RequestId(name), prompt=prompt))
    tokenized = worker.next(Tokenized)
    assert tokenized.request_id == name
    return tokenized


def test_tokens_are_told_before_the_weights_are_there(start: Start, slow_folder: Path) -> None:
    """A load that cannot go on stops no question of the tokenizer; a generation that comes too early is refused, and
    one that comes after Ready has exactly the tokens that were counted before."""
    worker = start(slow_folder, until=TokenizerReady, program=SLOW_WORKER, context_tokens=1000)
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="say SC04"),))

    counted = tokenize(worker, "chat", chat)
    text = tokenize(worker, "text", TextPrompt(text="say SC04 ✓"))
    worker.send(Detokenize(request_id=RequestId("back"), token_ids=text.token_ids))
    assert worker.next(Detokenized).text == "say SC04 ✓"
    assert len(text.tokens) == len(text.token_ids)
    assert text.context_tokens == 1000
    worker.generate("early", "say SC04")
    early = worker.next(Failed)
    assert (early.request_id, early.failure.kind) == ("early", FailureKind.MODEL_UNAVAILABLE)
    assert not any(isinstance(event, Ready) for event in worker.events)

    (slow_folder / "may_load").write_bytes(b"now")
    worker.next(Ready)
    worker.generate("later", "say SC04")
    assert worker.next(Queued).prompt_tokens == len(counted.token_ids)
    assert isinstance(worker.end("later"), Finished)


def test_an_id_that_is_no_token_is_refused_by_its_place(start: Start, script_model: Path) -> None:
    """C: the client is told which of its ids it is."""
    worker = start(script_model)
    worker.send(Detokenize(request_id=RequestId("bad"), token_ids=(1, 2, 10_000_000)))
    failed = worker.next(Failed)
    assert (failed.failure.kind, failed.failure.param) == (FailureKind.INVALID_REQUEST, "tokens[2]")


# --- through dispatch -------------------------------------------------------------------------------------------------


async def ask_tokens(dispatch: Dispatch, name: str, text: str, model: str = "answers_early") -> Tokenized | Failed:
    """The one event that the reply consists of."""
    asked = Tokenize(request_id=RequestId(name), prompt=TextPrompt(text=text))
    async with asyncio.timeout(DEADLINE_SECONDS):
        (event,) = [event async for event in dispatch.submit(ModelName(model), asked)]
    assert isinstance(event, Tokenized | Failed)
    return event


async def test_a_question_of_tokens_does_not_wait_for_the_load(runtime_directory: Path) -> None:
    """It starts the load, goes past a generation that waits for its end, and is answered before it."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert isinstance(await ask_tokens(dispatch, "first", "a"), Tokenized)
        waiting = submit(dispatch, "answers_early")
        await until(lambda: status_of(dispatch, "answers_early").waiting_requests > 0)
        tokenized = await ask_tokens(dispatch, "second", "abc")
        assert isinstance(tokenized, Tokenized)
        assert tokenized.tokens == ("a", "b", "c")
        status = status_of(dispatch, "answers_early")
        assert (status.state, status.incarnation, status.waiting_requests) == ("starting", 1, 1)
        assert waiting.events == []


async def test_a_check_takes_no_place_and_loads_nothing(runtime_directory: Path) -> None:
    """Of a model that nobody wants it waits, and starts no process; of one that loads it is answered, however many
    wait for that."""
    settings = settings_for(runtime_directory, max_waiting_per_model=1)
    async with serving(settings) as dispatch:
        check = Check(request_id=RequestId("check"), generate=generate("a"))
        unwanted = dispatch.submit(ModelName("answers_early"), check)
        submit(dispatch, "well_behaved")
        await until(lambda: bool(dispatch.status().models))
        assert [status.name for status in dispatch.status().models] == ["well_behaved"]
        submit(dispatch, "answers_early")
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert [event async for event in unwanted] == [Checked(request_id=check.request_id, prompt_tokens=1)]
        status = status_of(dispatch, "answers_early")
        assert (status.state, status.waiting_requests) == ("starting", 1)


async def test_a_check_is_no_reason_to_load_again(runtime_directory: Path) -> None:
    """When the process has died that had it, and nobody else wants the model, it waits, and is counted nowhere."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        wanted = submit(dispatch, "answers_early")
        check = Check(request_id=RequestId("check"), generate=generate("say nothing"))
        reply = dispatch.submit(ModelName("answers_early"), check)
        await until(lambda: bool(dispatch.status().models) and status_of(dispatch, "answers_early").open_requests == 1)
        wanted.reply.cancel()
        await wanted.end()
        pid = status_of(dispatch, "answers_early").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: status_of(dispatch, "answers_early").state == "absent")
        assert status_of(dispatch, "answers_early").waiting_requests == 0
        assert not reply.is_complete
        submit(dispatch, "answers_early")
        await until(lambda: status_of(dispatch, "answers_early").waiting_requests == 1)
        assert status_of(dispatch, "answers_early").incarnation == 2


async def test_a_held_load_gets_no_checks(runtime_directory: Path) -> None:
    """It is known to be held long before its time is over, and what clients ask and leave does not pile up at it. Who
    is still there is answered when it goes on."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        submit(dispatch, "answers_early")
        assert isinstance(await ask_tokens(dispatch, "first", "a"), Tokenized)
        pid = status_of(dispatch, "answers_early").pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: status_of(dispatch, "answers_early").held_reason is not None)
            for number in range(5):
                check = Check(request_id=RequestId(f"left-{number}"), generate=generate("a"))
                left = dispatch.submit(ModelName("answers_early"), check)
                left.cancel()
                assert [type(event) async for event in left] == [Failed]
            assert status_of(dispatch, "answers_early").open_requests == 0
            check = Check(request_id=RequestId("check"), generate=generate("a"))
            reply = dispatch.submit(ModelName("answers_early"), check)
        finally:
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert [event async for event in reply] == [Checked(request_id=check.request_id, prompt_tokens=1)]
        await until(lambda: status_of(dispatch, "answers_early").held_reason is None)


async def test_a_death_over_a_question_of_tokens_ends_it_once(runtime_directory: Path) -> None:
    """The next process may try it; when that dies over it as well, the client is told, and others are still served."""
    async with serving(settings_for(runtime_directory)) as dispatch:
        assert isinstance(await ask_tokens(dispatch, "fine", "a"), Tokenized)
        failed = await ask_tokens(dispatch, "bad", "die")
        assert isinstance(failed, Failed)
        assert failed.failure.kind is FailureKind.WORKER_DIED
        assert isinstance(await ask_tokens(dispatch, "again", "a"), Tokenized)
