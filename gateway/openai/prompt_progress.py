"""The `prompt_progress` of llama-server, for who asks for it. Decides only."""

from msgspec import Struct

from protocol.generation import Prefilling


class PromptProgressObject(Struct, frozen=True, kw_only=True):
    """llama-server's. `processed` counts the cached tokens, too; `time_ms` is since the prompt was first worked on."""

    total: int
    cache: int
    processed: int
    time_ms: int


def prompt_progress(event: Prefilling, *, prefill_seconds: float) -> PromptProgressObject:
    """How far the prompt is, in llama-server's words."""
    return PromptProgressObject(
        total=event.total_tokens,
        cache=event.cached_tokens,
        processed=event.done_tokens,
        time_ms=round(1000 * prefill_seconds),
    )
