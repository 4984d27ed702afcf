"""The engine against mlx-lm's own generation: the same tokens, alone or batched, cold or from cached blocks."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.ids import GRAIN_TOKENS
from protocol.sampling import Sampling
from tests.worker.engine_parts import Desk, Model, after_a_restart, prompt
from tests.worker.parts import GREEDY, prepared
from tests.worker.tiny_models import CONFIGS, QUANTIZED, VOCABULARY, make_tiny_model
from worker import mlx_blocks, mlx_cpu
from worker.mlx_model import context_tokens, load_model

KINDS = (*CONFIGS, *QUANTIZED)

CUTTABLE = {"llama", "deepseek_v3", "deepseek_v32", "llama kv8", "llama kv4", "deepseek_v3 kv8"}
"""Families that can be taken up again after any token; the others only where a state was kept."""


@pytest.fixture
def llama(model_of: Callable[[str], Model]) -> Model:
    return model_of("llama")


# --- every family ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_a_family_alone_says_what_mlx_lm_says(model_of: Callable[[str], Model], family: str) -> None:
    """Prompts longer than any window, in slices that fit no boundary, and asked twice (K01, K03)."""
    model = model_of(family)
    desk = Desk(model)
    for name, token_ids in {"one": prompt(1, 1), "short": prompt(2, 9), "long": prompt(3, 90)}.items():
        expected = model.says(token_ids, 12)
        assert desk.ask(name, token_ids, 12, slice_tokens=23) == expected
        assert desk.ask(name, token_ids, 12, slice_tokens=7) == expected
        again = len(token_ids) - 1
        assert desk.cached[name] == (again if desk.engine.prefix_reuse.available else 0)


@pytest.mark.parametrize("family", KINDS)
def test_a_family_batched_says_what_it_says_alone(model_of: Callable[[str], Model], family: str) -> None:
    """Rows of unequal lengths that join and leave at different steps; as many rows as there are KV heads, and more."""
    model = model_of(family)
    if not model.loaded.is_batchable:
        pytest.skip("served one row at a time")
    assert_batched_as_alone(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_batched_with_shared_angles_says_what_it_says_alone(
    model_of: Callable[[str], Model], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the rotations that MLX's CPU build gets."""
    model = model_of(family)
    if not model.loaded.is_batchable:
        pytest.skip("served one row at a time")
    model.known.clear()
    for token_ids, count in batched_rows().values():
        model.says(token_ids, count)  # with mlx-lm alone, before anything is replaced
    monkeypatch.setattr(mx.fast, "rope", mlx_cpu.rope)
    assert_batched_as_alone(model)


def test_the_layers_of_a_step_share_where_their_rows_stand(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One array for all of them, or every layer would work out the angles anew."""
    desk = Desk(llama)
    desk.start("one", prompt(1, 20), max_tokens=9)
    desk.start("other", prompt(2, 33), max_tokens=9)
    desk.step()
    offsets: list[Any] = []
    rope = mx.fast.rope

    def noting(*args: Any, **options: Any) -> mx.array:
        offsets.append(options["offset"])
        return rope(*args, **options)

    monkeypatch.setattr(mx.fast, "rope", noting)
    while not offsets:  # a step may only read what the one before launched
        desk.step()
    assert len(offsets) == 2 * len(llama.loaded.model.layers)
    assert all(offset is offsets[0] for offset in offsets)


def batched_rows() -> dict[str, tuple[list[int], int]]:
    """Prompts and how many tokens each draws."""
    lengths = enumerate([(40, 14), (3, 9), (70, 5), (1, 11)])
    return {f"r{i}": (prompt(10 + i, length), count) for i, (length, count) in lengths}


def assert_batched_as_alone(model: Model) -> None:
    desk = Desk(model)
    rows = batched_rows()
    for name, (token_ids, count) in rows.items():
        desk.start(name, token_ids, max_tokens=count, slice_tokens=16)
        desk.step()
        desk.step()
    desk.run()

    for name, (token_ids, count) in rows.items():
        assert desk.drawn[name] == model.says(token_ids, count), name


@pytest.mark.parametrize("family", KINDS)
def test_reuse_is_on_for_every_kind_of_cache(model_of: Callable[[str], Model], family: str) -> None:
    """K03: by cutting, or by states; where it cannot work it is off and says why."""
    engine = model_of(family).engine()

    assert engine.keeps_states == (family not in CUTTABLE and engine.prefix_reuse.available)
    assert bool(engine.prefix_reuse.reason) != engine.prefix_reuse.available


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("length", [15, 16, 17, 255, 256, 257, 511, 512, 513])
def test_a_hit_says_what_a_cold_run_says(model_of: Callable[[str], Model], family: str, length: int) -> None:
    """K01, K02, K03: another ending on a known prefix, the next turn after an answer, and while another row decodes."""
    model = model_of(family)
    desk = Desk(model)
    first = prompt(length, length)
    answer = desk.ask("first", first, 6, slice_tokens=200)
    assert answer == model.says(first, 6)
    if desk.engine.is_batchable:
        desk.start("beside", prompt(5, 33), max_tokens=40)
        desk.step()
    for name, token_ids in {
        "again": first,
        "other ending": [*first[: length - 3], 9, 8, 7, 6],
        "next turn": [*first, *answer, 5, 4, 3],
    }.items():
        desk.start(name, token_ids, max_tokens=6, slice_tokens=150)
        while name in desk._running:
            desk.step()
        assert desk.drawn[name] == model.says(token_ids, 6), name
    if desk.engine.prefix_reuse.available:
        assert desk.cached["next turn"] >= length
        assert desk.cached["again"] == length - 1


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("length", [255, 256, 257, 513])
def test_a_hit_from_disk_says_what_a_cold_run_says(
    model_of: Callable[[str], Model], family: str, length: int, tmp_path: Path
) -> None:
    """K02, K03: dtypes, offsets and states survive the files; reuse reaches to the last whole grain."""
    model = model_of(family)
    desk = Desk(model)
    first = prompt(length, length)
    desk.ask("first", first, 6, slice_tokens=200)
    fresh = after_a_restart(desk, model, tmp_path)
    for name, token_ids in {"again": first, "other ending": [*first[: length - 3], 9, 8, 7, 6]}.items():
        assert fresh.ask(name, token_ids, 6, slice_tokens=150) == model.says(token_ids, 6), name

    if fresh.engine.prefix_reuse.available:
        assert fresh.cached["again"] >= (length - 1) // GRAIN_TOKENS * GRAIN_TOKENS


@pytest.mark.parametrize("family", CONFIGS)
def test_a_slice_in_parts_is_that_in_one(model_of: Callable[[str], Model], family: str) -> None:
    """While it has stopped another row is opened, read and, in the rest of its life, decodes: both say what they say
    alone."""
    model = model_of(family)
    if not model.loaded.is_batchable:
        pytest.skip("served one row at a time")
    desk = Desk(model)
    first, second = prompt(7, 60), prompt(8, 40)
    stops: list[int] = []

    def read_another() -> None:
        stops.append(len(stops))
        if len(stops) == 2:
            desk.start("second", second, max_tokens=6)

    desk.start("first", first, max_tokens=6, parts=3, before_each=read_another)
    desk.run()
    assert len(stops) >= 2
    assert desk.drawn["first"] == model.says(first, 6)
    assert desk.drawn["second"] == model.says(second, 6)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_rows_join_and_leave_at_random(llama: Model, seed: int) -> None:
    """H02: every row's tokens are those of the row alone, whoever comes and goes; also when it is cancelled."""
    dice = random.Random(seed)
    desk = Desk(llama)
    asked: dict[str, tuple[list[int], int]] = {}
    running: list[str] = []
    for step in range(60):
        if len(running) < 5 and dice.random() < 0.3:
            name = f"r{step}"
            asked[name] = prompt(seed * 100 + step, dice.choice([1, 2, 17, 60, 200])), dice.randrange(1, 25)
            desk.start(name, asked[name][0], max_tokens=asked[name][1], slice_tokens=dice.choice([16, 50, 256]))
        running = list(desk._running)
        if running and dice.random() < 0.1:
            desk.leave(dice.choice(running))
        elif running:
            desk.step()
    desk.run()

    assert len(asked) > 5
    for name, (token_ids, count) in asked.items():
        drawn = desk.drawn[name]
        assert drawn == llama.says(token_ids, count)[: len(drawn)], name


def test_two_rows_of_two_heads(llama: Model) -> None:
    """As many rows as KV heads: a broadcast along the wrong axis would not raise, only lie."""
    desk = Desk(llama)
    asked = {"a": prompt(1, 50), "b": prompt(2, 5)}
    for name, token_ids in asked.items():
        desk.start(name, token_ids, max_tokens=20)
    desk.run()

    assert desk.drawn == {name: llama.says(token_ids, 20) for name, token_ids in asked.items()}


def test_sampling_of_one_row_does_not_reach_another(llama: Model) -> None:
    """H02: greedy rows stay greedy, seeded rows draw as alone."""
    settings = {
        "greedy": GREEDY,
        "seeded": Sampling(temperature=1.0, seed=5),
        "cold": Sampling(temperature=0.3, top_p=0.7, seed=6),
        "penalised": Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
        "biased": Sampling(temperature=0.0, logit_bias={9: 100.0}),
    }
    token_ids = prompt(4, 30)
    alone = {name: Desk(llama).ask(name, token_ids, 15, sampling=sampling) for name, sampling in settings.items()}
    desk = Desk(llama)
    for name, sampling in settings.items():
        desk.start(name, token_ids, max_tokens=15, sampling=sampling)
        desk.step()
    desk.run()

    assert desk.drawn == alone
    assert alone["greedy"] == llama.says(token_ids, 15)
    assert alone["biased"] == [9] * 15
    assert len({tuple(drawn) for drawn in alone.values()}) == len(alone)


def test_a_prompt_is_prefilled_while_others_decode(llama: Model) -> None:
    """A cancelled half of it leaves nothing behind."""
    desk = Desk(llama)
    desk.start("a", prompt(1, 40), max_tokens=12)
    desk.step()
    half = prepared("half", prompt(2, 300))
    desk.engine.open(half, ())
    desk.engine.prefill(half.request_id, 100)
    desk.step()
    desk.engine.prefill(half.request_id, 100)
    desk.engine.drop([half.request_id, half.request_id])
    desk.run()

    assert desk.drawn["a"] == llama.says(prompt(1, 40), 12)
    assert not desk.engine._alone


@pytest.mark.parametrize("family", KINDS)
def test_a_parked_row_goes_on_where_it_was(model_of: Callable[[str], Model], family: str) -> None:
    """Out of a batch of unequal rows and back into another one; who stays behind says what it says alone."""
    model = model_of(family)
    desk = Desk(model)
    lengths = {"a": 30, "b": 70, "c": 11} if desk.engine.is_batchable else {"b": 70}
    for seed, (name, length) in enumerate(lengths.items()):
        desk.start(name, prompt(seed, length), max_tokens=24)
        desk.step()
    desk.read()
    desk.engine.park(prepared("b", ()).request_id)
    for _ in range(5):
        desk.step()
    parked = len(desk.drawn["b"])
    desk.engine.join(prepared("b", ()).request_id)
    desk.step()
    assert len(desk.drawn["b"]) == parked
    desk.run()

    for seed, (name, length) in enumerate(lengths.items()):
        assert desk.drawn[name] == model.says(prompt(seed, length), 24)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("back", ["abc", "ca", "b", ""])
def test_a_whole_batch_is_parked_and_taken_back(model_of: Callable[[str], Model], family: str, back: str) -> None:
    """It stays whole while another row decodes. Then all of it comes back; or a part, and of the others one is dropped
    and one comes later. Each says what it says alone, and none keeps the batch in memory once it is not whole."""
    model = model_of(family)
    desk = Desk(model)
    if not desk.engine.is_batchable:
        pytest.skip("served one row at a time")
    lengths = {"a": 30, "b": 70, "c": 11}
    for seed, (name, length) in enumerate(lengths.items()):
        desk.start(name, prompt(seed, length), max_tokens=24)
        desk.step()
    desk.read()
    for name in lengths:
        desk.engine.park(prepared(name, ()).request_id)
    desk.start("q", prompt(9, 20), max_tokens=6)
    while "q" in desk._running:
        desk.step()
    assert [set(aside.rows) for aside in desk.engine._asides] == [set(lengths)]
    dropped, *later = [*(name for name in lengths if name not in back), "nobody"]
    for name in back:
        desk.engine.join(prepared(name, ()).request_id)
    if back:
        desk.step()
    if dropped in lengths:
        desk.leave(dropped)
    assert not desk.engine._asides
    for name in later[:-1]:
        desk.engine.join(prepared(name, ()).request_id)
    desk.run()

    assert desk.drawn["q"] == model.says(prompt(9, 20), 6)
    for seed, (name, length) in enumerate(lengths.items()):
        if name != dropped:
            assert desk.drawn[name] == model.says(prompt(seed, length), 24)


def test_a_row_that_joins_and_leaves_between_two_steps_holds_no_old_batch(llama: Model) -> None:
    """It came from a batch that was parked whole, and nothing of it was computed meanwhile."""
    desk = Desk(llama)
    for seed, name in enumerate("abc"):
        desk.start(name, prompt(seed, 30), max_tokens=12)
    desk.step()
    desk.read()
    for name in "abc":
        desk.engine.park(prepared(name, ()).request_id)
    desk.start("q", prompt(9, 20), max_tokens=6)
    desk.engine.drop(["q"])  # pyright: ignore[reportArgumentType]
    del desk._running["q"]
    assert len(desk.engine._asides) == 1
    desk.engine.join(prepared("a", ()).request_id)
    desk.engine.park(prepared("a", ()).request_id)
    desk.start("r", prompt(8, 20), max_tokens=6)
    assert not desk.engine._asides
    for name in "abc":
        desk.engine.join(prepared(name, ()).request_id)
    desk.run()

    assert desk.drawn["r"] == llama.says(prompt(8, 20), 6)
    for seed, name in enumerate("abc"):
        assert desk.drawn[name] == llama.says(prompt(seed, 30), 12)


@pytest.mark.parametrize("family", KINDS)
def test_a_row_may_be_parked_before_its_first_step(model_of: Callable[[str], Model], family: str) -> None:
    """Of a prompt of one token nothing is held yet."""
    model = model_of(family)
    desk = Desk(model)
    desk.start("r", prompt(1, 1), max_tokens=8)
    desk.engine.park(prepared("r", ()).request_id)
    desk.engine.join(prepared("r", ()).request_id)
    desk.run()

    assert desk.drawn["r"] == model.says(prompt(1, 1), 8)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
        Sampling(temperature=0.0, repetition_penalty=1.6),
    ],
)
def test_a_parked_rows_sampling_goes_on_too(llama: Model, sampling: Sampling) -> None:
    """Draws are counted from the first token on, and penalties know what was drawn before."""
    expected = Desk(llama).ask("r", prompt(4, 40), 20, sampling=sampling)
    desk = Desk(llama)
    desk.start("r", prompt(4, 40), max_tokens=20, sampling=sampling)
    desk.start("other", prompt(5, 50), max_tokens=30)
    for _ in range(6):
        desk.step()
    desk.read()
    desk.engine.park(prepared("r", ()).request_id)
    desk.step()
    desk.engine.join(prepared("r", ()).request_id)
    desk.run()

    assert desk.drawn["r"] == expected


def test_a_read_takes_each_token_once(llama: Model) -> None:
    """Whether it comes from a read or from the next step; logprobs are those of their token."""
    tokens, references = llama.reference(prompt(8, 20), 9)
    desk = Desk(llama)
    desk.start("r", prompt(8, 20), max_tokens=9, top_logprobs=0)
    assert desk.engine.read() == []
    while desk._running:
        desk.step()
        desk.read()
        desk.read()

    assert desk.drawn["r"] == tokens
    for token, reference, logprob in zip(tokens, references, desk.logprobs["r"], strict=True):
        assert logprob.chosen.logprob == pytest.approx(reference[token], abs=1e-4)


# --- logprobs -------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models(llama: Model) -> None:
    """Of the logits before any sampling setting, the best first; rows that asked for none pay nothing and get none."""
    token_ids = prompt(8, 20)
    tokens, references = llama.reference(token_ids, 6)
    desk = Desk(llama)
    desk.start("none", prompt(9, 33), max_tokens=20)
    desk.step()
    desk.start("chosen", token_ids, max_tokens=6, top_logprobs=0)
    desk.start("three", token_ids, max_tokens=6, top_logprobs=3)
    desk.run()

    assert desk.logprobs["none"] == []
    assert desk.drawn["none"] == llama.says(prompt(9, 33), 20)
    for name, count in (("chosen", 0), ("three", 3)):
        assert desk.drawn[name] == tokens
        for token, reference, logprob in zip(tokens, references, desk.logprobs[name], strict=True):
            assert logprob.chosen.token == f"<{token}>"
            assert logprob.chosen.logprob == pytest.approx(reference[token], abs=1e-4)
            best = np.argsort(-reference)[:count]
            assert [top.token for top in logprob.top] == [f"<{i}>" for i in best]
            assert [top.logprob for top in logprob.top] == pytest.approx(reference[best].tolist(), abs=1e-4)


def test_logprobs_of_a_drawn_token(llama: Model) -> None:
    """A token that was not the best has its own logprob, whatever the temperature."""
    desk = Desk(llama)
    drawn = desk.ask("r", prompt(8, 20), 8, top_logprobs=1, sampling=Sampling(temperature=3.0, seed=1))
    token_ids = prompt(8, 20)
    logits = llama.loaded.model(mx.array([[*token_ids, *drawn]]))[0]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    assert drawn != llama.says(token_ids, 8)
    for i, (token, logprob) in enumerate(zip(drawn, desk.logprobs["r"], strict=True)):
        assert logprob.chosen.logprob == pytest.approx(logprobs[len(token_ids) - 1 + i][token], abs=1e-4)


# --- reuse ----------------------------------------------------------------------------------------------------------


def _first_block_twice(uses: Sequence[Any]) -> list[Any]:
    return [uses[0]] * len(uses)


def _backwards(uses: Sequence[Any]) -> list[Any]:
    return list(reversed(uses))


@pytest.mark.parametrize("disorder", [_first_block_twice, _backwards])
def test_a_wrong_join_of_blocks_turns_reuse_off(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, disorder: Callable[[Sequence[Any]], list[Any]]
) -> None:
    """Each block alone comes back whole; only their join is wrong. The self-test at load sees it and says so."""
    joined: Callable[..., mx.array] = mlx_blocks._joined  # pyright: ignore[reportPrivateUsage]

    def wrongly_joined(uses: Sequence[Any], *where: Any) -> mx.array:
        return joined(disorder(uses), *where)

    monkeypatch.setattr(mlx_blocks, "_joined", wrongly_joined)
    reuse = model_of("llama").engine().prefix_reuse
    assert not reuse.available
    assert "self-test" in reuse.reason
    monkeypatch.undo()
    assert model_of("llama").engine().prefix_reuse.available


@pytest.mark.parametrize("family", sorted(CUTTABLE))
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513])
def test_a_hit_says_what_a_miss_says(model_of: Callable[[str], Model], family: str, length: int) -> None:
    """K01, K02: the same prompt three times, the last time beside another row; one token at least is computed."""
    model = model_of(family)
    desk = Desk(model)
    token_ids = prompt(length, length)
    expected = model.says(token_ids, 8)

    assert desk.ask("cold", token_ids, 8) == expected
    assert desk.ask("hit", token_ids, 8) == expected
    desk.start("other", prompt(99, 30), max_tokens=12)
    desk.step()
    assert desk.ask("beside", token_ids, 8) == expected
    assert desk.cached == {"cold": 0, "hit": length - 1, "other": 0, "beside": length - 1}
    assert desk.drawn["other"] == model.says(prompt(99, 30), 12)


@pytest.mark.parametrize("length", [200, 250, 256, 300, 505, 512])
def test_the_next_turn_continues_on_cached_blocks(llama: Model, length: int) -> None:
    """All of this turn is reused: KV cut out of a padded batch row, behind and across the block grid."""
    desk = Desk(llama)
    desk.start("padding", prompt(50, length + 60), max_tokens=40)
    desk.step()
    first = prompt(length, length)
    answer = desk.ask("first", first, 20)
    second = [*first, *answer, *prompt(7, 30)]

    assert desk.ask("second", second, 10) == llama.says(second, 10)
    assert desk.cached["second"] >= length + 19


def test_forks_share_their_prefix(llama: Model) -> None:
    """Token-exact: prompts that part ways anywhere in a block."""
    desk = Desk(llama)
    base = prompt(5, 600)
    desk.ask("base", base, 4)
    for at in (1, 100, 255, 256, 257, 400, 512, 599):
        fork = [*base[:at], (base[at] + 1) % VOCABULARY, *prompt(at, 20)]
        assert desk.ask(f"at{at}", fork, 6) == llama.says(fork, 6)
        assert desk.cached[f"at{at}"] >= at


def test_eviction_never_shows(llama: Model) -> None:
    """A tier of a few blocks under many prompts: hits, part hits and misses, and always the same tokens."""
    desk = Desk(llama, budget_bytes=2 * 600 * 3 * 2 * 8 * 4)
    dice = random.Random(1)
    base = prompt(1, 700)
    for turn in range(25):
        token_ids = [*base[: dice.randrange(1, 700)], *prompt(turn, dice.randrange(1, 40))]
        assert desk.ask(f"t{turn}", token_ids, 4) == llama.says(token_ids, 4)
        desk.cache.check()
    assert any(desk.cached.values())


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_returns_to_where_it_was(llama: Model) -> None:
    """H01: rows that finished or were cancelled hold nothing; what the cache holds is in its books."""
    desk = Desk(llama)
    desk.ask("first", prompt(1, 300), 30)
    desk.index.set_budget(0)
    desk.index.set_budget(10**9)
    base = desk.engine.active_bytes
    for i in range(10):
        desk.start(f"r{i}", prompt(i, 50 + 40 * i), max_tokens=8)
        desk.step()
        if i % 3 == 0:
            desk.leave(f"r{i}")
    desk.run()

    mx.synchronize()  # a GPU gives memory back when the work that used it has ended
    assert desk.engine.active_bytes - base == pytest.approx(desk.index.size_bytes, abs=100_000)
    desk.index.set_budget(0)
    assert desk.engine.active_bytes <= base + 10_000


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"max_position_embeddings": 4096}', 4096),
        ('{"text_config": {"max_position_embeddings": 8192}}', 8192),
        ('{"n_positions": 2048}', 2048),
        ('{"max_position_embeddings": null}', None),
        ("[]", None),
        ('{"text_config": null}', None),
    ],
)
def test_the_context_is_the_models_own(tmp_path: Path, config: str, expected: int | None) -> None:
    """C09: also from a nested text_config."""
    (tmp_path / "config.json").write_text(config)

    assert context_tokens(tmp_path) == expected


def test_loading_reports_its_progress(tmp_path: Path) -> None:
    """Bytes that rise to the total."""
    seen: list[tuple[int, int]] = []
    loaded = load_model(make_tiny_model("llama", tmp_path / "m"), lambda done, total: seen.append((done, total)))

    assert seen == sorted(seen)
    assert seen[-1] == (loaded.weight_bytes, loaded.weight_bytes)
