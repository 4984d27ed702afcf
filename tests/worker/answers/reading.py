"""What a client would see of an answer that comes in these pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protocol.tools import Tool
from worker.answers.formats import CallFormat, ForeignParser
from worker.answers.parser import AnswerParser
from worker.answers.parts import AnswerEnd, ArgumentsText, CallBegan, CallDone, Part, Text, Thought
from worker.answers.plan import AnswerPlan
from worker.answers.thinking import Start, ThinkSyntax

WEATHER = Tool(
    name="get_weather",
    description="The weather of a place",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hourly": {"type": "boolean"}},
        "required": ["city"],
    },
)
TIME = Tool(name="get_time", parameters={"type": "object", "properties": {"tz": {"type": "string"}}})
EDIT = Tool(
    name="edit_file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "options": {"type": "object"},
            "ratio": {"type": "number"},
            "backup": {"type": ["boolean", "null"]},
        },
    },
)
TOOLS = (WEATHER, TIME, EDIT)


@dataclass
class Call:
    """A call as its parts came."""

    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass
class Answer:
    """An answer, its parts joined."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    warnings: tuple[str, ...] = ()
    kinds: list[str] = field(default_factory=list[str])

    def take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            kind = type(part).__name__
            if self.kinds[-1:] != [kind]:
                self.kinds.append(kind)
            match part:
                case Text(text=text):
                    assert text, "an empty part"
                    self.text += text
                case Thought(text=text):
                    assert text, "an empty part"
                    self.thought += text
                case CallBegan(index=index, name=name):
                    assert index == len(self.calls), "calls are numbered from 0"
                    assert all(call.is_whole for call in self.calls), "one call ends before the next begins"
                    self.calls.append(Call(name))
                case ArgumentsText(index=index, text=text):
                    assert index == len(self.calls) - 1
                    assert not self.calls[index].is_whole
                    self.calls[index].arguments += text
                case CallDone(index=index):
                    assert index == len(self.calls) - 1
                    assert not self.calls[index].is_whole
                    self.calls[index].is_whole = True

    @property
    def whole(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for call in self.calls if call.is_whole]


def parser_of(
    form: CallFormat | None = None,
    *,
    thinking: ThinkSyntax | None = None,
    starts: Start = "answer",
    tools: tuple[Tool, ...] = TOOLS,
    foreign_parser: ForeignParser | None = None,
    calls: str = "many",
) -> AnswerParser:
    plan = AnswerPlan(
        thinking=thinking,
        starts=starts,
        form=form,
        tools=tools,
        foreign_parser=foreign_parser,
        calls="one" if calls == "one" else "many",
    )
    parser = plan.parser()
    assert parser is not None
    return parser


def read(parser: AnswerParser, pieces: Iterable[str], end: AnswerEnd = "stop") -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.take(parser.push(piece))
        if parser.is_over:
            break
    answer.take(parser.finish(end))
    answer.warnings = parser.warnings
    assert parser.whole_calls == len(answer.whole)
    return answer
