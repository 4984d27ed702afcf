"""The step loop beside other models: what it asks, what goes on while a slice is held, and what it tells."""

from dataclasses import dataclass, field

from protocol.failures import FailureKind
from protocol.generation import Cancel, Finished, Waiting
from protocol.ids import RequestId
from tests.worker.test_loop import QUIET, Run, asks
from worker.neighbours import Alone, Hold, Load, Permits


@dataclass
class Elsewhere(Alone):
    """Holds the first slices that are asked for, and then the first decode steps; writes down what it hears."""

    holds_slices: int = 0
    holds_steps: int = 0
    rows: int | None = None
    heard: list[str] = field(default_factory=list[str])
    loads: list[tuple[Load, int | None]] = field(default_factory=list[tuple[Load, int | None]])
    asked: int = 0

    def ask(self, load: Load, prefill_rank: int | None) -> Permits:
        self.loads.append((load, prefill_rank))
        prefill = decode = None
        if prefill_rank is not None and self.holds_slices:
            self.holds_slices -= 1
            prefill = Hold(held_by="other_model", until=0.0)
            self.heard.append("held")
        if load.decoding_rows and prefill_rank is None and self.holds_steps:
            self.holds_steps -= 1
            decode = Hold(held_by="higher_class", until=0.0)
        return Permits(prefill=prefill, decode=decode)

    def rows_elsewhere(self) -> int | None:
        return self.rows

    def slice_started(self) -> None:
        self.heard.append("slice")

    def slice_ended(self) -> None:
        self.heard.append("ended")

    def decoded(self) -> None:
        self.heard.append("decoded")

    def idle(self, load: Load) -> None:
        self.heard.append("idle" if load == Load() else "waits")


def test_a_held_slice_comes_later() -> None:
    """Nothing else to do: the loop asks again until it may, and tells the device of all that it does."""
    device = Elsewhere(holds_slices=5)
    run = Run([asks("r"), *QUIET], {"r": "hi"}, device=device)

    assert run.text("r") == "hi"
    assert device.heard[:8] == ["idle", *["held"] * 5, "slice", "ended"]
    assert device.heard.count("decoded") == 3
    assert device.heard[-1] == "idle"
    assert device.loads[0] == (Load(active_rank=1), 1)
    assert device.loads[-1] == (Load(active_rank=1, decoding_rank=1, decoding_rows=1), None)


def test_rows_go_on_while_a_slice_is_held() -> None:
    """A lease that another model has never stops a row of this one."""
    moments = [None] * 4

    class FromThen(Elsewhere):
        def ask(self, load: Load, prefill_rank: int | None) -> Permits:
            if prefill_rank is not None and load.decoding_rows:
                self.heard.append("held")
                return Permits(prefill=Hold(held_by="other_model", until=0.0))
            return super().ask(load, prefill_rank)

    device = FromThen()
    run = Run([asks("row"), *moments, asks("prompt", 300), *QUIET], {"row": "a" * 20, "prompt": "b"}, device=device)

    assert run.text("row") == "a" * 20
    assert run.text("prompt") == "b"
    assert device.heard.count("held") >= 10
    end = run.finished("prompt")
    assert end.timings.held_by == "other_model"
    assert end.timings.held_seconds > 0.1


def test_held_steps_come_later() -> None:
    """Rows of a lower class than what runs elsewhere rest, and lose nothing."""
    run = Run([asks("r"), *QUIET], {"r": "hello"}, device=Elsewhere(holds_steps=7))

    assert run.text("r") == "hello"


def test_a_cancel_is_seen_while_held() -> None:
    """B07: whoever is gone while another model has the device is gone at once."""
    device = Elsewhere(holds_slices=10**9)
    run = Run([asks("r"), None, Cancel(request_id=RequestId("r")), *QUIET], {"r": "x"}, device=device)

    assert run.failed("r") is FailureKind.CANCELLED
    assert run.engine.rows == {}
    assert "slice" not in device.heard


def test_slices_are_short_beside_rows_elsewhere() -> None:
    """As beside rows of one's own: the device is the same."""

    def slices(rows: int | None) -> int:
        end = Run([asks("r", 5000), *QUIET], {"r": "x"}, device=Elsewhere(rows=rows)).end("r")
        assert isinstance(end, Finished)
        return end.timings.prefill_slices

    assert slices(0) > slices(1) > slices(None)


def test_who_waits_is_told_for_whom() -> None:
    """Honest waiting, beyond this worker."""
    device = Elsewhere(holds_slices=2000)
    requests = [asks(f"r{i}") for i in range(6)]
    run = Run([*requests, *QUIET], {f"r{i}": "x" for i in range(6)}, device=device)

    assert all(isinstance(run.end(f"r{i}"), Finished) for i in range(6))
    assert {event.held_by for event in run.events if isinstance(event, Waiting)} <= {"", "other_model", "rows"}


def test_a_mixed_pass_is_a_slice_and_a_step_to_others() -> None:
    """It waits for the lease as a slice does, with rows going on; the device hears of both parts."""
    moments = [None] * 6
    device = Elsewhere(holds_slices=3)
    run = Run(
        [asks("row"), *moments, asks("prompt", 300), *QUIET],
        {"row": "a" * 20, "prompt": "b"},
        device=device,
        slices="mixed",
    )
    mixed = sum(line.startswith("mixed") for line in run.engine.log)
    heard = "".join(device.heard)

    assert (run.text("row"), run.text("prompt")) == ("a" * 20, "b")
    assert mixed >= 1
    assert heard.count("sliceendeddecoded") >= mixed


def test_rows_that_rest_are_not_mixed_in() -> None:
    """A higher class runs elsewhere: the rows rest, and the prompt, which may go on, is read alone."""

    class StepsRest(Elsewhere):
        def ask(self, load: Load, prefill_rank: int | None) -> Permits:
            may_rest = load.decoding_rows and self.asked < 200
            self.asked += bool(may_rest)
            return Permits(decode=Hold(held_by="higher_class", until=0.0) if may_rest and self.asked > 8 else None)

    run = Run(
        [asks("row"), *[None] * 6, asks("prompt", 5000), *QUIET],
        {"row": "a" * 20, "prompt": "b"},
        device=StepsRest(),
        slices="mixed",
    )

    assert (run.text("row"), run.text("prompt")) == ("a" * 20, "b")
    assert any(line.startswith("prefill prompt") for line in run.engine.log)
