"""A real worker process with a real embedding model: vectors, scores, refusals, cancels, and how it ends."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from protocol.failures import FailureKind
from protocol.generation import (
    Cancel,
    Detokenize,
    Detokenized,
    Drain,
    Embed,
    Embedded,
    Failed,
    LastWords,
    Prefilling,
    Queued,
    Ready,
    Rerank,
    Reranked,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenizerReady,
    TokenPrompt,
)
from protocol.ids import RequestId
from protocol.latency import LatencyClass
from tests.processes.running_worker import Start, WorkerProcess
from tests.worker.embedding import tiny_encoders
from tests.worker.tiny_models import CONFIGS, make_tiny_model

SENTENCES = ("That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day")


def with_tokenizer(folder: Path, source: Path) -> Path:
    """The model in `folder` reads text as the one in `source` does."""
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    return folder


def decoder(destination: Path, vocabulary_size: int, modules: list[str]) -> Path:
    """A tiny Qwen3 with noise in its weights, as a folder of sentence-transformers."""
    config = {**CONFIGS["llama"], "model_type": "qwen3", "vocab_size": vocabulary_size}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "qwen3", config)
        make_tiny_model("qwen3", destination)
    described = [{"type": f"sentence_transformers.{name}", "path": ""} for name in modules]
    described += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (destination / "modules.json").write_text(json.dumps(described))
    (destination / "1_Pooling").mkdir()
    (destination / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return destination


def embed(worker: WorkerProcess, name: str, *texts: str, **more: object) -> RequestId:
    request_id = RequestId(name)
    inputs = tuple(TextPrompt(text=text) for text in texts)
    worker.send(Embed(request_id=request_id, inputs=inputs, **more))  # pyright: ignore[reportArgumentType]
    return request_id


def vectors(embedded: Embedded) -> list[tuple[float, ...]]:
    size = embedded.dimensions
    return [struct.unpack_from(f"<{size}f", embedded.vectors, at) for at in range(0, len(embedded.vectors), 4 * size)]


def dot(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_a_life(start: Start, minilm: Path) -> None:
    """The tokenizer first, then limits and abilities; the model's published similarities; order, cut and refusals; a
    drain, and exit 0."""
    worker = start(minilm)
    ready = worker.events[-1]
    assert isinstance(ready, Ready)
    assert ready.capabilities == ("embeddings", "rerank")
    assert (ready.context_tokens, ready.prefix_reuse.available) == (256, False)
    assert any(isinstance(event, TokenizerReady) for event in worker.events)

    embed(worker, "four", *SENTENCES)
    assert worker.next(Queued).prompt_tokens == 29
    four = worker.next(Embedded)
    assert (four.dimensions, four.prompt_tokens) == (384, 29)
    first, *others = vectors(four)
    assert [round(dot(first, other), 3) for other in others] == [0.695, 0.943, 0.257]
    assert dot(first, first) == pytest.approx(1.0, abs=1e-5)

    embed(worker, "reversed", *reversed(SENTENCES))
    for one, other in zip(vectors(worker.next(Embedded)), reversed(vectors(four)), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    embed(worker, "cut", SENTENCES[0], dimensions=64)
    (cut,) = vectors(worker.next(Embedded))
    length = dot(first[:64], first[:64]) ** 0.5
    assert cut == pytest.approx([value / length for value in first[:64]], abs=1e-6)

    documents = ("Bees make honey.", "Paris is the capital of France.", "France is a country.")
    worker.send(Rerank(request_id=RequestId("rank"), query="What is the capital of France?", documents=documents))
    scores = worker.next(Reranked).scores
    assert sorted(range(3), key=lambda index: -scores[index]) == [1, 2, 0]
    assert all(0 <= score <= 1 for score in scores)

    worker.send(Tokenize(request_id=RequestId("tokens"), prompt=TextPrompt(text="happy dog")))
    tokenized = worker.next(Tokenized)
    assert tokenized.tokens == ("[CLS]", "happy", "dog", "[SEP]")
    worker.send(Tokenize(request_id=RequestId("bare"), prompt=TextPrompt(text="happy dog"), special_tokens="leave"))
    assert worker.next(Tokenized).token_ids == tokenized.token_ids[1:-1]
    worker.send(Detokenize(request_id=RequestId("back"), token_ids=tokenized.token_ids[1:-1]))
    assert worker.next(Detokenized).text == "happy dog"
    worker.send(Embed(request_id=RequestId("ids"), inputs=(TokenPrompt(token_ids=tokenized.token_ids),)))
    embed(worker, "text", "happy dog")
    by_ids, by_text = worker.next(Embedded), worker.next(Embedded)
    assert vectors(by_ids)[0] == pytest.approx(vectors(by_text)[0], abs=1e-6)

    worker.send(Drain(deadline_seconds=5.0))
    assert worker.exit_code() == 0


def test_what_it_cannot_do_is_refused_by_its_place(start: Start, minilm: Path) -> None:
    """C09 for vectors: the client learns which input, and what to do; nothing of it runs."""
    worker = start(minilm)

    def refusal() -> tuple[FailureKind, str | None]:
        failed = worker.next(Failed)
        assert not any(isinstance(event, Queued) for event in worker.of(failed.request_id))
        return failed.failure.kind, failed.failure.param

    long = "word " * 300
    embed(worker, "long", "short", long)
    assert refusal() == (FailureKind.CONTEXT_LENGTH_EXCEEDED, "input[1]")
    embed(worker, "big", "short", dimensions=385)
    assert refusal() == (FailureKind.INVALID_REQUEST, "dimensions")
    worker.send(Embed(request_id=RequestId("ids"), inputs=(TokenPrompt(token_ids=(1, 99_999)),)))
    assert refusal() == (FailureKind.INVALID_REQUEST, "input[0]")
    worker.send(Rerank(request_id=RequestId("rank"), query="q", documents=("d", long)))
    assert refusal() == (FailureKind.CONTEXT_LENGTH_EXCEEDED, "documents[1]")
    worker.generate("chat", [1, 2, 3])
    assert refusal() == (FailureKind.UNSUPPORTED, "model")

    embed(worker, "cut", long, overlong="cut")
    assert worker.next(Embedded).prompt_tokens == 256
    worker.send(Rerank(request_id=RequestId("rank cut"), query="q", documents=("d", long), overlong="cut"))
    assert len(worker.next(Reranked).scores) == 2


def test_nothing_private_is_logged(start: Start, minilm: Path) -> None:
    """S02: no text, query or document is in a log line, also at debug level and where it is refused."""
    worker = start(minilm, log_level="debug")
    embed(worker, "fine", "MARKER one")
    worker.next(Embedded)
    embed(worker, "long", "MARKER two " * 200)
    worker.next(Failed)
    worker.send(Rerank(request_id=RequestId("rank"), query="MARKER three", documents=("MARKER four",)))
    worker.next(Reranked)
    worker.send(Tokenize(request_id=RequestId("tokens"), prompt=TextPrompt(text="MARKER five " * 400)))
    worker.next(Tokenized)
    worker.send(Drain(deadline_seconds=5.0))
    assert worker.exit_code() == 0
    assert "ready" in worker.log
    assert "marker" not in worker.log.lower()


def test_an_urgent_text_goes_before_the_rest_of_a_heap(start: Start, minilm: Path) -> None:
    """A class goes first between two batches, a cancel takes effect there, and every request ends exactly once."""
    worker = start(minilm, prefill_slice_seconds=0.05)
    embed(worker, "heap", *(f"text number {number} of many, none of them short" for number in range(400)))
    worker.next(Prefilling)
    embed(worker, "urgent", "now", latency_class=LatencyClass.INTERACTIVE)
    urgent = worker.next(Embedded)
    assert urgent.request_id == "urgent"
    worker.send(Cancel(request_id=RequestId("heap")))
    failed = worker.next(Failed)
    assert (failed.request_id, failed.failure.kind) == ("heap", FailureKind.CANCELLED)
    pong = worker.pong()
    assert (pong.waiting_requests, pong.running_rows) == (0, 0)
    assert pong.steps >= 2
    assert worker.of("heap")[-1] is failed


def test_a_cross_encoder_reads_pairs_and_gives_no_vectors(start: Start, minilm: Path, tmp_path: Path) -> None:
    """From a folder to scores: each pair alone has the score it has among others."""
    config = {**tiny_encoders.BERT_RANKER, "vocab_size": 30522, "max_position_embeddings": 64}
    tiny_encoders.make(config, tmp_path / "m")
    worker = start(with_tokenizer(tmp_path / "m", minilm))
    ready = worker.events[-1]
    assert isinstance(ready, Ready)
    assert (ready.capabilities, ready.context_tokens) == (("rerank",), 64)

    documents = ("a dog", "Paris is the capital of France, and has been for long", "bees")
    worker.send(Rerank(request_id=RequestId("all"), query="what?", documents=documents))
    together = worker.next(Reranked)
    assert len(set(together.scores)) == 3
    for index, document in enumerate(documents):
        worker.send(Rerank(request_id=RequestId(f"{index}"), query="what?", documents=(document,)))
        assert worker.next(Reranked).scores == pytest.approx([together.scores[index]], abs=1e-6)

    embed(worker, "vectors", "a")
    assert worker.next(Failed).failure.kind is FailureKind.UNSUPPORTED
    worker.send(Rerank(request_id=RequestId("long"), query="q " * 70, documents=("d",)))
    assert worker.next(Failed).failure.param == "query"


def test_a_decoder_embeds_from_a_folder(start: Start, smollm2: Path, tmp_path: Path) -> None:
    """Its vectors keep their length where the folder does not ask for another; a long text runs in slices."""
    folder = with_tokenizer(decoder(tmp_path / "m", 49152, ["models.Transformer"]), smollm2)
    worker = start(folder, prefill_slice_seconds=0.001)
    embed(worker, "two", "hello", "hello there")
    two = worker.next(Embedded)
    assert (two.dimensions, two.prompt_tokens) == (32, 3)
    one, other = vectors(two)
    assert dot(one, one) != pytest.approx(1.0, abs=1e-3)
    assert one != pytest.approx(other, abs=1e-3)
    before = worker.pong().steps
    embed(worker, "long", "word " * 600)
    assert worker.next(Embedded).prompt_tokens > 600
    assert worker.pong().steps - before > 2


def test_a_decoder_judges_from_a_folder(start: Start, smollm2: Path, script_model: Path, tmp_path: Path) -> None:
    """By its tokens for yes and no; one whose tokenizer lacks them says so and does not start."""
    modules = ["models.Transformer", "cross_encoder.modules.LogitScore"]
    worker = start(with_tokenizer(decoder(tmp_path / "m", 49152, modules), smollm2))
    worker.send(Rerank(request_id=RequestId("r"), query="what?", documents=("a dog", "a cat")))
    scores = worker.next(Reranked).scores
    assert len(set(scores)) == 2
    assert all(0 < score < 1 for score in scores)

    mute = start(with_tokenizer(decoder(tmp_path / "mute", 2048, modules), script_model), until=LastWords)
    words = mute.events[-1]
    assert isinstance(words, LastWords)
    assert words.failure.kind is FailureKind.MODEL_UNAVAILABLE
    assert "`yes`" in words.failure.message
