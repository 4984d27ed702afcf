"""The board and the lease between real processes: what is read is whole, and the dead leave nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import Incarnation
from worker.board import PAGE_BYTES, SLOT_BYTES, Board
from worker.neighbours import Activity, Hold, Load, Neighbour, PrefillState, SharingSettings
from worker.prefill_lease import PrefillLease
from worker.shared_device import SharedDevice

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 20.0


class Other:
    """Another worker's process."""

    def __init__(self, runtime_directory: Path, incarnation: int) -> None:
        self.incarnation = incarnation
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("board_process.py")),
                runtime_directory,
                f"{incarnation}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert self.hears() == "there"

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hears()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


StartOther = Callable[[int], Other]


@pytest.fixture
def start(runtime_directory: Path) -> Iterator[StartOther]:
    others: list[Other] = []

    def start_one(incarnation: int) -> Other:
        others.append(Other(runtime_directory, incarnation))
        return others[-1]

    yield start_one
    for other in others:
        other.close()


@pytest.fixture
def board(runtime_directory: Path) -> Iterator[Board]:
    one = Board(runtime_directory, Incarnation(1), clock=time.monotonic, scan_every_seconds=0.0)
    yield one
    one.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "waited too long"


def names(runtime_directory: Path) -> set[str]:
    return {path.name for path in (runtime_directory / "board").iterdir()}


# --- the board ------------------------------------------------------------------------------------------------------


def test_what_one_says_the_others_read(board: Board, start: StartOther, runtime_directory: Path) -> None:
    """Every field, of every other, by nobody but this user; and who leaves is gone."""
    assert board.snapshot() == ()
    two, three = start(2), start(3)
    two.does("publish 7")
    found = {neighbour.key.incarnation: neighbour for neighbour in board.snapshot()}

    assert {n: neighbour.key.pid for n, neighbour in found.items()} == {2: two.process.pid, 3: three.process.pid}
    assert found[2].activity == Activity(active_rank=0, decode_steps=7)
    assert found[3].activity == Activity()
    assert 0.0 <= time.monotonic() - found[2].updated < DEADLINE_SECONDS, "the clock is the machine's"
    assert (runtime_directory / "board").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (runtime_directory / "board").iterdir()} == {0o600}
    assert (runtime_directory / "prefill.lease").stat().st_mode & 0o777 == 0o600

    two.does("leave")
    assert [neighbour.key.incarnation for neighbour in board.snapshot()] == [3]


@given(
    st.builds(
        Activity,
        active_rank=st.none() | st.integers(0, 3),
        decoding_rank=st.none() | st.integers(0, 3),
        decoding_rows=st.integers(0, 2**32 - 1),
        decode_steps=st.integers(0, 2**64 - 1),
        step_seconds=st.floats(0, 1e6),
        slices=st.integers(0, 2**64 - 1),
        prefill_state=st.sampled_from(PrefillState),
        prefill_rank=st.integers(0, 3),
        prefill_since=st.floats(0, 1e12),
    )
)
def test_a_word_survives_the_page(activity: Activity) -> None:
    """All that can be said can be read again."""
    reader, writer = _PAIR
    writer.publish(activity)

    assert [neighbour.activity for neighbour in reader.snapshot()] == [activity]


@pytest.fixture(autouse=True, scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    directory = tmp_path_factory.mktemp("run")
    _PAIR.extend(
        Board(directory, Incarnation(number), clock=time.monotonic, scan_every_seconds=0.0) for number in (1, 2)
    )
    yield
    for one in _PAIR:
        one.close()
    _PAIR.clear()


_PAIR: list[Board] = []
"""Made once: Hypothesis runs a test's body many times for one fixture."""


def test_no_read_is_torn(board: Board, start: StartOther) -> None:
    """Beside a writer that never pauses each word is whole, and never older than one read before."""
    storm = start(2)
    storm.does("storm")
    seen: list[int] = []
    until(lambda: _look(board.snapshot(), seen) > 2000)

    assert seen == sorted(seen)


def _look(neighbours: tuple[Neighbour, ...], seen: list[int]) -> int:
    for neighbour in neighbours:
        word = neighbour.activity
        assert word.decode_steps == word.slices == word.step_seconds == word.prefill_since
        if not seen or word.decode_steps != seen[-1]:
            seen.append(word.decode_steps)
    return len(seen)


@pytest.mark.parametrize("torn", range(0, 80, 7))
def test_a_torn_slot_is_the_word_before(board: Board, runtime_directory: Path, torn: int) -> None:
    """Killed between two bytes of a word: the one before still stands."""
    writer = Board(runtime_directory, Incarnation(2), clock=time.monotonic)
    for steps in (1, 2, 3):
        writer.publish(Activity(decode_steps=steps))
    page = runtime_directory / "board" / f"2-{os.getpid()}"
    content = bytearray(page.read_bytes())
    newest = max((0, SLOT_BYTES), key=lambda start: int.from_bytes(content[start : start + 8], "little"))
    content[newest + torn] ^= 0xFF
    with page.open("r+b") as file:
        file.write(content)
    (neighbour,) = board.snapshot()
    writer.close()

    assert neighbour.activity.decode_steps in (2, 3)  # beyond the checksum nothing matters


def test_the_dead_leave_nothing(board: Board, start: StartOther, runtime_directory: Path) -> None:
    """A killed worker's page is removed by whoever notices, and its incarnation may come again."""
    two = start(2)
    assert len(board.snapshot()) == 1
    two.kill()
    assert board.snapshot() == ()
    assert names(runtime_directory) == {f"1-{os.getpid()}"}

    again = start(2)
    assert [neighbour.key.pid for neighbour in board.snapshot()] == [again.process.pid]


def test_a_fork_does_not_keep_the_dead_alive(board: Board, start: StartOther, runtime_directory: Path) -> None:
    """A child that inherited the lock holds it still; the pid is gone."""
    two = start(2)
    child = int(two.does("fork"))
    try:
        two.kill()
        assert board.snapshot() == ()
        assert names(runtime_directory) == {f"1-{os.getpid()}"}
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stopped_worker_stays_on_the_board(board: Board, start: StartOther) -> None:
    """It is not dead; that it is silent, its age tells."""
    two = start(2)
    two.does("publish 1")
    two.process.send_signal(signal.SIGSTOP)
    (word,) = board.snapshot()
    until(lambda: time.monotonic() - word.updated > 0.2)

    assert board.snapshot() == (word,)


def test_what_is_no_page_is_left_alone_or_removed(board: Board, runtime_directory: Path) -> None:
    """Rests of a killed start, a short file, a link: nobody fails for them, and nothing is read through a link."""
    directory = runtime_directory / "board"
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone_pid = int(gone.stdout)
    (directory / f".9-{gone_pid}").write_bytes(b"")
    (directory / "short").write_bytes(b"x")
    (directory / "7-empty").write_bytes(bytes(PAGE_BYTES))
    precious = runtime_directory / "precious"
    precious.write_bytes(bytes(PAGE_BYTES))
    (directory / f"8-{gone_pid}").symlink_to(precious)

    assert board.snapshot() == ()
    assert board.snapshot() == ()
    assert f".9-{gone_pid}" not in names(runtime_directory)
    assert precious.exists()


def test_a_look_costs_less_than_a_thousandth_of_a_step(runtime_directory: Path) -> None:
    """Eight neighbours that all said something new: below 50 µs, but for a machine that is busy otherwise."""
    boards = [Board(runtime_directory, Incarnation(n), clock=time.monotonic) for n in range(9)]
    until(lambda: len(boards[0].snapshot()) == 8)
    seconds: list[float] = []
    for steps in range(300):
        for other in boards[1:]:
            other.publish(Activity(decode_steps=steps))
        started = time.perf_counter()
        boards[0].snapshot()
        seconds.append(time.perf_counter() - started)
    for one in boards:
        one.close()

    assert sorted(seconds)[len(seconds) // 10] < 50e-6


# --- the lease ------------------------------------------------------------------------------------------------------


def test_one_at_a_time(start: StartOther, runtime_directory: Path) -> None:
    """Refused at once while another has it, given when that gives it back; both are idempotent."""
    lease = PrefillLease(runtime_directory)
    two = start(2)
    assert two.does("take") == "taken"
    assert two.does("take") == "taken"
    assert lease.try_take() == "refused"
    assert not lease.is_held
    two.does("release")
    two.does("release")

    assert lease.try_take() == "taken"
    assert two.does("take") == "refused"
    lease.close()
    assert two.does("take") == "taken"


def test_the_dead_hold_nothing(start: StartOther, runtime_directory: Path) -> None:
    """The kernel gives the lease back, whatever the death."""
    lease = PrefillLease(runtime_directory)
    two = start(2)
    two.does("take")
    assert lease.try_take() == "refused"
    two.kill()

    assert lease.try_take() == "taken"
    lease.close()


# --- both -----------------------------------------------------------------------------------------------------------


class Clock:
    """Starts at the machine's time, and stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def shared(
    runtime_directory: Path,
    incarnation: int,
    clock: Clock,
    share_cores: Callable[[int], None] = lambda _workers: None,
    **settings: float,
) -> SharedDevice:
    return SharedDevice(
        Board(runtime_directory, Incarnation(incarnation), clock=clock, scan_every_seconds=0.0),
        PrefillLease(runtime_directory),
        SharingSettings(**settings),  # pyright: ignore[reportArgumentType]
        clock=clock,
        share_cores=share_cores,
    )


LOAD = Load(active_rank=0)


def test_two_workers_take_turns(runtime_directory: Path) -> None:
    """One slice at a time; while it runs and until it is paid for, the other is held; then it is its turn."""
    clock = Clock()
    one, two = shared(runtime_directory, 1, clock), shared(runtime_directory, 2, clock)
    row = Load(active_rank=0, decoding_rank=0, decoding_rows=1)
    assert two.ask(row, None).decode is None
    for _ in range(2):
        two.decoded()
        two.ask(row, None)
        clock.now += 0.05
    assert two.ask(row, 0).prefill is None, "nobody wants it"
    assert one.ask(LOAD, 0).prefill is not None, "two has the lease"
    two.ask(row, None)  # its prompt was cancelled
    assert one.ask(LOAD, 0).prefill is None
    one.slice_started()
    clock.now += 0.2
    assert two.ask(row, 0).prefill is not None
    one.slice_ended()
    held = one.ask(LOAD, 0).prefill
    assert isinstance(held, Hold)
    assert held.held_by == "other_model", "two's row stood still"
    assert two.ask(row, 0).prefill is not None, "one still pays"
    assert one.rows_elsewhere() == 0
    for _ in range(5):
        clock.now += 0.05
        two.decoded()
        two.ask(row, 0)
    assert one.ask(LOAD, 0).prefill is not None, "paid, and two asked first"
    assert two.ask(row, 0).prefill is None
    one.close()
    two.close()


def test_the_lease_of_a_stopped_worker_stops_nobody(start: StartOther, runtime_directory: Path) -> None:
    """Refused at first; when its holder is not seen to use it for the limit, one goes without, and again at once."""
    clock = Clock()
    one = shared(runtime_directory, 1, clock)
    two = start(2)
    two.does("take")
    two.process.send_signal(signal.SIGSTOP)
    assert one.ask(LOAD, 0).prefill is not None
    clock.now += SharingSettings().stopped_after_seconds + 0.1
    for _ in range(3):
        assert one.ask(LOAD, 0).prefill is None
        one.slice_started()
        one.slice_ended()
        clock.now += 0.1

    two.kill()
    assert one.ask(LOAD, 0).prefill is None
    one.idle(Load())
    three = start(3)
    assert three.does("take") == "taken", "one took the real lease again, and gave it back when idle"
    one.close()


def test_who_computes_beside_it_is_told(runtime_directory: Path) -> None:
    """Cores are divided by the workers that are at work: not by idle ones, nor by one that was stopped in its midst."""
    clock = Clock()
    told: list[int] = []
    one = shared(runtime_directory, 1, clock, share_cores=told.append)
    two = shared(runtime_directory, 2, clock)
    one.ask(LOAD, None)
    two.ask(LOAD, None)
    one.ask(LOAD, None)
    two.idle(Load())
    one.ask(LOAD, None)
    two.ask(LOAD, None)
    clock.now += 60
    one.ask(LOAD, None)
    assert told == [1, 2, 1, 1]
