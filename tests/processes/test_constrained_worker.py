"""Constrained answers and required calls in a real worker, beside others that say what they like."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from protocol.failures import FailureKind
from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    Cancel,
    ChatMessage,
    ChatPrompt,
    Drain,
    Failed,
    Finished,
    FinishReason,
    Ready,
    Reasoning,
)
from protocol.ids import RequestId
from protocol.sampling import Sampling
from protocol.tools import Grammar, JsonObject, JsonSchema, OneOf, Regex, Tool, ToolUse
from tests.fakes.script_model import said_by
from tests.processes.running_worker import Start, WorkerProcess

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["oslo", "bern"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool(name="get_time")


def hello(*tools: Tool, text: str = "hello") -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content=text),), tools=tools)


def calls(worker: WorkerProcess, name: str) -> list[tuple[str, Any]]:
    """Name and arguments of each call, every one of them whole."""
    found = [(event.name, []) for event in worker.of(name) if isinstance(event, CallStarted)]
    for event in worker.of(name):
        if isinstance(event, CallArguments):
            found[event.index][1].append(event.text)
    assert len([event for event in worker.of(name) if isinstance(event, CallEnded)]) == len(found)
    return [(called, json.loads("".join(texts))) for called, texts in found]


def test_beside_free_rows(start: Start, script_model: Path) -> None:
    """H02: eight at once, half of them constrained: these keep to their schema, the others say what they say alone."""
    worker = start(script_model, max_rows=8)
    ready = next(event for event in worker.events if isinstance(event, Ready))
    assert "structured_output" in ready.capabilities
    scripts = ["SC01", "SC19", "SC08", "SC15"]
    for i, tag in enumerate(scripts):
        worker.generate(tag, tag)
        constraint = JsonSchema(text=json.dumps(PERSON))
        worker.generate(f"held {i}", "hello", constraint=constraint, sampling=Sampling(temperature=0.8, seed=i))
    ends = worker.ends([*scripts, *(f"held {i}" for i in range(4))])

    assert [worker.text(tag) for tag in scripts] == [said_by(tag) for tag in scripts]
    assert {end.reason if isinstance(end, Finished) else end for end in ends.values()} == {FinishReason.STOP}
    for i in range(4):
        Draft202012Validator(PERSON).validate(json.loads(worker.text(f"held {i}")))


def test_every_kind_of_constraint(start: Start, script_model: Path) -> None:
    """And how such a row is cut, stopped and cancelled."""
    worker = start(script_model)

    assert worker.ask("one of", "hello", constraint=OneOf(options=("maybe", "never"))) in ("maybe", "never")
    assert worker.ask("regex", "hello", constraint=Regex(pattern="x[0-9]{3}/y")).startswith("x")
    assert worker.ask("grammar", "hello", constraint=Grammar(text='root ::= "k" [ab] "l"')) in ("kal", "kbl")
    assert worker.ask("cut", "hello", constraint=Regex(pattern="[0-9]{9}"), max_tokens=5).isdigit()
    end = worker.end("cut")
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 5)
    assert worker.ask("stopped", "hello", constraint=OneOf(options=("one, two",)), stop=(", ",)) == "one"

    worker.generate("endless", "hello", constraint=Regex(pattern="[ab]{4000}"))
    while not worker.text("endless"):
        worker.receive()
    worker.send(Cancel(request_id=RequestId("endless")))
    end = worker.end("endless")
    assert isinstance(end, Failed)
    assert end.failure.kind is FailureKind.CANCELLED
    assert worker.ask("after", "SC04") == said_by("SC04")


def test_a_required_call(start: Start, script_model: Path) -> None:
    """A06: a model that would only chat calls a tool that exists, with its arguments; a named one if one is."""
    worker = start(script_model)
    one = ToolUse(choice="required", calls="one")
    for seed in range(4):
        sampling = Sampling(temperature=1.0, seed=seed)
        worker.ask(f"any {seed}", hello(WEATHER, CLOCK), tool_use=one, sampling=sampling)
        ((called, arguments),) = calls(worker, f"any {seed}")
        assert called in ("get_weather", "get_time")
        if called == "get_weather":
            Draft202012Validator(WEATHER.parameters or {}).validate(arguments)
        else:
            assert arguments == {}
        assert worker.text(f"any {seed}") == ""
        end = worker.end(f"any {seed}")
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.TOOL_CALLS

    named = ToolUse(choice="required", allowed=("get_time",), calls="one")
    worker.ask("named", hello(WEATHER, CLOCK), tool_use=named)
    assert calls(worker, "named") == [("get_time", {})]
    many = ToolUse(choice="required")
    worker.ask("many", hello(CLOCK), tool_use=many, sampling=Sampling(temperature=1.0, seed=1))
    assert set(map(str, calls(worker, "many"))) == {"('get_time', {})"}


def test_reasoning_is_free(start: Start, script_model: Path) -> None:
    """The answer alone is held: to its form, or to be a call. Where reasoning is kept as text, all of it is."""
    worker = start(script_model)
    answer = Regex(pattern="answer[0-9]+")
    assert worker.ask("thinks", "SC15", constraint=answer, reasoning="split") == "answer15"
    thought = "".join(event.text for event in worker.of("thinks") if isinstance(event, Reasoning))
    assert thought == "why15 because"

    assert worker.ask("does not", "hello", constraint=OneOf(options=("yes",)), reasoning="split") == "yes"
    assert worker.ask("kept", "SC15", constraint=OneOf(options=("yes",))) == "yes"

    required = ToolUse(choice="required", calls="one")
    worker.ask("calls", hello(CLOCK, text="SC15"), tool_use=required, reasoning="split")
    assert calls(worker, "calls") == [("get_time", {})]


@pytest.mark.parametrize("log_level", ["debug"])
def test_what_cannot_be_held_is_refused(start: Start, script_model: Path, log_level: str) -> None:
    """With a reason and the field's name, before a row is taken; nothing of the schema is logged."""
    worker = start(script_model, log_level=log_level)
    schema = JsonSchema(text='{"type": "object", "properties": {"MARKER-1": false}, "required": ["MARKER-1"]}')
    required = ToolUse(choice="required")
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "impossible": ({"constraint": schema}, "response_format"),
        "no pattern": ({"constraint": Regex(pattern="(MARKER-2")}, "response_format"),
        "no tools": ({"tool_use": required}, "tool_choice"),
        "other tool": ({"tool_use": ToolUse(choice="required", allowed=("MARKER-3",))}, "tool_choice"),
        "goes on": ({"constraint": JsonObject(), "ignore_end": "yes"}, "ignore_eos"),
    }
    for name, (asked, param) in cases.items():
        tools = (CLOCK,) if name == "other tool" else ()
        worker.generate(name, hello(*tools), **asked)
        end = worker.end(name)
        assert isinstance(end, Failed)
        assert (end.failure.kind, end.failure.param) == (FailureKind.INVALID_REQUEST, param)
    worker.generate("odd tool", hello(Tool(name="odd", parameters={"type": "MARKER-4"})), tool_use=required)
    end = worker.end("odd tool")
    assert isinstance(end, Failed)
    assert (end.failure.kind, end.failure.param) == (FailureKind.INVALID_REQUEST, "tools")

    assert json.loads(worker.ask("fine", "MARKER-5", constraint=OneOf(options=("5",)))) == 5
    worker.send(Drain(deadline_seconds=1.0))
    assert worker.exit_code() == 0
    assert "MARKER" not in worker.log
