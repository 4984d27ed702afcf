"""A body's bytes → a typed request, or the Failure that names the field at fault. For every API. Pure."""

import re
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from protocol.failures import Failure, FailureKind

Body = TypeVar("Body")

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")


class Decoded(Struct, Generic[Body], frozen=True, kw_only=True):
    """A request whose types and ranges are right, and the names in it that nothing is done with."""

    request: Body
    ignored: tuple[str, ...]


def decode_plain(body: bytes, body_type: type[Body]) -> Body | Failure:
    """Read a body. Every malformed one, whatever its bytes, is a Failure."""
    try:
        body.decode()  # msgspec skips over what it does not keep, bad UTF-8 included
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as why:
        return _invalid_field(str(why))
    except RecursionError:
        return _malformed("it is nested too deeply")
    except UnicodeDecodeError as why:
        return _malformed(f"byte {why.start} is not UTF-8")
    except (msgspec.MsgspecError, ValueError, OverflowError) as why:
        return _malformed(str(why) if isinstance(why, msgspec.MsgspecError) else "a number is out of range")


def _invalid_field(why: str) -> Failure:
    found = _PATH.search(why)
    path = found["path"] if found else ""
    reason = why[: found.start()] if found else why
    missing = _MISSING.match(why)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        reason = "This field is required"
    while path.endswith("[...]"):  # msgspec does not say which key of an object
        path = path.removesuffix("[...]")
    if not path:
        return Failure(kind=FailureKind.INVALID_REQUEST, message=f"The body: {reason}. Send one JSON object.")
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        message=f"`{path}`: {reason}. Correct this field and send the request again.",
        param=path,
    )


def _malformed(why: str) -> Failure:
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        message=f"The body is not valid JSON ({why}). Send one JSON object, encoded in UTF-8.",
    )
