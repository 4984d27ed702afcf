"""One run of the service: what starts in which order, and how it stops.

SIGTERM or Ctrl-C: new requests get 503, open ones have `drain_seconds` to end, the rest end with an error event,
workers store their dirty blocks and go, then the cachestore, then this process, with exit code 0. A second signal
does not wait: children are killed and the exit code is 130 (SIGINT) or 143 (SIGTERM).
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import structlog
import uvicorn

from gateway.app import create_app
from gateway.auth import check_bind
from gateway.blas import worker_environment
from gateway.cache_doors import CacheAccess
from gateway.cachestore_child import CachestoreSettings
from gateway.catalog import Catalog
from gateway.catalog_snapshot import CatalogSnapshot
from gateway.config import Settings, SettingsError, prepare_directories
from gateway.control import (
    ControlError,
    ServiceAddress,
    announce_service,
    make_admin_token,
    open_port,
    service_url,
    withdraw_service,
)
from gateway.dispatch import Dispatch
from gateway.dispatch_terms import DispatchSettings
from gateway.file_limit import raise_file_limit
from gateway.fleet_terms import FleetSettings
from gateway.gate import DrainFlag, GateSecrets
from gateway.keys import Keyring
from gateway.logs import configure_logging
from gateway.machine_memory import memory_terms
from gateway.model_settings import KVSettings
from gateway.private_files import read_or_make_secret
from gateway.readiness import tell_ready, tell_stopping
from gateway.request_recorder import RequestRecorder
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.token_ledger import TokenLedger
from protocol.addresses import board_directory, prefill_lease
from protocol.ids import Incarnation, ModelName
from protocol.launch import CachestoreLaunch

_CONNECTIONS_CLOSE_SECONDS = 5
_QUIET_LIBRARIES = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Nothing that mlxd runs asks a model hub for anything."""

_log = structlog.get_logger()


def run_service(settings: Settings, *, log_file: Path | None = None) -> int:
    """Serve until told to stop. Gives the exit code; raises SettingsError, KeysError or ControlError at the start."""
    prepare_directories(settings)
    raise_file_limit()
    try:
        configure_logging(settings.log_level, file=log_file)
    except OSError as why:
        raise SettingsError(f"--log-file: {log_file} cannot be written ({why.strerror}); choose another") from None
    ledger = TokenLedger(settings.tokens_path)
    keyring = Keyring(settings.keys_path, tokens=ledger.tokens)
    if (refusal := check_bind(settings, keyring.records)) is not None:
        raise SettingsError(refusal)
    gc.freeze()  # what was imported stays: to look through it for garbage stops every stream for 0.04 s
    with _only_service_here(settings), open_port(settings.host, settings.port) as listener:
        return asyncio.run(_serve(settings, keyring, ledger, listener))


async def _serve(settings: Settings, keyring: Keyring, ledger: TokenLedger, listener: socket.socket) -> int:
    environment = worker_environment({**os.environ, **_QUIET_LIBRARIES}, Path(settings.home) / "blas")
    _log.info("worker_blas", blas=environment.description)
    catalog = CatalogSnapshot(Catalog([Path(directory) for directory in settings.models_directories]))
    await catalog.refresh()
    drain_flag = DrainFlag()
    recorder = RequestRecorder(
        keep_seconds=60.0 * settings.explain.keep_minutes, clock=time.monotonic, unix_clock=time.time
    )
    dispatch = Dispatch(
        dispatch_settings(settings, environment.environment),
        catalog,
        clock=time.monotonic,
        unix_clock=time.time,
        observer=recorder,
    )
    response_store = open_response_store(settings)
    app = create_app(
        settings=settings,
        keyring=keyring,
        catalog=catalog,
        generator=dispatch,
        status_source=dispatch,
        secrets=GateSecrets(
            admin_token=make_admin_token(settings.admin_token_path),
            local_scope=read_or_make_secret(settings.local_salt_path),
        ),
        drain=drain_flag,
        cache=CacheAccess(control=dispatch, recorder=recorder),
        response_store=response_store,
        model_control=dispatch,
    )
    port = int(listener.getsockname()[1])
    address = ServiceAddress(pid=os.getpid(), host=settings.host, port=port)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_CONNECTIONS_CLOSE_SECONDS,
        ),
        when_started=lambda: tell_ready(service_url(settings, address)),
    )
    signals = _Signals()
    signals.listen()
    announce_service(settings, address)
    _log.info("serving", host=settings.host, port=port, models=len(catalog.entries()), keys=len(keyring.records))

    dispatching = asyncio.create_task(dispatch.run())
    for model in settings.preload:
        dispatch.preload(ModelName(model))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    asked_to_stop = asyncio.create_task(signals.first.wait())
    housekeeping = asyncio.create_task(_keep_house(ledger, response_store))
    try:
        await asyncio.wait({dispatching, serving, asked_to_stop}, return_when=asyncio.FIRST_COMPLETED)
        if not asked_to_stop.done():
            _log.error("service_broke", dispatch_ended=dispatching.done(), server_ended=serving.done())
            return 1
        drain_flag.start()
        tell_stopping()
        _log.info("stopping", drain_seconds=settings.drain_seconds)
        draining = asyncio.create_task(_drain(dispatch, settings, server, serving))
        hurry = asyncio.create_task(signals.second.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            _log.warning("stopping_at_once")
            draining.cancel()
            return 128 + signals.last
        hurry.cancel()
        await draining
        _log.info("stopped")
        return 0
    finally:
        server.should_exit = server.force_exit = True
        tasks = (dispatching, serving, asked_to_stop, housekeeping)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                _log.error("task_failed", exc_info=ended)
        ledger.save()
        response_store.close()
        withdraw_service(settings, pid=os.getpid())
        # The workers are gone, and with them what they told each other.
        runtime_directory = Path(settings.runtime_directory)
        shutil.rmtree(board_directory(runtime_directory), ignore_errors=True)
        prefill_lease(runtime_directory).unlink(missing_ok=True)


async def _keep_house(ledger: TokenLedger, response_store: ResponseStore) -> None:
    """Until cancelled: what is done now and then for the files in the home."""
    await asyncio.gather(ledger.keep_saved(), response_store.keep_tidy())


async def _drain(dispatch: Dispatch, settings: Settings, server: "_Server", serving: "asyncio.Task[None]") -> None:
    await dispatch.drain(settings.drain_seconds)
    server.should_exit = True
    await serving


def open_response_store(settings: Settings) -> ResponseStore:
    """Where responses go that are to be stored. Makes no file yet."""
    return ResponseStore(
        settings.responses_path,
        StoreLimits(
            keep_seconds=3600.0 * settings.responses.keep_hours,
            holder_responses=settings.responses.key_responses,
            holder_bytes=settings.responses.key_quota_bytes,
            total_bytes=settings.responses.quota_bytes,
        ),
        unix_clock=time.time,
    )


def dispatch_settings(settings: Settings, environment: Mapping[str, str]) -> DispatchSettings:
    """The part of the settings that supervision needs."""
    return DispatchSettings(
        runtime_directory=settings.runtime_directory,
        worker_command=settings.worker_command,
        worker_environment=environment,
        cachestore=CachestoreSettings(
            command=settings.cachestore_command,
            environment=dict(os.environ),
            launch=CachestoreLaunch(
                directory=settings.cache.directory,
                runtime_directory=settings.runtime_directory,
                incarnation=Incarnation(0),
                quota_bytes=settings.cache.quota_bytes,
                free_floor_bytes=settings.cache.free_floor_bytes,
                daily_write_bytes=settings.cache.daily_write_bytes,
                log_level=settings.log_level,
            ),
        ),
        fleet=FleetSettings(
            start_timeout_seconds=settings.worker.load_timeout_seconds,
            hang_seconds=settings.worker.hang_seconds,
            drain_seconds=settings.drain_seconds,
            memory=memory_terms(settings),
        ),
        max_waiting_per_model=settings.limits.max_queued_requests,
        max_rows=settings.worker.max_rows,
        context_tokens=settings.worker.context_tokens,
        hot_cache_bytes=settings.worker.hot_cache_bytes,
        kv=KVSettings(bits=settings.worker.kv_bits, group_size=settings.worker.kv_group_size, models=settings.models),
        persist=settings.cache.persist,
        prefill_slice_seconds=settings.worker.prefill_slice_seconds,
        log_level=settings.log_level,
        first_incarnation=int(time.time()),
    )


class _Server(uvicorn.Server):
    """Leaves signals to this module: uvicorn would close its connections before the requests have drained."""

    def __init__(self, config: uvicorn.Config, *, when_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = when_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """Remembers the first and the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last = 0

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: int) -> None:
        self.last = number
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def _only_service_here(settings: Settings) -> Generator[None, None, None]:
    """Hold the runtime directory. The kernel gives the lock back when its holder dies, however it dies."""
    path = Path(settings.runtime_directory) / "gateway.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "another process"
            raise ControlError(
                f"mlxd already runs in {settings.runtime_directory} (process {holder}): stop it first, "
                "or set MLXD_HOME for a second service"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
