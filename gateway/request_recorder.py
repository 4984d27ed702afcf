"""Remembers finished requests for `explain`: the ring and the marks, with a clock and a secret of this process."""

import secrets
from collections import OrderedDict
from collections.abc import Callable

import structlog

from gateway.explain import Explanation, explain
from gateway.open_requests import OpenRequest
from gateway.prompt_comparison import PromptComparison, compare_prompts
from gateway.request_ring import RequestMarks, RequestRecord, RequestRing
from protocol.generation import Finished, Generate, Queued, Warm, Warmed
from protocol.ids import Incarnation, ModelName, RequestId

_MAX_BYTES = 32 * 1024**2
_MAX_PER_OWNER = 64
_MAX_CLIENT_IDS = 4096
_ID_PREFIXES = ("req_", "chatcmpl-", "cmpl-", "msg_", "resp_", "warm-")

_log = structlog.get_logger()


class RequestRecorder:
    """Told by dispatch what finished, asked by the explain route. Used on the event loop only."""

    def __init__(self, *, keep_seconds: float, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        self._ring = RequestRing(keep_seconds=keep_seconds, max_per_owner=_MAX_PER_OWNER, max_bytes=_MAX_BYTES)
        self._marks = RequestMarks(secrets.token_bytes(32))
        self._clock = clock
        self._unix_clock = unix_clock
        self._client_ids: OrderedDict[tuple[str, str], RequestId] = OrderedDict()
        self._is_on = keep_seconds > 0

    def finished(self, request: OpenRequest, incarnation: Incarnation, end: Finished | Warmed) -> None:
        """Remember it. Never raises: no request may suffer for its explanation."""
        if not self._is_on or not isinstance(request.work, Generate | Warm):
            return
        now = self._clock()
        try:
            record = self._marks.record(
                request.work,
                request.queued,
                end,
                model=request.model,
                incarnation=incarnation,
                now=now,
                unix_now=self._unix_clock(),
            )
            self._ring.add(record, now=now)
        except Exception as error:  # noqa: BLE001  dispatch must go on; the error's own words may quote the prompt
            _log.error("request_not_recorded", request_id=request.request_id, error_type=type(error).__qualname__)

    def also_known_as(self, owner: str, request_id: RequestId, client_id: str) -> None:
        """The client gave its request an id of its own, by which it will ask. The latest of equal ones counts."""
        if not self._is_on:
            return
        self._client_ids[owner, client_id] = request_id
        self._client_ids.move_to_end((owner, client_id))
        if len(self._client_ids) > _MAX_CLIENT_IDS:
            self._client_ids.popitem(last=False)

    def explain(self, owner: str, asked_id: str) -> Explanation | None:
        """Of the request with this id: ours, the answer's, or the client's own. None for everybody else's."""
        record = self.find(owner, asked_id)
        return None if record is None else explain(record, self._ring.before(record))

    def compare(
        self, earlier_id: str, work: Generate | Warm, queued: Queued | None, *, model: ModelName
    ) -> PromptComparison | None:
        """This request's prompt with that of its owner's earlier one, by any of its ids. None: nothing is kept here."""
        if not self._is_on:
            return None
        mine = self._marks.prompt(work, queued, model=model)
        return compare_prompts(mine, self.find(work.cache.owner, earlier_id))

    def find(self, owner: str, asked_id: str) -> RequestRecord | None:
        """What is remembered of the request with this id: ours, the answer's, or the client's own."""
        now = self._clock()
        bare = asked_id
        for prefix in _ID_PREFIXES:
            bare = bare.removeprefix(prefix)
        for request_id in (RequestId(f"req_{bare}"), self._client_ids.get((owner, asked_id))):
            record = self._ring.find(owner, request_id, now=now) if request_id is not None else None
            if record is not None:
                return record
        return None

    def forget(self, owner: str) -> None:
        """Who has their blocks forgotten has this forgotten, too."""
        self._ring.forget_owner(owner)

    def forget_everything(self) -> None:
        """Likewise for all."""
        self._ring.forget_everyone()
