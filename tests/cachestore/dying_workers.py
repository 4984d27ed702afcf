# pyright: basic
"""Workers that die at every step of a publish, one after the other, beside a cachestore that lives on.

    python -m tests.cachestore.dying_workers RUNTIME_DIRECTORY

The n-th one is killed (SIGKILL) at its n-th step, the last one not at all. Each is the real ColdCache with real block
files and prompts of its own. Steps are: before and after each message it sends, a reply that is there and not yet
read, before and after a file is written, and inside of that: a file that ends after some of its bytes. On standard
output `NUMBER SLOT` says that this worker heard that its block is durable, `NUMBER end STATUS` how it ended.
A process of its own, since it forks.
"""

import os
import queue
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from protocol.addresses import cachestore_socket
from protocol.blocks import BlockReply
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey
from protocol.sockets import Peer
from tests.worker import parts
from tests.worker.parts import FINGERPRINT
from worker.cold_cache import ColdCache
from worker.cost_model import PrefillCost
from worker.messages import BlocksFetched, BlockStored
from worker.prefix_cache import Fetch
from worker.prefix_index import Block
from worker.sequence import Prepared

SLOTS = 4
SHORT_GRAINS = 5
LONG_GRAINS = 9
FIRST_SLOTS = (0, "short")
"""What is on disk before a worker begins to die: a whole block and a tail behind it."""
LATER_SLOTS = (1, 2, 3)
"""What it writes then: two whole blocks, of which the first supersedes that tail, and a tail."""

_WIDTH = 8
ALWAYS_RESTORE = PrefillCost(fixed=0.0, token=1e6, attention=0.0)
_ANSWER_SECONDS = 20.0
_UNFINISHED_BYTES = (0, 1, 8, 300)


def connect(runtime_directory: Path, name: str) -> Peer:
    return Peer(cachestore_socket(runtime_directory), name.encode(), BlockReply)


def prepared(number: int) -> Prepared:
    """The prompt of one worker, which nobody shares."""
    tokens = (SLOTS - 1) * BLOCK_TOKENS + LONG_GRAINS * GRAIN_TOKENS
    # One token more than the blocks hold: the last one of a prompt is always computed.
    token_ids = tuple(range(number, number + tokens + 1))
    return parts.prepared(f"kill-{number}", token_ids, max_tokens=1)


def payload(number: int, slot: int, tokens: int) -> dict:
    """The first tokens' KV, the same each time."""
    import mlx.core as mx
    import numpy

    shape = (2, 1, BLOCK_TOKENS, _WIDTH)
    values = numpy.random.default_rng(number * SLOTS + slot).random((2, *shape), dtype=numpy.float32)
    arrays = {name: mx.array(part[:, :, :tokens]) for name, part in zip(("keys0", "values0"), values, strict=True)}
    mx.eval(arrays)
    return arrays


def block(number: int, slot: int | str) -> Block:
    """One block of that prompt; `short` is a tail in slot 1."""
    prompt = prepared(number)
    grain_count = (
        SHORT_GRAINS if slot == "short" else LONG_GRAINS if slot == SLOTS - 1 else BLOCK_TOKENS // GRAIN_TOKENS
    )
    place = 1 if slot == "short" else int(slot)
    start, tokens = place * BLOCK_TOKENS, grain_count * GRAIN_TOKENS
    first = start // GRAIN_TOKENS
    grains = prompt.grains[first : first + grain_count]
    arrays = payload(number, place, tokens)
    return Block(
        key=BlockKey(grains[-1]),
        parent=BlockKey(prompt.grains[first - 1]) if start else prompt.root.digest,
        start=start,
        token_ids=prompt.token_ids[start : start + tokens],
        grains=grains,
        payload=arrays,
        kv_bytes=sum(array.nbytes for array in arrays.values()),
        supersedes=BlockKey(prompt.grains[first + SHORT_GRAINS - 1]) if slot == 1 else None,
    )


class _Steps:
    """Counts steps once it is told to, and dies at the one that was asked for."""

    def __init__(self, die_at: int) -> None:
        self._left = die_at
        self._is_counting = False

    def begin(self) -> None:
        self._is_counting = True

    def is_the_one(self) -> bool:
        if not self._is_counting:
            return False
        self._left -= 1
        return self._left == -1

    def step(self) -> None:
        if self.is_the_one():
            os.kill(os.getpid(), signal.SIGKILL)


class _DyingPeer(Peer):
    steps: _Steps

    def send(self, message) -> None:
        self.steps.step()
        super().send(message)
        self.steps.step()

    def receive(self, timeout_seconds: float) -> list:
        messages = super().receive(timeout_seconds)
        if messages:
            self.steps.step()
        return messages


def _dying_write(steps: _Steps) -> Callable[..., None]:
    from worker.mlx_block_files import write_block

    def write(path: str, block: Block, tokens: int, metadata: dict[str, str]) -> None:
        steps.step()
        for file_bytes in (*_UNFINISHED_BYTES, block.size_bytes // 2, block.size_bytes):  # the header comes on top
            if steps.is_the_one():
                # The kernel ends the process inside of the write that would go further.
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        write_block(path, block, tokens, metadata)
        steps.step()

    return write


def work(runtime_directory: Path, number: int) -> None:
    """One worker, from its first block to its end or its last."""
    from worker.mlx_block_files import BlockFile

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    steps = _Steps(number)
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def peer() -> _DyingPeer:
        made = _DyingPeer(cachestore_socket(runtime_directory), f"w{number}:{os.getpid()}".encode(), BlockReply)
        made.steps = steps
        return made

    cold: ColdCache = ColdCache(
        connect=peer,
        fingerprint=FINGERPRINT,
        begin=BlockFile,
        write=_dying_write(steps),
        deliver=answers.put,
        clock=time.monotonic,
    )
    cold.start()
    for slot in FIRST_SLOTS:
        _store(cold, answers, number, slot)
    steps.begin()
    cold.fetch(Fetch(prepared(number), 0, 0, ALWAYS_RESTORE))
    fetched = answers.get(timeout=_ANSWER_SECONDS)
    assert isinstance(fetched, BlocksFetched), fetched
    assert len(fetched.blocks) == len(FIRST_SLOTS), fetched.outcome
    for slot in LATER_SLOTS:
        _store(cold, answers, number, slot)
    assert cold.stop(_ANSWER_SECONDS) == 0


def _store(cold: ColdCache, answers: queue.SimpleQueue, number: int, slot: int | str) -> None:
    assert cold.store(block(number, slot))
    stored = answers.get(timeout=_ANSWER_SECONDS)
    assert isinstance(stored, BlockStored), stored
    assert stored.outcome == "durable"
    os.write(sys.stdout.fileno(), f"{number} {slot}\n".encode())


def main(runtime_directory: Path) -> None:
    for number in range(10_000):
        child = os.fork()
        if not child:
            try:
                work(runtime_directory, number)
            except BaseException as why:  # noqa: BLE001 - a fork must never come back into `main`
                sys.stderr.write(f"worker {number}: {why!r}\n")
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(sys.stdout.fileno(), f"{number} end {status}\n".encode())
        if status == 0:
            return
        if status not in (-signal.SIGKILL, -signal.SIGXFSZ):
            raise SystemExit(f"worker {number} failed with status {status}")
    raise SystemExit("there is always one step more")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    main(Path(sys.argv[1]))
