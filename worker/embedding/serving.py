"""A worker that embeds or reranks, from its folder to the end of its loop: joins the parts, as `__main__` does."""

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from protocol.generation import PrefixReuse, Ready, WorkerEvent
from protocol.launch import WorkerLaunch
from protocol.model_kind import ModelKind, capabilities_of
from worker.embedding.folder import read_recipe
from worker.embedding.inputs import InputLimits, Inputs, answer_ids
from worker.embedding.loop import EmbeddingLoop
from worker.embedding.packing import Packer
from worker.embedding.text_plane import EmbeddingTextPlane
from worker.model_unusable import unusable_if_unloadable
from worker.neighbours import DeviceSharing
from worker.tokenizing import TokenQuestions

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class WorkerHands:
    """What the process gives to whatever model it runs. `open_text_plane` lets questions to the tokenizer in."""

    inbox: "queue.SimpleQueue[Any]"
    send: Callable[[WorkerEvent], None]
    report_loading: Callable[[int, int], None]
    open_text_plane: Callable[[EmbeddingTextPlane], None]
    device: Callable[[], DeviceSharing]


def embed_until_drained(launch: WorkerLaunch, kind: ModelKind, hands: WorkerHands) -> None:
    """On the thread that owns MLX. Raises ModelUnusable."""
    from worker.embedding.mlx_batch import load_batch_model
    from worker.mlx_model import load_tokenizer

    started = time.monotonic()
    path = Path(launch.model_path)
    with unusable_if_unloadable():
        config, recipe = read_recipe(path, kind)
        vocabulary_size = int(config["vocab_size"])
        tokenizer = load_tokenizer(path)
    context = min(recipe.context_tokens, launch.context_tokens or recipe.context_tokens)
    wrapped = tokenizer._tokenizer  # noqa: SLF001 - what mlx-lm's wrapper wraps
    text_plane = EmbeddingTextPlane(
        questions=TokenQuestions(tokenizer, wrapped, context_tokens=context),
        kind=kind,
        deliver=hands.inbox.put,
        send=hands.send,
        clock=time.monotonic,
    )
    hands.open_text_plane(text_plane)
    with unusable_if_unloadable():
        answers = answer_ids(wrapped, kind)
        loaded = load_batch_model(path, kind, recipe, answer_ids=answers, report=hands.report_loading)
    limits = InputLimits(context_tokens=context, vocabulary_size=vocabulary_size, dimensions=loaded.dimensions)
    text_plane.weights_loaded(Inputs(wrapped, kind, recipe, limits))
    device = hands.device()
    loop = EmbeddingLoop(
        model=loaded.model,
        kind=kind,
        packer=Packer(),
        inbox=hands.inbox,
        send=hands.send,
        clock=time.monotonic,
        device=device,
        batch_seconds=launch.prefill_slice_seconds,
    )
    hands.send(
        Ready(
            context_tokens=context,
            max_rows=launch.max_rows,
            weight_bytes=loaded.weight_bytes,
            load_seconds=time.monotonic() - started,
            prefix_reuse=PrefixReuse(available=False, reason="a model that embeds or reranks keeps no KV"),
            fingerprint=loaded.fingerprint,
            capabilities=capabilities_of(kind),
        )
    )
    log.info("ready", model=launch.model, load_seconds=round(time.monotonic() - started, 2), context=context)
    loop.run()
    device.close()
    log.info("drained", model=launch.model)
