"""How the client of a stream hears that it waits, and what for, in every dialect: comment lines, which parsers drop.
Decides only.
"""

import math
from typing import assert_never

from gateway.event_bytes import KEEPALIVE
from gateway.in_flight import RequestView


def waiting_comment(view: RequestView) -> bytes:
    """`: mlxd queue=2 eta=14s`, `: mlxd prefill=8192/32768 cached=24576 eta=9s`, `: mlxd loading=40%`.

    A plain keepalive when nothing better is known: a made-up number would be worse than none.
    """
    words: list[str] = []
    match view.phase:
        case "waiting_for_model":
            if view.loading_percent is not None:
                words.append(f"loading={view.loading_percent}%")
        case "queued":
            if view.ahead is not None:
                words.append(f"queue={view.ahead}")
        case "prefilling":
            if view.progress is not None:
                words.append(f"prefill={view.progress.done_tokens}/{view.progress.total_tokens}")
                words.append(f"cached={view.progress.cached_tokens}")
        case "decoding":
            pass
        case _:
            assert_never(view.phase)
    if view.eta_seconds is not None and math.isfinite(view.eta_seconds):
        words.append(f"eta={max(0, math.ceil(view.eta_seconds))}s")
    if view.held_by:
        words.append(f"held_by={view.held_by}")
    return f": mlxd {' '.join(words)}\n\n".encode() if words else KEEPALIVE
