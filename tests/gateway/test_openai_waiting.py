"""What a waiting client reads."""

from typing import Any

import pytest

from gateway.in_flight import PromptProgress, RequestView
from gateway.openai.prompt_progress import prompt_progress
from gateway.waiting_comment import waiting_comment
from protocol.generation import Prefilling
from protocol.ids import ModelName, RequestId
from protocol.latency import LatencyClass

PROGRESS = PromptProgress(done_tokens=8192, total_tokens=32768, cached_tokens=4096)


def view(**fields: Any) -> RequestView:
    return RequestView(
        id=RequestId("r"),
        key="ada",
        model=ModelName("m"),
        latency_class=LatencyClass.STANDARD,
        seconds=1.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "comment"),
    [
        ({"phase": "waiting_for_model"}, ": keepalive"),
        ({"phase": "waiting_for_model", "loading_percent": 40}, ": mlxd loading=40%"),
        ({"phase": "queued"}, ": keepalive"),
        ({"phase": "queued", "ahead": 2, "eta_seconds": 13.2}, ": mlxd queue=2 eta=14s"),
        ({"phase": "queued", "ahead": 0, "held_by": "memory"}, ": mlxd queue=0 held_by=memory"),
        ({"phase": "queued", "ahead": 1, "eta_seconds": float("inf")}, ": mlxd queue=1"),
        (
            {"phase": "prefilling", "progress": PROGRESS, "eta_seconds": 8.1},
            ": mlxd prefill=8192/32768 cached=4096 eta=9s",
        ),
        ({"phase": "decoding"}, ": keepalive"),
        ({"phase": "decoding", "held_by": "higher_class"}, ": mlxd held_by=higher_class"),
    ],
)
def test_a_comment_says_what_is_known(fields: dict[str, Any], comment: str) -> None:
    """One comment, one whole block, and no number that nobody measured."""
    assert waiting_comment(view(**fields)) == comment.encode() + b"\n\n"


def test_progress_in_llama_servers_words() -> None:
    """`processed` counts cached tokens; time in whole milliseconds."""
    event = Prefilling(request_id=RequestId("r"), done_tokens=60, total_tokens=100, cached_tokens=20)
    progress = prompt_progress(event, prefill_seconds=1.2345)
    assert (progress.total, progress.cache, progress.processed, progress.time_ms) == (100, 20, 60, 1234)
