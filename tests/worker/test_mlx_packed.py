"""Slices that rows ride along with: every row and every prompt says what it says alone, or the engine does not mix."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from jsonschema import Draft202012Validator

from protocol.sampling import Sampling
from tests.worker.engine_parts import Desk, Model, PlainTokenizer, prompt
from tests.worker.parts import GREEDY, prepared
from tests.worker.test_constrained_rows import SCHEMAS, Room
from tests.worker.tiny_models import CONFIGS, PLAIN_CONFIGS, make_tiny_model
from worker import mlx_packed
from worker.engine import nothing
from worker.mlx_engine import MlxEngine
from worker.mlx_model import load_model
from worker.sequence import BooksDoNotAddUp


@pytest.fixture
def llama(model_of: Callable[[str], Model]) -> Model:
    return model_of("llama")


class MixedDesk(Desk):
    """A desk whose slices give each running row a token."""

    mixed = 0

    def _slice(self, request: Any, tokens: int, parts: int = 1, before_each: Callable[[], None] = nothing) -> None:
        self.read()
        if not self.engine._rows:
            super()._slice(request, tokens, parts, before_each)
            return
        self.mixed += 1
        self._take(self.engine.prefill_and_decode(request.request_id, tokens))


@pytest.mark.parametrize("family", PLAIN_CONFIGS)
def test_a_family_mixed_says_what_it_says_alone(model_of: Callable[[str], Model], family: str) -> None:
    """Rows of unequal lengths beside prompts that come in slices, and rows that end beside one; first runs come from
    mlx-lm."""
    model = model_of(family)
    desk = MixedDesk(model)
    assert desk.engine.mixes
    rows = {"a": (40, 30), "b": (3, 4), "c": (70, 12), "d": (90, 6), "e": (1, 20)}
    for seed, (name, (length, count)) in enumerate(rows.items()):
        desk.start(name, prompt(seed, length), max_tokens=count, slice_tokens=(9, 16, 31)[seed % 3])
        desk.step()
    desk.run()

    assert desk.mixed > 6
    for seed, (name, (length, count)) in enumerate(rows.items()):
        assert desk.drawn[name] == model.says(prompt(seed, length), count), name


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - set(PLAIN_CONFIGS)))
def test_what_is_not_plain_attention_is_not_mixed(model_of: Callable[[str], Model], family: str) -> None:
    """Windows, states, latent attention: slices and steps stay apart, and trying left the model as it was."""
    model = model_of(family)
    desk = Desk(model)

    assert not desk.engine.mixes
    assert desk.ask("r", prompt(3, 60), 6, slice_tokens=23) == model.says(prompt(3, 60), 6)


@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go_between_mixed_passes(llama: Model, seed: int) -> None:
    """H02: slices of any size, prompts half done that are cancelled, rows that leave, are parked and come back."""
    dice = random.Random(seed)
    desk = MixedDesk(llama)
    asked: dict[str, tuple[list[int], int]] = {}
    parked: list[Any] = []
    for step in range(50):
        running = [name for name in desk._running if name not in parked]
        match dice.choice(["start", "start", "step", "step", "leave", "park", "back", "half"]):
            case "start" if len(running) < 4:
                name = f"r{step}"
                asked[name] = prompt(seed * 100 + step, dice.choice([1, 2, 17, 60, 300])), dice.randrange(1, 25)
                desk.start(name, asked[name][0], max_tokens=asked[name][1], slice_tokens=dice.choice([1, 7, 50]))
            case "leave" if running:
                desk.leave(dice.choice(running))
            case "park" if running:
                desk.read()
                if running := [name for name in desk._running if name not in parked]:
                    parked.append(dice.choice(running))
                    desk.engine.park(parked[-1])
            case "back" if parked:
                desk.engine.join(parked.pop())
            case "half" if running:
                half = prepared("half", prompt(step, 90))
                desk.engine.open(half, ())
                desk._slice(half, 40)
                desk.engine.drop([half.request_id])
            case _ if running:
                desk.step()
            case _:
                pass
    for name in parked:
        desk.engine.join(name)
    desk.run()

    assert desk.mixed > 5
    for name, (token_ids, count) in asked.items():
        drawn = desk.drawn[name]
        assert drawn == llama.says(token_ids, count)[: len(drawn)], name


def test_settings_and_logprobs_in_mixed_passes(llama: Model) -> None:
    """Seeds, penalties and logprobs of a row are those of the row alone, with a long prompt in between."""
    settings: dict[str, dict[str, Any]] = {
        "greedy": {"sampling": GREEDY, "top_logprobs": 2},
        "seeded": {"sampling": Sampling(temperature=1.0, seed=5)},
        "penalised": {"sampling": Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5)},
    }
    token_ids = prompt(4, 30)
    alone = Desk(llama)
    for name, more in settings.items():
        alone.ask(name, token_ids, 25, **more)
    desk = MixedDesk(llama)
    for name, more in settings.items():
        desk.start(name, token_ids, max_tokens=25, **more)
        desk.step()
    desk.start("long", prompt(5, 200), max_tokens=3, slice_tokens=12)
    desk.run()

    assert desk.mixed > 15
    assert {name: desk.drawn[name] for name in settings} == alone.drawn
    assert desk.drawn["long"] == llama.says(prompt(5, 200), 3)
    for seen, expected in zip(desk.logprobs["greedy"], alone.logprobs["greedy"], strict=True):
        assert seen.chosen.token_bytes == expected.chosen.token_bytes
        assert seen.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-4)
        assert [top.logprob for top in seen.top] == pytest.approx([top.logprob for top in expected.top], abs=1e-4)


class MixedRoom(MixedDesk, Room):
    """The same, where some rows are held to a grammar."""


def test_constrained_rows_ride_along(llama: Model) -> None:
    """They keep to their schema, and say what they say alone."""
    room = MixedRoom(llama)
    for i, schema in enumerate(SCHEMAS):
        room.start_constrained(f"held {i}", schema, i, sampling=Sampling(temperature=1.3, seed=i))
    room.start("long", prompt(5, 120), max_tokens=3, slice_tokens=9)
    room.run()

    assert room.mixed > 10
    assert room.drawn["long"] == llama.says(prompt(5, 120), 3)
    for i, schema in enumerate(SCHEMAS):
        Draft202012Validator(schema).validate(room.value(f"held {i}"))
        alone = Room(llama)
        alone.start_constrained("alone", schema, i, sampling=Sampling(temperature=1.3, seed=i))
        alone.run()
        assert alone.drawn["alone"] == room.drawn[f"held {i}"]


def test_blocks_cut_between_mixed_passes_are_reused(llama: Model) -> None:
    """K01, K02: of the prompt that was read beside rows, and of a row that rode along."""
    desk = MixedDesk(llama)
    desk.start("row", prompt(1, 20), max_tokens=40)
    desk.step()
    first = prompt(2, 600)
    desk.start("first", first, max_tokens=4, slice_tokens=30)
    desk.run()
    for name, token_ids in {"again": first, "row's next turn": [*prompt(1, 20), *desk.drawn["row"], 5, 6]}.items():
        assert desk.ask(name, token_ids, 6) == llama.says(token_ids, 6), name
    assert desk.cached["again"] == 599
    assert desk.cached["row's next turn"] >= 59


def test_a_mixed_pass_leaves_nothing_unread(llama: Model) -> None:
    """Its tokens are those of this very pass, and a row's token that is unread is not overwritten."""
    desk = MixedDesk(llama)
    desk.start("row", prompt(1, 20), max_tokens=40)
    desk.step()
    other = prepared("other", prompt(2, 50))
    desk.engine.open(other, ())
    with pytest.raises(BooksDoNotAddUp, match="unread"):
        desk.engine.prefill_and_decode(other.request_id, 10)
    desk.read()

    assert [drawn.request_id for drawn in desk.engine.prefill_and_decode(other.request_id, 10)] == ["row"]
    assert desk.engine.read() == []
    assert (desk.engine.tokens_held(other.request_id), desk.engine.tokens_held(prepared("row", ()).request_id)) == (
        10,
        21,
    )


def _as_the_slice(rope: Callable[..., mx.array], x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
    return rope(x, offset=offset if isinstance(offset, int | mx.array) else offset.of_each[0], **more)


def test_a_wrong_pass_is_found_at_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are turned as if they stood behind the slice: the engine says that it does not mix, and goes on."""
    monkeypatch.setattr(mlx_packed, "_turn", _as_the_slice)
    loaded = load_model(make_tiny_model("llama", tmp_path / "model"), lambda _done, _total: None)
    model = Model(loaded)
    engine = MlxEngine(loaded, PlainTokenizer())

    assert not engine.mixes
    assert "logits differ" in engine._mixing_fault
    assert Desk(model).ask("r", prompt(1, 40), 8) == model.says(prompt(1, 40), 8)
