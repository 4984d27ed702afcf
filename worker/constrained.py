"""A request's constraint, or its duty to call a tool → the matcher that holds its row to it. On the text thread."""

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from protocol.failures import Failure, FailureKind
from protocol.generation import ChatPrompt, Generate
from protocol.tools import Tool
from worker.answers.call_syntax import CallSyntax
from worker.answers.plan import AnswerPlan
from worker.answers.thinking import HARMONY, Start, ThinkSyntax
from worker.grammars import Calls, Frame, GrammarRefused, grammar
from worker.prompts import PromptRefused
from worker.sequence import Matcher

_MARKER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")


class TokenizerUnsupported(Exception):
    """This model's tokenizer gives no vocabulary of bytes, so nothing can be forced. The message is for the client."""


class Compiler(Protocol):
    """What `worker.grammar_compiler` offers."""

    def special_ids(self, markers: Iterable[str]) -> Mapping[str, int]: ...

    def compile(self, grammar: str) -> Matcher: ...


def is_constrained(request: Generate) -> bool:
    return request.constraint is not None or _must_call(request)


def matcher_for(request: Generate, answer: AnswerPlan, compiler: Compiler | None) -> Matcher | None:
    """None for a request that may say anything. `answer` is how its text will be read. Raises PromptRefused.

    Reasoning is free if it is told apart; else all of the text is the answer.
    """
    if not is_constrained(request):
        return None
    param = "response_format" if request.constraint is not None and not _must_call(request) else "tool_choice"
    if request.ignore_end == "yes":
        raise _refused("an answer that is held to a form ends where that does; leave ignore_eos out", "ignore_eos")
    calls = _calls(request, answer.form.syntax if answer.form is not None else None)
    frame = frame_of(answer.thinking, answer.starts) if answer.thinking is not None else None
    # Who must call has no other answer, so that there a constraint of it says nothing.
    constraint = None if _must_call(request) else request.constraint
    markers = (*(frame.markers if frame is not None else ()), *(calls.syntax.markers if calls is not None else ()))
    try:
        if compiler is None:
            raise TokenizerUnsupported("this model cannot be held to a form of its answer")
        text = grammar(constraint, calls, frame, compiler.special_ids(markers))
        return compiler.compile(text)
    except TokenizerUnsupported as why:
        raise _refused(str(why), param, FailureKind.UNSUPPORTED) from why
    except GrammarRefused as why:
        raise _refused_grammar(str(why), param, calls) from why


def frame_of(thinking: ThinkSyntax, starts: Start) -> Frame:
    """What stands around the answer of a model that marks its reasoning so."""
    if thinking == HARMONY:
        # The turn goes on after reasoning, with a head that says which channel follows.
        texts = [thinking.opens[0], "<|end|><|start|>assistant", "<|channel|>final<|message|>", ""]
    else:
        texts = [thinking.opens[0], thinking.closes[0], *(thinking.layout[:2] or ("", ""))]
    opens, closes, before, after = texts
    return Frame(
        opens=opens,
        closes=closes,
        begins=starts,
        before=before,
        after=after,
        layout="always" if thinking == HARMONY else "optional",
        markers=tuple(marker for text in texts for marker in _MARKER.findall(text)),
    )


def _must_call(request: Generate) -> bool:
    return request.tool_use is not None and request.tool_use.choice == "required"


def _calls(request: Generate, syntax: CallSyntax | None) -> Calls | None:
    use = request.tool_use
    if use is None:
        return None
    tools = _callable_tools(request)
    if not tools and use.choice == "auto":
        return None
    if not tools:
        raise _refused("a call is required and there is no tool to call; send tools", "tool_choice")
    if syntax is None and use.choice == "required":
        raise _refused(
            "this model's form of calls cannot be enforced; use tool_choice auto",
            "tool_choice",
            FailureKind.UNSUPPORTED,
        )
    if syntax is None:
        raise _refused(
            "this model's form of calls cannot stand beside a constrained answer; use tool_choice none, or no "
            "response_format",
            "response_format",
            FailureKind.UNSUPPORTED,
        )
    return Calls(tools=tools, syntax=syntax, calls=use.calls)


def _callable_tools(request: Generate) -> tuple[Tool, ...]:
    tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
    allowed = request.tool_use.allowed if request.tool_use is not None else ()
    unknown = next((name for name in allowed if name not in {tool.name for tool in tools}), None)
    if unknown is not None:
        raise _refused(f"there is no tool {unknown!r} in tools", "tool_choice")
    return tuple(tool for tool in tools if not allowed or tool.name in allowed)


def _refused_grammar(reason: str, param: str, calls: Calls | None) -> PromptRefused:
    if param == "tool_choice":
        return _refused(f"no call can be forced with these tools' parameters: {reason}", "tools")
    beside = " (beside the tools)" if calls is not None else ""
    return _refused(f"an answer cannot be held to this{beside}: {reason}", param)


def _refused(message: str, param: str, kind: FailureKind = FailureKind.INVALID_REQUEST) -> PromptRefused:
    return PromptRefused(Failure(kind=kind, message=message, param=param))
