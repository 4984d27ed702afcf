"""This machine's memory, where the settings leave it open how much of it models may have."""

import psutil

from gateway.config import Settings
from gateway.residency import LIVE_KV_SHARE, WORKING_SHARE, MemoryTerms
from protocol.ids import ModelName


def memory_terms(settings: Settings) -> MemoryTerms:
    """The part of the settings that the memory ledger needs, and this machine's memory where they leave it open."""
    memory = settings.memory
    limit_bytes = memory.limit_bytes
    if limit_bytes is None:
        limit_bytes = psutil.virtual_memory().total * 3 // 4
    live_kv_bytes = settings.worker.live_kv_bytes
    if live_kv_bytes is None:
        live_kv_bytes = int(LIVE_KV_SHARE * limit_bytes)
    return MemoryTerms(
        limit_bytes=limit_bytes,
        hot_cache_bytes=settings.worker.hot_cache_bytes,
        live_kv_bytes=live_kv_bytes,
        working_bytes=memory.working_bytes,
        working_share=WORKING_SHARE,
        pinned=frozenset(ModelName(name) for name in memory.pinned),
        unload_after_seconds=memory.unload_after_seconds or None,
        wait_seconds=memory.wait_seconds,
    )
