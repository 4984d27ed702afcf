"""Which rows run next: every row once, batches within their bounds, classes first, nobody for ever last."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import RequestId
from protocol.latency import LatencyClass
from worker.embedding.packing import Batch, Packer, PackingSettings

SETTINGS = PackingSettings(most_tokens=400, most_rows=8, first_batch_tokens=64, lower_class_every=5)
SECONDS_PER_TOKEN = 0.001
INTERACTIVE, STANDARD, BATCH = LatencyClass


@dataclass(frozen=True)
class Request:
    name: str
    lengths: tuple[int, ...]
    latency_class: LatencyClass = STANDARD
    tenant: str = ""


def add(packer: Packer, request: Request) -> None:
    packer.add(RequestId(request.name), request.lengths, latency_class=request.latency_class, tenant=request.tenant)


def run_one(packer: Packer, most_seconds: float = 0.1) -> Batch:
    """The next batch, which then has run, at a fixed speed."""
    batch = packer.next_batch(most_seconds)
    assert batch is not None
    packer.ran(batch, batch.padded_tokens * SECONDS_PER_TOKEN)
    return batch


def run_all(packer: Packer, most_seconds: float = 0.1) -> list[Batch]:
    batches: list[Batch] = []
    while not packer.is_empty:
        batches.append(run_one(packer, most_seconds))
    return batches


def batches_until_done(packer: Packer, name: str, rows: int) -> int:
    """How many batches run until this request has none left."""
    count = 0
    while rows:
        count += 1
        rows -= sum(row.request_id == name for row in run_one(packer).rows)
    return count


requests = st.lists(
    st.tuples(
        st.lists(st.integers(1, 300), min_size=1, max_size=30),
        st.sampled_from(LatencyClass),
        st.sampled_from(("ada", "bob")),
    ),
    min_size=1,
    max_size=8,
).map(
    lambda drawn: [
        Request(f"r{number}", tuple(lengths), latency_class, tenant)
        for number, (lengths, latency_class, tenant) in enumerate(drawn)
    ]
)


@given(requests, st.floats(0.001, 1.0))
def test_every_row_runs_once_and_every_batch_keeps_its_bounds(asked: list[Request], most_seconds: float) -> None:
    """Tokens with padding, rows, padding's share and expected time are bounded; a single row may break them."""
    packer = Packer(SETTINGS)
    for request in asked:
        add(packer, request)
    ran: list[tuple[str, int]] = []
    while not packer.is_empty:
        rate = packer.tokens_per_second
        batch = run_one(packer, most_seconds)
        ran += [(row.request_id, row.index) for row in batch.rows]
        if len(batch.rows) > 1:
            assert len(batch.rows) <= SETTINGS.most_rows
            assert batch.padded_tokens <= SETTINGS.most_tokens
            real = sum(row.tokens for row in batch.rows)
            assert batch.padded_tokens - real <= SETTINGS.wasted_share * batch.padded_tokens
            bound = SETTINGS.first_batch_tokens if rate is None else rate * most_seconds
            assert batch.padded_tokens <= bound
        classes = {
            request.latency_class.rank for request in asked for row in batch.rows if request.name == row.request_id
        }
        assert classes == {batch.rank}
    assert sorted(ran) == sorted((request.name, index) for request in asked for index in range(len(request.lengths)))


@given(requests, st.data())
def test_what_is_removed_runs_no_more(asked: list[Request], data: st.DataObject) -> None:
    """A cancel between two batches takes out the rest of its request, and of no other."""
    packer = Packer(SETTINGS)
    for request in asked:
        add(packer, request)
    gone = data.draw(st.sampled_from(asked)).name
    before = run_one(packer)
    packer.remove(RequestId(gone))
    packer.remove(RequestId("never there"))
    after = [row for batch in run_all(packer) for row in batch.rows]
    assert gone not in {row.request_id for row in after}
    others = {(row.request_id, row.index) for row in (*before.rows, *after) if row.request_id != gone}
    assert len(others) == sum(len(request.lengths) for request in asked if request.name != gone)


@given(requests, st.data())
def test_a_removed_request_may_end_while_its_batch_runs(asked: list[Request], data: st.DataObject) -> None:
    """The device's batch comes back for a request that nobody wants any more: the books stay right."""
    packer = Packer(SETTINGS)
    for request in asked:
        add(packer, request)
    batch = packer.next_batch(0.1)
    assert batch is not None
    gone = data.draw(st.sampled_from(batch.rows)).request_id
    packer.remove(gone)
    packer.ran(batch, 0.1)
    left = {row.request_id for later in run_all(packer) for row in later.rows}
    assert gone not in left


def test_a_class_goes_first_and_a_lower_one_is_not_starved() -> None:
    """One batch of five is the lower class's, and of two lower classes both have theirs."""
    packer = Packer(SETTINGS)
    for latency_class in LatencyClass:
        add(packer, Request(latency_class.value, (300,) * 60, latency_class))
    ranks = [run_one(packer).rank for _ in range(40)]
    assert ranks.count(INTERACTIVE.rank) == 32
    assert ranks.count(STANDARD.rank) == ranks.count(BATCH.rank) == 4
    assert ranks[0] == INTERACTIVE.rank


def test_a_tenant_with_little_does_not_wait_for_one_with_much() -> None:
    """In a class the device is shared by tenants, not by rows."""
    packer = Packer(SETTINGS)
    add(packer, Request("heap", (300,) * 100, tenant="ada"))
    for _ in range(5):
        run_one(packer)
    add(packer, Request("few", (300,) * 3, tenant="bob"))
    assert batches_until_done(packer, "few", 3) <= 7


def test_of_one_tenant_a_short_request_overtakes_and_the_oldest_still_moves() -> None:
    """Every second batch goes to the request with the fewest rows left, every other to the oldest."""
    packer = Packer(SETTINGS)
    add(packer, Request("heap", (300,) * 40))
    add(packer, Request("one", (300,)))
    for number in range(60):
        add(packer, Request(f"small{number}", (300,)))
    assert batches_until_done(packer, "one", 1) <= 4
    assert batches_until_done(packer, "heap", 38) <= 80


def test_rows_of_like_length_of_several_requests_share_a_batch() -> None:
    """Three clients with one short text each are one batch, whatever long ones wait beside."""
    packer = Packer(SETTINGS)
    for number in range(3):
        add(packer, Request(f"short{number}", (10,), tenant=f"tenant{number}"))
    add(packer, Request("long", (300,), tenant="other"))
    batch = run_one(packer)
    assert {row.request_id for row in batch.rows} == {"short0", "short1", "short2"}


def test_speed_is_that_of_the_slowest_of_late() -> None:
    """A batch is bounded by what was measured, and a slow one makes the next smaller."""
    packer = Packer(SETTINGS)
    add(packer, Request("many", (10,) * 200))
    assert packer.tokens_per_second is None
    first = packer.next_batch(0.1)
    assert first is not None
    packer.ran(first, first.padded_tokens * 0.01)
    second = packer.next_batch(0.3)
    assert second is not None
    assert second.padded_tokens == 30
