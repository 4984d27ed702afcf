"""The formats in which families of models write calls. Pure.

A call stands in an envelope: from a marker that opens it to one that closes it. Where its arguments are one JSON object
behind a known header, they can be streamed; else the envelope is read when it is closed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import regex

from protocol.tools import Tool
from worker.answers import call_syntax, tagged_calls
from worker.answers.call_syntax import CallSyntax
from worker.answers.gemma_calls import read_function_gemma_calls, read_gemma4_calls
from worker.answers.json_calls import read_json_calls, read_keyed_calls
from worker.answers.pythonic_calls import read_pythonic_calls
from worker.answers.readings import ReadCall, Reader, Reading
from worker.answers.tagged_calls import read_tagged_calls


class Match(Protocol):
    """What is asked of the `regex` library's matches. `partial`: the text ended before the pattern did."""

    @property
    def partial(self) -> bool: ...

    def end(self) -> int: ...

    def groupdict(self) -> dict[str, str | None]: ...


class Pattern(Protocol):
    """And of its patterns. `re` cannot tell whether a text may yet become a match."""

    def match(self, string: str, *, partial: bool) -> Match | None: ...


def _compiled(pattern: str) -> Pattern:
    return regex.compile(pattern)


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """`opens` and `closes` are an envelope's markers; without `closes` it ends with its JSON, or with the answer.

    `sections` are markers around several envelopes, no text of their own. `header` matches an envelope's inside up to
    and with the `{` of the arguments (group `name`), `item_end` what follows the arguments; its group `again` says that
    another header comes in this envelope. `bare` matches calls that begin with no marker, where an answer begins or
    another call ended; if it has a group `known_name`, that must be one of the tools. `goes_on` says of an inside that
    a value in it is open, so that the marker behind may be a part of it. `inside` "needs_marker": what reads well may
    yet have lacked its last arguments. `syntax` is how to write a call, in a way that is read back.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    read: Reader
    header: Pattern | None = None
    item_end: Pattern | None = None
    bare: Pattern | None = None
    goes_on: Callable[[str], bool] | None = None
    inside: Literal["ends_itself", "needs_marker"] = "ends_itself"
    syntax: CallSyntax


_NAME = r'"(?P<name>[^"\\]+)"'
_JSON_ITEM = rf'\s*\{{\s*"name"\s*:\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
_ID = r'(?:"id"\s*:\s*"[^"\\]*"\s*,\s*)?'
_LIST_ITEM = rf'\s*\[?\s*\{{\s*{_ID}"name"\s*:\s*{_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{'
_COHERE_ITEM = (
    rf'\s*\[?\s*\{{\s*(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?"tool_name"\s*:\s*{_NAME}\s*,\s*"parameters"\s*:\s*\{{'
)
_LIST_REST = r'\s*(?:,\s*"id"\s*:\s*"[^"\\]*"\s*)?\}\s*'


def _list_end(close: str) -> Pattern:
    # Without a marker nothing may be taken after the bracket: what follows is text.
    last = rf"\]\s*{regex.escape(close)}" if close else r"\]"
    return _compiled(rf"{_LIST_REST}(?:(?P<again>,)|{last})")


def _whole(
    name: str,
    opens: str,
    closes: str,
    read: Reader,
    *,
    value: tuple[str, str] | None = None,
    inside: Literal["ends_itself", "needs_marker"] = "ends_itself",
) -> CallFormat:
    """A format that is read when its envelope is closed. `value` are the tags around a value, which may hold a marker.

    Every reader is followed by that of plain JSON (see `plan`), so that a forced call can be written so.
    """
    return CallFormat(
        name=name,
        opens=(opens,),
        closes=(closes,),
        read=read,
        goes_on=partial(_is_open, *value) if value is not None else None,
        inside=inside,
        syntax=call_syntax.json_between(opens, closes),
    )


def _is_open(opens: str, closes: str, inside: str) -> bool:
    return inside.rfind(opens) > inside.rfind(closes)


HERMES = CallFormat(
    name="hermes",
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    read=read_json_calls,
    header=_compiled(_JSON_ITEM),
    item_end=_compiled(r"\s*\}\s*</tool_call>"),
    syntax=call_syntax.HERMES,
)

_QWEN = partial(read_tagged_calls, tagged_calls.QWEN_CODER)
_PARAMETER = ("<parameter=", "</parameter>")
QWEN_CODER = _whole("qwen_coder", "<tool_call>", "</tool_call>", _QWEN, value=_PARAMETER)
SEED = _whole("seed", "<seed:tool_call>", "</seed:tool_call>", _QWEN, value=_PARAMETER)
GLM = _whole(
    "glm",
    "<tool_call>",
    "</tool_call>",
    partial(read_tagged_calls, tagged_calls.GLM),
    value=("<arg_value>", "</arg_value>"),
    inside="needs_marker",
)
LONGCAT = _whole(
    "longcat",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    partial(read_tagged_calls, tagged_calls.LONGCAT),
    value=("<longcat_arg_value>", "</longcat_arg_value>"),
    inside="needs_marker",
)
MINIMAX = _whole(
    "minimax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    partial(read_tagged_calls, tagged_calls.MINIMAX),
    value=("<parameter name=", "</parameter>"),
)
DEEPSEEK_V32 = CallFormat(
    name="deepseek_v32",
    opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    read=partial(read_tagged_calls, tagged_calls.DEEPSEEK_V32),
    goes_on=partial(_is_open, "<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
    syntax=call_syntax.json_between("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)
"""DeepSeek V3.2 and V4."""

GEMMA4 = _whole("gemma4", "<|tool_call>", "<tool_call|>", read_gemma4_calls)
FUNCTION_GEMMA = _whole("function_gemma", "<start_function_call>", "<end_function_call>", read_function_gemma_calls)
LFM2 = _whole("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", read_pythonic_calls)


def _llama(inside: str, tools: Sequence[Tool]) -> Reading | None:
    """JSON, or Python; one of the built-in tools is called in Python (`brave_search.call(query="…")`)."""
    text = inside.strip().removesuffix(_PYTHON_END)
    reading = read_json_calls(text, tools) or read_pythonic_calls(text, tools)
    if reading is None:
        return None
    return Reading(tuple(ReadCall(call.name.removesuffix(".call"), call.arguments) for call in reading.calls))


_PYTHON_END = "<|python_end|>"
_LLAMA_ITEM = (
    r'(?:;\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*{_NAME}\s*,\s*"(?:parameters|arguments)"\s*:\s*\{{'
)
LLAMA = CallFormat(
    name="llama",
    opens=("<|python_tag|>", "<|python_start|>"),
    sections=(_PYTHON_END,),
    read=_llama,
    header=_compiled(rf"\s*{_LLAMA_ITEM}"),
    item_end=_compiled(r"\s*\}"),
    bare=_compiled(rf"{_LLAMA_ITEM}|\[\s*(?P<known_name>[A-Za-z_][\w.]*)\("),
    syntax=call_syntax.LLAMA,
)
"""Llama 3.1 to 4: JSON without a marker, or a list of calls in Python."""

_MISTRAL_ITEM = r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*\{"
MISTRAL_NAMED = CallFormat(
    name="mistral_named",
    opens=("[TOOL_CALLS]",),
    read=read_json_calls,
    header=_compiled(rf"\s*{_MISTRAL_ITEM}"),
    item_end=_compiled(""),
    bare=_compiled(_MISTRAL_ITEM.replace("<name>", "<known_name>")),
    syntax=call_syntax.MISTRAL_NAMED,
)
MISTRAL_LIST = CallFormat(
    name="mistral_list",
    opens=("[TOOL_CALLS]",),
    read=read_json_calls,
    header=_compiled(_LIST_ITEM),
    item_end=_list_end(""),
    syntax=call_syntax.MISTRAL_LIST,
)

DEEPSEEK_V3 = CallFormat(
    name="deepseek_v3",
    opens=("<｜tool▁call▁begin｜>",),
    closes=("<｜tool▁call▁end｜>",),
    sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    read=read_json_calls,
    header=_compiled(r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[^\s<`]+)\s*```(?:json)?\s*\{"),
    item_end=_compiled(r"\s*```\s*<｜tool▁call▁end｜>"),
    syntax=call_syntax.DEEPSEEK_V3,
)
DEEPSEEK_V31 = CallFormat(
    name="deepseek_v31",
    opens=("<｜tool▁call▁begin｜>",),
    closes=("<｜tool▁call▁end｜>",),
    sections=DEEPSEEK_V3.sections,
    read=read_json_calls,
    header=_compiled(r"\s*(?P<name>[^\s<`{]+)\s*<｜tool▁sep｜>\s*\{"),
    item_end=_compiled(r"\s*<｜tool▁call▁end｜>"),
    syntax=call_syntax.DEEPSEEK_V31,
)

KIMI_K2 = CallFormat(
    name="kimi_k2",
    opens=("<|tool_call_begin|>",),
    closes=("<|tool_call_end|>",),
    sections=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    read=read_json_calls,
    header=_compiled(r"\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*\{"),
    item_end=_compiled(r"\s*<\|tool_call_end\|>"),
    syntax=call_syntax.KIMI_K2,
)

GRANITE_LIST = CallFormat(
    name="granite_list",
    opens=("<|tool_call|>", "<tool_call>"),
    read=read_json_calls,
    header=_compiled(_LIST_ITEM),
    item_end=_list_end(""),
    syntax=call_syntax.GRANITE_LIST,
)
PHI = CallFormat(
    name="phi",
    opens=("<|tool_call|>",),
    closes=("<|/tool_call|>",),
    read=read_json_calls,
    header=_compiled(_LIST_ITEM),
    item_end=_list_end("<|/tool_call|>"),
    syntax=call_syntax.PHI,
)
COMMAND = CallFormat(
    name="command",
    opens=("<|START_ACTION|>",),
    closes=("<|END_ACTION|>",),
    read=read_json_calls,
    header=_compiled(_COHERE_ITEM),
    item_end=_list_end("<|END_ACTION|>"),
    syntax=call_syntax.COMMAND,
)
"""Command R7B and Command A."""
COMMAND_R = CallFormat(
    name="command_r",
    opens=("Action: ```json", "Action:```json"),
    closes=("```",),
    read=read_json_calls,
    syntax=call_syntax.COMMAND_R,
)
"""Command-R and R+ of 2024."""


def _json_list(name: str, opens: str, closes: str) -> CallFormat:
    """Calls as a JSON list between markers, or as objects one after another."""
    return CallFormat(
        name=name,
        opens=(opens,),
        closes=(closes,),
        read=read_json_calls,
        header=_compiled(_LIST_ITEM),
        item_end=_list_end(closes),
        syntax=call_syntax.json_between(opens, closes),
    )


TOOL_CALLS = _json_list("tool_calls", "<tool_calls>", "</tool_calls>")
"""Apriel, MiniMax M1."""
NEMOTRON = _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>")
"""Nemotron Nano v2."""
APERTUS = _whole("apertus", "<|tools_prefix|>", "<|tools_suffix|>", read_keyed_calls)
GIGACHAT = CallFormat(
    name="gigachat",
    opens=("<|function_call|>",),
    read=read_json_calls,
    header=_compiled(_JSON_ITEM),
    item_end=_compiled(r"\s*\}"),
    syntax=call_syntax.GIGACHAT,
)
FUNCTIONARY = CallFormat(
    name="functionary",
    opens=("<function=",),
    closes=("</function>",),
    read=read_json_calls,
    header=_compiled(r"(?P<name>[^>\s]+)>\s*\{"),
    item_end=_compiled(r"\s*</function>"),
    syntax=call_syntax.FUNCTIONARY,
)
"""Functionary 3.1."""
SOLAR = CallFormat(
    name="solar",
    opens=("<|tool_call:begin|>",),
    closes=("<|tool_call:end|>",),
    sections=("<|tool_calls|>", "<|calls|>"),
    read=read_json_calls,
    header=_compiled(r"\s*\S*?\s*<\|tool_call:name\|>\s*(?P<name>[^<\s]+)\s*<\|tool_call:args\|>\s*\{"),
    item_end=_compiled(r"\s*<\|tool_call:end\|>"),
    syntax=call_syntax.SOLAR,
)
"""Solar Open."""


def _nothing(inside: str, tools: Sequence[Tool]) -> Reading | None:
    del inside, tools
    return None


_HARMONY_ITEM = (
    r"(?P<name>[\w.-]+)\s*(?:<\|channel\|>\s*\w+\s*)?(?:<\|constrain\|>)?\s*(?:json|JSON|code)?\s*<\|message\|>\s*\{"
)
HARMONY = CallFormat(
    name="harmony",
    opens=(
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis to=functions.",
        "<|start|>assistant to=functions.",
    ),
    closes=("<|call|>", "<|end|>"),
    read=_nothing,
    header=_compiled(rf"(?:to=functions\.)?{_HARMONY_ITEM}"),
    item_end=_compiled(r"\s*(?:<\|call\|>|<\|end\|>)"),
    bare=_compiled(rf"to=functions\.{_HARMONY_ITEM}"),
    syntax=call_syntax.HARMONY,
)
"""gpt-oss. Its other channels are reasoning and text: see `thinking`."""


def foreign(opens: str, closes: str) -> CallFormat:
    """A format that only mlx-lm's own parser reads."""
    return _whole("mlx_lm", opens, closes, _nothing)


ForeignParser = Callable[[str, Any], Any]
"""mlx-lm's parser of a family: text inside the markers and tools → a call, or a list of them. May raise anything."""
