"""`tools`, `tool_choice` and their legacy names → the tools of a prompt and how they may be called. Pure."""

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gateway.openai.json_values import plain
from gateway.openai.refusals import Refusal, invalid, unsupported
from gateway.openai.schema import AllowedTool, ChatRequest, FunctionDefinition, ToolChoice, ToolDefinition
from protocol.tools import Tool, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = "Send none, auto, required, or an object that names a function."


class AskedTools(Struct, frozen=True, kw_only=True):
    """What a request says of tools. `use` is None when none may be called; then none is rendered either."""

    tools: tuple[Tool, ...] = ()
    use: ToolUse | None = None


def asked_tools(request: ChatRequest) -> AskedTools:
    """Of a chat request, under either generation of names. Raises Refusal, which names the field."""
    if request.functions is not None or request.function_call is not None:
        return _legacy(request)
    tools = _tools(request.tools or ())
    calls = "one" if request.parallel_tool_calls is False else "many"
    use = _use(request.tool_choice, tools, calls)
    return AskedTools() if use is None else AskedTools(tools=tools, use=use)


def _legacy(request: ChatRequest) -> AskedTools:
    """`functions` and `function_call`: one call at most."""
    if request.tools or request.tool_choice is not None:
        raise invalid("functions", "cannot be combined with `tools`, which replaces it. Send only `tools`.")
    functions = request.functions or []
    tools = tuple(_function(function, f"functions[{index}]") for index, function in enumerate(functions))
    _refuse_doubles(tools, "functions[{}].name")
    choice = request.function_call
    if choice in ("none", "auto", None):
        use = ToolUse(calls="one") if tools and choice != "none" else None
    elif isinstance(choice, str):
        raise invalid("function_call", 'must be none, auto, or {"name": …}. Correct it.')
    else:
        use = _forced([choice.name], tools, "function_call")
    return AskedTools() if use is None else AskedTools(tools=tools, use=use)


# --- tools -----------------------------------------------------------------------------------------------------------


def _tools(definitions: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, definition in enumerate(definitions):
        at = f"tools[{index}]"
        if definition.type != "function":
            raise unsupported(f"{at}.type", "only tools of type `function` are supported. Leave this one out.")
        if definition.function is None:
            raise invalid(f"{at}.function", "is required. Put name, description and parameters into it.")
        tools.append(_function(definition.function, f"{at}.function"))
    _refuse_doubles(tools, "tools[{}].function.name")
    return tuple(tools)


def _function(function: FunctionDefinition, at: str) -> Tool:
    if not _NAME.fullmatch(function.name):
        raise invalid(f"{at}.name", "must be 1 to 128 letters, digits or `_.:/-`. Rename the function.")
    parameters = function.parameters
    if parameters is not None:
        parameters = plain(parameters, f"{at}.parameters")
        if parameters.get("type") not in (None, "object"):
            raise invalid(f"{at}.parameters", "must be the JSON schema of an object. Set its `type` to `object`.")
    return Tool(name=function.name, description=function.description or "", parameters=parameters)


def _refuse_doubles(tools: Sequence[Tool], path: str) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(path.format(index), "is the name of an earlier one, too. Give each its own.")
        seen.add(tool.name)


# --- choice ----------------------------------------------------------------------------------------------------------


def _use(choice: str | ToolChoice | None, tools: Sequence[Tool], calls: Literal["many", "one"]) -> ToolUse | None:
    match choice:
        case "none":
            return None
        case "auto" | None:
            return ToolUse(calls=calls) if tools else None
        case "required":
            if not tools:
                raise invalid("tool_choice", "needs `tools` to choose from. Send them, or leave `tool_choice` out.")
            return ToolUse(choice="required", calls=calls)
        case ToolChoice(type="function", function=function, name=name):
            named = name if function is None else function.name
            if named is None:
                raise invalid("tool_choice", 'must be {"type": "function", "function": {"name": …}}. Correct it.')
            return _forced([named], tools, "tool_choice")
        case ToolChoice(type="allowed_tools", allowed_tools=allowed):
            if allowed is None or not allowed.tools:
                raise invalid("tool_choice", "needs `allowed_tools` with a `mode` and some `tools`. Send them.")
            names = tuple(dict.fromkeys(_allowed_name(tool) for tool in allowed.tools))
            _refuse_strangers(names, tools, "tool_choice")
            return ToolUse(choice=allowed.mode, allowed=names, calls=calls)
        case ToolChoice() | str():
            raise invalid("tool_choice", f"is none of the known choices. {_CHOICES}")


def _forced(names: Sequence[str], tools: Sequence[Tool], at: str) -> ToolUse:
    """Exactly one call of this function."""
    _refuse_strangers(names, tools, at)
    return ToolUse(choice="required", allowed=tuple(names), calls="one")


def _allowed_name(tool: AllowedTool) -> str:
    name = tool.name if tool.function is None else tool.function.name
    if tool.type != "function" or name is None:
        raise _unnamed()
    return name


def _unnamed() -> Refusal:
    return invalid("tool_choice", 'allows tools of the form {"type": "function", "function": {"name": …}} only.')


def _refuse_strangers(names: Sequence[str], tools: Sequence[Tool], at: str) -> None:
    known = {tool.name for tool in tools}
    if any(name not in known for name in names):
        raise invalid(at, "names a function that the request does not have. Add it to the tools, or name one of them.")
