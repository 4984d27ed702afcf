"""The field cases whose answer is known, for every client: raw HTTP and both SDKs, whole and streamed, in each dialect.

`EveryClient` holds that all of them have the same; the table says what that is. After each case the service must serve.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from tests.cases.conftest import MODEL
from tests.fakes.every_client import EveryClient
from tests.fakes.live_service import LiveService, live_service
from tests.fakes.same_conversation import DIALECTS, Dialect, in_dialect
from tests.fakes.script_model import said_by

THINKER = "org/thinker:16"


@pytest.fixture(scope="module")
def service(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """The script model, and one whose template opens the block of thinking itself, under a name with slash and tag."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(script_model, folder)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    head, found, tail = template.rpartition("<|im_start|>assistant\n")
    opening = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
    assert found
    (folder / "chat_template.jinja").write_text(f"{head}{found}{opening}{tail}", encoding="utf-8")
    with live_service({MODEL: script_model, THINKER: folder}) as live:
        yield live


@pytest.fixture(scope="module")
def shared_clients(service: LiveService) -> Iterator[EveryClient]:
    clients = EveryClient(service)
    yield clients
    clients.close()


@pytest.fixture
def clients(shared_clients: EveryClient) -> Iterator[EveryClient]:
    yield shared_clients
    shared_clients.assert_served(MODEL)


# --- the table -------------------------------------------------------------------------------------------------------


def function(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
WEATHER = function("get_weather", city=TEXT)
TIME = function("get_time", tz={"type": "string", "enum": ["B"]})
TOOLS = [WEATHER, TIME, function("grep", pattern=TEXT), function("edit", text=TEXT)]
NAMED = {"type": "function", "function": {"name": "get_time"}}
NESTED = {"city": 'Zürich "Altstadt"', "opts": {"days": [1, {"h": "}]"}]}}
WHOLE_07 = said_by("SC07")
SC04 = said_by("SC04")


class Case(Struct, frozen=True, kw_only=True):
    """What is asked, and what everybody must have in the end. Cases differ in their last message or in `messages`."""

    user: str = ""
    messages: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    model: str = MODEL
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    finish: str = "stop"
    dialects: tuple[Dialect, ...] = DIALECTS
    most_tokens: int = 300

    @property
    def body(self) -> dict[str, Any]:
        messages = self.messages or [{"role": "user", "content": self.user}]
        return {"model": self.model, "max_tokens": 300, "messages": messages, **self.fields}


def say(role: str, content: object, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(content: object, arguments: str = '{"city": "Oslo"}') -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [say("user", "weather?"), say("assistant", content, tool_calls=[call]), say("tool", "x", tool_call_id="c1")]


def with_tools(user: str, **fields: Any) -> dict[str, Any]:
    return {"user": user, "fields": {"tools": TOOLS, **fields}}


STOPPABLE: tuple[Dialect, ...] = ("chat", "messages")
"""Responses has no stop strings."""

CASES: dict[str, Case] = {
    # (a) tool calls
    "A01 ordinary tokens": Case(**with_tools("SC08"), calls=(("get_weather", {"city": "Oslo"}),), finish="tool_calls"),
    "A01 marker tokens": Case(**with_tools("SC07"), calls=(("get_weather", NESTED),), finish="tool_calls"),
    "A02 two calls": Case(
        **with_tools("SC09"), calls=(("get_weather", {"city": "A"}), ("get_time", {"tz": "B"})), finish="tool_calls"
    ),
    "A02 one at most": Case(
        **with_tools("SC09", parallel_tool_calls=False), calls=(("get_weather", {"city": "A"}),), finish="tool_calls"
    ),
    "A03 bad escape": Case(**with_tools("SC10"), calls=(("grep", {"pattern": "\\d+"}),), finish="tool_calls"),
    "A04 never closed": Case(**with_tools("SC12"), text=said_by("SC12")),
    "A04 cut": Case(
        **with_tools("SC08", max_tokens=3), text='<tool_call>\n{"name": "get_weather", "argu', finish="length"
    ),
    "A05 none": Case(**with_tools("SC07", tool_choice="none"), text=WHOLE_07),
    "A05 no tools": Case(user="SC07", text=WHOLE_07),
    "A05 empty tools": Case(user="SC07", fields={"tools": []}, text=WHOLE_07),
    "A07 unknown name": Case(**with_tools("SC13"), calls=(("no_such_tool", {}),), finish="tool_calls"),
    "A08 history of calls": Case(messages=[*called(None), say("user", "SC04")], fields={"tools": TOOLS}, text=SC04),
    "A08 no tools now": Case(messages=[*called(None), say("user", "SC04")], text=SC04),
    # (b) streaming
    "B01 joined emoji": Case(user="SC01", text="ok 👩\u200d🚀 end01"),
    "B01 CJK": Case(user="SC02", text="東京02."),
    "B02 over tokens": Case(user="SC04", fields={"stop": ["beta gamma"]}, text="alpha ", dialects=STOPPABLE),
    "B02 a string": Case(user="SC04", fields={"stop": "gamma"}, text="alpha beta ", dialects=STOPPABLE),
    "B02 really ends": Case(
        user="SC19",
        fields={"stop": ["t005 t006"]},
        text=" t000 t001 t002 t003 t004 ",
        dialects=STOPPABLE,
        most_tokens=8,
    ),
    "B02 endless": Case(user="SC20", fields={"stop": ["la la la"]}, text=" ", dialects=STOPPABLE, most_tokens=4),
    "B04 natural end": Case(user="SC04", text=SC04),
    "B04 length": Case(user="SC19", fields={"max_tokens": 5}, text=" t000 t001 t002 t003 t004", finish="length"),
    # (c) what must be accepted
    "C03 parts": Case(
        messages=[
            say("system", parts("be ", "brief")),
            *called(parts("let me ", "look")),
            say("user", parts("SC", "04")),
        ],
        text=SC04,
    ),
    "C04 system in the middle": Case(
        messages=[say("user", "a"), say("assistant", "b"), say("system", "z"), say("user", "SC04")], text=SC04
    ),
    "C04 two leading": Case(messages=[say("system", "z"), say("system", "y"), say("user", "SC04")], text=SC04),
    "C05 developer": Case(
        messages=[say("developer", "z"), say("user", "SC04")], text=SC04, dialects=("chat", "responses")
    ),
    "C05 developer, system": Case(
        messages=[say("developer", "z"), say("system", "y"), say("user", "SC04")],
        text=SC04,
        dialects=("chat", "responses"),
    ),
    "C07 null beside a call": Case(messages=[*called(None), say("user", "SC04")], text=SC04),
    # (d) reasoning
    "D01 both markers": Case(user="SC15", reasoning="why15 because", text="answer15"),
    "D01 beside tools": Case(**with_tools("SC15"), reasoning="why15 because", text="answer15"),
    "D02 cut": Case(
        user="SC18",
        fields={"max_tokens": 10},
        reasoning="never w00 w01 w02 w03 w04 w05 w06 w07",
        finish="length",
    ),
    "D02 never closed": Case(user="SC18", reasoning=said_by("SC18").removeprefix("<think>")),
    "D03 empty block": Case(user="SC21", text="answer21"),
    "D03 no markers": Case(user="SC04", text=SC04),
}


@pytest.mark.parametrize(
    ("name", "dialect"), [(name, dialect) for name, case in CASES.items() for dialect in case.dialects]
)
def test_everybody_has_the_right_answer(clients: EveryClient, name: str, dialect: Dialect) -> None:
    """The named case's RIGHT, whichever API and client, streamed or not."""
    case = CASES[name]
    outcome = clients.ask(dialect, case.body)
    said = (outcome.status, outcome.text, outcome.reasoning, outcome.calls, outcome.finish)
    assert said == (200, case.text, case.reasoning, case.calls, case.finish), outcome
    assert 0 < outcome.completion_tokens <= case.most_tokens


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a06_a_call_that_must_be_is(clients: EveryClient, choice: object, dialect: Dialect) -> None:
    """A06: a model that would rather say something else calls what it must; what it thinks before that is free."""
    tools = [TIME] if choice == "required" else [WEATHER, TIME]
    fields = {"tools": tools, "tool_choice": choice, "temperature": 0, "seed": 1}
    if dialect == "messages":
        del fields["seed"]
    outcome = clients.ask(dialect, Case(user="hello", fields=fields).body)
    assert (outcome.text, outcome.calls, outcome.finish) == ("", (("get_time", {"tz": "B"}),), "tool_calls")


@pytest.mark.parametrize("name", ["C03 parts", "C04 system in the middle", "C04 two leading", "A08 history of calls"])
def test_the_same_conversation_is_the_same_prompt(clients: EveryClient, name: str) -> None:
    """C03, C04, A08: each instruction and part once, in every dialect: then all prompts are equally long."""
    counted = {clients.ask(dialect, CASES[name].body, clients="http").prompt_tokens for dialect in DIALECTS}
    assert len(counted) == 1


# --- D01, D03 on a model whose template opens the block --------------------------------------------------------------


def thinking(dialect: Dialect, said: str, how: str, **fields: Any) -> dict[str, Any]:
    """A body that asks the thinker, in the dialect's own words for thinking on or off."""
    body = in_dialect(dialect, {"model": THINKER, "max_tokens": 2000, "messages": [say("user", said)], **fields})
    match dialect, how:
        case "messages", "on":
            return {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        case "messages", _:
            return {**body, "thinking": {"type": "disabled"}}
        case "chat", "off":
            return {**body, "reasoning_effort": "none"}
        case "responses", "off":
            return {**body, "reasoning": {"effort": "none"}}
        case _:
            return body


@pytest.mark.parametrize("dialect", DIALECTS)
def test_d01_the_prompt_opened_the_block(clients: EveryClient, dialect: Dialect) -> None:
    """D01: the answer begins inside the block that the template opened; only the closing marker comes, in pieces."""
    outcome = clients.send(dialect, thinking(dialect, "SC16", "on"))
    said = (outcome.reasoning, outcome.text, outcome.finish)
    assert said == ("implicit16 reasoning", "answer16", "stop")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_d03_thinking_off(clients: EveryClient, dialect: Dialect) -> None:
    """D03: switched off in the API's own words, everything is the answer and nothing was thought."""
    outcome = clients.send(dialect, thinking(dialect, "SC04", "off"))
    assert (outcome.reasoning, outcome.text, outcome.finish) == ("", SC04, "stop")
