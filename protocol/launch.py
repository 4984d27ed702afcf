"""What a child is told at its start: one JSON line on its standard input, never in argv.

The same pipe tells a child that its parent is gone: the gateway keeps it open, so end-of-file means orphaned, on
macOS as on Linux, and the child ends itself.
"""

from typing import Literal

from msgspec import Struct

from protocol.ids import Incarnation, ModelName
from protocol.kv_storage import KVQuantization

PersistPolicy = Literal["second-touch", "through", "off"]
"""When a KV block goes to disk: when its prefix is used again, at once, or never."""

NeighbourPolicy = Literal["fair", "ignore"]
"""Whether a worker takes turns with the others on its device, or behaves as if it were alone."""


class WorkerLaunch(Struct, frozen=True, kw_only=True):
    """Everything one worker needs to know. Byte budgets are this worker's own; `live_kv_bytes` is that
    of rows' KV, None for no bound. `kv` None: keys and values are kept as they are computed."""

    model: ModelName
    model_path: str
    runtime_directory: str
    incarnation: Incarnation
    max_rows: int = 16
    context_tokens: int | None = None
    hot_cache_bytes: int = 2 * 1024**3
    live_kv_bytes: int | None = None
    kv: KVQuantization | None = None
    persist: PersistPolicy = "second-touch"
    prefill_slice_seconds: float = 0.2
    neighbours: NeighbourPolicy = "fair"
    log_level: str = "info"


class CachestoreLaunch(Struct, frozen=True, kw_only=True):
    """Everything the cachestore needs to know."""

    directory: str
    runtime_directory: str
    incarnation: Incarnation
    quota_bytes: int = 50 * 1024**3
    daily_write_bytes: int | None = 200 * 1024**3
    free_floor_bytes: int = 5 * 1024**3
    log_level: str = "info"
