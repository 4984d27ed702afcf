"""K05 through the running service: several models write blocks at once, and the store dies in the middle of it."""
# pyright: basic

import contextlib
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.fakes.http_answers import COMPLETIONS, ask_whole
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.tiny_llama import make_tiny_llama

PROMPT_TOKENS = 700


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(33, 93), k=PROMPT_TOKENS)


def say(service: LiveService, model: str, prompt: Sequence[int]) -> tuple[str, int]:
    """What a model says to a prompt, and how much of that it did not compute."""
    request = {"model": model, "prompt": list(prompt), "max_tokens": 8, "temperature": 0}
    with service.client() as client:
        answer = ask_whole(client, request, path=COMPLETIONS)
    assert (answer.status, answer.completion_tokens) == (200, 8), answer
    return answer.text, answer.cached_tokens


def leave_early(service: LiveService, model: str, prompt: Sequence[int]) -> None:
    """Ask, and hang up while the answer comes, so that its blocks are written for nobody."""
    request = {"model": model, "prompt": list(prompt), "max_tokens": 500, "temperature": 0, "stream": True}
    with service.client() as client, client.stream("POST", COMPLETIONS, json=request) as response:
        next(response.iter_lines())


def staged(service: LiveService) -> list[Path]:
    folders = [path for path in Path(service.settings.cache.directory).rglob("*") if path.name == "staging"]
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_k05_writers_do_each_other_no_harm(script_model: Path, tmp_path: Path) -> None:
    """K05: with two models that write, a third that starts, clients that leave and a power cut in the middle, every
    model says afterwards what it said before; the first two find their blocks again, half-written files are gone, and
    nobody took another's blocks for stale."""
    models = {name: make_tiny_llama(script_model, tmp_path / name, seed=seed) for seed, name in enumerate("abc")}
    asked = [(name, seed) for seed in range(4) for name in "ab"]
    with live_service(models, settings_toml='[cache]\npersist = "through"\n') as service:
        with ThreadPoolExecutor(8) as pool:
            leaving = [pool.submit(leave_early, service, name, prompt_of(100 + seed)) for name, seed in asked[:4]]
            said = dict(
                zip(asked, pool.map(lambda one: say(service, one[0], prompt_of(one[1]))[0], asked), strict=True)
            )
            for left in leaving:
                left.result()
        until("something is durable", lambda: service.stored_blocks() >= 4, seconds=60)
        with ThreadPoolExecutor(8) as pool:
            late = [pool.submit(say, service, name, prompt_of(200 + seed)) for name, seed in [*asked, ("c", 0)]]
            enough = service.stored_blocks() + 4
            until(
                "more is being written",
                lambda: service.stored_blocks() >= enough or all(future.done() for future in late),
                seconds=60,
            )
            service.kill_everything()
            for future in late:
                with contextlib.suppress(httpx.HTTPError, AssertionError):  # these clients lost their server
                    future.result()
        some = next(Path(service.settings.cache.directory).rglob("*.safetensors"))
        folder = next(path for path in Path(service.settings.cache.directory).rglob("staging"))
        shutil.copyfile(some, folder / "torn.tmp.safetensors")
        with (folder / "torn.tmp.safetensors").open("r+b") as torn:
            torn.truncate(some.stat().st_size // 2)

        service.start()
        third, _ = say(service, "c", prompt_of(0))  # starts and writes while the others' blocks are looked up
        again = {one: say(service, one[0], prompt_of(one[1])) for one in asked}
        assert {one: text for one, (text, _) in again.items()} == said
        for name in "ab":
            assert any(cached > 0 for (model, _), (_, cached) in again.items() if model == name), name
        assert say(service, "c", prompt_of(0))[0] == third
        until("nothing is half-written", lambda: not staged(service))
        assert service.stored_blocks() >= 4
