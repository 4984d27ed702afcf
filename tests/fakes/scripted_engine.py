"""An engine that says what a script says and takes as long as a script says, on a clock that only moves by that.

It is strict where the real one would give nonsense: KV put into a row must be that of the row's own tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from protocol.generation import ChosenLogprob, TokenLogprob
from protocol.ids import RequestId
from worker.engine import Drawn, nothing
from worker.prefix_index import BlockUse, State
from worker.sequence import Prepared

BYTES_PER_TOKEN = 10

Kv = tuple[int, ...]
"""A payload: the tokens themselves stand for their KV."""


class ManualClock:
    """Seconds since some start; moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class ScriptedRow:
    prepared: Prepared
    says: list[int]
    token_ids: list[int]
    held: int
    is_decoding: bool = False
    is_unread: bool = False
    kv: list[int] = field(default_factory=list[int])


class ScriptedEngine:
    """`says(prepared)` is what a row draws, one token a step; asking for more than it says is an error.

    Pipelined as the real one: a row's first decode step reads its last prompt token and gives nothing.
    """

    def __init__(
        self,
        clock: ManualClock,
        says: Callable[[Prepared], Sequence[int]],
        *,
        prefill_seconds_per_token: float = 0.001,
        decode_seconds: float = 0.02,
        mixes: bool = False,
    ) -> None:
        self._clock = clock
        self._says = says
        self._prefill_seconds_per_token = prefill_seconds_per_token
        self._decode_seconds = decode_seconds
        self.mixes = mixes
        self.rows: dict[RequestId, ScriptedRow] = {}
        self.log: list[str] = []

    @property
    def active_bytes(self) -> int:
        return sum(row.held for row in self.rows.values()) * BYTES_PER_TOKEN

    @property
    def live_kv_bytes(self) -> int:
        return self.active_bytes

    def open(self, prepared: Prepared, uses: Sequence[BlockUse[Kv]]) -> None:
        assert prepared.request_id not in self.rows, "opened twice"
        kv = list(chain.from_iterable(use.block.payload[: use.tokens] for use in uses))
        assert tuple(kv) == prepared.token_ids[: len(kv)], "another prompt's KV"
        assert len(kv) < len(prepared.token_ids), "nothing left to compute"
        tokens = list(prepared.token_ids)
        says = list(self._says(prepared))[prepared.drawn_tokens :]
        self.rows[prepared.request_id] = ScriptedRow(prepared, says, tokens, len(kv), kv=kv)
        self.log.append(f"open {prepared.request_id} {len(kv)}")

    def prefill(
        self, request_id: RequestId, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing
    ) -> None:
        seconds = tokens * self._prefill_seconds_per_token
        for _ in range(parts):
            if parts > 1:
                before_each()
            self._clock.advance(seconds / parts)
        self._hold(request_id, tokens)
        self.log.append(f"prefill {request_id} {tokens}")

    def prefill_and_decode(self, request_id: RequestId, tokens: int) -> list[Drawn]:
        assert self.mixes
        assert not any(row.is_unread for row in self.rows.values()), "a mixed pass, and a row's last token is unread"
        self._hold(request_id, tokens)
        self._clock.advance(tokens * self._prefill_seconds_per_token)
        self._decode()
        self.log.append(f"mixed {request_id} {tokens}")
        return self.read()

    def _hold(self, request_id: RequestId, tokens: int) -> None:
        row = self.rows[request_id]
        assert tokens > 0
        assert not row.is_decoding
        assert row.held + tokens < len(row.token_ids), "the last prompt token belongs to decode"
        row.held += tokens
        row.kv = row.token_ids[: row.held]

    def join(self, request_id: RequestId) -> None:
        row = self.rows[request_id]
        assert row.held == len(row.token_ids) - 1
        row.is_decoding = True
        self.log.append(f"join {request_id}")

    def park(self, request_id: RequestId) -> None:
        row = self.rows[request_id]
        assert row.is_decoding
        assert not row.is_unread
        row.is_decoding = False
        self.log.append(f"park {request_id}")

    def decode(self) -> list[Drawn]:
        drawn = self._decode()
        self.log.append("decode")
        return drawn

    def _decode(self) -> list[Drawn]:
        rows = {i: row for i, row in self.rows.items() if row.is_decoding}
        assert rows, "a decode step of no row"
        self._clock.advance(self._decode_seconds)
        drawn = self._take(rows)
        for row in rows.values():
            row.held += 1
            row.is_unread = True
        return drawn

    def read(self) -> list[Drawn]:
        return self._take(self.rows)

    def _take(self, rows: Mapping[RequestId, ScriptedRow]) -> list[Drawn]:
        drawn: list[Drawn] = []
        for request_id, row in rows.items():
            if not row.is_unread:
                continue
            row.is_unread = False
            token_id = row.says.pop(0)
            row.token_ids.append(token_id)
            row.kv = row.token_ids[: row.held]
            logprob = None
            if row.prepared.request.top_logprobs is not None:
                chosen = TokenLogprob(token=chr(token_id), token_bytes=chr(token_id).encode(), logprob=-0.5)
                logprob = ChosenLogprob(chosen=chosen)
            drawn.append(Drawn(request_id, token_id, logprob))
        return drawn

    def tokens_held(self, request_id: RequestId) -> int:
        row = self.rows[request_id]
        return min(row.held, len(row.token_ids))

    def token_ids(self, request_id: RequestId) -> Sequence[int]:
        return self.rows[request_id].token_ids

    def cut(self, request_id: RequestId, start: int, end: int) -> tuple[Kv, int]:
        row = self.rows[request_id]
        assert start < end <= self.tokens_held(request_id)
        return tuple(row.token_ids[start:end]), (end - start) * BYTES_PER_TOKEN

    keeps_states = False

    def state(self, request_id: RequestId) -> State[Kv]:
        raise AssertionError(f"{request_id}: this engine's cache can be cut anywhere")

    def drop(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self.rows.pop(request_id, None)


class LetterDetokenizer:
    """Token 97 is `a`."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def saying(texts: Mapping[str, str], end_token_id: int = 0) -> Callable[[Prepared], list[int]]:
    """A script by request id: its letters, then the end of the turn, and more that nobody may ever see."""
    return lambda prepared: [*map(ord, texts.get(prepared.request_id, "")), end_token_id, *map(ord, "beyond the end")]
