"""What the model says → the items of a response's output, piece by piece or all at once. Decides only.

Both ways make the same items with the same ids, so a stream's last event holds what a whole answer would have held.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec import UNSET, Struct, UnsetType

from gateway.answer_parts import CallPart, Part, ReasoningPart, TextPart
from gateway.openai.answers import TokenObject
from gateway.openai.logprobs import token_object
from gateway.responses.answers import (
    CustomCallOutput,
    FunctionCallOutput,
    ItemStatus,
    MessageOutput,
    OutputItem,
    OutputText,
    ReasoningOutput,
    ReasoningText,
)
from gateway.responses.custom_input import CustomInput
from gateway.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from gateway.responses.tools import Origin
from protocol.generation import AnswerEvent, CallArguments, CallEnded, CallStarted, Delta, Reasoning


class ItemMaker(Struct, frozen=True, kw_only=True):
    """How this response's items look. `bare_id` is in the id of each; `seal` is for a client that keeps reasoning."""

    bare_id: str
    origins: dict[str, Origin]
    seal: Callable[[str], str] | None

    def message(self, index: int, text: str, logprobs: Sequence[TokenObject], status: ItemStatus) -> MessageOutput:
        content = (OutputText(text=text, logprobs=tuple(logprobs)),)
        return MessageOutput(id=f"msg_{self.bare_id}_{index}", status=status, content=content)

    def reasoning(self, index: int, text: str, status: ItemStatus) -> ReasoningOutput:
        return ReasoningOutput(
            id=f"rs_{self.bare_id}_{index}",
            status=status,
            content=(ReasoningText(text=text),),
            encrypted_content=UNSET if self.seal is None else self.seal(text),
        )

    def function_call(self, index: int, call_id: str, origin: Origin, arguments: str, status: ItemStatus) -> OutputItem:
        return FunctionCallOutput(
            id=f"fc_{self.bare_id}_{index}",
            status=status,
            call_id=call_id,
            name=origin.name,
            namespace=_present(origin.namespace),
            arguments=arguments,
        )

    def custom_call(
        self, index: int, call_id: str, origin: Origin, input_text: str, status: ItemStatus, *, arguments: str | None
    ) -> OutputItem:
        return CustomCallOutput(
            id=f"ctc_{self.bare_id}_{index}",
            status=status,
            call_id=call_id,
            name=origin.name,
            namespace=_present(origin.namespace),
            input=input_text,
            mlxd_arguments=_present(arguments),
        )

    def origin(self, name: str) -> Origin:
        """A model may call what nobody offered: that is the client's to answer."""
        return self.origins.get(name) or Origin(kind="function", name=name)


def output_items(parts: Sequence[Part], maker: ItemMaker, *, last_status: ItemStatus) -> tuple[OutputItem, ...]:
    """The items of a whole answer. `last_status` is that of its last text; a call knows whether it is whole."""
    shown = [part for part in parts if not (isinstance(part, ReasoningPart) and not part.text)]
    items = [
        _item(part, index, maker, last_status if index == len(shown) - 1 else "completed")
        for index, part in enumerate(shown)
    ]
    return tuple(items) or (maker.message(0, "", (), last_status),)


def _item(part: Part, index: int, maker: ItemMaker, status: ItemStatus) -> OutputItem:
    match part:
        case TextPart():
            return maker.message(index, part.text, [token_object(token) for token in part.logprobs], status)
        case ReasoningPart():
            return maker.reasoning(index, part.text, status)
        case CallPart():
            call = _OpenCall(maker, index, part.call_id, part.name)
            call.feed(part.arguments)
            return call.item("completed" if part.is_whole else "incomplete")
        case _:
            assert_never(part)


# --- streamed --------------------------------------------------------------------------------------------------------


class Output:
    """The output as it comes. `number` gives the next event's sequence number."""

    def __init__(self, maker: ItemMaker, number: Callable[[], int]) -> None:
        self._maker = maker
        self._number = number
        self._items: list[OutputItem] = []
        self._open: _OpenText | _OpenReasoning | _OpenCall | None = None

    def add(self, event: AnswerEvent) -> list[Event]:
        """What this adds to the stream."""
        match event:
            case Delta() | Reasoning() if not event.text and not self._goes_on(event):
                return []  # as in the whole answer, a token that brings no text begins no item
            case Delta():
                return self._add_text(event)
            case Reasoning():
                return self._add_reasoning(event)
            case CallStarted():
                closed = self._close("completed")
                self._open = _OpenCall(self._maker, len(self._items), event.call_id, event.name)
                return [*closed, *self._open.begin(self._number)]
            case CallArguments():
                return self._open.add(event.text, self._number) if isinstance(self._open, _OpenCall) else []
            case CallEnded():
                return self._close("completed")
            case _:
                assert_never(event)

    def end(self, last_status: ItemStatus) -> list[Event]:
        """Nothing follows. An answer without any item is an empty message."""
        status = "incomplete" if isinstance(self._open, _OpenCall) else last_status
        events = self._close(status)
        if self._items:
            return events
        empty = _OpenText(self._maker, 0)
        self._open = empty
        return [*events, *empty.begin(self._number), *self._close(last_status)]

    def so_far(self) -> tuple[OutputItem, ...]:
        """What there is of it, in the middle of an answer that breaks."""
        is_begun = self._open is not None and self._open.is_begun
        return (*self._items, self._open.item("incomplete")) if self._open is not None and is_begun else (*self._items,)

    @property
    def items(self) -> tuple[OutputItem, ...]:
        """Those that are whole."""
        return tuple(self._items)

    def _add_text(self, event: Delta) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, _OpenText):
            events = self._close("completed")
            self._open = _OpenText(self._maker, len(self._items))
        if event.text or event.logprobs:
            events += self._open.begin(self._number)
            events += self._open.add(event.text, [token_object(token) for token in event.logprobs], self._number)
        return events

    def _add_reasoning(self, event: Reasoning) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, _OpenReasoning):
            events = self._close("completed")
            self._open = _OpenReasoning(self._maker, len(self._items))
        if event.text:
            events += self._open.begin(self._number)
            events += self._open.add(event.text, self._number)
        return events

    def _goes_on(self, event: Delta | Reasoning) -> bool:
        if self._open is None:
            return not self._items
        return isinstance(self._open, _OpenText if isinstance(event, Delta) else _OpenReasoning)

    def _close(self, status: ItemStatus) -> list[Event]:
        closing, self._open = self._open, None
        if closing is None or not closing.is_begun:
            return []
        events = closing.done(status, self._number)
        self._items.append(closing.item(status))
        return events


class _OpenText:
    """A message that is being written."""

    def __init__(self, maker: ItemMaker, index: int) -> None:
        self._maker, self._index = maker, index
        self._pieces: list[str] = []
        self._logprobs: list[TokenObject] = []
        self._id = maker.message(index, "", (), "in_progress").id
        self.is_begun = False

    def begin(self, number: Callable[[], int]) -> list[Event]:
        if self.is_begun:
            return []
        self.is_begun = True
        at, item_id = self._index, self._id
        item = MessageOutput(id=item_id, status="in_progress", content=())
        return [
            ItemAdded(sequence_number=number(), output_index=at, item=item),
            PartAdded(sequence_number=number(), output_index=at, item_id=item_id, part=OutputText(text="")),
        ]

    def add(self, text: str, logprobs: Sequence[TokenObject], number: Callable[[], int]) -> list[Event]:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return [
            TextDelta(
                sequence_number=number(),
                output_index=self._index,
                item_id=self._id,
                delta=text,
                logprobs=tuple(logprobs),
            )
        ]

    def done(self, status: ItemStatus, number: Callable[[], int]) -> list[Event]:
        at, item_id, item = self._index, self._id, self.item(status)
        (part,) = item.content
        return [
            TextDone(
                sequence_number=number(), output_index=at, item_id=item_id, text=part.text, logprobs=part.logprobs
            ),
            PartDone(sequence_number=number(), output_index=at, item_id=item_id, part=part),
            ItemDone(sequence_number=number(), output_index=at, item=item),
        ]

    def item(self, status: ItemStatus) -> MessageOutput:
        return self._maker.message(self._index, "".join(self._pieces), self._logprobs, status)


class _OpenReasoning:
    """Reasoning that is being written."""

    def __init__(self, maker: ItemMaker, index: int) -> None:
        self._maker, self._index = maker, index
        self._pieces: list[str] = []
        self._id = f"rs_{maker.bare_id}_{index}"
        self.is_begun = False

    def begin(self, number: Callable[[], int]) -> list[Event]:
        if self.is_begun:
            return []
        self.is_begun = True
        at, item_id = self._index, self._id
        item = ReasoningOutput(id=item_id, status="in_progress", content=())
        return [
            ItemAdded(sequence_number=number(), output_index=at, item=item),
            PartAdded(sequence_number=number(), output_index=at, item_id=item_id, part=ReasoningText(text="")),
        ]

    def add(self, text: str, number: Callable[[], int]) -> list[Event]:
        self._pieces.append(text)
        return [ReasoningDelta(sequence_number=number(), output_index=self._index, item_id=self._id, delta=text)]

    def done(self, status: ItemStatus, number: Callable[[], int]) -> list[Event]:
        at, item_id, item = self._index, self._id, self.item(status)
        (part,) = item.content
        return [
            ReasoningDone(sequence_number=number(), output_index=at, item_id=item_id, text=part.text),
            PartDone(sequence_number=number(), output_index=at, item_id=item_id, part=part),
            ItemDone(sequence_number=number(), output_index=at, item=item),
        ]

    def item(self, status: ItemStatus) -> ReasoningOutput:
        return self._maker.reasoning(self._index, "".join(self._pieces), status)


class _OpenCall:
    """A call of either kind that is being written."""

    def __init__(self, maker: ItemMaker, index: int, call_id: str, name: str) -> None:
        self._maker, self._index, self._call_id = maker, index, call_id
        self._origin = maker.origin(name)
        self._custom = CustomInput() if self._origin.kind == "custom" else None
        self._pieces: list[str] = []
        prefix = "fc" if self._custom is None else "ctc"
        self._id = f"{prefix}_{maker.bare_id}_{index}"
        self.is_begun = False

    def begin(self, number: Callable[[], int]) -> list[Event]:
        self.is_begun = True
        return [ItemAdded(sequence_number=number(), output_index=self._index, item=self._item("", "in_progress"))]

    def feed(self, arguments: str) -> str:
        """Of a custom tool, what they add to its input; else the arguments themselves."""
        text = arguments if self._custom is None else self._custom.feed(arguments)
        self._pieces.append(text)
        return text

    def add(self, arguments: str, number: Callable[[], int]) -> list[Event]:
        return self._delta(self.feed(arguments), number)

    def done(self, status: ItemStatus, number: Callable[[], int]) -> list[Event]:
        events = self._delta(self._rest(), number)
        at, item_id, text = self._index, self._id, "".join(self._pieces)
        if self._custom is None:
            events.append(
                ArgumentsDone(
                    sequence_number=number(), output_index=at, item_id=item_id, name=self._origin.name, arguments=text
                )
            )
        else:
            events.append(InputDone(sequence_number=number(), output_index=at, item_id=item_id, input=text))
        events.append(ItemDone(sequence_number=number(), output_index=at, item=self._item(text, status)))
        return events

    def item(self, status: ItemStatus) -> OutputItem:
        self._rest()
        return self._item("".join(self._pieces), status)

    def _rest(self) -> str:
        rest = "" if self._custom is None else self._custom.end()
        self._pieces.append(rest)
        return rest

    def _delta(self, text: str, number: Callable[[], int]) -> list[Event]:
        if not text:
            return []
        kind = ArgumentsDelta if self._custom is None else InputDelta
        return [kind(sequence_number=number(), output_index=self._index, item_id=self._id, delta=text)]

    def _item(self, text: str, status: ItemStatus) -> OutputItem:
        at, call_id, origin = self._index, self._call_id, self._origin
        if self._custom is None:
            return self._maker.function_call(at, call_id, origin, text, status)
        return self._maker.custom_call(at, call_id, origin, text, status, arguments=self._custom.arguments)


def _present(value: str | None) -> str | UnsetType:
    return UNSET if value is None else value
