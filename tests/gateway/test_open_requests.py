"""The books of open requests: everybody is in one place, and only their own process can move them."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.open_requests import OpenRequest, OpenRequests, Phase
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Delta, Failed, Generate, Prefilling, Queued, RequestEvent, TextPrompt
from protocol.ids import Incarnation, ModelName, RequestId
from protocol.sampling import Sampling

MODEL = ModelName("m")
OURS, FOREIGN = Incarnation(1), Incarnation(2)
ID = RequestId("a")
QUEUED = Queued(request_id=ID, prompt_tokens=1)
PREFILLING = Prefilling(request_id=ID, done_tokens=1, total_tokens=2, cached_tokens=0)
DELTA = Delta(request_id=ID, text="x", tokens=1)
FAILED = Failed(request_id=ID, failure=Failure(kind=FailureKind.INTERNAL, message="m"))


def request(name: str = "a", model: ModelName = MODEL) -> OpenRequest:
    request_id = RequestId(name)
    return OpenRequest(
        model=model,
        work=Generate(request_id=request_id, prompt=TextPrompt(text="t"), sampling=Sampling()),
        reply=Reply(request_id, lambda _: None),
    )


@pytest.mark.parametrize(
    ("phase", "event", "after"),
    [
        ("sent", QUEUED, "accepted"),
        ("sent", PREFILLING, "accepted"),
        ("sent", DELTA, "streaming"),
        ("accepted", QUEUED, None),
        ("accepted", PREFILLING, "accepted"),
        ("accepted", DELTA, "streaming"),
        ("streaming", QUEUED, None),
        ("streaming", PREFILLING, None),
        ("streaming", DELTA, "streaming"),
        ("cancelled", DELTA, "cancelled"),
    ],
)
def test_a_request_only_moves_forward(phase: Phase, event: RequestEvent, after: Phase | None) -> None:
    """Events that come twice or too late belong to nobody."""
    books = OpenRequests()
    one = request()
    books.send(one, OURS)
    one.phase = phase
    found = books.advance(OURS, event)
    assert (found.phase if found else None) == after


def test_only_its_own_process_can_move_or_end_a_request() -> None:
    """A foreign process, or none, changes nothing; the end is taken once."""
    books = OpenRequests()
    one = request()
    books.wait(one)
    assert books.advance(OURS, FAILED) is None
    books.send(one, OURS)
    assert books.advance(FOREIGN, FAILED) is None
    assert books.advance(OURS, FAILED) is one
    assert books.advance(OURS, FAILED) is None
    assert len(books) == 0


class Books(RuleBasedStateMachine):
    """Any order of moves of a few requests."""

    def __init__(self) -> None:
        super().__init__()
        self.books = OpenRequests()
        self.requests = [request(name, ModelName(model)) for name, model in ("ax", "bx", "cy", "dy")]
        self.place: dict[RequestId, ModelName | Incarnation] = {}

    @rule(index=st.integers(0, 3))
    def wait(self, index: int) -> None:
        one = self.requests[index]
        self.books.wait(one)
        self.place[one.request_id] = one.model

    @rule(index=st.integers(0, 3), incarnation=st.integers(1, 2))
    def send(self, index: int, incarnation: int) -> None:
        one = self.requests[index]
        self.books.send(one, Incarnation(incarnation))
        self.place[one.request_id] = Incarnation(incarnation)

    @rule(index=st.integers(0, 3))
    def remove(self, index: int) -> None:
        one = self.requests[index]
        self.books.remove(one)
        self.place.pop(one.request_id, None)

    @invariant()
    def every_request_is_in_exactly_its_place(self) -> None:
        found: dict[RequestId, ModelName | Incarnation] = {}
        for model in (ModelName("x"), ModelName("y")):
            for one in self.books.waiting(model):
                assert found.setdefault(one.request_id, model) == model
        for incarnation in (OURS, FOREIGN):
            for one in self.books.sent_to(incarnation):
                assert found.setdefault(one.request_id, incarnation) == incarnation
        assert found == self.place
        assert len(self.books) == len(found)


TestBooks = Books.TestCase
TestBooks.settings = hypothesis_settings(max_examples=50, stateful_step_count=20, deadline=None)
