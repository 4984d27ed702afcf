"""Which formats a model writes, and a parser for each request. Pure.

By mlx-lm's own inference first (`tool_parser_type`), then by the chat template, then by the vocabulary.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from protocol.tools import Tool, ToolUse
from worker.answers import formats
from worker.answers.call_syntax import CallSyntax
from worker.answers.formats import CallFormat, ForeignParser
from worker.answers.json_calls import is_json_object, mend_json_calls, read_json_calls
from worker.answers.openai_tools import openai_tool
from worker.answers.parser import AnswerParser
from worker.answers.readings import ReadCall, Reading, as_json
from worker.answers.thinking import Start, ThinkSyntax, start_after, think_syntax


@dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """What one model writes. `calls` None: its calls, if it knows any, are in no format that we can read; so it is told
    of its tools by a text of ours (see `tool_preamble`)."""

    thinking: ThinkSyntax | None = None
    calls: CallFormat | None = None
    foreign_parser: ForeignParser | None = None

    @property
    def syntax(self) -> CallSyntax | None:
        """How this model writes a call, where its template may be left to tell it of tools."""
        return self.calls.syntax if self.calls is not None else None


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """How the answer to one request is to be read. `form` None: no part of it is a call."""

    thinking: ThinkSyntax | None = None
    starts: Start = "answer"
    form: CallFormat | None = None
    tools: tuple[Tool, ...] = ()
    foreign_parser: ForeignParser | None = None
    calls: Literal["many", "one"] = "many"

    def parser(self) -> AnswerParser | None:
        """A new parser; None when the text is the answer."""
        if self.thinking is None and self.form is None:
            return None
        return AnswerParser(
            thinking=self.thinking,
            starts=self.starts,
            form=self.form,
            tools=self.tools,
            read=self._read,
            most_calls=1 if self.calls == "one" else None,
        )

    def _read(self, inside: str, how: Literal["strict", "mend"]) -> Reading | None:
        """Our own reader, then plain JSON, then mlx-lm's parser of this family, then what can be mended."""
        if self.form is None:
            return None
        try:
            reading = self.form.read(inside, self.tools) or read_json_calls(inside, self.tools)
            if reading is None and self.foreign_parser is not None:
                reading = read_foreign(self.foreign_parser, inside, self.tools)
            if reading is None and how == "mend":
                reading = mend_json_calls(inside, self.tools)
        except Exception:  # noqa: BLE001 - a fault of a reader makes this call text; it must not end everybody's worker
            return None
        return reading


def plan(
    model: AnswerFormats,
    *,
    tools: Sequence[Tool],
    tool_use: ToolUse | None,
    told_by: Literal["template", "preamble"],
    reasoning: Literal["split", "keep"],
    tail: str,
) -> AnswerPlan:
    """`told_by` says who told the model of the tools, and so in which format it will call them. `tail` is what its
    chat template put behind the last message: it may leave the model thinking."""
    thinking = model.thinking if reasoning == "split" else None
    form: CallFormat | None = None
    if tools and tool_use is not None:
        form = formats.HERMES if told_by == "preamble" or model.calls is None else model.calls
    return AnswerPlan(
        thinking=thinking,
        starts=start_after(tail, thinking) if thinking is not None else "answer",
        form=form,
        tools=tuple(tools),
        foreign_parser=model.foreign_parser if form is model.calls else None,
        calls="many" if tool_use is None else tool_use.calls,
    )


_MOST_FOREIGN_CHARACTERS = 64_000
"""Some of its expressions take the square of the length on nonsense, and everybody's rows wait meanwhile."""


def read_foreign(parse: ForeignParser, inside: str, tools: Sequence[Tool]) -> Reading | None:
    """What mlx-lm's parser makes of an inside; None if it raises, or gives what is no call, or would look too long."""
    if len(inside) > _MOST_FOREIGN_CHARACTERS:
        return None
    try:
        parsed = parse(inside, [openai_tool(tool) for tool in tools])
        calls = [_foreign_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]  # pyright: ignore[reportUnknownVariableType]
    except Exception:  # noqa: BLE001 - its parsers raise whatever their code runs into
        return None
    whole = tuple(call for call in calls if call is not None)
    return Reading(whole) if whole and len(whole) == len(calls) else None


def _foreign_call(call: Any) -> ReadCall | None:
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    if set(arguments) == {"raw"}:  # pyright: ignore[reportUnknownArgumentType]
        return None  # its GLM parser's way to say that it could not read it
    text = as_json(arguments)
    return ReadCall(name, text) if is_json_object(text) else None


# --- which model writes what -----------------------------------------------------------------------------------------

_BY_MLX_LM: Mapping[str, CallFormat] = {
    "minimax_m2": formats.MINIMAX,
    "gemma4": formats.GEMMA4,
    "function_gemma": formats.FUNCTION_GEMMA,
    "longcat": formats.LONGCAT,
    "glm47": formats.GLM,
    "laguna": formats.GLM,
    "pythonic": formats.LFM2,
    "qwen3_coder": formats.QWEN_CODER,
    "kimi_k2": formats.KIMI_K2,
    "json_tools": formats.HERMES,
}

_BY_TEMPLATE: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<minimax:tool_call>",), formats.MINIMAX),
    (("｜DSML｜",), formats.DEEPSEEK_V32),
    (("<｜tool▁call▁begin｜>", "```json"), formats.DEEPSEEK_V3),
    (("<｜tool▁call▁begin｜>",), formats.DEEPSEEK_V31),
    (("<seed:tool_call>",), formats.SEED),
    (("<arg_key>",), formats.GLM),
    (("<tool_call>", "<function="), formats.QWEN_CODER),
    (("<|START_ACTION|>",), formats.COMMAND),
    (("Action:", "```json"), formats.COMMAND_R),
    (("<tool_calls>", "</tool_calls>"), formats.TOOL_CALLS),
    (("<TOOLCALL>",), formats.NEMOTRON),
    (("<|tools_prefix|>",), formats.APERTUS),
    (("<|function_call|>",), formats.GIGACHAT),
    (("<|tool_call:begin|>",), formats.SOLAR),
    (("[TOOL_CALLS]", "[ARGS]"), formats.MISTRAL_NAMED),
    (("[TOOL_CALLS]",), formats.MISTRAL_LIST),
    (("<|/tool_call|>",), formats.PHI),
    (("<|tool_call|>",), formats.GRANITE_LIST),
    (("<|tool_call>",), formats.GEMMA4),
    (("<tool_call>",), formats.HERMES),
    (("<function=", "</function>"), formats.FUNCTIONARY),
    (("<|python_start|>",), formats.LLAMA),
    (("<|python_tag|>",), formats.LLAMA),
    (("<|start_header_id|>", '"parameters"'), formats.LLAMA),
)
"""All of these texts are in the template. The first that fits counts."""


def formats_of(
    *,
    template: str,
    vocabulary: Container[str],
    tool_parser_type: str | None = None,
    foreign_parser: ForeignParser | None = None,
    foreign_opens: str | None = None,
    foreign_closes: str | None = None,
) -> AnswerFormats:
    """The formats of a model. The foreign parts are what mlx-lm inferred for its tokenizer."""
    thinking = think_syntax(template, vocabulary)
    calls = _calls_of(template, vocabulary, tool_parser_type)
    if calls is None and tool_parser_type is not None and foreign_opens and foreign_closes:
        calls = formats.foreign(foreign_opens, foreign_closes)
    return AnswerFormats(thinking=thinking, calls=calls, foreign_parser=foreign_parser)


def _calls_of(template: str, vocabulary: Container[str], tool_parser_type: str | None) -> CallFormat | None:
    if all(token in vocabulary for token in ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")):
        return formats.HARMONY
    if tool_parser_type is not None and (known := _BY_MLX_LM.get(tool_parser_type)) is not None:
        return known
    if tool_parser_type is not None and tool_parser_type != "mistral":
        return None
    return next((form for marks, form in _BY_TEMPLATE if all(mark in template for mark in marks)), None)
