"""What a schema costs a token, and whether what it promises holds.

    python -m tests.bench.constrained_bench [--repeats N] [--tokens N] [--model FOLDER]

One real worker. Rows of the same length that are free, constrained, or half of each take turns in one run: a step's
time is that of the whole batch, so the halves show what constrained rows cost their free neighbours. Then eight mixed
rows run to their own ends: constrained ones are validated by a JSON-schema library, and the greedy text of the free
ones is compared with what they say alone.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from transformers import AutoTokenizer

from protocol.generation import Finished, FinishReason
from protocol.sampling import Sampling
from protocol.tools import JsonSchema
from tests.bench.measuring import print_head, print_table, spread
from tests.bench.servers import models_cache
from tests.processes.running_worker import WorkerProcess, gateway_environment, started
from worker import demo_model

Mix = Literal["free", "half", "constrained"]

CASES: tuple[tuple[int, Mix], ...] = ((1, "free"), (1, "constrained"), (8, "free"), (8, "half"), (8, "constrained"))

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["teacher", "student", "guest"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "address"],
    "additionalProperties": False,
}
ENDLESS = JsonSchema(text=json.dumps({"type": "array", "items": PERSON, "minItems": 1000}))
"""For rows that are timed: none ends before its tokens are drawn."""

ASKED = ["a person in Oslo", "somebody who teaches", "a guest", "a student of eighty", "me", "you", "a poet", "nobody"]


class BenchFailed(Exception):
    """A row ended badly. Says how."""


class Bench:
    """One worker and its questions."""

    def __init__(self, worker: WorkerProcess, special_ids: list[int]) -> None:
        self._worker = worker
        self._never_ends = Sampling(temperature=0.0, logit_bias=dict.fromkeys(special_ids, -100.0))
        self._asked = 0

    def step_seconds(self, rows: int, mix: Mix, tokens: int) -> float:
        """A decode step of this batch: of the row that joined last, since only then the batch is whole."""
        draws = random.SystemRandom()
        names: list[str] = []
        for row in range(rows):
            held = mix == "constrained" or (mix == "half" and row % 2 == 0)
            name = self._name()
            prompt = [draws.randrange(1000, 9000) for _ in range(12)]
            constraint = ENDLESS if held else None
            self._worker.generate(name, prompt, max_tokens=tokens, sampling=self._never_ends, constraint=constraint)
            names.append(name)
        seconds: list[float] = []
        for end in self._worker.ends(names).values():
            if not isinstance(end, Finished) or end.usage.completion_tokens != tokens:
                raise BenchFailed(f"a row ended with {end}")
            seconds.append(end.timings.decode_seconds / tokens)
        return min(seconds)

    def mixed(self, seed: int) -> tuple[int, int]:
        """Eight rows, half of them free: how many of each kept their promise."""
        free = {text: self._name() for text in ASKED[4:]}
        alone = {text: self._worker.ask(self._name(), text, max_tokens=40) for text in free}
        held = {text: self._name() for text in ASKED[:4]}
        for (free_text, free_name), (held_text, held_name) in zip(free.items(), held.items(), strict=True):
            self._worker.generate(free_name, free_text, max_tokens=40)
            sampling = Sampling(temperature=1.0, seed=seed)
            constraint = JsonSchema(text=json.dumps(PERSON))
            self._worker.generate(held_name, held_text, sampling=sampling, constraint=constraint)
        ends = self._worker.ends([*free.values(), *held.values()])
        valid = sum(_is_valid(ends[name], self._worker.text(name)) for name in held.values())
        return valid, sum(self._worker.text(name) == alone[text] for text, name in free.items())

    def _name(self) -> str:
        self._asked += 1
        return f"row {self._asked}"


def _is_valid(end: object, text: str) -> bool:
    if not isinstance(end, Finished) or end.reason is not FinishReason.STOP:
        return False
    try:
        Draft202012Validator(PERSON).validate(json.loads(text))
    except (ValidationError, json.JSONDecodeError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", type=Path, help="a model folder instead of SmolLM2-135M in float32")
    arguments = parser.parse_args()
    folder = arguments.model or demo_model.build(
        models_cache() / "smollm2-float32", dtype="float32", progress=lambda _: None
    )
    print_head(f"a decode step with and without a schema, model {folder.name}")
    special = list(AutoTokenizer.from_pretrained(str(folder)).all_special_ids)
    steps: dict[tuple[int, Mix], list[float]] = {case: [] for case in CASES}
    promises: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="mlxd") as directory:
        runtime_directory = Path(directory) / "run"
        runtime_directory.mkdir(mode=0o700)
        with started(runtime_directory, gateway_environment(Path(directory)), Path(directory)) as start:
            bench = Bench(start(folder, max_rows=8), special)
            bench.step_seconds(8, "half", 4)
            for repeat in range(arguments.repeats):
                for rows, mix in CASES:
                    steps[rows, mix].append(bench.step_seconds(rows, mix, arguments.tokens))
                promises.append(bench.mixed(repeat))
                print(f"repeat {repeat + 1} done", flush=True)
    table = [
        [
            f"{rows} rows, {mix}" if rows > 1 else f"1 row, {mix}",
            spread([1000 * second for second in seconds]).text(1),
            spread([1000 * (s - free) for s, free in zip(seconds, steps[rows, "free"], strict=True)]).text(1),
        ]
        for (rows, mix), seconds in steps.items()
    ]
    print_table("median (least-most)", ["batch", "ms a step", "ms more than free"], table)
    count = 4 * arguments.repeats
    valid, equal = (sum(values) for values in zip(*promises, strict=True))
    print(f"eight mixed rows: {valid} of {count} constrained answers are valid, {equal} of {count} free ones as alone")


if __name__ == "__main__":
    main()
