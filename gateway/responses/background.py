"""Responses that are made while nobody waits for them: started, polled, cancelled, and stored when they end.

Each is one task of the event loop, so it lives as long as the service. What a stop cuts off, the next finds failed.
"""

import asyncio
import sqlite3
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from gateway.answering import Answering
from gateway.dialects import Accepted, pointing_at
from gateway.front_desk import Place
from gateway.http_errors import unexpected_failure
from gateway.responses.answers import Status
from gateway.responses.rendering import ResponseRendering
from gateway.responses.store import ResponseStore
from gateway.responses.stored import with_status
from protocol.failures import Failure
from protocol.ids import RequestId

_log = structlog.stdlib.get_logger("mlxd.responses")


class _Flight(Struct, frozen=True, kw_only=True):
    task: "asyncio.Task[None]"
    place: Place


class BackgroundResponses:
    """Those that are open. Used on the event loop only."""

    def __init__(self, answering: Answering, store: ResponseStore) -> None:
        self._answering = answering
        self._store = store
        self._flights: dict[tuple[str, str], _Flight] = {}

    def start(
        self,
        accepted: Accepted[Any],
        place: Place,
        rendering: ResponseRendering,
        *,
        holder: str,
        request_id: RequestId,
    ) -> None:
        """Go on without the client. It was stored as it is now; its place is left when it has ended."""
        task = asyncio.create_task(self._run(accepted, place, rendering, holder, request_id))
        self._flights[holder, rendering.id] = _Flight(task=task, place=place)

    def status(self, holder: str, response_id: str) -> Status | None:
        """How far it is, None when it is not open here."""
        flight = self._flights.get((holder, response_id))
        if flight is None:
            return None
        return "in_progress" if flight.place.view.phase in ("prefilling", "decoding") else "queued"

    async def cancel(self, holder: str, response_id: str) -> None:
        """End it, if it is open: its row is freed, and it is stored as cancelled."""
        flight = self._flights.get((holder, response_id))
        if flight is None:
            return
        flight.task.cancel()
        await asyncio.wait({flight.task})
        stored = await self._store.get(holder, response_id)
        if stored is not None and stored.status not in ("completed", "incomplete", "failed"):
            cancelled = with_status(stored.response, "cancelled")
            await self._store.replace(holder, response_id, status="cancelled", response=cancelled)

    async def _run(
        self,
        accepted: Accepted[Any],
        place: Place,
        rendering: ResponseRendering,
        holder: str,
        request_id: RequestId,
    ) -> None:
        try:
            try:
                answers = await self._answering.run(accepted, place)
                if isinstance(answers, Failure):
                    rendering.failed(pointing_at("input", answers, accepted.constraint_field))
                else:
                    rendering.whole(answers)
            except Exception as error:  # noqa: BLE001 - logged, and told to who asks for the response
                rendering.failed(unexpected_failure(error, request_id))
            finally:
                place.leave()
                # Its client's line in the log was written when it was accepted.
                _log.info("background_response_ended", request_id=request_id, **place.log_fields())
            final = rendering.final or rendering.frame
            await self._store.replace(holder, rendering.id, status=final.status, response=msgspec.json.encode(final))
        except (sqlite3.Error, OSError) as why:
            _log.error("response_not_stored", request_id=request_id, error_type=type(why).__qualname__)
        finally:
            del self._flights[holder, rendering.id]
