"""Rows that are held to a grammar, in a batch with others: a model of noise says anything, and must not be let to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from protocol.sampling import Sampling
from protocol.tools import JsonSchema, OneOf
from tests.fakes.char_tokenizer import END, char_tokenizer
from tests.worker.engine_parts import Desk, Model, prompt
from tests.worker.parts import GREEDY
from tests.worker.tiny_models import VOCABULARY, make_tiny_model
from worker.engine import Drawn
from worker.grammar_compiler import GrammarCompiler
from worker.grammars import grammar
from worker.mlx_model import load_model
from worker.sequence import Matcher

TOKENIZER = char_tokenizer()
END_ID: int = TOKENIZER.convert_tokens_to_ids(END)  # pyright: ignore
COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY, [END_ID])

SCHEMAS: Sequence[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
    {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "why": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
        },
        "required": ["ok"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module", params=["llama", "qwen3_next", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One whose cache can be cut, one with recurrent state, one with a window."""
    path = make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    return Model(load_model(path, lambda _done, _total: None))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    return Model(load_model(path, lambda _done, _total: None))


def schema_matcher(schema: dict[str, Any]) -> Matcher:
    return COMPILER.compile(grammar(JsonSchema(text=json.dumps(schema)), None, None, {}))


class Room(Desk):
    """A desk at which constrained rows leave with their end token, as the loop lets them."""

    def _take(self, tokens: Sequence[Drawn]) -> None:
        super()._take(tokens)
        ended = [drawn.request_id for drawn in tokens if drawn.token_id == END_ID and drawn.request_id in self._running]
        self.leave(*(name for name in ended if self._running[name][0].matcher is not None))

    def start_constrained(self, name: str, schema: dict[str, Any], seed: int, **settings: Any) -> None:
        self.start(name, prompt(seed, 5 + seed), max_tokens=400, matcher=schema_matcher(schema), **settings)

    def value(self, name: str) -> Any:
        """What a constrained row said. It ended by itself."""
        *said, end = self.drawn[name]
        assert end == END_ID
        return json.loads(TOKENIZER.decode(said))


def test_constrained_and_free_rows_beside_each_other(model: Model) -> None:
    """Eight rows that join at different steps: what is constrained keeps to its schema, greedy or drawn; what is free
    says what it says alone, and so does what is constrained (H02)."""
    room = Room(model)
    samplings = [GREEDY, Sampling(seed=3), Sampling(temperature=1.5, top_p=0.7, seed=4), Sampling(top_k=2, seed=5)]
    for i, (schema, sampling) in enumerate(zip(SCHEMAS, samplings, strict=True)):
        room.start_constrained(f"held {i}", schema, i, sampling=sampling)
        room.step()
        room.start(f"free {i}", prompt(50 + i, 20 + 3 * i), max_tokens=60)
        room.step()
    room.run()

    for i, (schema, sampling) in enumerate(zip(SCHEMAS, samplings, strict=True)):
        Draft202012Validator(schema).validate(room.value(f"held {i}"))
        assert room.drawn[f"free {i}"] == model.says(prompt(50 + i, 20 + 3 * i), 60)
        alone = Room(model)
        alone.start_constrained("alone", schema, i, sampling=sampling)
        alone.run()
        assert alone.drawn["alone"] == room.drawn[f"held {i}"]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1, top_k=1),
        Sampling(seed=1, top_p=0.0),
        Sampling(seed=1, min_p=1.0),
        Sampling(temperature=0.0, repetition_penalty=1.9, frequency_penalty=2.0, presence_penalty=2.0),
        Sampling(temperature=0.0, logit_bias=dict.fromkeys(range(VOCABULARY), -100.0)),
        Sampling(temperature=0.0, logit_bias={VOCABULARY - 1: 100.0, END_ID: 100.0}),
        Sampling(temperature=1e-30, seed=1),
        Sampling(temperature=2.0, seed=1),
    ],
)
def test_no_setting_leaves_the_grammar(llama: Model, sampling: Sampling) -> None:
    """The mask comes after penalties and biases and before truncation, so that some allowed token always is left."""
    room = Room(llama)
    room.start_constrained("held", SCHEMAS[0], 2, sampling=sampling)
    room.run()

    Draft202012Validator(SCHEMAS[0]).validate(room.value("held"))


def test_steps_that_are_read_at_once(llama: Model) -> None:
    """As on a CPU: a step gives its own tokens and leaves none unread, constrained rows or not; so a row may be parked
    after any step, and what rows say is what they say pipelined."""
    said: list[dict[str, list[int]]] = []
    for steps in ("read at once", "pipelined"):
        room = Room(Model(llama.loaded, steps=steps))
        room.start("free", prompt(1, 40), max_tokens=9, top_logprobs=0)
        room.start_constrained("held", SCHEMAS[0], 2)
        for count in range(1, 5):
            room.step()
            if steps == "read at once":
                assert len(room.drawn["free"]) == len(room.drawn["held"]) == count
                assert room.engine.read() == []
        room.read()
        room.engine.park("free")  # pyright: ignore[reportArgumentType]
        room.step()
        room.engine.join("free")  # pyright: ignore[reportArgumentType]
        room.run()
        said.append(room.drawn)

    assert said[0] == said[1]
    assert said[0]["free"] == llama.says(prompt(1, 40), 9)


def test_joining_a_step_that_is_under_way(llama: Model) -> None:
    """A free row's step is unread when a constrained one joins, and again when that one has left."""
    room = Room(llama)
    room.start("free", prompt(1, 9), max_tokens=80)
    for _ in range(3):
        room.step()
    for i, schema in enumerate(SCHEMAS):
        room.start_constrained(f"held {i}", schema, i)
        while f"held {i}" in room._running:
            room.step()
        room.step()
    room.run()

    assert room.drawn["free"] == llama.says(prompt(1, 9), 80)
    for i, schema in enumerate(SCHEMAS):
        Draft202012Validator(schema).validate(room.value(f"held {i}"))


def test_parked_and_taken_back(model: Model) -> None:
    """At any step: the row goes on where its grammar stood, and its neighbours do not notice."""
    if not model.loaded.is_batchable:
        pytest.skip("served one row at a time")
    alone = Room(model)
    alone.start_constrained("held", SCHEMAS[0], 3, sampling=Sampling(seed=8))
    alone.run()
    for steps in (1, 4, 11):
        room = Room(model)
        room.start("free", prompt(1, 9), max_tokens=70)
        room.start_constrained("held", SCHEMAS[0], 3, sampling=Sampling(seed=8))
        for _ in range(steps):
            room.step()
        room.read()
        room.engine.park("held")  # pyright: ignore[reportArgumentType]
        for _ in range(5):
            room.step()
        room.engine.join("held")  # pyright: ignore[reportArgumentType]
        room.run()

        assert room.drawn["held"] == alone.drawn["held"]
        assert room.drawn["free"] == model.says(prompt(1, 9), 70)


def test_cancelled_and_cut(llama: Model) -> None:
    """Rows that leave in mid-answer take their grammar with them, and the others keep theirs."""
    room = Room(llama)
    for i, schema in enumerate(SCHEMAS):
        room.start_constrained(f"held {i}", schema, i)
    room.start("cut", prompt(7, 8), max_tokens=4, matcher=schema_matcher(SCHEMAS[0]))
    for _ in range(3):
        room.step()
    room.leave("held 1")
    room.run()

    assert len(room.drawn["cut"]) == 4
    for i in (0, 2, 3):
        Draft202012Validator(SCHEMAS[i]).validate(room.value(f"held {i}"))


def test_logprobs_are_the_models(llama: Model) -> None:
    """Of the drawn token under the unmodified model: the first ones are those of the free row beside it."""
    room = Room(llama)
    room.start("held", prompt(2, 9), max_tokens=30, top_logprobs=3, matcher=schema_matcher(SCHEMAS[1]))
    room.start("free", prompt(2, 9), max_tokens=1, top_logprobs=3)
    room.run()

    held, free = room.logprobs["held"], room.logprobs["free"]
    assert len(held) == len(room.drawn["held"])
    assert [top.token for top in held[0].top] == [top.token for top in free[0].top]
    assert [top.logprob for top in held[0].top] == pytest.approx([top.logprob for top in free[0].top])  # pyright: ignore[reportUnknownMemberType]
    assert any(step.chosen.logprob < step.top[-1].logprob for step in held)


def test_a_choice_takes_few_steps(llama: Model) -> None:
    """The end is forced as soon as nothing else may follow."""
    room = Room(llama)
    matcher = COMPILER.compile(grammar(OneOf(options=("yes", "no")), None, None, {}))
    room.start("held", prompt(2, 9), max_tokens=30, matcher=matcher)
    room.run()

    *said, end = room.drawn["held"]
    assert TOKENIZER.decode(said) in ("yes", "no")
    assert end == END_ID


def test_free_rows_pay_nothing(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a constrained row no mask is made, and the next step is launched before the last is read: but for a first
    token, which somebody waits for."""
    made: list[Any] = []
    monkeypatch.setattr("worker.mlx_engine.allowed_tokens", lambda *args: made.append(args))
    order: list[str] = []
    room = Room(llama)
    room.start("free", prompt(1, 9), max_tokens=6)
    room.step()
    monkeypatch.setattr(room.engine, "_draw", _noting(order, "launched", room.engine._draw))
    monkeypatch.setattr(room.engine, "_read", _noting(order, "read", room.engine._read))
    for _ in range(4):
        room.step()

    assert order == ["read", *["launched", "read"] * 3]
    assert made == []


def _noting(order: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        order.append(name)
        return call(*args)

    return noted
