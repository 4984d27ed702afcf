"""Whether a cache on this disk is worth it: restoring a prefix against computing it. Decides only."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gateway.cache_terms import AdminModelCache
from protocol.disk_bench import BlockSpeed, DiskBench
from protocol.generation import Pong
from protocol.ids import BLOCK_TOKENS, ModelName

_CLEARLY = 2.0
"""Restoring must be so many times faster before it is called worth it without an if: the rates are measured once."""


class DiskWorth(Struct, frozen=True, kw_only=True):
    """One model's answer. Seconds are per 1,000 tokens; `unknown` until the model has served a prompt or two."""

    model: ModelName
    verdict: Literal["worth_it", "barely", "not_worth_it", "unknown"]
    text: str
    kv_bytes_per_token: float | None = None
    restore_seconds: float | None = None
    compute_seconds: float | None = None


def disk_worth(bench: DiskBench, models: Sequence[AdminModelCache]) -> tuple[DiskWorth, ...]:
    """For each loaded model."""
    return tuple(_of_model(bench, row.model, row.books) for row in models if row.books is not None)


def kv_bytes_per_token(books: Pong) -> float | None:
    """From what is hot: exactly from pinned prefixes, else about, since a last block may not be full."""
    pinned_tokens = sum(pin.tokens for pin in books.pins)
    if pinned_tokens:
        return sum(pin.size_bytes for pin in books.pins) / pinned_tokens
    if not books.hot_cache_blocks or not books.hot_cache_bytes:
        return None
    return books.hot_cache_bytes / (books.hot_cache_blocks * BLOCK_TOKENS)


def nearest_size(bench: DiskBench, block_bytes: float) -> BlockSpeed | None:
    """The measured block size that is closest to this one, by ratio."""
    return min(
        bench.sizes,
        key=lambda speed: max(speed.block_bytes / block_bytes, block_bytes / speed.block_bytes),
        default=None,
    )


def _of_model(bench: DiskBench, model: ModelName, books: Pong) -> DiskWorth:
    per_token = kv_bytes_per_token(books)
    speed = nearest_size(bench, per_token * BLOCK_TOKENS) if per_token else None
    if not per_token or speed is None or books.prefill_tokens_per_second <= 0 or speed.cold_read_bytes_per_second <= 0:
        return DiskWorth(
            model=model,
            verdict="unknown",
            text="send it a prompt of some hundred tokens first: its speed is not known yet",
            kv_bytes_per_token=per_token,
        )
    restore_seconds = 1000 * per_token / speed.cold_read_bytes_per_second
    compute_seconds = 1000 / books.prefill_tokens_per_second
    factor = compute_seconds / restore_seconds
    if factor >= _CLEARLY:
        verdict, text = "worth_it", f"worth it: a prefix comes from this disk {factor:.0f} times faster than computed"
    elif factor > 1:
        verdict, text = "barely", f"barely worth it: only {factor:.1f} times faster than computing"
    else:
        verdict, text = "not_worth_it", f"not worth it: computing is {1 / factor:.1f} times faster than this disk"
    return DiskWorth(
        model=model,
        verdict=verdict,
        text=text,
        kv_bytes_per_token=per_token,
        restore_seconds=restore_seconds,
        compute_seconds=compute_seconds,
    )
