"""The first message of a worker, and the answer. Never change a field of `Hello`: old peers must stay readable."""

from msgspec import Struct

from protocol.ids import Incarnation, ModelName

PROTOCOL_VERSION = 2
"""Must match exactly on both sides: one wheel ships all processes, so a mismatch means one outlived an upgrade."""


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """A child says who it is, as soon as it can speak and before it loads anything."""

    protocol_version: int
    model: ModelName
    incarnation: Incarnation
    pid: int


class Welcome(Struct, frozen=True, kw_only=True, tag=True):
    """The gateway knows this child."""


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """The gateway will not talk to this child, which must exit."""

    reason: str


def answer_hello(hello: Hello, *, expected: Incarnation | None) -> Welcome | Refused:
    """Decide whether a child may join. `expected` is the incarnation the gateway runs for that model, if any."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return Refused(
            reason=f"worker speaks protocol {hello.protocol_version}, this gateway {PROTOCOL_VERSION}: "
            "both must come from one installation of mlxd"
        )
    if hello.incarnation != expected:
        return Refused(reason=f"the gateway does not run {hello.model} as incarnation {hello.incarnation}")
    return Welcome()
