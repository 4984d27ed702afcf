"""Which grammar a request needs, and which requests are refused, without a compiler."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from protocol.failures import FailureKind
from protocol.generation import ChatMessage, ChatPrompt, Generate, TextPrompt
from protocol.ids import RequestId
from protocol.tools import Constraint, JsonObject, OneOf, Tool, ToolUse
from tests.worker.parts import GREEDY
from worker.answers import formats, thinking
from worker.answers.plan import AnswerPlan
from worker.constrained import TokenizerUnsupported, frame_of, matcher_for
from worker.grammars import GrammarRefused
from worker.prompts import PromptRefused
from worker.sequence import Matcher

TOOLS = (Tool(name="one"), Tool(name="two"))


class Recorder:
    """A compiler that only remembers what it was asked."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.grammars: list[dict[str, Any]] = []
        self.markers: tuple[str, ...] = ()
        self._raises = raises

    def special_ids(self, markers: Iterable[str]) -> Mapping[str, int]:
        self.markers = tuple(markers)
        return {}

    def compile(self, grammar: str) -> Matcher:
        if self._raises is not None:
            raise self._raises
        self.grammars.append(json.loads(grammar))
        return _Nothing()

    @property
    def parts(self) -> list[str]:
        return [part["name"] for part in self.grammars[-1]["grammars"]]


class _Nothing:
    binds = True

    def consume(self, token_id: int) -> None:
        raise NotImplementedError

    def next_mask(self) -> bytes:
        raise NotImplementedError


def request(
    constraint: Constraint | None = None, tool_use: ToolUse | None = None, tools: tuple[Tool, ...] = TOOLS, **more: Any
) -> Generate:
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content="x"),), tools=tools)
    return Generate(
        request_id=RequestId("r"), prompt=prompt, sampling=GREEDY, constraint=constraint, tool_use=tool_use, **more
    )


def plan(form: formats.CallFormat | None = formats.HERMES) -> AnswerPlan:
    return AnswerPlan(form=form, tools=TOOLS)


BAD = GrammarRefused("no")
UNWRITTEN = replace(formats.GLM, syntax=None)
REQUIRED = ToolUse(choice="required")
AUTO = ToolUse(choice="auto")


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (request(JsonObject()), ["whole", "answer"]),
        (request(None, REQUIRED), ["whole", "arguments0", "arguments1"]),
        (request(None, ToolUse(choice="required", allowed=("two",))), ["whole", "arguments0"]),
        (request(JsonObject(), AUTO), ["whole", "answer", "arguments0", "arguments1"]),
        (request(JsonObject(), AUTO, tools=()), ["whole", "answer"]),
        # who must call has no other answer
        (request(JsonObject(), REQUIRED), ["whole", "arguments0", "arguments1"]),
    ],
)
def test_which_parts_a_grammar_has(asked: Generate, parts: list[str]) -> None:
    """An answer, calls of the tools that are allowed, or either."""
    compiler = Recorder()

    assert matcher_for(asked, plan(), compiler) is not None
    assert compiler.parts == parts


@pytest.mark.parametrize("asked", [request(), request(None, AUTO)])
def test_most_requests_need_none(asked: Generate) -> None:
    """And then nothing is compiled, nor the vocabulary built."""
    compiler = Recorder()

    assert matcher_for(asked, plan(), compiler) is None
    assert matcher_for(asked, plan(), None) is None
    assert compiler.grammars == []


@pytest.mark.parametrize(
    ("asked", "form", "compiler", "kind", "param"),
    [
        (request(None, REQUIRED, tools=()), formats.HERMES, Recorder(), "invalid_request", "tool_choice"),
        (
            request(None, ToolUse(choice="required", allowed=("three",))),
            formats.HERMES,
            Recorder(),
            "invalid_request",
            "tool_choice",
        ),
        (request(JsonObject(), ignore_end="yes"), formats.HERMES, Recorder(), "invalid_request", "ignore_eos"),
        (request(None, REQUIRED), UNWRITTEN, Recorder(), "unsupported", "tool_choice"),
        (request(JsonObject(), AUTO), UNWRITTEN, Recorder(), "unsupported", "response_format"),
        (request(None, REQUIRED), formats.HERMES, None, "unsupported", "tool_choice"),
        (request(JsonObject()), formats.HERMES, None, "unsupported", "response_format"),
        (request(JsonObject()), None, Recorder(TokenizerUnsupported("no")), "unsupported", "response_format"),
        (request(JsonObject()), None, Recorder(BAD), "invalid_request", "response_format"),
        (
            request(JsonObject(), AUTO),
            formats.HERMES,
            Recorder(BAD),
            "invalid_request",
            "response_format",
        ),
        (request(None, REQUIRED), formats.HERMES, Recorder(BAD), "invalid_request", "tools"),
        (request(OneOf(options=())), None, Recorder(), "invalid_request", "response_format"),
    ],
)
def test_what_is_refused(
    asked: Generate, form: formats.CallFormat | None, compiler: Recorder | None, kind: str, param: str
) -> None:
    """A06, C12: honestly, naming the field."""
    with pytest.raises(PromptRefused) as refused:
        matcher_for(asked, plan(form), compiler)

    assert refused.value.failure.kind == FailureKind(kind)
    assert refused.value.failure.param == param


def test_without_a_chat_there_is_no_tool() -> None:
    """A plain text's request that must call says what is missing."""
    asked = Generate(request_id=RequestId("r"), prompt=TextPrompt(text="x"), sampling=GREEDY, tool_use=REQUIRED)

    with pytest.raises(PromptRefused) as refused:
        matcher_for(asked, AnswerPlan(), Recorder())
    assert refused.value.failure.param == "tool_choice"


def known(closes: str) -> thinking.ThinkSyntax:
    found = thinking.think_syntax(closes, ())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("syntax", "texts", "markers"),
    [
        (known("</think>"), ("<think>", "</think>", "", ""), ("<think>", "</think>")),
        (known("[/THINK]"), ("[THINK]", "[/THINK]", "", ""), ("[THINK]", "[/THINK]")),
        (known("<channel|>"), ("<|channel>thought", "<channel|>", "", ""), ("<|channel>", "<channel|>")),
        (
            known("<|END_THINKING|>"),
            ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        (
            thinking.HARMONY,
            ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>", ""),
            ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"),
        ),
    ],
)
def test_frames_of_families(
    syntax: thinking.ThinkSyntax, texts: tuple[str, str, str, str], markers: tuple[str, ...]
) -> None:
    """Where reasoning begins and ends, what stands around the answer, and which of it may be tokens."""
    frame = frame_of(syntax, "thinking")

    assert (frame.opens, frame.closes, frame.before, frame.after) == texts
    assert frame.markers == markers
    assert frame.begins == "thinking"
