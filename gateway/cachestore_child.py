"""The cachestore's process: started first, restarted when it ends, asked for its books.

No completion ever waits for it. Who asks about the cache itself (`ask`) waits for a reply or a deadline.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.fleet_crashes import backoff_seconds
from gateway.fleet_terms import FleetSettings
from gateway.processes import ChildExit, ChildProcess, spawn
from gateway.status import CachestoreStatus, LastExit, ModelState
from protocol.addresses import cachestore_socket
from protocol.blocks import BlockReply, BlockRequest, Describe, Described
from protocol.framing import MalformedMessage
from protocol.ids import Incarnation
from protocol.launch import CachestoreLaunch
from protocol.sockets import AsyncPeer, PeerGone

_log = structlog.get_logger()


class CachestoreSettings(Struct, frozen=True, kw_only=True):
    """`launch.incarnation` is replaced at each start. `silent_limit` unanswered questions in a row mean it is stuck."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    launch: CachestoreLaunch
    describe_every_seconds: float = 5.0
    describe_within_seconds: float = 10.0
    silent_limit: int = 6
    stable_seconds: float = 60.0
    terminate_grace_seconds: float = 10.0
    backoff_first_seconds: float = 1.0
    backoff_longest_seconds: float = 30.0


class CachestoreSilent(Exception):
    """No reply in time, or no process to reply. What was asked may be done yet."""


class CachestoreChild:
    """Keeps one cachestore running from `run` until `stop`. The dispatch task starts `run` and awaits its end."""

    def __init__(
        self, settings: CachestoreSettings, *, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._unix_clock = unix_clock
        self._patience = FleetSettings(
            backoff_first_seconds=settings.backoff_first_seconds,
            backoff_longest_seconds=settings.backoff_longest_seconds,
        )
        self._stopping = asyncio.Event()
        self._call_ids = itertools.count(1)
        self._peer: AsyncPeer[BlockReply, BlockRequest] | None = None
        self._awaited: dict[int, asyncio.Future[BlockReply]] = {}
        self._status = CachestoreStatus(state="absent", since_unix=unix_clock())

    def status(self) -> CachestoreStatus:
        return self._status

    def stop(self) -> None:
        """Let `run` end: SIGTERM, then SIGKILL after the grace. Idempotent."""
        self._stopping.set()

    async def ask(self, request: BlockRequest, *, within_seconds: float) -> BlockReply:
        """The reply to this request, whatever its `call_id` was. Raises CachestoreSilent. Call it while `run` runs."""
        if self._peer is None or self._status.state != "ready":
            raise CachestoreSilent(f"the cachestore is {self._status.state}")
        return await self._exchange(self._peer, request, within_seconds=within_seconds)

    async def run(self) -> None:
        """Until `stop`. A child's end, however often, is logged and answered with a new one."""
        peer: AsyncPeer[BlockReply, BlockRequest] = AsyncPeer(
            cachestore_socket(Path(self._settings.launch.runtime_directory)),
            b"gateway",
            cast("type[BlockReply]", BlockReply),
        )
        self._peer = peer
        reading = asyncio.create_task(self._read(peer))
        failures = 0
        try:
            for number in itertools.count(1):
                began = self._clock()
                ended = await self._one_life(peer, Incarnation(number))
                if self._stopping.is_set():
                    break
                failures = 1 if self._clock() - began >= self._settings.stable_seconds else failures + 1
                delay = backoff_seconds(failures, self._patience)
                _log.warning(
                    "cachestore_ended",
                    incarnation=number,
                    reason=ended.reason,
                    stderr_tail=ended.stderr_tail[-3:],
                    restart_in_seconds=delay,
                )
                self._change("backing_off", pid=None, last_exit=self._last_exit(ended))
                await _until(self._stopping, delay)
                if self._stopping.is_set():
                    break
                self._status = replace(self._status, restarts=self._status.restarts + 1)
        finally:
            self._change("absent", pid=None)
            self._peer = None
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            peer.close()

    async def _one_life(self, peer: AsyncPeer[BlockReply, BlockRequest], incarnation: Incarnation) -> ChildExit:
        settings = self._settings
        self._status = replace(self._status, incarnation=incarnation, books=None)
        launch = replace(settings.launch, incarnation=incarnation)
        try:
            child = await spawn(
                settings.command,
                launch_line=msgspec.json.encode(launch),
                environment=settings.environment,
                on_line=lambda line: _log.info("child_output", child="cachestore", incarnation=incarnation, line=line),
            )
        except (OSError, ValueError) as why:
            return ChildExit(stderr_tail=(str(why),))
        self._change("starting", pid=child.pid)
        exited = asyncio.create_task(child.wait())
        silent = asyncio.create_task(self._ask_until_silent(peer, incarnation))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({exited, silent, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._put_down(child, exited)
            return await exited
        finally:
            for task in (exited, silent, stopping):
                task.cancel()
            await asyncio.gather(exited, silent, stopping, return_exceptions=True)
            for awaited in self._awaited.values():
                if not awaited.done():
                    awaited.set_exception(CachestoreSilent("the cachestore ended before it answered"))

    async def _put_down(self, child: ChildProcess, exited: "asyncio.Task[ChildExit]") -> None:
        """It owns no GPU memory and its files survive a kill, so the ladder is short."""
        self._change("draining", pid=child.pid)
        child.terminate()
        await asyncio.wait({exited}, timeout=self._settings.terminate_grace_seconds)
        if not exited.done():
            _log.warning("cachestore_killed", pid=child.pid, reason="still there after SIGTERM")
            child.kill()

    async def _ask_until_silent(
        self, peer: AsyncPeer[BlockReply, BlockRequest], incarnation: Incarnation
    ) -> Literal["silent"]:
        """Ask for the books for as long as answers come."""
        silences = 0
        while silences < self._settings.silent_limit:
            books = await self._describe(peer)
            if books is None:
                silences += 1
                continue
            silences = 0
            state = self._status.state
            self._status = replace(self._status, books=books)
            if state == "starting":
                self._change("ready", pid=self._status.pid)
            await asyncio.sleep(self._settings.describe_every_seconds)
        _log.warning("cachestore_silent", incarnation=incarnation, unanswered=silences)
        return "silent"

    async def _describe(self, peer: AsyncPeer[BlockReply, BlockRequest]) -> Described | None:
        try:
            reply = await self._exchange(
                peer, Describe(call_id=0), within_seconds=self._settings.describe_within_seconds
            )
        except CachestoreSilent:
            return None
        return reply if isinstance(reply, Described) else None

    async def _exchange(
        self, peer: AsyncPeer[BlockReply, BlockRequest], request: BlockRequest, *, within_seconds: float
    ) -> BlockReply:
        call_id = next(self._call_ids)
        awaited: asyncio.Future[BlockReply] = asyncio.get_running_loop().create_future()
        self._awaited[call_id] = awaited
        try:
            async with asyncio.timeout(within_seconds):
                await peer.send(replace(request, call_id=call_id))
                return await awaited
        except PeerGone:
            await asyncio.sleep(within_seconds)  # its queue is full: to ask again at once would not help
            raise CachestoreSilent("the cachestore reads nothing") from None
        except TimeoutError:
            raise CachestoreSilent(f"the cachestore did not answer within {within_seconds:g} s") from None
        finally:
            del self._awaited[call_id]

    async def _read(self, peer: AsyncPeer[BlockReply, BlockRequest]) -> None:
        """Hand each reply to whoever waits for it; one that comes too late is dropped."""
        while True:
            reply = await peer.receive()
            if isinstance(reply, MalformedMessage):
                _log.warning("cachestore_malformed", why=str(reply))
                continue
            awaited = self._awaited.get(reply.call_id)
            if awaited is not None and not awaited.done():
                awaited.set_result(reply)

    def _change(self, state: ModelState, *, pid: int | None, last_exit: LastExit | None = None) -> None:
        self._status = replace(
            self._status,
            state=state,
            pid=pid,
            since_unix=self._unix_clock(),
            last_exit=last_exit or self._status.last_exit,
        )

    def _last_exit(self, ended: ChildExit) -> LastExit:
        return last_exit(ended, at_unix=self._unix_clock())


def last_exit(ended: ChildExit, *, at_unix: float) -> LastExit:
    """A child's end as the status shows it."""
    return LastExit(
        reason=ended.reason,
        at_unix=at_unix,
        exit_code=ended.exit_code,
        signal=ended.signal,
        stderr_tail=ended.stderr_tail,
    )


async def _until(event: asyncio.Event, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
    except TimeoutError:
        return
