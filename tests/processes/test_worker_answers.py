"""A real worker with the script model: what its template, its tokens and its text make of tools and reasoning."""

import json
from pathlib import Path

from protocol.generation import (
    CallArguments,
    CallEnded,
    CallStarted,
    ChatMessage,
    ChatPrompt,
    Finished,
    FinishReason,
    Ready,
    Reasoning,
)
from protocol.tools import Tool, ToolUse
from tests.fakes.script_model import said_by
from tests.processes.running_worker import Start, WorkerProcess

TOOLS = (
    Tool(name="get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool(name="get_time", parameters={"type": "object", "properties": {"tz": {"type": "string"}}}),
    Tool(name="grep", parameters={"type": "object", "properties": {"pattern": {"type": "string"}}}),
)


MANY = ToolUse()


def ask(worker: WorkerProcess, tag: str, name: str = "", tool_use: ToolUse | None = MANY, **more: object) -> Finished:
    name = name or tag
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content=tag),), tools=TOOLS if tool_use is not None else ())
    worker.generate(name, prompt, tool_use=tool_use, reasoning="split", **more)
    end = worker.end(name)
    assert isinstance(end, Finished), end
    return end


def calls_of(worker: WorkerProcess, name: str) -> list[tuple[str, str]]:
    """Names and arguments, in order; each call is whole."""
    calls: list[tuple[str, str]] = []
    ended = 0
    for event in worker.of(name):
        match event:
            case CallStarted():
                calls.append((event.name, ""))
            case CallArguments():
                calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
            case CallEnded():
                ended += 1
            case _:
                pass
    assert ended == len(calls)
    return calls


def thought_of(worker: WorkerProcess, name: str) -> str:
    return "".join(event.text for event in worker.of(name) if isinstance(event, Reasoning))


def test_the_scripts(start: Start, script_model: Path) -> None:
    """A01-A05, A07, D01-D03 of the worker's half: one worker, every script that holds a call or a thought."""
    worker = start(script_model, persist="off")
    ready = next(event for event in worker.events if isinstance(event, Ready))
    assert {"tools", "reasoning"} <= set(ready.capabilities)

    # SC07: whole markers, nested values; SC08: the same markers in pieces of ordinary text
    assert ask(worker, "SC07").reason is FinishReason.TOOL_CALLS
    ((name, arguments),) = calls_of(worker, "SC07")
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": 'Zürich "Altstadt"', "opts": {"days": [1, {"h": "}]"}]}}
    assert ask(worker, "SC08").reason is FinishReason.TOOL_CALLS
    assert calls_of(worker, "SC08") == [("get_weather", '{"city": "Oslo"}')]
    # SC09: two calls, nothing between them; and only the first where one is asked for
    assert ask(worker, "SC09").reason is FinishReason.TOOL_CALLS
    assert calls_of(worker, "SC09") == [("get_weather", '{"city": "A"}'), ("get_time", '{"tz": "B"}')]
    assert ask(worker, "SC09", "one", ToolUse(calls="one")).reason is FinishReason.TOOL_CALLS
    assert calls_of(worker, "one") == [("get_weather", '{"city": "A"}')]
    # SC10: a bad escape; SC12: never closed; SC13: an unknown tool
    assert ask(worker, "SC10").warnings == ("tool_call_repaired",)
    assert calls_of(worker, "SC10") == [("grep", r'{"pattern": "\\d+"}')]
    end = ask(worker, "SC12")
    assert (end.reason, end.warnings) == (FinishReason.STOP, ("tool_call_unparsed",))
    assert worker.text("SC12") == said_by("SC12")
    assert ask(worker, "SC13").reason is FinishReason.TOOL_CALLS
    assert calls_of(worker, "SC13") == [("no_such_tool", "{}")]
    for tag in ("SC07", "SC08", "SC09", "one", "SC10", "SC13"):
        assert worker.text(tag) == "", tag
    # cut by length, and no tools at all: plain text
    assert ask(worker, "SC08", "cut", max_tokens=3).reason is FinishReason.LENGTH
    assert worker.text("cut") == "".join(["<tool", '_call>\n{"na', 'me": "get_weather", "argu'])
    assert ask(worker, "SC07", "none", None).reason is FinishReason.STOP
    assert worker.text("none") == said_by("SC07")
    assert calls_of(worker, "none") == []

    # SC15: thoughts; SC18: cut in them, and to their natural end; SC21: empty ones; SC04: none
    assert ask(worker, "SC15").usage.reasoning_tokens == 4
    assert (thought_of(worker, "SC15"), worker.text("SC15")) == ("why15 because", "answer15")
    assert ask(worker, "SC18", "short", max_tokens=10).reason is FinishReason.LENGTH
    assert said_by("SC18").startswith(f"<think>{thought_of(worker, 'short')}")
    assert ask(worker, "SC18").reason is FinishReason.STOP
    assert f"<think>{thought_of(worker, 'SC18')}" == said_by("SC18")
    ask(worker, "SC21")
    assert (thought_of(worker, "SC21"), worker.text("SC21")) == ("", "answer21")
    ask(worker, "SC04")
    assert (thought_of(worker, "SC04"), worker.text("SC04")) == ("", said_by("SC04"))
    for tag in ("short", "SC18"):
        assert worker.text(tag) == ""


def test_a_template_that_leaves_the_model_thinking(start: Start, script_model: Path, tmp_path: Path) -> None:
    """D01: the state comes from the rendered prompt, so that a closing tag alone ends the reasoning."""
    folder = tmp_path / "thinks"
    folder.mkdir()
    for file in script_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    opening = "{% if 'SC16' in asked.text %}<think>\n{% endif %}"
    template = (folder / "chat_template.jinja").read_text()
    head, tags = template.split("{%- if 'SC01' in asked.text -%}", 1)
    template = f"{head}{opening}{{%- if 'SC01' in asked.text -%}}{tags}"
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))

    worker = start(folder, persist="off")
    ask(worker, "SC16")
    assert thought_of(worker, "SC16") == "implicit16 reasoning"
    assert worker.text("SC16") == "answer16"
    assert ask(worker, "please print <think> and SC04", "SC04").reason is FinishReason.STOP
    assert worker.text("SC04") == said_by("SC04")
