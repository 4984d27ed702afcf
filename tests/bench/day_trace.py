# pyright: basic
"""A day of requests, made up and the same for a seed: people who chat, agents with long prefixes, batch work.

From 08:00 on: people chat until 20:00, agents call with prefixes of 20,000 to 50,000 tokens (hot but for the first call
of a session), somebody has batch requests by day, and at 20:00 a batch of thousands comes in. Who asks keeps to one
model; some models are asked more than others, as the n-th word of a language is.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.sequence import Lane

_DAY_SECONDS = 12 * 3600


@dataclass(order=True)
class Arrival:
    """`kind` is what it is, `lane` what it asks as. It names a model by its number."""

    at: float
    name: str = field(compare=False)
    kind: Lane = field(compare=False)
    lane: Lane = field(compare=False)
    tenant: str = field(compare=False)
    prompt_tokens: int = field(compare=False)
    cached_tokens: int = field(compare=False)
    answer_tokens: int = field(compare=False)
    model: int = field(compare=False, default=0)


def day(hours: float, clients: int, models: int, seed: int) -> list[Arrival]:
    """Of `clients`, eight in eleven are people and three are agents; batch work grows with their number."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    end = hours * 3600
    agents = round(clients * 3 / 11)
    weights = [1 / (model + 1) for model in range(models)]

    def some_model() -> int:
        return draw.choices(range(models), weights)[0] if models > 1 else 0

    def poisson(mean_seconds: float, start: float, until: float) -> Iterator[float]:
        at = start + draw.expovariate(1 / mean_seconds)
        while at < min(until, end):
            yield at
            at += draw.expovariate(1 / mean_seconds)

    def add(kind: str, lane: Lane, tenant: str, model: int, at: float, tokens: tuple[int, int, int]) -> None:
        prompt, cached, answer = tokens
        cached = min(cached, prompt - 1)
        arrivals.append(Arrival(at, f"{kind}{len(arrivals)}", lane, lane, tenant, prompt, cached, answer, model))

    for person in range(clients - agents):
        history, model = 0, some_model()
        for at in poisson(240, 0, _DAY_SECONDS):
            history = 0 if draw.random() < 0.2 else history
            question = int(draw.lognormvariate(4, 1)) + 5
            answer = min(800, int(draw.lognormvariate(5, 0.7)) + 5)
            add("chat", Lane.INTERACTIVE, f"p{person}", model, at, (history + question, history, answer))
            history += question + answer
    for agent in range(agents):
        model = some_model()
        for session in poisson(5400, 0, _DAY_SECONDS):
            at, held = session, 0
            prompt = draw.randrange(20_000, 50_000)
            for _ in range(draw.randrange(10, 30)):
                answer = draw.randrange(30, 400)
                add("agent", Lane.STANDARD, f"a{agent}", model, at, (prompt, held, answer))
                held = prompt + answer
                prompt = held + draw.randrange(100, 2500)
                at += draw.uniform(10, 60)
    scale = clients / 11
    for at in sorted(_DAY_SECONDS + draw.uniform(0, 600) for _ in range(round(1500 * scale))):
        if at < end:
            tokens = draw.randrange(200, 3000), 0, draw.randrange(50, 300)
            add("batch", Lane.BATCH, "night", some_model(), at, tokens)
    # Somebody's batch by day, too: the case that classes are for.
    for at in poisson(180 / scale, 3600, 10 * 3600):
        tokens = draw.randrange(500, 6000), 0, draw.randrange(50, 300)
        add("batch", Lane.BATCH, "day", some_model(), at, tokens)
    return sorted(arrivals)
