"""The bytes of server-sent events. Decides only."""

KEEPALIVE = b": keepalive\n\n"
"""A comment. Safe in every client, as long as no `id:` line was ever sent."""

DONE = b"data: [DONE]\n\n"
"""The last event of a whole OpenAI stream."""


def data_event(payload: bytes) -> bytes:
    """One event. `payload` is JSON on one line."""
    return b"data: " + payload + b"\n\n"


def named_event(name: bytes, payload: bytes) -> bytes:
    """One event with its name on a line of its own, for clients that go by that. `payload` is JSON on one line."""
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"
