"""`tools` and `tool_choice` → the tools of a prompt, how they may be called, and what a call of each looks like. Pure.

The model sees functions only. A custom tool becomes one with a single text; a namespace's tools get its name in front
of theirs. A table leads back, so that a call comes as the client knows the tool. Kinds that only OpenAI can run, such
as web search, are left out, and named as ignored.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from gateway.openai.json_values import plain
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.responses.schema import (
    ChosenTool,
    CustomTool,
    FunctionTool,
    ItemKind,
    NamespaceTool,
    PromptFields,
    decode_part,
)
from protocol.failures import Failure
from protocol.tools import Tool, ToolUse

CUSTOM_INPUT = "input"
"""The one argument of a custom tool."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_DEFINITION_MAX_CHARACTERS = 64 * 1024

Part = TypeVar("Part")


class Origin(Struct, frozen=True, kw_only=True):
    """A tool as the client knows it."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AskedTools(Struct, frozen=True, kw_only=True):
    """What a request says of tools. `use` is None when none may be called; then none is rendered either.

    `origins` has every tool by the name that the model calls it by. `ignored` are fields that nothing is done with.
    """

    tools: tuple[Tool, ...] = ()
    use: ToolUse | None = None
    origins: dict[str, Origin] = {}
    ignored: tuple[str, ...] = ()


def model_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def asked_tools(request: PromptFields, added: Sequence[tuple[str, msgspec.Raw]]) -> AskedTools:
    """Of a request; `added` are tools out of its input, with where they stand. Raises Refusal."""
    table = _Table()
    for at, raw in [*((f"tools[{index}]", raw) for index, raw in enumerate(request.tools or ())), *added]:
        table.read(raw, at, namespace=None)
    use = _use(request, table)
    return AskedTools(
        tools=() if use is None else tuple(table.tools),
        use=use,
        origins=table.origins,
        ignored=tuple(dict.fromkeys(table.ignored)),
    )


def read(raw: msgspec.Raw, part_type: type[Part], at: str) -> Part:
    """One item or tool. Raises Refusal."""
    part = decode_part(raw, part_type, at)
    if isinstance(part, Failure):
        refusal = Refusal(part.kind, at, "")
        refusal.failure = part
        raise refusal
    return part


class _Table:
    """The tools as they are read, in the client's order."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        self.origins: dict[str, Origin] = {}
        self.ignored: list[str] = []

    def read(self, raw: msgspec.Raw, at: str, *, namespace: str | None) -> None:
        kind = read(raw, ItemKind, at).type
        match kind:
            case None:
                raise invalid(f"{at}.type", "is required. Send function, custom or namespace.")
            case "function":
                function = read(raw, FunctionTool, at)
                parameters = _parameters(function.parameters, f"{at}.parameters")
                self._add("function", function.name, namespace, function.description or "", parameters, at)
            case "custom":
                custom = read(raw, CustomTool, at)
                if custom.format is not None and custom.format.type != "text":
                    self.ignored.append("tools.format")  # is shown to the model, and not held
                self._add("custom", custom.name, namespace, _custom_description(custom, at), _INPUT_SCHEMA, at)
            case "namespace" if namespace is None:
                group = read(raw, NamespaceTool, at)
                for index, member in enumerate(group.tools):
                    self.read(member, f"{at}.tools[{index}]", namespace=group.name)
            case _:
                self.ignored.append(f"tools.{kind}")

    def _add(
        self,
        kind: Literal["function", "custom"],
        name: str,
        namespace: str | None,
        description: str,
        parameters: dict[str, Any] | None,
        at: str,
    ) -> None:
        known_as = model_name(name, namespace)
        if not _NAME.fullmatch(known_as):
            raise invalid(f"{at}.name", "must be 1 to 128 letters, digits or `_.:/-`. Rename the tool.")
        if known_as in self.origins:
            raise invalid(f"{at}.name", "is the name of an earlier tool, too. Give each its own.")
        self.origins[known_as] = Origin(kind=kind, name=name, namespace=namespace)
        self.tools.append(Tool(name=known_as, description=description, parameters=parameters))


_INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The whole input of this tool, as plain text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


def _parameters(parameters: dict[str, Any] | None, at: str) -> dict[str, Any] | None:
    if parameters is None:
        return None
    if plain(parameters, at).get("type", "object") != "object":
        raise invalid(at, "must be the JSON schema of an object. Set its `type` to `object`.")
    return parameters


def _custom_description(custom: CustomTool, at: str) -> str:
    """A grammar is something to read, too: it is the only place where many such tools say what they want."""
    description = custom.description or ""
    if custom.format is None or custom.format.definition is None:
        return description
    if len(custom.format.definition) > _DEFINITION_MAX_CHARACTERS:
        raise invalid(
            f"{at}.format.definition", f"is over {_DEFINITION_MAX_CHARACTERS} characters. Send a shorter one."
        )
    language = {"lark": "Lark grammar", "regex": "regular expression"}.get(custom.format.syntax or "", "grammar")
    return f"{description}\n\nThe input must match this {language}:\n{custom.format.definition}".lstrip()


# --- choice ----------------------------------------------------------------------------------------------------------


def _use(request: PromptFields, table: _Table) -> ToolUse | None:
    calls: Literal["many", "one"] = "one" if request.parallel_tool_calls is False else "many"
    match request.tool_choice:
        case "none":
            return None
        case "auto" | None:
            return ToolUse(calls=calls) if table.tools else None
        case "required":
            if not table.tools:
                raise invalid("tool_choice", "needs `tools` to choose from. Send them, or leave `tool_choice` out.")
            return ToolUse(choice="required", calls=calls)
        case ChosenTool(type="function" | "custom", name=name, namespace=namespace):
            if name is None:
                raise invalid("tool_choice.name", "is required. Name one of the tools.")
            return ToolUse(choice="required", allowed=(_known(name, namespace, table),), calls="one")
        case ChosenTool(type="allowed_tools") as chosen:
            return _allowed(chosen, table, calls)
        case ChosenTool():
            raise unsupported(
                "tool_choice.type", "only function, custom and allowed_tools can be chosen. Use one of them."
            )


def _allowed(chosen: ChosenTool, table: _Table, calls: Literal["many", "one"]) -> ToolUse | None:
    if chosen.tools is None:
        raise invalid("tool_choice.tools", "is required. Name the tools that may be called.")
    named = [tool for tool in chosen.tools if tool.type in ("function", "custom")]
    if any(tool.name is None for tool in named):
        raise invalid("tool_choice.tools", "each needs a `name`. Name one of the tools.")
    names = tuple(dict.fromkeys(_known(tool.name or "", tool.namespace, table) for tool in named))
    if names:
        return ToolUse(choice=chosen.mode or "auto", allowed=names, calls=calls)
    if chosen.mode == "required":
        raise invalid("tool_choice.tools", "holds no tool that can be called here. Name a function or a custom tool.")
    return None


def _known(name: str, namespace: str | None, table: _Table) -> str:
    known_as = model_name(name, namespace)
    if known_as in table.origins:
        return known_as
    matches = _members(name, table.origins.items()) if namespace is None else []
    if len(matches) == 1:
        return matches[0]
    raise invalid(
        "tool_choice", "names a tool that the request does not have. Add it to the tools, or name one of them."
    )


def _members(name: str, origins: Iterable[tuple[str, Origin]]) -> list[str]:
    """Tools of any namespace that have this name."""
    return [known_as for known_as, origin in origins if origin.name == name]
