"""What is remembered of finished requests so that a miss can be explained: hashes and numbers, no text. Decides only.

Hashes are keyed with a secret of this process, so they tell nothing to whoever should see one. Entries are grouped by
the owner of their cache scope, and are only ever compared within one owner.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec
from msgspec import Struct

from gateway.volatile_heads import VolatileKind, volatile_form
from protocol.generation import (
    CacheReport,
    ChatMessage,
    ChatPrompt,
    Finished,
    Generate,
    Queued,
    TextPrompt,
    TokenPrompt,
    Warm,
    Warmed,
)
from protocol.ids import GRAIN_TOKENS, Grain, Incarnation, ModelName, RequestId

GRAIN_MARK_BYTES = 8
"""Of each grain so much is kept: enough to tell prompts apart, and half the memory."""

_MARK_BYTES = 8
_ENTRY_BYTES = 1024
_MESSAGE_BYTES = 256
_KNOWN_HEADS = 512

MessageRole = Literal["system", "developer", "user", "assistant", "tool", "prompt"]


class HeadMark(Struct, frozen=True, kw_only=True):
    """A text's form without its volatile parts, and each kind of those, as hashes."""

    form: bytes
    values: dict[VolatileKind, bytes]


class MessageMark(Struct, frozen=True, kw_only=True):
    """One message. `head` is there for the first messages only: those that a client's frame consists of."""

    role: MessageRole
    digest: bytes
    head: HeadMark | None = None


class PromptMarks(Struct, frozen=True, kw_only=True):
    """A prompt. `scope` tells narrowed scopes of one owner apart; `grains` are the marks, end to end.

    `tools` stands for its tools in their order, `rendering` for what else the chat template was given.
    """

    scope: bytes
    model: ModelName
    tools: bytes
    rendering: bytes
    messages: tuple[MessageMark, ...]
    message_starts: tuple[int, ...]
    grains: bytes


class RequestRecord(PromptMarks, frozen=True, kw_only=True):
    """A finished request."""

    request_id: RequestId
    owner: str
    incarnation: Incarnation
    finished_at: float
    finished_unix: float
    prompt_tokens: int
    cache: CacheReport

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        return _ENTRY_BYTES + len(self.grains) + _MESSAGE_BYTES * len(self.messages) + 32 * len(self.message_starts)


class RequestMarks:
    """Makes marks under one secret. Remembers the marks of heads, which most requests repeat and which cost most."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._heads: OrderedDict[bytes, HeadMark] = OrderedDict()

    def prompt(self, command: Generate | Warm, queued: Queued | None, *, model: ModelName) -> PromptMarks:
        """What there is to know of a prompt before its request has ended."""
        return PromptMarks(
            scope=self._mark(command.cache.scope),
            model=model,
            tools=self._tools(command),
            rendering=self._rendering(command),
            messages=self._messages(command),
            message_starts=queued.message_starts if queued else (),
            grains=b"".join(grain_mark(grain) for grain in queued.grains) if queued else b"",
        )

    def record(
        self,
        command: Generate | Warm,
        queued: Queued | None,
        end: Finished | Warmed,
        *,
        model: ModelName,
        incarnation: Incarnation,
        now: float,
        unix_now: float,
    ) -> RequestRecord:
        """What to remember of a request that ended well."""
        prompt = self.prompt(command, queued, model=model)
        return RequestRecord(
            request_id=command.request_id,
            owner=command.cache.owner,
            scope=prompt.scope,
            model=prompt.model,
            tools=prompt.tools,
            incarnation=incarnation,
            finished_at=now,
            finished_unix=unix_now,
            prompt_tokens=end.usage.prompt_tokens if isinstance(end, Finished) else end.prompt_tokens,
            rendering=prompt.rendering,
            messages=prompt.messages,
            message_starts=prompt.message_starts,
            grains=prompt.grains,
            cache=end.cache,
        )

    def _tools(self, command: Generate | Warm) -> bytes:
        tools = command.prompt.tools if isinstance(command.prompt, ChatPrompt) else ()
        return self._mark(msgspec.msgpack.encode(tools))

    def _rendering(self, command: Generate | Warm) -> bytes:
        match command.prompt:
            case ChatPrompt(template_arguments=arguments):
                return self._mark(b"chat" + msgspec.msgpack.encode(arguments))
            case TextPrompt():
                return self._mark(b"text")
            case TokenPrompt():
                return self._mark(b"tokens")
            case _:
                assert_never(command.prompt)

    def _messages(self, command: Generate | Warm) -> tuple[MessageMark, ...]:
        match command.prompt:
            case ChatPrompt(messages=messages):
                frame = _frame_length(messages)
                return tuple(self._message(message, in_frame=at < frame) for at, message in enumerate(messages))
            case TextPrompt(text=text):
                digest = self._mark(text.encode())
                return (MessageMark(role="prompt", digest=digest, head=self._head(digest, text)),)
            case TokenPrompt():
                return ()
            case _:
                assert_never(command.prompt)

    def _message(self, message: ChatMessage, *, in_frame: bool) -> MessageMark:
        digest = self._mark(msgspec.msgpack.encode(message))
        return MessageMark(
            role=message.role, digest=digest, head=self._head(digest, message.content) if in_frame else None
        )

    def _head(self, digest: bytes, text: str) -> HeadMark:
        known = self._heads.get(digest)
        if known is not None:
            self._heads.move_to_end(digest)
            return known
        form = volatile_form(text)
        mark = HeadMark(
            form=self._mark(form.text.encode()),
            values={kind: self._mark(values.encode()) for kind, values in form.values.items()},
        )
        self._heads[digest] = mark
        if len(self._heads) > _KNOWN_HEADS:
            self._heads.popitem(last=False)
        return mark

    def _mark(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, digest_size=_MARK_BYTES).digest()


class RequestRing:
    """Finished requests of the last `keep_seconds`, so many per owner and so many bytes in all; the oldest go first."""

    def __init__(self, *, keep_seconds: float, max_per_owner: int, max_bytes: int) -> None:
        self._keep_seconds = keep_seconds
        self._max_per_owner = max_per_owner
        self._max_bytes = max_bytes
        self._by_owner: dict[str, deque[RequestRecord]] = {}
        self._in_order: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._in_order)

    def add(self, record: RequestRecord, *, now: float) -> None:
        """Records come in the order in which they finished."""
        if self._keep_seconds <= 0 or record.size_bytes > self._max_bytes or record.request_id in self._in_order:
            return
        mine = self._by_owner.setdefault(record.owner, deque())
        if len(mine) >= self._max_per_owner:
            self._drop(mine[0])
        self._by_owner.setdefault(record.owner, mine).append(record)
        self._in_order[record.request_id] = record
        self._bytes += record.size_bytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._in_order.values())))
        self.forget_old(now=now)

    def find(self, owner: str, request_id: RequestId, *, now: float) -> RequestRecord | None:
        """The record, if it is this owner's and still kept."""
        self.forget_old(now=now)
        record = self._in_order.get(request_id)
        return record if record is not None and record.owner == owner else None

    def before(self, record: RequestRecord) -> tuple[RequestRecord, ...]:
        """What the same owner's finished requests were before this one, oldest first."""
        earlier: list[RequestRecord] = []
        for other in self._by_owner.get(record.owner, ()):
            if other.request_id == record.request_id:
                break
            earlier.append(other)
        return tuple(earlier)

    def forget_old(self, *, now: float) -> None:
        """Drop what is over its time."""
        while self._in_order:
            oldest = next(iter(self._in_order.values()))
            if now - oldest.finished_at <= self._keep_seconds:
                return
            self._drop(oldest)

    def forget_owner(self, owner: str) -> None:
        """Drop everything of one owner: who has their cache forgotten wants this forgotten, too."""
        for record in tuple(self._by_owner.get(owner, ())):
            self._drop(record)

    def forget_everyone(self) -> None:
        """Drop everything."""
        self._by_owner.clear()
        self._in_order.clear()
        self._bytes = 0

    def _drop(self, record: RequestRecord) -> None:
        del self._in_order[record.request_id]
        self._bytes -= record.size_bytes
        mine = self._by_owner[record.owner]
        mine.popleft()  # its owner's oldest, since all records come in one order
        if not mine:
            del self._by_owner[record.owner]


def grain_mark(grain: Grain) -> bytes:
    """What is kept of a grain."""
    return grain[:GRAIN_MARK_BYTES].ljust(GRAIN_MARK_BYTES, b"\0")


def common_grains(one: bytes, other: bytes) -> int:
    """How many grains two chains share. Chains that part never meet again, so halving finds the place."""
    low, high = 0, min(len(one), len(other)) // GRAIN_MARK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * GRAIN_MARK_BYTES, middle * GRAIN_MARK_BYTES)
        if one[at] == other[at]:
            low = middle
        else:
            high = middle - 1
    return low


def common_tokens(one: PromptMarks, other: PromptMarks) -> int:
    """The tokens that both prompts begin with, to the grain."""
    return common_grains(one.grains, other.grains) * GRAIN_TOKENS


def common_messages(one: PromptMarks, other: PromptMarks) -> int:
    """How many messages both begin with."""
    count = 0
    for mine, theirs in zip(one.messages, other.messages, strict=False):
        if mine.digest != theirs.digest:
            return count
        count += 1
    return count


def _frame_length(messages: Sequence[ChatMessage]) -> int:
    """The system's messages at the start and the one after them."""
    for at, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return at + 1
    return len(messages)
