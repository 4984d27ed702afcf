"""Why a response reused no more of the one that its client named."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.request_ring import MessageMark, RequestRecord
from gateway.responses.diagnostics import diagnose
from protocol.generation import CacheReport
from protocol.ids import Incarnation, ModelName, RequestId

GRAIN = b"12345678"


def record(request_id: str, **fields: Any) -> RequestRecord:
    marks = (MessageMark(role="system", digest=b"s"), MessageMark(role="user", digest=b"u"))
    made = RequestRecord(
        scope=b"",
        model=ModelName("m"),
        tools=b"",
        rendering=b"",
        messages=marks,
        message_starts=(),
        grains=GRAIN * 64,
        request_id=RequestId(request_id),
        owner="o",
        incarnation=Incarnation(1),
        finished_at=0.0,
        finished_unix=0.0,
        prompt_tokens=1030,
        cache=CacheReport(ram_tokens=1024),
    )
    return replace(made, **fields)


EARLIER = record("req_1")
LATER = replace(record("req_2"), messages=(*EARLIER.messages, MessageMark(role="user", digest=b"v")))
OTHER_SYSTEM = (MessageMark(role="system", digest=b"x"), *EARLIER.messages[1:])
OTHER_USER = (EARLIER.messages[0], MessageMark(role="user", digest=b"x"))


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (replace(LATER, model=ModelName("other")), "model_changed"),
        (replace(LATER, tools=b"t"), "tools_changed"),
        (replace(LATER, rendering=b"r"), "reasoning_effort_changed"),
        (replace(LATER, messages=OTHER_SYSTEM, grains=b"87654321" * 64), "input_changed"),
        (replace(LATER, messages=OTHER_USER, grains=GRAIN * 32 + b"87654321" * 32), "input_changed"),
    ],
)
def test_what_was_changed(later: RequestRecord, reason: str) -> None:
    """The first thing that is not the same, in OpenAI's words, and how many tokens it cost."""
    found = diagnose(later, EARLIER)
    assert (found.type, found.reason) == ("cache_miss", reason)
    assert isinstance(found.cache_missed_tokens, int)
    assert isinstance(found.comparison_reusable_tokens, int)
    assert found.cache_missed_tokens + found.comparison_reusable_tokens == later.prompt_tokens


def test_a_hit() -> None:
    """All that both begin with was reused, to the block."""
    assert diagnose(LATER, EARLIER).type == "cache_hit"


def test_a_loss_is_no_change() -> None:
    """Nothing was changed and little was reused: the worker's reason, in words of ours."""
    lost = replace(LATER, cache=CacheReport(ram_tokens=0, miss_reason="evicted"))
    found = diagnose(lost, EARLIER)
    assert (found.type, found.mlxd_reason) == ("unavailable", "evicted")
    assert found.mlxd_reason_text
