"""One worker: reads its launch line, says hello, loads the model, runs the loop. The only place that joins the parts.

Threads: this one owns the socket to the gateway; the step thread owns everything of MLX; the text thread renders and
tokenizes; the cold-cache thread talks to the cachestore and reads and writes block files, which block-checks hashes
beside it; one more waits for the parent's death.
"""

import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, assert_never

import structlog

from protocol.addresses import cachestore_socket, gateway_socket
from protocol.blocks import BlockReply, BlockRequest
from protocol.failures import Failure, FailureKind
from protocol.framing import MalformedMessage
from protocol.generation import (
    Cancel,
    Check,
    Detokenize,
    Drain,
    Embed,
    ForgetHot,
    Generate,
    LastWords,
    Loading,
    Ping,
    Ready,
    Rerank,
    SetBudget,
    Tokenize,
    TokenizerReady,
    Unpin,
    Warm,
    WorkerCommand,
    WorkerEvent,
)
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.launch import WorkerLaunch
from protocol.model_kind import capabilities_of
from protocol.sockets import Peer
from worker.answers.of_tokenizer import formats_of_tokenizer
from worker.blas_threads import blas_threads
from worker.board import Board
from worker.cold_cache import ColdCache
from worker.detokenizer import detokenizer_maker
from worker.embedding.folder import model_kind
from worker.embedding.serving import WorkerHands, embed_until_drained
from worker.embedding.text_plane import EmbeddingTextPlane
from worker.live_kv import KVFootprint, LiveKV
from worker.log import configure_logging
from worker.loop import StepLoop
from worker.model_unusable import ModelUnusable, unusable_if_unloadable
from worker.neighbours import Alone, DeviceSharing, SharingSettings
from worker.outbox import Outbox
from worker.pacing import SchedulerSettings
from worker.parent import read_launch, when_parent_is_gone
from worker.prefill_lease import PrefillLease
from worker.prefix_cache import PrefixCache
from worker.prefix_index import Boundary, PrefixIndex
from worker.scheduler import Scheduler
from worker.shared_device import SharedDevice
from worker.text_plane import LoadedWeights, TextPlane
from worker.tokenizing import TokenQuestions
from worker.weights_fingerprint import fingerprint_of_kv

EXIT_FAILED = 1
EXIT_REFUSED = 78
"""EX_CONFIG: starting again cannot help."""

SIGTERM_DRAIN_SECONDS = 5.0
ORPHAN_DRAIN_SECONDS = 1.0
PERSIST_SECONDS = 20.0
_LOADING_REPORT_SECONDS = 0.5
_UNSENT_RETRY_SECONDS = 0.02

log = structlog.get_logger()


class Worker:
    """Passes messages between the gateway's socket and the threads. `run` gives the exit code."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self._launch = launch
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of what the loop takes that this model needs
        self._text_plane: TextPlane | EmbeddingTextPlane | None = None
        self._exit_code: int | None = None
        runtime_directory = Path(launch.runtime_directory)
        self._cachestore_path = cachestore_socket(runtime_directory)
        self._peer: Peer[WorkerCommand, WorkerEvent] = Peer(
            gateway_socket(runtime_directory), f"w{launch.incarnation}".encode(), WorkerCommand
        )
        self._outbox = Outbox(self._peer.wake)

    def run(self) -> int:
        """Until the step thread ends, or the gateway refuses this process."""
        self._peer.send(
            Hello(
                protocol_version=PROTOCOL_VERSION,
                model=self._launch.model,
                incarnation=self._launch.incarnation,
                pid=os.getpid(),
            )
        )
        threading.Thread(target=self._run_steps, name="steps", daemon=True).start()
        try:
            unsent = 0
            while self._exit_code is None:
                for command in self._peer.receive(_UNSENT_RETRY_SECONDS if unsent else 1.0):
                    self._take(command)
                unsent = self._outbox.send(self._peer.send)
            self._outbox.send(self._peer.send)
        finally:
            self._peer.close()
        return self._exit_code

    def drain(self, seconds: float) -> None:
        """Safe from any thread and from a signal handler."""
        self._inbox.put(Drain(deadline_seconds=seconds))

    def _send(self, event: WorkerEvent) -> None:
        self._outbox.put(event)

    def _take(self, command: WorkerCommand | MalformedMessage) -> None:
        match command:
            case Generate() | Warm() | Tokenize() | Detokenize() | Check() | Embed() | Rerank():
                # The gateway sends no request before TokenizerReady.
                if self._text_plane is not None:
                    self._text_plane.submit(command)
            case Cancel() | Drain() | Ping() | Unpin() | SetBudget() | ForgetHot():
                self._inbox.put(command)
            case Welcome():
                pass
            case Refused(reason=reason):
                log.error("refused_by_gateway", reason=reason)
                self._exit_code = EXIT_REFUSED
            case MalformedMessage():
                log.error("malformed_command", error=str(command))
            case _:
                assert_never(command)

    def _run_steps(self) -> None:
        code = EXIT_FAILED
        try:
            self._load_and_step()
            code = 0
        except ModelUnusable as why:
            log.error("model_unusable", model=self._launch.model, reason=str(why))
            self._send(LastWords(failure=Failure(kind=FailureKind.MODEL_UNAVAILABLE, message=str(why))))
        except BaseException as why:
            log.exception("worker_failed", model=self._launch.model)
            kind = FailureKind.OUT_OF_MEMORY if isinstance(why, MemoryError) else FailureKind.INTERNAL
            message = f"{type(why).__name__}: {str(why)[:500]}"
            self._send(LastWords(failure=Failure(kind=kind, message=message)))
        finally:
            self._exit_code = code
            self._peer.wake()

    def _load_and_step(self) -> None:
        from worker import mlx_cpu

        mlx_cpu.install()
        with unusable_if_unloadable():
            kind = model_kind(Path(self._launch.model_path), self._launch.model)
        if kind == "generation":
            self._generate()
        else:
            embed_until_drained(
                self._launch,
                kind,
                WorkerHands(
                    inbox=self._inbox,
                    send=self._send,
                    report_loading=self._loading_report(),
                    open_text_plane=self._open_text_plane,
                    device=self._device,
                ),
            )

    def _generate(self) -> None:
        from worker import mlx_cpu
        from worker.grammar_compiler import GrammarCompiler
        from worker.mlx_block_files import BlockFile, write_block
        from worker.mlx_engine import MlxEngine
        from worker.mlx_model import context_tokens, load_model, load_tokenizer

        launch = self._launch
        started = time.monotonic()
        path = Path(launch.model_path)
        with unusable_if_unloadable():
            tokenizer = load_tokenizer(path)
            context = self._context_tokens(context_tokens(path))
        wrapped = tokenizer._tokenizer  # noqa: SLF001 - what mlx-lm's wrapper wraps
        formats = formats_of_tokenizer(tokenizer)
        text_plane = TextPlane(
            tokenizer=tokenizer,
            formats=formats,
            make_detokenizer=detokenizer_maker(wrapped),
            questions=TokenQuestions(tokenizer, wrapped, context_tokens=context, syntax=formats.syntax),
            context_tokens=context,
            deliver=self._inbox.put,
            send=self._send,
            clock=time.monotonic,
        )
        self._open_text_plane(text_plane)
        with unusable_if_unloadable():
            loaded = load_model(path, self._loading_report())
        engine = MlxEngine(loaded, tokenizer, launch.kv, "read at once" if mlx_cpu.is_used() else "pipelined")
        kv = engine.kv_storage
        if kv.reason:
            told = "kv_not_quantized" if kv.quantization is None else "kv_is_dequantized_in_steps"
            log.warning(told, model=launch.model, reason=kv.reason)
        fingerprint = fingerprint_of_kv(loaded.fingerprint, kv.quantization)
        if not engine.prefix_reuse.available:
            log.warning("prefix_reuse_off", model=launch.model, reason=engine.prefix_reuse.reason)

        boundary: Boundary = "states" if engine.keeps_states else "any_token"
        cold: ColdCache[dict[str, Any]] = ColdCache(
            connect=self._connect_cachestore,
            fingerprint=fingerprint,
            begin=BlockFile,
            write=write_block,
            deliver=self._inbox.put,
            clock=time.monotonic,
            boundary=boundary,
        )
        index: PrefixIndex[dict[str, Any]] = PrefixIndex(launch.hot_cache_bytes, boundary)
        cache = PrefixCache(
            index,
            cold,
            launch.persist,
            reuse_off_reason=engine.prefix_reuse.reason,
        )
        max_rows = launch.max_rows if engine.is_batchable else 1
        device = self._device()
        loop = StepLoop(
            engine=engine,
            scheduler=Scheduler(
                SchedulerSettings(
                    max_rows=max_rows,
                    live_kv=LiveKV(footprint=engine.kv_footprint, budget_bytes=launch.live_kv_bytes),
                    slices="mixed" if engine.mixes else "apart",
                    slice_seconds=launch.prefill_slice_seconds,
                )
            ),
            cache=cache,
            make_detokenizer=detokenizer_maker(wrapped),
            end_token_ids=frozenset(tokenizer.eos_token_ids),
            inbox=self._inbox,
            send=self._send,
            clock=time.monotonic,
            device=device,
        )
        compiler = GrammarCompiler(wrapped, engine.vocabulary_size, tokenizer.eos_token_ids)
        row_tokens = self._row_tokens(engine.kv_footprint, context)
        text_plane.weights_loaded(LoadedWeights(engine.vocabulary_size, fingerprint, compiler, row_tokens))
        cold.start()
        # What was loaded stays. To look through it for garbage takes 0.15 s, in which no row gets a token.
        gc.collect()
        gc.freeze()
        self._send(
            Ready(
                context_tokens=context,
                max_rows=max_rows,
                weight_bytes=loaded.weight_bytes,
                load_seconds=time.monotonic() - started,
                prefix_reuse=engine.prefix_reuse,
                fingerprint=fingerprint,
                kv=kv,
                capabilities=(
                    *capabilities_of("generation"),
                    *(("tools",) if tokenizer.has_chat_template else ()),
                    *(("reasoning",) if formats.thinking is not None else ()),
                    *(("structured_output",) if compiler.is_usable else ()),
                ),
            )
        )
        log.info("ready", model=launch.model, load_seconds=round(time.monotonic() - started, 2), context=context)
        loop.run()
        device.close()
        cold.lift_staging_budget()
        cache.store_everything()
        left = cold.stop(PERSIST_SECONDS, loop.hear)
        log.info("drained", model=launch.model, blocks_stored=cold.stored_blocks, blocks_left=left)

    def _context_tokens(self, of_model: int | None) -> int:
        limits = [limit for limit in (self._launch.context_tokens, of_model) if limit is not None]
        return min(limits, default=32_768)

    def _row_tokens(self, footprint: KVFootprint, context_tokens: int) -> int | None:
        """How many tokens one row may have at most by its memory, where that is less than by the model."""
        budget_bytes = self._launch.live_kv_bytes
        if budget_bytes is None:
            return None
        most = footprint.most_tokens(budget_bytes, context_tokens)
        if most < context_tokens:
            log.warning("context_is_bounded_by_memory", row_tokens=most, context=context_tokens, advice="raise live_kv")
            return most
        return None

    def _open_text_plane(self, text_plane: TextPlane | EmbeddingTextPlane) -> None:
        """Questions to the tokenizer are answered from now on."""
        text_plane.start()
        self._text_plane = text_plane
        self._send(TokenizerReady())

    def _device(self) -> DeviceSharing:
        launch = self._launch
        threads = blas_threads(time.monotonic)
        share_cores: Callable[[int], None] = (lambda _workers: None) if threads is None else threads.share
        if launch.neighbours == "ignore":
            return Alone(share_cores)
        runtime_directory = Path(launch.runtime_directory)
        try:
            board = Board(runtime_directory, launch.incarnation, clock=time.monotonic)
            lease = PrefillLease(runtime_directory)
        except OSError as why:
            # To serve without regard for other models is better than not to serve.
            log.warning("neighbours_ignored", reason=str(why), advice="free space in runtime_directory, then restart")
            return Alone(share_cores)
        return SharedDevice(board, lease, SharingSettings(), clock=time.monotonic, share_cores=share_cores)

    def _loading_report(self) -> Any:
        last = time.monotonic()

        def report(done_bytes: int, total_bytes: int) -> None:
            nonlocal last
            now = time.monotonic()
            if done_bytes == total_bytes or now - last > _LOADING_REPORT_SECONDS:
                last = now
                self._send(Loading(done_bytes=done_bytes, total_bytes=total_bytes))

        return report

    def _connect_cachestore(self) -> Peer[BlockReply, BlockRequest]:
        return Peer(self._cachestore_path, f"w{self._launch.incarnation}:{os.getpid()}".encode(), BlockReply)


def main() -> int:
    """Exit codes: 0 drained, 1 failed, 78 refused by the gateway."""
    os.umask(0o077)
    faulthandler.enable()
    launch = read_launch(WorkerLaunch)
    configure_logging(launch.log_level)
    worker = Worker(launch)

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        worker.drain(SIGTERM_DRAIN_SECONDS)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    when_parent_is_gone(lambda: worker.drain(ORPHAN_DRAIN_SECONDS), then_exit_within_seconds=10.0)
    return worker.run()


def exit_at_once(code: int) -> NoReturn:
    """Leave without the interpreter's shutdown, which aborts beneath threads that are inside MLX or a tokenizer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_at_once(main())
