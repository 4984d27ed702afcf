"""What a stored response is, and how its items are found again. Decides only."""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.caller import Caller
from gateway.request_body import decode_plain
from gateway.responses.answers import ItemList, ResponseError, Status
from protocol.failures import Failure

CHAIN_MAX = 512
"""How many answers a conversation may be made of before it has to be sent as items."""

_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_[0-9]{1,6}")


class StoredResponse(Struct, frozen=True, kw_only=True):
    """One response of one holder. `response` is the object's JSON, `input_items` that of a list, its own input's only;
    what came before is found by `previous_response_id`."""

    holder: str
    id: str
    created_unix: float
    status: Status
    background: bool
    previous_response_id: str | None
    input_items: bytes
    response: bytes


class _Identified(Struct, frozen=True, kw_only=True):
    id: str | None = None
    type: str | None = None


class _WithOutput(Struct, frozen=True, kw_only=True):
    output: list[msgspec.Raw]


def holder_of(caller: Caller) -> str:
    """Whose response it is: this key's as it is now. Keys that share a cache share no conversations, and one that was
    made again under an old name has none."""
    return f"{caller.cache_owner}:{caller.key_name}"


def identified(items: Sequence[msgspec.Raw], *, bare_id: str) -> bytes:
    """A request's own items as a JSON list, each with an id and a type."""
    return b"[" + b",".join(_with_id(bytes(item), f"in_{bare_id}_{at}") for at, item in enumerate(items)) + b"]"


def _with_id(item: bytes, item_id: str) -> bytes:
    """Spliced in rather than decoded and encoded: what a client sent is kept to the byte."""
    known = decode_plain(item, _Identified)
    if isinstance(known, Failure):  # it was read as an item before
        return item
    missing = b""
    if known.id is None:
        missing += b'"id":' + msgspec.json.encode(item_id) + b","
    if known.type is None:
        missing += b'"type":"message",'
    return b"{" + missing + item.strip()[1:]


def input_items_of(stored: StoredResponse) -> list[msgspec.Raw]:
    """Its own input."""
    return msgspec.json.decode(stored.input_items, type=list[msgspec.Raw])


def output_items_of(stored: StoredResponse) -> list[msgspec.Raw]:
    """Its output."""
    return msgspec.json.decode(stored.response, type=_WithOutput).output


def response_of_item(item_id: str) -> str | None:
    """The response whose output this item is, None for ids that were not made here."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def item_in(stored: StoredResponse, item_id: str) -> msgspec.Raw | None:
    """The item of its output, or of its input, with this id."""
    for item in (*output_items_of(stored), *input_items_of(stored)):
        if _id_of(item) == item_id:
            return item
    return None


def with_status(response: bytes, status: Status, *, error: ResponseError | None = None) -> bytes:
    """A response's JSON with another status, and with an error if there is one."""
    fields = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    fields["status"] = msgspec.Raw(msgspec.json.encode(status))
    if error is not None:
        fields["error"] = msgspec.Raw(msgspec.json.encode(error))
    return msgspec.json.encode(fields)


def page_of(stored: StoredResponse, *, after: str | None, limit: int, order: Literal["asc", "desc"]) -> ItemList | None:
    """A part of its input. None when `after` is no item of it."""
    items = input_items_of(stored)
    if order == "desc":
        items.reverse()
    ids = [_id_of(item) for item in items]
    if after is not None and after not in ids:
        return None
    start = 0 if after is None else ids.index(after) + 1
    shown, shown_ids = items[start : start + limit], ids[start : start + limit]
    return ItemList(
        data=tuple(shown),
        first_id=shown_ids[0] if shown_ids else None,
        last_id=shown_ids[-1] if shown_ids else None,
        has_more=start + limit < len(items),
    )


def _id_of(item: msgspec.Raw) -> str | None:
    known = decode_plain(bytes(item), _Identified)
    return None if isinstance(known, Failure) else known.id
