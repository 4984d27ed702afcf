"""What a request refers to → the items themselves, out of the store: earlier answers, and single items of them."""

import msgspec

from gateway.request_body import decode_plain
from gateway.responses.schema import ItemKind, PromptFields, ReferenceItem, decode_part
from gateway.responses.store import ResponseStore
from gateway.responses.stored import (
    CHAIN_MAX,
    input_items_of,
    item_in,
    output_items_of,
    response_of_item,
)
from gateway.responses.translate import input_items
from protocol.failures import Failure, FailureKind

Items = list[tuple[str, msgspec.Raw]]

_PREVIOUS = "previous_response_id"


async def resolved_items(
    request: PromptFields, store: ResponseStore, holder: str, *, max_bytes: int
) -> Items | Failure:
    """All items that make the prompt, in order, with where they stand. Raises what the store raises."""
    own: Items = []
    for at, item in input_items(request):
        found = await _dereferenced(at, item, store, holder)
        if isinstance(found, Failure):
            return found
        own.append(found)
    if request.previous_response_id is None:
        return own
    earlier = await _earlier(request.previous_response_id, store, holder, max_bytes=max_bytes)
    return earlier if isinstance(earlier, Failure) else [*earlier, *own]


async def _earlier(response_id: str, store: ResponseStore, holder: str, *, max_bytes: int) -> Items | Failure:
    chain = await store.chain(holder, response_id)
    if chain is None:
        return not_stored(_PREVIOUS, store)
    if chain[-1].status not in ("completed", "incomplete"):
        return _invalid(_PREVIOUS, f"this response is {chain[-1].status}. Name one that has been answered.")
    total_bytes = sum(len(stored.input_items) + len(stored.response) for stored in chain)
    if len(chain) > CHAIN_MAX or total_bytes > max_bytes:
        return _invalid(_PREVIOUS, "this conversation has become too long to be kept here. Send its items in `input`.")
    return [(_PREVIOUS, item) for stored in chain for item in (*input_items_of(stored), *output_items_of(stored))]


async def _dereferenced(
    at: str, item: msgspec.Raw, store: ResponseStore, holder: str
) -> tuple[str, msgspec.Raw] | Failure:
    kind = decode_plain(bytes(item), ItemKind)
    if isinstance(kind, Failure) or kind.type != "item_reference":
        return at, item  # whatever is wrong with it is said where it is read
    reference = decode_part(item, ReferenceItem, at)
    if isinstance(reference, Failure):
        return reference
    response_id = response_of_item(reference.id)
    stored = None if response_id is None else await store.get(holder, response_id)
    found = None if stored is None else item_in(stored, reference.id)
    return not_stored(f"{at}.id", store) if found is None else (at, found)


def not_stored(param: str | None, store: ResponseStore) -> Failure:
    """For an id that this holder has nothing under, be it somebody else's, over its time, or never stored."""
    field = "" if param is None else f"`{param}`: "
    what = (
        f"Only responses asked for with `store: true` are kept, for {store.keep_hours:g} hours after their last use, "
        "and only for the key that asked."
        if store.is_on
        else "This server stores no responses."
    )
    return Failure(
        kind=FailureKind.NOT_FOUND,
        message=f"{field}no such response of this key is stored. {what} Send all items in `input` instead.",
        param=param,
    )


def _invalid(param: str, message: str) -> Failure:
    return Failure(kind=FailureKind.INVALID_REQUEST, message=f"`{param}`: {message}", param=param)
