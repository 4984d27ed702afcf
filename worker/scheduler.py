"""Which step comes next: a slice of one prompt, one decode step of all rows, or nothing. Pure.

The rules, in the order they are asked:

1. A sequence that waits for blocks from disk is not ready until they came or its deadline passed. Then it is opened:
   the engine makes its KV cache and puts in what the prefix cache has.
2. Prompts are prefilled one at a time, oldest first, in slices bounded by *time*: tokens = target seconds times the
   measured rate. The target is small while rows decode and larger when nobody waits for a token.
3. A slice of T seconds owes the decoding rows `share / (1 - share)` times T seconds of decode before the next slice.
4. A new prompt starts only while a row is free for it.
5. What only warms the cache runs when no other prompt can, and stops between two slices when one comes.
"""

from dataclasses import dataclass

from protocol.ids import BLOCK_TOKENS, RequestId
from worker.sequence import BooksDoNotAddUp, Sequence


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """`slice_seconds` bounds a slice beside decoding rows, `idle_slice_seconds` one that delays nobody (and so bounds
    how long a cancel can wait). `decode_share` is the part of the time that decoding rows keep, 0…1."""

    max_rows: int
    slice_seconds: float = 0.2
    idle_slice_seconds: float = 1.0
    decode_share: float = 0.5
    floor_tokens: int = 16
    ceiling_tokens: int = 2048
    first_rate_tokens_per_second: float = 256.0


@dataclass(frozen=True)
class Open:
    """Give this sequence its KV cache, filled with what is cached of its prefix."""

    request_id: RequestId


@dataclass(frozen=True)
class Prefill:
    """Run the next `tokens` of this prompt. Zero tokens: nothing is left to prefill, only let the row join."""

    request_id: RequestId
    tokens: int


@dataclass(frozen=True)
class Decode:
    """Run one decode step of all rows."""


@dataclass(frozen=True)
class Idle:
    """Nothing can run before a message arrives, or before `until` (on the caller's clock) if there is one."""

    until: float | None = None


Step = Open | Prefill | Decode | Idle


class Scheduler:
    """Owned by the step thread. `next_step` changes nothing; the other methods are told what happened."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._waiting: dict[RequestId, Sequence] = {}
        self._decoding: dict[RequestId, Sequence] = {}
        self._debt_seconds = 0.0
        self._rate = settings.first_rate_tokens_per_second

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._decoding)

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._decoding

    @property
    def rate_tokens_per_second(self) -> float:
        """How fast prompts are prefilled, by the latest slices."""
        return self._rate

    @property
    def debt_seconds(self) -> float:
        return self._debt_seconds

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._waiting.get(request_id) or self._decoding.get(request_id)

    def sequences(self) -> list[Sequence]:
        return [*self._waiting.values(), *self._decoding.values()]

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence

    def blocks_arrived(self, request_id: RequestId) -> None:
        """Its blocks from disk came, or never will. An unknown id is fine."""
        if sequence := self._waiting.get(request_id):
            sequence.blocks_deadline = None

    def remove(self, request_id: RequestId) -> Sequence | None:
        """It finished, failed or was cancelled. Idempotent; an unknown id is fine."""
        sequence = self._waiting.pop(request_id, None) or self._decoding.pop(request_id, None)
        if not self._decoding:
            self._debt_seconds = 0.0
        return sequence

    def next_step(self, now: float) -> Step:
        candidate = self._candidate(now)
        if self._decoding and (candidate is None or self._debt_seconds > 0):
            return Decode()
        if candidate is not None and not candidate.has_started:
            return Open(candidate.request_id)
        if candidate is not None:
            return Prefill(candidate.request_id, self._slice_tokens(candidate))
        deadlines = [s.blocks_deadline for s in self._waiting.values() if s.blocks_deadline is not None]
        return Idle(min(deadlines, default=None))

    def opened(self, request_id: RequestId, cached_tokens: int, now: float) -> None:
        """Its KV cache exists and holds `cached_tokens` of its prompt."""
        sequence = self._waiting[request_id]
        sequence.prefill_started = now
        sequence.prefilled = sequence.cached = cached_tokens

    def prefilled(self, step: Prefill, seconds: float, now: float) -> None:
        """A slice ran. When nothing is left the row has joined the decode batch, or is gone if it was only to warm."""
        sequence = self._waiting[step.request_id]
        sequence.prefilled += step.tokens
        sequence.slices += step.tokens > 0
        if step.tokens >= self._settings.floor_tokens and seconds > 0:
            # The latest slices count most: the rate falls as the context grows.
            self._rate += 0.5 * (step.tokens / seconds - self._rate)
        if self._decoding:
            self._debt_seconds += seconds * self._settings.decode_share / (1 - self._settings.decode_share)
        if sequence.prefill_left == 0:
            del self._waiting[step.request_id]
            if sequence.priority == "warm":
                return
            sequence.decode_started = now
            self._decoding[step.request_id] = sequence

    def decoded(self, seconds: float) -> None:
        """A decode step ran."""
        self._debt_seconds = max(0.0, self._debt_seconds - seconds)

    def check(self) -> None:
        """Raise BooksDoNotAddUp if an invariant is broken."""
        laws = {
            "debt is never negative": self._debt_seconds >= 0,
            "no more rows than allowed": len(self._decoding) <= self._settings.max_rows,
            "a sequence waits or decodes": not self._waiting.keys() & self._decoding.keys(),
            "decoding means prefilled": all(s.is_decoding and s.prefill_left == 0 for s in self._decoding.values()),
            "waiting means not decoding": all(
                not s.is_decoding and s.prefilled <= s.prefill_total for s in self._waiting.values()
            ),
        }
        if broken := [law for law, holds in laws.items() if not holds]:
            raise BooksDoNotAddUp("; ".join(broken))

    def _candidate(self, now: float) -> Sequence | None:
        if len(self._decoding) >= self._settings.max_rows:
            return None
        ready = [s for s in self._waiting.values() if s.blocks_deadline is None or s.blocks_deadline <= now]
        return min(ready, key=_precedence, default=None)

    def _slice_tokens(self, sequence: Sequence) -> int:
        settings = self._settings
        target_seconds = settings.slice_seconds if self._decoding else settings.idle_slice_seconds
        tokens = int(target_seconds * self._rate)
        tokens = min(max(tokens, settings.floor_tokens), settings.ceiling_tokens, sequence.prefill_left)
        boundary = sequence.next_boundary
        if boundary is not None and sequence.prefilled + tokens >= boundary:
            return boundary - sequence.prefilled
        end = sequence.prefilled + tokens
        # End on the block grid where that costs less than half the slice: whole blocks are what the cache keeps.
        beyond = end % BLOCK_TOKENS
        if tokens < sequence.prefill_left and beyond < tokens / 2:
            tokens -= beyond
        return tokens


def _precedence(sequence: Sequence) -> tuple[bool, bool]:
    """Smallest first; of equals the oldest, since `min` keeps the order of arrival."""
    return sequence.priority == "warm", not sequence.has_started
