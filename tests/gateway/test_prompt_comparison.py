"""What two prompts of one owner differ in."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.prompt_comparison import PromptComparison, compare_prompts
from gateway.request_recorder import RequestRecorder
from gateway.request_ring import PromptMarks, RequestMarks, RequestRecord
from protocol.generation import CacheUse, ChatMessage, ChatPrompt, Finished, FinishReason, Generate, Queued, Usage
from protocol.ids import GRAIN_TOKENS, Grain, Incarnation, ModelName, RequestId
from protocol.sampling import Sampling
from protocol.tools import Tool
from tests.fakes.scripted_generator import TIMINGS

MARKS = RequestMarks(b"secret")
SYSTEM = ChatMessage(role="system", content="be kind")
HI = ChatMessage(role="user", content="hi")
HELLO = ChatMessage(role="assistant", content="hello")
TOOLS = (Tool(name="f"), Tool(name="g"))


def work(*messages: ChatMessage, scope: bytes = b"ada", tools: tuple[Tool, ...] = TOOLS, **arguments: Any) -> Generate:
    return Generate(
        request_id=RequestId("req_1"),
        prompt=ChatPrompt(messages=messages, tools=tools, template_arguments=arguments),
        sampling=Sampling(),
        cache=CacheUse(scope=scope, owner="ada"),
    )


def queued(*grains: int) -> Queued:
    chain = tuple(Grain(bytes([grain]) * 16) for grain in grains)
    return Queued(request_id=RequestId("req_1"), prompt_tokens=GRAIN_TOKENS * len(grains) + 3, grains=chain)


def mine(command: Generate, *grains: int, model: str = "m") -> PromptMarks:
    return MARKS.prompt(command, queued(*grains), model=ModelName(model))


def earlier(command: Generate, *grains: int) -> RequestRecord:
    known = queued(*grains)
    usage = Usage(prompt_tokens=known.prompt_tokens, completion_tokens=1, cached_tokens=0)
    end = Finished(request_id=RequestId("req_1"), reason=FinishReason.STOP, usage=usage, timings=TIMINGS)
    return MARKS.record(command, known, end, model=ModelName("m"), incarnation=Incarnation(1), now=0.0, unix_now=0.0)


BEFORE = earlier(work(SYSTEM, HI), 1, 2, 3, 4)
ALL = BEFORE.prompt_tokens


@pytest.mark.parametrize(
    ("now", "difference", "reusable"),
    [
        (mine(work(SYSTEM, HI, HELLO, HI), 1, 2, 3, 4, 5), "none", ALL),
        (mine(work(SYSTEM, HI), 1, 2, 3, 4), "none", ALL),
        (mine(work(SYSTEM, HI), 1, 2, 3, 4, model="other"), "model", 0),
        (mine(work(HI), 1, 8, 9), "system", GRAIN_TOKENS),
        (mine(work(SYSTEM, HI, tools=TOOLS[::-1]), 7, 8), "tools", 0),
        (mine(work(SYSTEM, HELLO, HI), 1, 2, 9), "messages", 2 * GRAIN_TOKENS),
        (mine(work(SYSTEM), 1, 2), "messages", 2 * GRAIN_TOKENS),
        (mine(work(SYSTEM, HI, enable_thinking=True), 1, 2, 3, 9), "rendering", 3 * GRAIN_TOKENS),
        (mine(work(SYSTEM, HI, scope=b"ada, salted"), 1, 2, 3, 4), "rendering", 0),
    ],
)
def test_the_first_difference_and_its_price(now: PromptMarks, difference: str, reusable: int) -> None:
    """Model, system, tools, messages, then what else was given to the template; what it costs is the earlier prompt
    but for what both begin with."""
    compared = compare_prompts(now, BEFORE)
    assert compared.difference == difference
    assert compared.reusable_tokens == reusable
    assert compared.missed_tokens == (0 if difference == "none" else ALL - reusable)


def test_what_is_not_known_is_no_change() -> None:
    """An id of nobody's, or forgotten."""
    assert compare_prompts(mine(work(HI)), None) == PromptComparison(difference="unknown")
    without_chain = replace(BEFORE, grains=b"")
    assert compare_prompts(mine(work(HI), 1), without_chain).missed_tokens == ALL


def test_nobody_compares_with_anothers_request() -> None:
    """The id is looked up among the owner's own; a recorder that is off remembers nothing."""
    off = RequestRecorder(keep_seconds=0, clock=lambda: 0.0, unix_clock=lambda: 0.0)
    assert off.compare("msg_1", work(HI), None, model=ModelName("m")) is None
    recorder = RequestRecorder(keep_seconds=60, clock=lambda: 0.0, unix_clock=lambda: 0.0)
    recorder._ring.add(replace(BEFORE, owner="bob"), now=0.0)
    found = recorder.compare("msg_1", work(SYSTEM, HI), None, model=ModelName("m"))
    assert found == PromptComparison(difference="unknown")
