# pyright: basic, reportOptionalMemberAccess=false, reportOptionalSubscript=false
"""The engine on mlx-lm's models and caches: rows are prefilled alone and join the decode batch by merging.

Right-padded batched prefill is wrong for several families and cannot be bounded in time, so it is not used.
Decode is pipelined one step deep, on a GPU: the next step is launched from the lazy tokens of the last one before those
are read, so the host's work (text, stops, sockets) runs beside the device's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import structlog
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from msgspec import structs

from protocol.generation import ChosenLogprob, PrefixReuse, TokenLogprob
from protocol.ids import BlockKey, RequestId
from protocol.kv_storage import KVQuantization, KVStorage
from worker import mlx_cpu, mlx_packed
from worker.detokenizer import token_bytes
from worker.engine import Drawn, nothing
from worker.mlx_blocks import KVArrays, KVLayout, block_bytes
from worker.mlx_footprint import footprint_of
from worker.mlx_kv_choice import choose_kv
from worker.mlx_masks import allowed_tokens
from worker.mlx_model import LoadedModel
from worker.mlx_quantized_kv import quantized
from worker.mlx_row_masks import mask_padding_only
from worker.mlx_sampling import BatchSampler
from worker.mlx_state import leaves, resume, row_snapshot, shape_of, snapshot, state_bytes
from worker.prefix_index import Block, BlockUse, State
from worker.sequence import BooksDoNotAddUp, Matcher, Prepared

log = structlog.get_logger()

_CLEAR_EVERY_STEPS = 512
_CLEAR_PREFILL_TOKENS = 2048
_BOOKKEEPING_BYTES = 4096
"""What a block weighs at least: it holds its tokens and digests even when it holds no KV."""

_SELF_TEST_TOLERANCE = 0.02
"""Of the largest logit: the noise of bf16, and far below what a wrong position or a wrong row does."""

_SELF_TEST_TOKENS = (16, 16, 16)
"""How many tokens the self-test keeps in each of two blocks, and how many it then computes on top. Two, or a wrong join
of blocks would not show; small, because it runs at every load."""


@dataclass
class Row:
    """A row and what its cache holds. `token_ids` are its prompt and all it drew, as far as read. `is_unread`: a step
    was launched that drew one more."""

    prepared: Prepared
    token_ids: list[int]
    held: int = 0
    drawn: int = 0
    is_unread: bool = False
    caches: list[Any] = field(default_factory=list)

    @property
    def wants_logprobs(self) -> bool:
        return self.prepared.request.top_logprobs is not None

    @property
    def ends_with_next_read(self) -> bool:
        return self.is_unread and self.drawn + 1 >= self.prepared.max_tokens


@dataclass
class _Aside:
    """A whole batch that was parked: its rows hold parts of it, which are not computed before they join again."""

    rows: dict[RequestId, Row]
    size: int


class MlxEngine:
    """See `worker.engine.Engine`. Make it on the thread that loaded the model, and use it there only.

    `kv` asks for quantized keys and values; what is done, `kv_storage` says. `steps`: pipelined suits a device that
    computes while the host goes on. MLX's CPU build lets a launch through when most of it has run, so tokens that are
    read a launch later come a whole step late there, to save 3 to 6 % of it (SmolLM2, two cores).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        kv: KVQuantization | None = None,
        steps: Literal["pipelined", "read at once"] = "pipelined",
    ) -> None:
        self._model = loaded.model
        self._tokenizer = tokenizer
        self._is_batchable = loaded.is_batchable
        self._layout: KVLayout | None = None
        self._alone: dict[RequestId, Row] = {}  # in prefill, or parked
        self._rows: list[Row] = []
        self._caches: list[Any] = []
        self._leaving: dict[RequestId, Row] = {}  # parked, and still among the rows
        self._asides: list[_Aside] = []
        self._inputs: mx.array | None = None  # [rows], lazy: what each row's next step reads
        self._logprobs: tuple[mx.array, ...] | None = None  # of `_inputs`
        self._vocabulary_size = 0
        self._sampler: BatchSampler | None = None
        self._steps = 0
        self._is_pipelined = steps == "pipelined"
        self._prefilled_since_clear = 0
        self.kv_storage = KVStorage()
        self._warm_up()
        if kv is not None:
            self.kv_storage = choose_kv(self._model, kv, rows=self.kv_footprint.rows)
            if self.kv_storage.quantization is not None:
                self._warm_up()
        self.kv_storage = structs.replace(self.kv_storage, bytes_per_token=self.kv_footprint.bytes_per_token)
        self.prefix_reuse = loaded.prefix_reuse
        if self.prefix_reuse.available and (fault := self._reuse_fault()):
            self.prefix_reuse = PrefixReuse(available=False, reason=fault)
        self._mixing_fault = self._find_mixing_fault()
        if self._mixing_fault:
            log.info("slices_are_not_mixed", reason=self._mixing_fault)

    def _make_caches(self) -> list[Any]:
        """Empty ones of one row."""
        caches, kv = make_prompt_cache(self._model), self.kv_storage
        return caches if kv.quantization is None else quantized(caches, kv.quantization, kv.reading)

    @property
    def is_batchable(self) -> bool:
        """Whether several rows may decode in one step."""
        return self._is_batchable

    @property
    def mixes(self) -> bool:
        """Whether `prefill_and_decode` may be asked."""
        return not self._mixing_fault

    @property
    def active_bytes(self) -> int:
        return mx.get_active_memory()

    @property
    def live_kv_bytes(self) -> int:
        alone = [cache for row in self._alone.values() for cache in row.caches]
        return sum(cache.nbytes for cache in (*alone, *self._caches))

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        return self._vocabulary_size

    def open(self, prepared: Prepared, uses: Sequence[BlockUse[KVArrays]]) -> None:
        row = Row(prepared=prepared, token_ids=list(prepared.token_ids), caches=self._make_caches())
        row.drawn = prepared.drawn_tokens
        if uses and self._layout is not None:
            flat = leaves(row.caches)
            self._layout.fill(flat, uses, len(row.token_ids))
            if self._shape.stateful:
                last = uses[-1]
                resume(flat, self._shape, last.block.states[last.tokens].payload)
            row.held = sum(use.tokens for use in uses)
        self._alone[prepared.request_id] = row

    def prefill(
        self, request_id: RequestId, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing
    ) -> None:
        row = self._alone[request_id]
        self._model(mx.array([row.token_ids[row.held : row.held + tokens]]), cache=row.caches)
        # Logits are never asked for, so the output layer does not run. All cache state is, or the graph would grow.
        # What a layer keeps needs those before it, so layers can be computed some at a time; the others wait, lazy.
        at_once = -(-len(row.caches) // parts)
        for first in range(0, len(row.caches), at_once):
            if parts > 1:
                before_each()
            mx.eval([cache.state for cache in row.caches[first : first + at_once]])
        self._prefilled(row, tokens)

    def prefill_and_decode(self, request_id: RequestId, tokens: int) -> list[Drawn]:
        self._settle_batch()
        row = self._alone[request_id]
        if self._inputs is None or any(each.is_unread for each in self._rows):
            raise BooksDoNotAddUp("a mixed pass needs rows, of which none is unread")
        slice_ids = row.token_ids[row.held : row.held + tokens]
        logits = mlx_packed.packed_pass(self._model, slice_ids, self._inputs, row.caches, self._caches)
        self._draw(logits)
        # Read at once, unlike a decode step: such a pass is long, so little is gained by launching the next before it
        # ends, and its tokens would come a whole pass late.
        drawn = self.read()
        mx.eval([cache.state for cache in row.caches])
        self._prefilled(row, tokens)
        return drawn

    def _prefilled(self, row: Row, tokens: int) -> None:
        row.held += tokens
        self._prefilled_since_clear += tokens
        if self._prefilled_since_clear >= _CLEAR_PREFILL_TOKENS:
            mx.clear_cache()
            self._prefilled_since_clear = 0

    def join(self, request_id: RequestId) -> None:
        self._let_leave()
        row = self._alone.pop(request_id)
        self._leave_aside([request_id])
        caches, row.caches = row.caches, []
        first_input = mx.array([row.token_ids[-1]], mx.uint32)
        if self._sampler is None:
            self._sampler = BatchSampler(self._vocabulary_size)
        prompt_tokens = len(row.prepared.token_ids) - row.prepared.drawn_tokens
        self._sampler.join(row.prepared.request.sampling, row.token_ids[:prompt_tokens], row.token_ids[prompt_tokens:])
        if not self._is_batchable:
            self._caches = caches
        else:
            joining = [type(cache).merge([cache]) for cache in caches]
            if self._rows:
                for cache, other in zip(self._caches, joining, strict=True):
                    cache.extend(other)
            else:
                self._caches = joining
        self._inputs = first_input if self._inputs is None else mx.concatenate([self._inputs, first_input])
        if self._logprobs is not None:
            self._logprobs = tuple(mx.concatenate([part, part[:1]]) for part in self._logprobs)
        self._rows.append(row)
        self._mask_rows()

    def park(self, request_id: RequestId) -> None:
        row = self._rows[self._row_index(request_id)]
        if row.is_unread:
            raise BooksDoNotAddUp("a row with an unread token cannot be parked")
        self._leaving[request_id] = row  # at the batch's next step or change: others may leave with it

    def _let_leave(self) -> None:
        """Take out those that were parked. When all are, nothing is computed: what they hold stays where it is, until
        they join again."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        for index, row in enumerate(self._rows):
            if (request_id := row.prepared.request_id) not in leaving:
                continue
            if row.held == 0:  # parked before its first step: there is nothing yet that could be taken out
                row.caches = self._make_caches()
            elif self._is_batchable:
                row.caches = [cache.extract(index) for cache in self._caches]
            else:
                row.caches = self._caches
            self._alone[request_id] = row
        staying = [i for i, row in enumerate(self._rows) if row.prepared.request_id not in leaving]
        # What came from a batch that is not whole any more may not be computed either, and hold all of that.
        is_settled = not self._settle_asides()
        if staying or not is_settled:
            mx.eval([cache.state for row in leaving.values() for cache in row.caches])
        else:
            self._asides.append(_Aside(leaving, len(leaving)))
        self._keep_rows(staying)

    def _settle_asides(self) -> bool:
        """Give those of a batch that is not whole any more caches of their own: it would stay in memory for each of
        them. Says whether there was such a batch."""
        parted = [aside for aside in self._asides if len(aside.rows) < aside.size]
        mx.eval([cache.state for aside in parted for row in aside.rows.values() for cache in row.caches])
        self._asides = [aside for aside in self._asides if len(aside.rows) == aside.size]
        return bool(parted)

    def _leave_aside(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            for aside in self._asides:
                aside.rows.pop(request_id, None)

    def _settle_batch(self) -> None:
        """Before a step."""
        self._let_leave()
        self._settle_asides()

    def decode(self) -> list[Drawn]:
        self._settle_batch()
        if self._inputs is None:
            return []
        self._steps += 1
        if self._steps % _CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        if all(row.ends_with_next_read for row in self._rows):
            return self.read()
        if any(row.is_unread and row.drawn == 0 for row in self._rows):
            # Somebody waits for a first token: not also for the host to launch the next step.
            return self.read()
        self._stand_together()
        logits = self._model(self._inputs[:, None], cache=self._caches)[:, -1, :]
        if self._matchers:
            # What may come next depends on the token before: it is read while the device computes these logits.
            mx.async_eval(logits)
            drawn = self.read()
            self._draw(logits)
            return drawn if self._is_pipelined else self.read()
        inputs, logprobs, unread = self._inputs, self._logprobs, [row.is_unread for row in self._rows]
        self._draw(logits)
        return self._read(inputs, logprobs, unread) if self._is_pipelined else self.read()

    def read(self) -> list[Drawn]:
        if self._inputs is None:
            return []
        unread = [row.is_unread for row in self._rows]
        for row in self._rows:
            row.is_unread = False
        return self._read(self._inputs, self._logprobs, unread)

    def _stand_together(self) -> None:
        """Each layer counts its rows' tokens apart, and they all count the same."""
        batches = [leaf for leaf in leaves(self._caches) if isinstance(leaf, BatchKVCache)]
        for batch in batches:
            batch.offset = batches[0].offset
        if batches:
            mlx_cpu.stand_at(batches[0].offset)

    @property
    def _matchers(self) -> dict[int, Matcher]:
        """Those that bind now, by row."""
        matchers = ((index, row.prepared.matcher) for index, row in enumerate(self._rows))
        return {index: matcher for index, matcher in matchers if matcher is not None and matcher.binds}

    def _draw(self, logits: mx.array) -> None:
        """Launch the rows' draws from their lazy logits. Where a matcher binds, what was drawn before was read."""
        allowed = None
        if matchers := self._matchers:
            mx.async_eval(logits)  # the device is busy while masks are made
            allowed = allowed_tokens(matchers, logits.shape)
        positions = [row.drawn + row.is_unread for row in self._rows]
        self._inputs = self._sampler.draw(logits, positions, allowed)
        self._logprobs = self._top_logprobs(logits, self._inputs) if any(r.wants_logprobs for r in self._rows) else None
        mx.async_eval(self._inputs, self._logprobs, self._sampler.state, [cache.state for cache in self._caches])
        for row in self._rows:
            row.held += 1
            row.is_unread = True

    def _read(self, tokens: mx.array, logprobs: tuple[mx.array, ...] | None, unread: list[bool]) -> list[Drawn]:
        if not any(unread):
            return []
        mx.eval(tokens, logprobs)
        token_ids: Any = tokens.tolist()
        read: list[Any] | None = [part.tolist() for part in logprobs] if logprobs is not None else None
        drawn: list[Drawn] = []
        for index, (row, token_id) in enumerate(zip(self._rows, token_ids, strict=True)):
            if not unread[index]:
                continue
            row.token_ids.append(token_id)
            row.drawn += 1
            if row.prepared.matcher is not None:
                row.prepared.matcher.consume(token_id)
            chosen = None
            if row.wants_logprobs and read is not None:
                logprob, ids, values = (part[index] for part in read)
                chosen = self._chosen(token_id, logprob, ids, values, row.prepared.request.top_logprobs or 0)
            drawn.append(Drawn(row.prepared.request_id, token_id, chosen))
        return drawn

    def tokens_held(self, request_id: RequestId) -> int:
        row = self._find(request_id)
        return min(row.held, len(row.token_ids))

    def token_ids(self, request_id: RequestId) -> list[int]:
        return self._find(request_id).token_ids

    def cut(self, request_id: RequestId, start: int, end: int) -> tuple[KVArrays, int]:
        if self._layout is None:
            raise BooksDoNotAddUp("this model's cache cannot be cut")
        if request_id in self._alone:
            arrays = self._layout.cut(leaves(self._alone[request_id].caches), 0, start, end)
        else:
            index = self._row_index(request_id)
            # Rows are left-padded to one common end, so a row's first token lies at (end - tokens held).
            first = self._written - self._rows[index].held
            arrays = self._layout.cut(leaves(self._caches), index, first + start, first + end)
        return arrays, max(block_bytes(arrays), _BOOKKEEPING_BYTES)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers cannot be cut, so that reuse needs states."""
        return bool(self._shape.stateful)

    def state(self, request_id: RequestId) -> State[KVArrays]:
        """What the layers that cannot be cut hold after `tokens_held` tokens of this row."""
        if request_id in self._alone:
            arrays = snapshot(leaves(self._alone[request_id].caches), self._shape)
        elif self._is_batchable:
            arrays = row_snapshot(leaves(self._caches), self._shape, self._row_index(request_id))
        else:
            arrays = snapshot(leaves(self._caches), self._shape)
        return State(arrays, state_bytes(arrays))

    def drop(self, request_ids: Sequence[RequestId]) -> None:
        leaving = set(request_ids)
        for request_id in leaving:
            self._leaving.pop(request_id, None)
        self._let_leave()
        for request_id in leaving:
            self._alone.pop(request_id, None)
        self._leave_aside(leaving)
        self._settle_asides()
        keep = [i for i, row in enumerate(self._rows) if row.prepared.request_id not in leaving]
        if len(keep) < len(self._rows):
            self._keep_rows(keep)

    def _keep_rows(self, keep: list[int]) -> None:
        self._rows = [self._rows[i] for i in keep]
        if not keep:
            self._caches, self._inputs, self._logprobs, self._sampler = [], None, None, None
            return
        index = mx.array(keep, mx.int32)
        self._inputs = self._inputs[index]
        self._sampler.keep(keep)
        if self._logprobs is not None:
            self._logprobs = tuple(part[index] for part in self._logprobs)
        for cache in self._caches:
            cache.filter(index)
        self._mask_rows()
        # At once, or the KV of those that left would stay until the next step is computed.
        mx.eval([cache.state for cache in self._caches])

    def _mask_rows(self) -> None:
        mask_padding_only(leaves(self._caches), [row.held for row in self._rows])

    @property
    def _written(self) -> int:
        """The slot after the last one written, the same for all rows. Unimportant when nothing can be cut."""
        if not self._shape.cut:
            return 0
        cache = leaves(self._caches)[self._shape.cut[0]]
        return cache.offset if isinstance(cache, KVCache) else cache._idx  # noqa: SLF001 - it has no other name

    def _row_index(self, request_id: RequestId) -> int:
        return next(i for i, row in enumerate(self._rows) if row.prepared.request_id == request_id)

    def _find(self, request_id: RequestId) -> Row:
        row = self._alone.get(request_id)
        return row or next(row for row in self._rows if row.prepared.request_id == request_id)

    def _top_logprobs(self, logits: mx.array, tokens: mx.array) -> tuple[mx.array, ...]:
        """Of each row: the drawn token's logprob `[rows]`, the best ids and their logprobs `[rows, k]`, best first."""
        count = max(1, *(row.prepared.request.top_logprobs or 0 for row in self._rows))
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        best = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(logprobs, best, axis=-1)
        order = mx.argsort(-values, axis=-1)
        return chosen, mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

    def _chosen(self, token_id: int, logprob: float, ids: list[int], values: list[float], top: int) -> ChosenLogprob:
        return ChosenLogprob(
            chosen=self._token_logprob(token_id, logprob),
            top=tuple(self._token_logprob(i, v) for i, v in zip(ids[:top], values[:top], strict=True)),
        )

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        piece = token_bytes(self._tokenizer, token_id)
        return TokenLogprob(token=piece.decode(errors="replace"), token_bytes=piece, logprob=logprob)

    def _warm_up(self) -> None:
        """Run the shapes that serving needs once: MLX compiles kernels at their first use (g++ on its CPU build)."""
        caches = self._make_caches()
        self._shape = shape_of(caches)
        for tokens in (9, 1):
            logits = self._model(mx.zeros((1, tokens), mx.int32), cache=caches)
            mx.eval(logits, [cache.state for cache in caches])
        self._vocabulary_size = logits.shape[-1]
        self._layout = KVLayout.of(leaves(caches), self._shape.cut)
        footprint = footprint_of(leaves(caches))
        if self._is_batchable:
            try:
                batch = [type(cache).merge([cache, cache]) for cache in caches]
                mx.eval(self._model(mx.zeros((2, 1), mx.int32), cache=batch))
            except (TypeError, ValueError, NotImplementedError, AttributeError) as why:
                # A family nobody has listed yet: one row at a time is slower, and right.
                log.warning("rows_are_not_batched", error=type(why).__name__, reason=str(why)[:200])
                self._is_batchable = False
        self.kv_footprint = replace(footprint, rows="padded" if self._is_batchable else "apart")
        mx.clear_cache()

    def _find_mixing_fault(self) -> str:
        """Why slices and decode steps are run apart. Empty when they need not be."""
        if not self._is_batchable:
            return "its rows are not batched"
        try:
            fault = mlx_packed.prepare(self._model, self._make_caches())
            return fault or mlx_packed.fault(self._model, self._make_caches, self._vocabulary_size)
        except mlx_packed.CANNOT as why:
            return f"{type(why).__name__}: {str(why)[:200]}"

    def _reuse_fault(self) -> str:
        """Cut a cache into two blocks, join them in another, and compare what it holds and what it says next.

        Empty when both are the same. What it says is not enough: attention is blind to the order of what it sees, so
        blocks in the wrong order would only show once a sequence is cut again.
        """
        first_tokens, second_tokens, more = _SELF_TEST_TOKENS
        kept = first_tokens + second_tokens
        tokens = mx.array([[(7 * i + 3) % min(self._vocabulary_size, 997) for i in range(kept + more)]], mx.int32)
        first, second = self._make_caches(), self._make_caches()
        self._model(tokens[:, :kept], cache=first)
        mx.eval([cache.state for cache in first])
        whole = self._layout.cut(leaves(first), 0, 0, kept)
        uses = [
            self._self_test_use(leaves(first), start, end) for start, end in ((0, first_tokens), (first_tokens, kept))
        ]
        state = snapshot(leaves(first), self._shape)
        expected = self._model(tokens[:, kept:], cache=first)[0, -1].astype(mx.float32)
        self._layout.fill(leaves(second), uses, kept + more)
        joined = self._layout.cut(leaves(second), 0, 0, kept)
        if not all(bool(mx.array_equal(whole[name], joined[name])) for name in whole):
            return "the reuse self-test failed: joined blocks are not what they were cut from"
        resume(leaves(second), self._shape, state)
        seen = self._model(tokens[:, kept:], cache=second)[0, -1].astype(mx.float32)
        worst = float(mx.max(mx.abs(expected - seen)).item())  # pyright: ignore[reportArgumentType]
        scale = float(mx.max(mx.abs(expected)).item())  # pyright: ignore[reportArgumentType]
        if not worst <= _SELF_TEST_TOLERANCE * scale:
            return f"the reuse self-test failed: logits differ by {worst:.3g} of {scale:.3g}"
        return ""

    def _self_test_use(self, caches: Sequence[Any], start: int, end: int) -> BlockUse[KVArrays]:
        block = Block(
            key=BlockKey(b""),
            parent=BlockKey(b""),
            start=start,
            token_ids=(0,) * (end - start),
            grains=(),
            payload=self._layout.cut(caches, 0, start, end),
            kv_bytes=0,
        )
        return BlockUse(block, end - start)
