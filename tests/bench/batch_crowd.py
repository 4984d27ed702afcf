# pyright: basic
"""Interactive questions beside a batch class that has more than it can do, and without it."""

import concurrent.futures
import time

import msgspec
from msgspec import Struct

from tests.bench.fresh_prompts import FreshPrompts
from tests.bench.servers import BenchFailed, Server
from tests.bench.streams import Stream

BATCH_STREAMS = 8
BATCH_PROMPT_TOKENS = 300
BATCH_ANSWER_TOKENS = 32
INTERACTIVE_TOKENS = 16
MESSAGE_TOKENS = 300
SETTLE_SECONDS = 240.0


class Waits(Struct, frozen=True, kw_only=True):
    """Interactive first tokens and gaps, in seconds, and what of batch was completed meanwhile. `first_tokens` are of
    questions of some forty tokens, `message_first_tokens` of `MESSAGE_TOKENS`."""

    first_tokens: tuple[float, ...]
    message_first_tokens: tuple[float, ...]
    gaps: tuple[float, ...]
    batch_requests: int = 0
    batch_tokens: int = 0


def interactive(server: Server, material: FreshPrompts, waits: int) -> Waits:
    """So many questions and as many messages, one after another."""
    first_tokens: dict[int, list[float]] = {0: [], 1: []}
    gaps: list[float] = []
    for number in range(2 * waits):
        time.sleep(material.pause_seconds())  # a reader's, so that questions meet batch work at any point
        asked = material.document(MESSAGE_TOKENS) if number % 2 else material.tale()
        stream = Stream(server, asked, INTERACTIVE_TOKENS, latency_class="interactive").wait()
        first_tokens[number % 2].append(stream.first_token_seconds)
        gaps += [to - since for since, to in stream.gaps]
    return Waits(first_tokens=tuple(first_tokens[0]), message_first_tokens=tuple(first_tokens[1]), gaps=tuple(gaps))


class Crowd:
    """Batch requests without end: whenever one has its answer, another takes its place."""

    def __init__(self, server: Server, material: FreshPrompts) -> None:
        self._server = server
        self._material = material
        self._open = [self._another() for _ in range(BATCH_STREAMS)]
        self.requests = 0
        self.tokens = 0

    def tend(self, seconds: float) -> None:
        """For so long; what ends is counted and replaced. Raises BenchFailed when one failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for place, stream in enumerate(self._open):
                if stream.ended is not None:
                    self.tokens += stream.wait().completion_tokens
                    self.requests += 1
                    self._open[place] = self._another()
            time.sleep(0.02)  # other threads read

    def settle(self) -> None:
        """Until it has got into its stride: half as many have ended as there are places."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.requests < BATCH_STREAMS // 2:
            if time.monotonic() > deadline:
                raise BenchFailed("the batch class got nowhere, with nobody beside it")
            self.tend(0.2)
        self.requests = self.tokens = 0

    def leave(self) -> None:
        for stream in self._open:
            stream.stop()

    def _another(self) -> Stream:
        messages = self._material.document(BATCH_PROMPT_TOKENS)
        return Stream(self._server, messages, BATCH_ANSWER_TOKENS, latency_class="batch")


def saturated(server: Server, material: FreshPrompts, waits: int) -> Waits:
    """The same beside a crowd. Raises BenchFailed when the crowd got nothing done."""
    crowd = Crowd(server, material)
    try:
        crowd.settle()
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            asked = executor.submit(interactive, server, material, waits)
            while not asked.done():
                crowd.tend(0.2)
        found = asked.result()
    finally:
        crowd.leave()
    if not crowd.requests:
        raise BenchFailed("no batch request ended while interactive ones were asked")
    return msgspec.structs.replace(found, batch_requests=crowd.requests, batch_tokens=crowd.tokens)
