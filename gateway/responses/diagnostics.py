"""Why a response reused no more of an earlier one's prompt, in the words of OpenAI's API. Decides only.

OpenAI's reasons are all changes of the request. Here a prefix can also be lost though nothing changed: that is told as
`unavailable`, with the reason in words of our own beside it.
"""

from gateway.explain import explain
from gateway.prompt_comparison import Difference, compare_prompts
from gateway.request_ring import RequestRecord
from gateway.responses.answers import CacheDiagnostics
from protocol.ids import BLOCK_TOKENS

NOT_FOUND = CacheDiagnostics(type="comparison_response_not_found")
UNAVAILABLE = CacheDiagnostics(type="unavailable")

_REASONS: dict[Difference, str] = {
    "model": "model_changed",
    "system": "input_changed",
    "tools": "tools_changed",
    "messages": "input_changed",
    "rendering": "reasoning_effort_changed",
}


def diagnose(record: RequestRecord, earlier: RequestRecord) -> CacheDiagnostics:
    """Compare a response that has ended with the one that its client named."""
    compared = compare_prompts(record, earlier)
    reason = _REASONS.get(compared.difference)
    if reason is not None:
        return CacheDiagnostics(
            type="cache_miss",
            reason=reason,
            cache_missed_tokens=record.prompt_tokens - min(compared.reusable_tokens, record.prompt_tokens),
            comparison_reusable_tokens=compared.reusable_tokens,
        )
    reused = record.cache.ram_tokens + record.cache.disk_tokens
    if reused and reused + BLOCK_TOKENS > compared.reusable_tokens:  # what does not fill a block may not be kept
        return CacheDiagnostics(type="cache_hit")
    explained = explain(record, [earlier])
    return CacheDiagnostics(
        type="unavailable",
        comparison_reusable_tokens=compared.reusable_tokens,
        mlxd_reason=explained.reason,
        mlxd_reason_text=explained.reason_text,
    )
