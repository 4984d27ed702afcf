"""Workers that go wrong in one way each, and one that does not. A program: the model's path in its launch line is the
name of the fault. The text of a prompt is the request's script: `forever` streams until cancelled, else it is echoed.
"""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from protocol.addresses import gateway_socket
from protocol.failures import Failure, FailureKind
from protocol.framing import MalformedMessage
from protocol.generation import (
    Cancel,
    Check,
    Checked,
    Delta,
    Drain,
    Failed,
    Finished,
    FinishReason,
    ForgetHot,
    Generate,
    LastWords,
    Ping,
    Pong,
    Prefilling,
    PrefixReuse,
    Queued,
    Ready,
    SetBudget,
    TextPrompt,
    Timings,
    Tokenize,
    Tokenized,
    TokenizerReady,
    Unpin,
    Usage,
    WorkerCommand,
    WorkerEvent,
)
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.ids import RequestId
from protocol.launch import WorkerLaunch
from protocol.sockets import Peer

WorkerPeer = Peer[WorkerCommand, WorkerEvent]


def finished(request_id: RequestId, tokens: int) -> Finished:
    return Finished(
        request_id=request_id,
        reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=1, completion_tokens=tokens, cached_tokens=0),
        timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0, prefill_slices=1),
    )


class EchoWorker:
    """A well-behaved worker in miniature; the problem workers replace one of its steps."""

    def __init__(self, peer: WorkerPeer, launch: WorkerLaunch) -> None:
        self.peer = peer
        self.launch = launch
        self.streaming: set[RequestId] = set()
        self.steps = 0
        self.draining = False
        self.budget_bytes = launch.hot_cache_bytes
        self.orders: dict[str, int] = {}

    def introduce(self) -> None:
        self.hello(PROTOCOL_VERSION)
        self.peer.send(
            Ready(
                context_tokens=1000,
                max_rows=self.launch.max_rows,
                weight_bytes=0,
                load_seconds=0,
                prefix_reuse=PrefixReuse(available=True),
                fingerprint="echo",
            )
        )

    def hello(self, version: int) -> None:
        self.peer.send(
            Hello(
                protocol_version=version,
                model=self.launch.model,
                incarnation=self.launch.incarnation,
                pid=os.getpid(),
            )
        )

    def serve(self) -> int:
        self.introduce()
        while not (self.draining and not self.streaming):
            for command in self.peer.receive(0.01 if self.streaming else 1.0):
                self.obey(command)
            for request_id in self.streaming:
                self.steps += 1
                self.peer.send(Delta(request_id=request_id, text="la ", tokens=1))
        return 0

    def obey(self, command: WorkerCommand | MalformedMessage) -> None:
        match command:
            case Generate(request_id=request_id, prompt=TextPrompt(text=text)):
                self.peer.send(Queued(request_id=request_id, prompt_tokens=1))
                self.peer.send(Prefilling(request_id=request_id, done_tokens=1, total_tokens=1, cached_tokens=0))
                self.generate(request_id, text)
            case Check(request_id=request_id):
                self.peer.send(Checked(request_id=request_id, prompt_tokens=1))
            case Cancel(request_id=request_id):
                if request_id in self.streaming:
                    self.streaming.remove(request_id)
                    failure = Failure(kind=FailureKind.CANCELLED, message="cancelled")
                    self.peer.send(Failed(request_id=request_id, failure=failure))
            case Drain():
                self.drain()
            case Ping(nonce=nonce):
                self.peer.send(
                    Pong(
                        nonce=nonce,
                        steps=self.steps,
                        running_rows=len(self.streaming),
                        waiting_requests=0,
                        active_bytes=1,
                        hot_cache_bytes=0,
                        hot_cache_blocks=0,
                        hot_cache_budget_bytes=self.budget_bytes,
                        misses=self.orders,
                    )
                )
            case SetBudget(hot_cache_bytes=budget_bytes):
                self.budget_bytes = budget_bytes
            case Unpin() | ForgetHot():
                name = type(command).__name__
                self.orders[name] = self.orders.get(name, 0) + 1
            case Welcome():
                pass
            case Refused():
                sys.exit(4)
            case _:
                sys.exit(5)

    def generate(self, request_id: RequestId, text: str) -> None:
        if text == "forever":
            self.streaming.add(request_id)
            return
        words = text.split(" ")
        for word in words:
            self.steps += 1
            self.peer.send(Delta(request_id=request_id, text=word + " ", tokens=1))
        self.peer.send(finished(request_id, len(words)))

    def drain(self) -> None:
        self.draining = True


class DiesAtStart(EchoWorker):
    def introduce(self) -> None:
        sys.stderr.write("boom: the weights are cursed\n")
        sys.exit(3)


class BrokenFolder(EchoWorker):
    def introduce(self) -> None:
        self.hello(PROTOCOL_VERSION)
        failure = Failure(kind=FailureKind.MODEL_UNAVAILABLE, message="config.json is not valid")
        self.peer.send(LastWords(failure=failure))
        self.peer.close()
        os._exit(1)


class DiesMidStream(EchoWorker):
    def generate(self, request_id: RequestId, text: str) -> None:
        self.peer.send(Delta(request_id=request_id, text="last ", tokens=1))
        self.peer.close()  # so that the delta is on its way
        os.kill(os.getpid(), signal.SIGKILL)


class NeverReady(EchoWorker):
    def introduce(self) -> None:
        self.hello(PROTOCOL_VERSION)


class AnswersEarly(EchoWorker):
    """Its tokenizer is there, its weights never are. Asked for the tokens of `die`, it dies; a check of `say nothing`
    it never answers."""

    def introduce(self) -> None:
        self.hello(PROTOCOL_VERSION)
        self.peer.send(TokenizerReady())

    def obey(self, command: WorkerCommand | MalformedMessage) -> None:
        match command:
            case Check(generate=Generate(prompt=TextPrompt(text="say nothing"))):
                pass
            case Tokenize(request_id=request_id, prompt=TextPrompt(text=text)):
                if text == "die":
                    os._exit(3)
                token_ids = tuple(range(len(text)))
                self.peer.send(
                    Tokenized(request_id=request_id, token_ids=token_ids, tokens=tuple(text), context_tokens=1000)
                )
            case _:
                super().obey(command)


class HangsMidStep(EchoWorker):
    def generate(self, request_id: RequestId, text: str) -> None:
        self.peer.send(Delta(request_id=request_id, text="la ", tokens=1))
        if text == "hang":
            threading.Event().wait()
        self.peer.send(finished(request_id, 1))


class HangsBeforeTheAnswer(EchoWorker):
    """The first process of the model reads a prompt for ever; those after it are well."""

    def generate(self, request_id: RequestId, text: str) -> None:
        if self.launch.incarnation == 1:
            threading.Event().wait()
        super().generate(request_id, text)


class HangsAndIgnoresSigterm(HangsMidStep):
    def introduce(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().introduce()


class IgnoresSigterm(EchoWorker):
    def introduce(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().introduce()

    def drain(self) -> None:
        pass


class SpeaksOldProtocol(EchoWorker):
    def introduce(self) -> None:
        self.hello(PROTOCOL_VERSION - 1)


class Floods(EchoWorker):
    def generate(self, request_id: RequestId, text: str) -> None:
        if text != "flood":
            super().generate(request_id, text)
            return
        for number in range(20_000):
            self.patiently(Delta(request_id=request_id, text="x", tokens=1))
            if number % 2 == 0:
                self.patiently(Prefilling(request_id=request_id, done_tokens=1, total_tokens=1, cached_tokens=0))
        self.patiently(finished(request_id, 20_000))

    def patiently(self, event: WorkerEvent) -> None:
        for _ in itertools.count():
            try:
                self.peer.send(event)
            except Exception:  # noqa: BLE001  (PeerGone: the queue is full, which is what a flood is about)
                time.sleep(0.001)
            else:
                return


class LiesAboutFinish(EchoWorker):
    def generate(self, request_id: RequestId, text: str) -> None:
        self.peer.send(finished(RequestId("nobody"), 1))
        self.peer.send(Delta(request_id=RequestId(text), text="stolen ", tokens=1))  # the prompt names somebody else's
        self.peer.send(finished(RequestId(text), 1))
        self.peer.send(Delta(request_id=request_id, text="true ", tokens=1))
        self.peer.send(finished(request_id, 1))
        self.peer.send(Delta(request_id=request_id, text="posthumous ", tokens=1))
        self.peer.send(finished(request_id, 99))


class Babbles(EchoWorker):
    def generate(self, request_id: RequestId, text: str) -> None:
        for _ in range(100):
            self.peer.send({"type": "Nonsense"})  # pyright: ignore[reportArgumentType]


WORKERS: dict[str, Callable[[WorkerPeer, WorkerLaunch], EchoWorker]] = {
    "well_behaved": EchoWorker,
    "dies_at_start": DiesAtStart,
    "broken_folder": BrokenFolder,
    "dies_mid_stream": DiesMidStream,
    "never_ready": NeverReady,
    "answers_early": AnswersEarly,
    "hangs_mid_step": HangsMidStep,
    "hangs_before_the_answer": HangsBeforeTheAnswer,
    "hangs_and_ignores_sigterm": HangsAndIgnoresSigterm,
    "ignores_sigterm": IgnoresSigterm,
    "speaks_old_protocol": SpeaksOldProtocol,
    "floods": Floods,
    "lies_about_finish": LiesAboutFinish,
    "babbles": Babbles,
}


def exit_with_parent() -> None:
    """End-of-file on standard input: the gateway is gone."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would abort the interpreter's shutdown
        pass
    os._exit(0)


def main() -> int:
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerLaunch)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    path = gateway_socket(Path(launch.runtime_directory))
    peer: WorkerPeer = Peer(path, b"w%d" % launch.incarnation, WorkerCommand)  # pyright: ignore[reportArgumentType]
    try:
        return WORKERS[launch.model_path](peer, launch).serve()
    finally:
        peer.close()


if __name__ == "__main__":
    sys.exit(main())
