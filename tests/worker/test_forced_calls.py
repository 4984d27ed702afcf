"""What the grammar of a required call lets through is what the parser of that family reads as calls."""

import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from protocol.tools import Tool, ToolUse
from worker.answers import formats
from worker.answers.parts import ArgumentsText, CallBegan, CallDone, Text, Thought
from worker.answers.plan import AnswerFormats, plan
from worker.answers.thinking import HARMONY, ThinkSyntax, think_syntax
from worker.constrained import frame_of
from worker.grammar_compiler import GrammarCompiler
from worker.grammars import Calls, Frame, grammar

FORMS = [form for form in vars(formats).values() if isinstance(form, formats.CallFormat) and form.syntax is not None]

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 90},
                "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 4},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(name="get_time"),
)


class Vocabulary:
    """All bytes, and a few markers as tokens of their own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        self._compiler = GrammarCompiler(tokenizer, len(tokenizer), [self._end])

    def grammar(self, calls: Calls, frame: Frame | None = None) -> str:
        markers = (*calls.syntax.markers, *(frame.markers if frame is not None else ()))
        return grammar(None, calls, frame, self._compiler.special_ids(markers))

    def drawn(self, grammar_text: str, seed: int, begin: str = "") -> str:
        """A text of any allowed tokens behind `begin`, up to the first end, which is taken as soon as it may be."""
        chance = random.Random(seed)
        row = self._compiler.compile(grammar_text)
        said: list[int] = []
        beginning = self._tokenizer.encode(begin)
        while True:
            mask = int.from_bytes(row.next_mask(), "little")
            if mask >> self._end & 1:
                return self._tokenizer.decode(said)
            allowed = [token for token in range(len(self._tokenizer)) if mask >> token & 1]
            token = beginning.pop(0) if beginning else chance.choice(allowed)
            assert token in allowed
            row.consume(token)
            said.append(token)
            assert len(said) < 4000


@pytest.fixture(scope="module")
def vocabulary(script_model: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(script_model))  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize("calls", ["one", "many"])
@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_forced_calls_are_read_as_calls(
    vocabulary: Vocabulary, form: formats.CallFormat, calls: Literal["one", "many"]
) -> None:
    """A06, of every family that can be forced: at least one call, each whole and of its schema, and no text beside."""
    assert form.syntax is not None
    text = vocabulary.grammar(Calls(tools=TOOLS, syntax=form.syntax, calls=calls))
    for seed in range(6):
        parts, whole = read(form, None, vocabulary.drawn(text, seed))

        assert [part for part in parts if isinstance(part, Text | Thought)] == []
        names = [part.name for part in parts if isinstance(part, CallBegan)]
        assert len(names) == whole == len([part for part in parts if isinstance(part, CallDone)]) > 0
        for number, name in enumerate(names):
            joined = "".join(p.text for p in parts if isinstance(p, ArgumentsText) and p.index == number)
            parameters = next(tool.parameters for tool in TOOLS if tool.name == name)
            Draft202012Validator(parameters or {"maxProperties": 0}).validate(json.loads(joined))


def known(closes: str) -> ThinkSyntax:
    found = think_syntax(closes, ())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("form", "thinking"),
    [
        (formats.HERMES, known("</think>")),
        (formats.MISTRAL_NAMED, known("[/THINK]")),
        (formats.DEEPSEEK_V31, known("</think>")),
        (formats.HARMONY, HARMONY),
    ],
    ids=["hermes", "mistral", "deepseek", "harmony"],
)
def test_forced_calls_after_reasoning(vocabulary: Vocabulary, form: formats.CallFormat, thinking: ThinkSyntax) -> None:
    """A model that is left thinking by its prompt may think, and then calls."""
    assert form.syntax is not None
    frame = frame_of(thinking, "thinking")
    text = vocabulary.grammar(Calls(tools=TOOLS, syntax=form.syntax, calls="one"), frame)
    thought = "I may say what I like, even { or <."
    said = vocabulary.drawn(text, 1, begin=f"{thought}{frame.closes}")

    parts, whole = read(form, thinking, said, starts="thinking")
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == thought
    assert whole == 1
    assert "".join(part.text for part in parts if isinstance(part, Text)).strip() == ""


def read(
    form: formats.CallFormat, thinking: ThinkSyntax | None, text: str, starts: str = "answer"
) -> tuple[list[Any], int]:
    """The parts of a whole answer, and how many calls of it are whole."""
    model = AnswerFormats(thinking=thinking, calls=form)
    parser = plan(
        model,
        tools=TOOLS,
        tool_use=ToolUse(choice="required"),
        told_by="template",
        reasoning="split",
        tail=thinking.opens[0] if thinking is not None and starts == "thinking" else "",
    ).parser()
    assert parser is not None
    parts = [*parser.push(text), *parser.finish("stop")]
    return parts, parser.whole_calls
