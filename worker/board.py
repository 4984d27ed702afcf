"""The board: one small mapped file per worker, on which it says what it does and the others read it.

`board/<incarnation>-<pid>` under the runtime directory, written by its owner alone. The owner holds a file lock on it
for as long as it lives; the kernel lets go when it dies, whatever the death. A file whose lock is free, or whose
process is gone (a forked child may have inherited the lock), is removed by whoever notices.

Two slots are written in turn, each with a counter and a checksum; a reader takes the newest that is whole. So a torn
read costs one step of age, nobody waits for anybody, and no memory order is assumed, which ARM would not promise.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.addresses import board_directory
from protocol.ids import Incarnation
from worker.neighbours import Activity, Neighbour, PrefillState, WorkerKey

PAGE_BYTES = 4096
SLOT_BYTES = 256
BOARD_FORMAT = 1
"""Rises when an older reader would misread a newer page. Workers of one gateway are of one version."""

_RECORD = struct.Struct("<QIIQbbBbIQQddd")
_CHECKSUM = struct.Struct("<I")
_SLOTS = (0, SLOT_BYTES)
_NO_RANK = -1


@dataclass
class _Page:
    """Another worker's file, open and mapped."""

    descriptor: int
    memory: mmap.mmap
    latest: Neighbour | None = None
    counter: int = 0

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


class Board:
    """This worker's page and its view of the others'. Use from one thread."""

    def __init__(
        self,
        runtime_directory: Path,
        incarnation: Incarnation,
        *,
        clock: Callable[[], float],
        scan_every_seconds: float = 0.25,
    ) -> None:
        """Put up this worker's page, idle. Raises OSError when the directory cannot be used."""
        self._directory = board_directory(runtime_directory)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self.key = WorkerKey(incarnation, os.getpid())
        self._name = f"{incarnation}-{os.getpid()}"
        self._clock = clock
        self._scan_every_seconds = scan_every_seconds
        self._next_scan = clock()
        self._others: dict[str, _Page] = {}
        self._counter = 0
        # Under another name until it is locked and says something: an unlocked page is a dead worker's.
        unfinished = self._directory / f".{self._name}"
        unfinished.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(unfinished, flags, 0o600)
        try:
            # Written, not only extended: on a full disk a hole would be found by a signal instead of an error.
            os.pwrite(self._descriptor, bytes(PAGE_BYTES), 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._memory = mmap.mmap(self._descriptor, PAGE_BYTES)
            self.publish(Activity())
            unfinished.rename(self._directory / self._name)
        except BaseException:
            os.close(self._descriptor)
            unfinished.unlink(missing_ok=True)
            raise

    def publish(self, activity: Activity) -> None:
        """Say what this worker does now."""
        self._counter += 1
        record = _RECORD.pack(
            self._counter,
            BOARD_FORMAT,
            self.key.pid,
            self.key.incarnation,
            _NO_RANK if activity.active_rank is None else activity.active_rank,
            _NO_RANK if activity.decoding_rank is None else activity.decoding_rank,
            activity.prefill_state,
            activity.prefill_rank,
            activity.decoding_rows,
            activity.decode_steps,
            activity.slices,
            activity.step_seconds,
            activity.prefill_since,
            self._clock(),
        )
        start = _SLOTS[self._counter % 2]
        whole = record + _CHECKSUM.pack(zlib.crc32(record))
        self._memory[start : start + len(whole)] = whole

    def snapshot(self) -> tuple[Neighbour, ...]:
        """The latest word of every other living worker. Who came or died is noticed at the next scan."""
        now = self._clock()
        if now >= self._next_scan:
            self._next_scan = now + self._scan_every_seconds
            self._scan()
        words = [_read(page) for page in self._others.values()]
        return tuple(word for word in words if word is not None)

    def close(self) -> None:
        """Take this worker's page down."""
        for page in self._others.values():
            page.close()
        self._others.clear()
        (self._directory / self._name).unlink(missing_ok=True)
        self._memory.close()
        os.close(self._descriptor)

    def _scan(self) -> None:
        names = {path.name for path in self._directory.iterdir()}
        for name in [name for name in self._others if name not in names]:
            self._others.pop(name).close()
        for name in names - {self._name}:
            if name.startswith("."):
                self._remove_unfinished(name)
                continue
            page = self._others.get(name) or self._open(name)
            if page is None:
                continue
            self._others[name] = page
            if _is_dead(page.descriptor, name):
                self._remove(name, page.descriptor)
                self._others.pop(name).close()

    def _open(self, name: str) -> _Page | None:
        """None if it is no page, or gone again."""
        try:
            descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            # A shorter file would be found by a signal, when its missing part is read.
            if os.fstat(descriptor).st_size == PAGE_BYTES:
                return _Page(descriptor, mmap.mmap(descriptor, PAGE_BYTES, access=mmap.ACCESS_READ))
            if _is_dead(descriptor, name):
                self._remove(name, descriptor)
        except OSError:
            pass  # no memory map to be had: this neighbour is not seen, the next scan tries again
        os.close(descriptor)
        return None

    def _remove(self, name: str, descriptor: int) -> None:
        """Unless the name is another file's by now."""
        path = self._directory / name
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            if os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False)):
                path.unlink()

    def _remove_unfinished(self, name: str) -> None:
        """A worker was killed between making its page and naming it."""
        path = self._directory / name
        with contextlib.suppress(FileNotFoundError):  # it has its name now
            if _pid_is_gone(name):
                path.unlink()


def _read(page: _Page) -> Neighbour | None:
    """Its newest whole slot; the word before if neither is whole or both are of another format."""
    for start in _SLOTS:
        record = page.memory[start : start + _RECORD.size]
        (
            counter,
            board_format,
            pid,
            incarnation,
            active_rank,
            decoding_rank,
            prefill_state,
            prefill_rank,
            decoding_rows,
            decode_steps,
            slices,
            step_seconds,
            prefill_since,
            updated,
        ) = _RECORD.unpack(record)
        if counter <= page.counter or board_format != BOARD_FORMAT:
            continue
        if _CHECKSUM.unpack_from(page.memory, start + _RECORD.size)[0] != zlib.crc32(record):
            continue
        page.counter = counter
        page.latest = Neighbour(
            key=WorkerKey(incarnation, pid),
            activity=Activity(
                active_rank=None if active_rank == _NO_RANK else active_rank,
                decoding_rank=None if decoding_rank == _NO_RANK else decoding_rank,
                decoding_rows=decoding_rows,
                decode_steps=decode_steps,
                step_seconds=step_seconds,
                slices=slices,
                prefill_state=PrefillState(prefill_state),
                prefill_rank=prefill_rank,
                prefill_since=prefill_since,
            ),
            updated=updated,
        )
    return page.latest


def _is_dead(descriptor: int, name: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_is_gone(name)
    return True


def _pid_is_gone(name: str) -> bool:
    pid = name.rpartition("-")[2]
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives, and is another user's
    return False
