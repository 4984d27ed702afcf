"""What an answer must be → the text of an llguidance grammar. Pure.

A grammar is a JSON document of named parts. The first is written here in llguidance's Lark dialect: reasoning if the
model may think, then the answer or the calls; it refers to the others (`@answer`, `@arguments0`…), which hold schemas
and whatever the client wrote, so that no client's text is ever spliced into ours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from protocol.tools import Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex, Tool
from worker.answers.call_syntax import CallSyntax
from worker.closed_schemas import closed

MAX_CONSTRAINT_CHARACTERS = 64 * 1024
"""Longer schemas, patterns and grammars are refused: 64 KiB of the worst compile in half a second."""

MAX_TOOLS_CHARACTERS = 4 * MAX_CONSTRAINT_CHARACTERS
"""All parameters of the tools that may be called, as JSON. Much of it is descriptions, which cost nothing."""

_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line, with at most the one blank that models are used to: a small model can loop in whitespace."""

_LENIENT: dict[str, Any] = _COMPACT | {"lenient": True, "coerce_one_of": True}
"""For arguments: a call is promised, and its arguments keep to what of their schema a grammar can say."""

_GAP = "GAP: /[ \\n]{0,2}/"


class GrammarRefused(Exception):
    """The client's constraint says nothing that an answer could keep to. The message is for the client."""


Begins = Literal["thinking", "answer"]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What stands around the answer of a model that thinks.

    Reasoning runs from `opens`, which the model may write or leave out, or which the prompt ends with (`begins`
    "thinking"), up to `closes`. `before` and `after` are the layout around the answer, not around calls; where it is
    "optional" the model may leave it out. `markers` are the pieces of these texts that a vocabulary may hold as one
    token.
    """

    opens: str
    closes: str
    begins: Begins
    before: str = ""
    after: str = ""
    layout: Literal["always", "optional"] = "always"
    markers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The answer is a call of one of these tools or, if `calls` is "many", several."""

    tools: tuple[Tool, ...]
    syntax: CallSyntax
    calls: Literal["many", "one"]


def grammar(answer: Constraint | None, calls: Calls | None, frame: Frame | None, special_ids: Mapping[str, int]) -> str:
    """The grammar of an answer that keeps to `answer`, or makes `calls`; either of them where both are given.

    `special_ids`: the markers that are one special token of the vocabulary; a grammar must name those by their id.
    Raises GrammarRefused.
    """
    try:
        return _grammar(answer, calls, frame, special_ids)
    except RecursionError as why:
        raise GrammarRefused("it is nested too deeply") from why


def _grammar(
    answer: Constraint | None, calls: Calls | None, frame: Frame | None, special_ids: Mapping[str, int]
) -> str:
    lark: list[str] = []
    parts: list[dict[str, Any]] = []
    choices: list[str] = []
    if answer is not None:
        parts.append(_part("answer", answer))
        choices.append(_framed_answer(frame, special_ids))
    if calls is not None:
        call_lark, call_parts = _calls(calls, special_ids)
        lark += call_lark
        parts += call_parts
        choices.append("calls")
    thinking, thinking_lark = _thinking(frame, special_ids)
    lines = [f"start: {thinking} answer_or_calls", "answer_or_calls: " + " | ".join(choices), *thinking_lark, *lark]
    return msgspec.json.encode({"grammars": [{"name": "whole", "lark_grammar": "\n".join(lines)}, *parts]}).decode()


def _framed_answer(frame: Frame | None, special_ids: Mapping[str, int]) -> str:
    if frame is None:
        return "@answer"
    mark = "?" if frame.layout == "optional" else ""
    before, after = (f"({spelled(text, special_ids)}){mark}" if text else "" for text in (frame.before, frame.after))
    return f"{before} @answer {after}"


def _thinking(frame: Frame | None, special_ids: Mapping[str, int]) -> tuple[str, list[str]]:
    """The expression for reasoning and its end, and the rules that it needs."""
    if frame is None:
        return "", []
    first, *others = _pieces(frame.closes, special_ids)
    rest = spelled("".join(others), special_ids)
    rules = [f"thinking: thought {rest}", f"thought[suffix={_quoted(first)}]: /(?s:.*)/", _GAP]
    if first in special_ids:
        # Spelled in other tokens it is the end as well: who reads the text cannot tell, and would take what follows for
        # the answer.
        rules[0] += f" | UNENDED <[{special_ids[first]}]> {rest}"
        rules.append(f"UNENDED: /(?s:.*)/ & ~/(?s:.*){_lark_pattern(re.escape(first))}(?s:.*)/")
    if frame.begins == "thinking":
        return "thinking GAP", rules
    return f"({spelled(frame.opens, special_ids)} thinking GAP)?", rules


def _calls(calls: Calls, special_ids: Mapping[str, int]) -> tuple[list[str], list[dict[str, Any]]]:
    syntax = calls.syntax
    parts: list[dict[str, Any]] = []
    alternatives: list[str] = []
    characters = 0
    in_json = syntax.before_name.endswith('"')
    for number, tool in enumerate(calls.tools):
        schema = _object_schema(tool.parameters)
        characters += len(msgspec.json.encode(schema))
        if characters > MAX_TOOLS_CHARACTERS:
            raise GrammarRefused(
                f"the tools' parameters have more than {MAX_TOOLS_CHARACTERS} characters, too many to force a call; "
                "send fewer tools or tool_choice auto"
            )
        name = msgspec.json.encode(tool.name).decode()[1:-1] if in_json else tool.name
        parts.append({"name": f"arguments{number}", "json_schema": schema | {"x-guidance": _LENIENT}})
        alternatives.append(f"{_quoted(name)} {spelled(syntax.before_arguments, special_ids)} @arguments{number}")

    def spell(text: str) -> str:
        return spelled(text, special_ids)

    several = calls.calls == "many" and syntax.max_calls != 1
    more = f"({spell(syntax.separator)} call)*" if several else ""
    return [
        f"calls: {spell(syntax.section_start)} call {more} {spell(syntax.section_end)}",
        f"call: {spell(syntax.before_name)} named {spell(syntax.after_arguments)}",
        "named: " + "\n     | ".join(alternatives),
    ], parts


def _part(name: str, answer: Constraint) -> dict[str, Any]:
    match answer:
        case JsonSchema(text=text):
            return {"name": name, "json_schema": _schema(text)}
        case JsonObject():
            return {"name": name, "json_schema": {"type": "object", "x-guidance": _COMPACT}}
        case Regex(pattern=pattern):
            _check_size(pattern, "pattern")
            return {"name": name, "lark_grammar": f"start: /{_lark_pattern(pattern)}/" if pattern else 'start: ""'}
        case OneOf(options=options):
            if not options:
                raise GrammarRefused("there is no option to choose from; give at least one")
            _check_size("".join(options), "list of options")
            return {"name": name, "lark_grammar": "start: " + "\n     | ".join(map(_quoted, options))}
        case Grammar(text=text):
            _check_size(text, "grammar")
            return {"name": name, "lark_grammar": _lark(text)}
        case _:
            assert_never(answer)


def _schema(text: str) -> Any:
    _check_size(text, "schema")
    try:
        schema: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as why:
        raise GrammarRefused(f"the schema is not JSON that can be read: {why}") from why
    match schema:
        case True:
            return {"x-guidance": _COMPACT}
        case dict():
            # Ours replaces the client's: what it may say (the form of whitespace, leniency) is not a schema's matter.
            return closed(schema) | {"x-guidance": _COMPACT}  # pyright: ignore[reportUnknownArgumentType]
        case _:
            raise GrammarRefused("the schema must be a JSON object, and one that some value keeps to")


def _object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return closed(parameters if "type" in parameters else {"type": "object", **parameters})


def _lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as why:  # the converter raises bare ones for what it cannot read
        raise GrammarRefused(f"the grammar is neither Lark nor GBNF that can be read: {why}") from why


def _lark_pattern(pattern: str) -> str:
    """A pattern as it stands between slashes: those in it and line ends are escaped, if they are not yet."""
    return re.sub(r"\\.|/|\n|\r", lambda found: _ESCAPED.get(found[0], found[0]), pattern, flags=re.DOTALL)


_ESCAPED = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}


def spelled(text: str, special_ids: Mapping[str, int]) -> str:
    """A text in Lark: markers that are special tokens by their ids, all else in quotes. Empty for no text."""
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else _quoted(piece) for piece in _pieces(text, special_ids)
    )


def _pieces(text: str, special_ids: Mapping[str, int]) -> Sequence[str]:
    if not special_ids:
        return [text] if text else []
    markers = sorted(special_ids, key=len, reverse=True)
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, markers))})", text) if piece]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _check_size(text: str, what: str) -> None:
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise GrammarRefused(f"the {what} has {len(text)} characters; at most {MAX_CONSTRAINT_CHARACTERS} are taken")
