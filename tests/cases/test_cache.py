"""Field cases of the prefix cache (K) through the running service, on a model whose words depend on its cache."""
# pyright: basic

import concurrent.futures
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from protocol.block_file import parse_metadata
from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS
from tests.fakes.http_answers import COMPLETIONS, Answer, ask_stream, ask_whole
from tests.fakes.live_service import LiveService, live_service, until
from tests.fakes.ordinary_rights import files_can_be_forbidden
from tests.fakes.tiny_llama import make_tiny_llama

MODEL = "tiny"


@pytest.fixture(scope="session")
def tiny_llama(script_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(script_model, tmp_path_factory.mktemp("models") / "tiny")


def prompt_of(tokens: int, *, seed: int) -> list[int]:
    """Ordinary token ids, different for every seed from the first one on."""
    return random.Random(seed).choices(range(33, 93), k=tokens)


def request(prompt: Sequence[int], max_tokens: int = 12) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}


def complete(client: httpx.Client, prompt: Sequence[int]) -> Answer:
    answer = ask_whole(client, request(prompt), path=COMPLETIONS)
    assert (answer.status, answer.completion_tokens) == (200, 12), answer
    assert answer.prompt_tokens == len(prompt)
    return answer


def block_files(service: LiveService) -> set[Path]:
    """Published blocks. A staged one may be whole, and is gone from there the next moment."""
    files = Path(service.settings.cache.directory).rglob("*.safetensors")
    return {path for path in files if "staging" not in path.parts and _is_whole(path)}


def _is_whole(path: Path) -> bool:
    try:
        with safe_open(path, "np") as file:
            return bool(file.metadata())
    except Exception:  # noqa: BLE001  a file that is being written or moved is not one yet
        return False


LENGTHS = (1, 2, 255, 256, 257, 511, 512, 513)


def test_k01_the_identical_request(tiny_llama: Path) -> None:
    """K01: asked again and again, whole and as a stream, then again after a restart, a prompt of any length gets the
    same greedy text; at least its last token is computed; all the rest is reused, from disk up to its grain."""
    prompts = {length: prompt_of(length, seed=length) for length in LENGTHS}
    with live_service({MODEL: tiny_llama}) as service:
        texts: dict[int, str] = {}
        with service.client() as client:
            for length, prompt in prompts.items():
                cold = complete(client, prompt)
                assert cold.cached_tokens == 0
                texts[length] = cold.text
                for _ in range(2):
                    again = complete(client, prompt)
                    assert (again.text, again.cached_tokens) == (cold.text, length - 1)
                assert ask_stream(client, request(prompt), path=COMPLETIONS).text == cold.text
        assert len(set(texts.values())) == len(texts), "the model says the same for every prompt: nothing is proved"
        service.stop()

        service.start()
        with service.client() as client:
            for length, prompt in prompts.items():
                restored = complete(client, prompt)
                assert restored.text == texts[length], length
                assert (length - 1) // GRAIN_TOKENS * GRAIN_TOKENS <= restored.cached_tokens < length, length


def test_k02_a_hit_says_what_a_miss_says(tiny_llama: Path) -> None:
    """K02: cold, after a hit, and after a hit while other rows decode, a prompt gets the same greedy text; a salt
    of the client's own keeps it from the others' prefix."""
    shared = prompt_of(600, seed=99)
    prompts = [[*shared, *prompt_of(20 + 7 * number, seed=200 + number)] for number in range(4)]
    with live_service({MODEL: tiny_llama}) as service, service.client() as client:
        cold = [
            ask_whole(client, {**request(prompt, 40), "cache_salt": f"salt {number}"}, path=COMPLETIONS)
            for number, prompt in enumerate(prompts)
        ]
        assert [answer.cached_tokens for answer in cold] == [0] * 4
        assert len({answer.text for answer in cold}) == 4
        warm = [ask_whole(client, request(prompt, 40), path=COMPLETIONS) for prompt in prompts]
        assert [answer.cached_tokens for answer in warm] == [0, 600, 600, 600]
        assert [answer.text for answer in warm] == [answer.text for answer in cold]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            together = list(
                threads.map(lambda prompt: ask_stream(client, request(prompt, 40), path=COMPLETIONS), prompts)
            )
        assert [answer.text for answer in together] == [answer.text for answer in cold]
        assert all(answer.cached_tokens >= 600 for answer in together)


# --- K06 -------------------------------------------------------------------------------------------------------------


def truncate(chain: list[Path]) -> None:
    data = chain[2].read_bytes()
    chain[2].write_bytes(data[:-1])


def flip(chain: list[Path]) -> None:
    data = bytearray(chain[2].read_bytes())
    data[-100] ^= 1
    chain[2].write_bytes(data)


def flip_header(chain: list[Path]) -> None:
    data = bytearray(chain[2].read_bytes())
    data[20] ^= 1
    chain[2].write_bytes(data)


def empty(chain: list[Path]) -> None:
    chain[2].write_bytes(b"")


def delete(chain: list[Path]) -> None:
    chain[2].unlink()


def swap(chain: list[Path]) -> None:
    """With the next one: each file is whole, and is not what its name says."""
    one, two = chain[2].read_bytes(), chain[3].read_bytes()
    chain[2].write_bytes(two)
    chain[3].write_bytes(one)


def forbid(chain: list[Path]) -> None:
    chain[2].chmod(0)


def make_directory(chain: list[Path]) -> None:
    chain[2].unlink()
    chain[2].mkdir()


DAMAGES: tuple[Callable[[list[Path]], None], ...] = (
    truncate,
    flip,
    flip_header,
    empty,
    delete,
    swap,
    make_directory,
    *((forbid,) if files_can_be_forbidden() else ()),
)


def test_k06_damaged_blocks_are_misses(tiny_llama: Path) -> None:
    """K06: whatever happens to a block's file, the prefix before it is still used, the text is the cold one, the
    block is dropped and written anew; never an error, never a crash."""
    prompts = [prompt_of(4 * BLOCK_TOKENS + 6, seed=1000 + number) for number in range(len(DAMAGES))]
    with live_service({MODEL: tiny_llama}, settings_toml='cache.persist = "through"', rights="ordinary") as service:
        texts: list[str] = []
        chains: list[list[Path]] = []
        with service.client() as client:
            for prompt in prompts:
                before = block_files(service)
                texts.append(complete(client, prompt).text)
                chains.append(_chain(service, before))
        worker = service.worker_pid(MODEL)
        service.stop()
        for damage, chain in zip(DAMAGES, chains, strict=True):
            damage(chain)

        service.start()
        with service.client() as client:
            for damage, prompt, text in zip(DAMAGES, prompts, texts, strict=True):
                answer = complete(client, prompt)
                assert (answer.text, answer.cached_tokens) == (text, 2 * BLOCK_TOKENS), damage.__name__
                assert complete(client, prompt).text == text
        assert service.worker_pid(MODEL) != worker
        assert service.model(MODEL).restarts == 0
        service.stop()

        service.start()
        with service.client() as client:
            for damage, prompt, text in zip(DAMAGES, prompts, texts, strict=True):
                answer = complete(client, prompt)
                assert answer.text == text
                assert answer.cached_tokens >= 4 * BLOCK_TOKENS, f"{damage.__name__}: not written anew"
        assert "level=error" not in service.log


def _chain(service: LiveService, before: set[Path]) -> list[Path]:
    """The four whole blocks that one prompt has left on disk, first to last."""

    def fresh() -> list[Path]:
        whole: dict[bytes, Path] = {}
        for path in block_files(service) - before:
            with safe_open(path, "np") as file:
                metadata = parse_metadata(file.metadata())
            if len(metadata.grains) * GRAIN_TOKENS == BLOCK_TOKENS:
                whole[metadata.parent] = path
        keys = {path: _key(path) for path in whole.values()}
        chain: list[Path] = []
        parent = b""
        while parent in whole:
            chain.append(whole[parent])
            parent = keys[chain[-1]]
        return chain if len(chain) == 4 else []

    return until("four blocks are on disk", fresh)


def _key(path: Path) -> bytes:
    with safe_open(path, "np") as file:
        return parse_metadata(file.metadata()).key
