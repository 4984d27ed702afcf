"""Text out of tokens: whole characters only, nothing lost, whatever the tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.fakes.script_model import SCRIPTS, said_by
from worker.detokenizer import Detokenizer, detokenizer_maker, token_bytes


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def script_tokenizer(script_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(script_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback_tokenizer() -> Tokenizer:
    """The SentencePiece way of Llama 2 and Gemma: `▁` for a space, and `<0xE6>` for a byte that no piece holds."""
    words = ["▁", "▁the", "▁a", "b", "c", "▁東", "é", "�"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: len(vocabulary) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class SlowTokenizer:
    """A tokenizer without a Rust half."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def fast(backend: Tokenizer) -> Detokenizer:
    return detokenizer_maker(Wrapped(backend))()


def slow(backend: Tokenizer) -> Detokenizer:
    return detokenizer_maker(SlowTokenizer(backend))()


def bytes_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The text, one token per byte."""
    vocabulary = tokenizer.get_vocab()
    if "<0x41>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
    return [tokenizer.encode(bytes([byte]).decode("latin1")).ids[-1] for byte in text.encode()]


@pytest.mark.parametrize("tag", ["SC01", "SC02", "SC04", "SC07"])
@pytest.mark.parametrize("kind", [fast, slow])
def test_scripts(script_tokenizer: Tokenizer, tag: str, kind: Callable[[Tokenizer], Detokenizer]) -> None:
    """B01: emoji and CJK cut inside a character come out whole, with no U+FFFD on the way."""
    vocabulary = script_tokenizer.get_vocab()
    by_bytes = {token_bytes_of(script_tokenizer, token): token for token in vocabulary.values()}
    token_ids = [by_bytes[piece_bytes(piece)] for piece in SCRIPTS[tag]]

    pieces = pieces_of(kind(script_tokenizer), token_ids)

    assert "".join(pieces) == said_by(tag)
    assert not any("�" in piece for piece in pieces)


def piece_bytes(piece: Any) -> bytes:
    return piece if isinstance(piece, bytes) else (piece if isinstance(piece, str) else piece.text).encode()


def token_bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    return token_bytes(Wrapped(tokenizer), token_id)


class Wrapped:
    """The two methods of a Hugging Face tokenizer that `token_bytes` asks."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def decode(self, token_ids: list[int]) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=False)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)


TEXT = "é 東京 👩‍🚀 \U0001f1eb\U0001f1f7 a"


@pytest.mark.parametrize("cut", range(len(TEXT.encode()) + 1))
def test_every_byte_boundary(byte_fallback_tokenizer: Tokenizer, cut: int) -> None:
    """One token per byte, ended anywhere: every character that is whole is there, a cut one is one or more U+FFFD."""
    token_ids = bytes_of(TEXT, byte_fallback_tokenizer)[:cut]
    whole = TEXT.encode()[:cut].decode(errors="ignore")

    for detokenizer in (fast(byte_fallback_tokenizer), slow(byte_fallback_tokenizer)):
        pieces = pieces_of(detokenizer, token_ids)
        assert "".join(pieces[:-1]) == whole
        assert set(pieces[-1]) <= {"�"}
        assert bool(pieces[-1]) == (len(whole.encode()) < cut)


def test_flush_starts_anew(script_tokenizer: Tokenizer) -> None:
    """Nothing of one flush comes again with the next."""
    half = script_tokenizer.token_to_id("æĿ")  # the first bytes of SC02
    for detokenizer in (fast(script_tokenizer), slow(script_tokenizer)):
        detokenizer.push(half)
        assert set(detokenizer.flush()) == {"�"}
        assert detokenizer.flush() == ""


@settings(max_examples=150)
@given(data=st.data())
@pytest.mark.parametrize("name", ["script_tokenizer", "smollm2_tokenizer", "byte_fallback_tokenizer"])
def test_nothing_is_lost(request: pytest.FixtureRequest, name: str, data: st.DataObject) -> None:
    """Joined pieces are the full decode, for any sequence of tokens, also ones that spell no text."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    size = tokenizer.get_vocab_size()
    # Byte tokens come first in all three: draw them often, to make half characters and invalid runs.
    token_ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, size - 1)), max_size=30))
    text = "".join(pieces_of(fast(tokenizer), token_ids))

    assert text == "".join(pieces_of(slow(tokenizer), token_ids))
    expected = tokenizer.decode(token_ids, skip_special_tokens=False)
    if name == "byte_fallback_tokenizer" and "�" in expected:
        # Its decoder takes back a good character when a bad byte follows; a stream cannot. DecodeStream raised here.
        assert len(text) <= len(expected)
    else:
        assert text == expected


def test_a_row_that_spells_no_character_costs_no_more_each_token(script_tokenizer: Tokenizer) -> None:
    """A client can make a model say half a character for ever; the window stays short all the same."""
    half = script_tokenizer.token_to_id("æĿ")
    longest = 0

    class Counting(SlowTokenizer):
        def decode(self, token_ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids)

    pieces = pieces_of(detokenizer_maker(Counting(script_tokenizer))(), [half] * 1000)

    assert "".join(pieces) == "�" * 1000
    assert longest <= 128


def test_token_ids_that_the_tokenizer_lacks_say_nothing(script_tokenizer: Tokenizer) -> None:
    """Logits are often wider than the vocabulary; drawing such a token must not end the worker."""
    beyond = script_tokenizer.get_vocab_size() + 3
    alpha = script_tokenizer.token_to_id("alpha")

    assert "".join(pieces_of(fast(script_tokenizer), [beyond, alpha, beyond, alpha])) == "alphaalpha"


def test_a_leading_space_is_kept(smollm2_tokenizer: Tokenizer) -> None:
    """A completion's first word often begins with one."""
    token_ids = smollm2_tokenizer.encode(" world is").ids

    assert "".join(pieces_of(fast(smollm2_tokenizer), token_ids)) == " world is"


def test_every_row_has_its_own(script_tokenizer: Tokenizer) -> None:
    """Half a character of one row never reaches another."""
    make = detokenizer_maker(Wrapped(script_tokenizer))
    one, other = make(), make()
    one.push(script_tokenizer.token_to_id("æĿ"))

    assert other.push(script_tokenizer.token_to_id("alpha")) == "alpha"


@pytest.mark.parametrize(
    ("name", "piece", "expected"),
    [
        ("script_tokenizer", "æĿ", b"\xe6\x9d"),
        ("script_tokenizer", "Ġbe", b" be"),
        ("script_tokenizer", "<think>", b"<think>"),
        ("byte_fallback_tokenizer", "<0xE6>", b"\xe6"),
        ("byte_fallback_tokenizer", "<0x41>", b"A"),
        ("byte_fallback_tokenizer", "▁東", " 東".encode()),
        ("byte_fallback_tokenizer", "�", "�".encode()),
    ],
)
def test_a_tokens_bytes(request: pytest.FixtureRequest, name: str, piece: str, expected: bytes) -> None:
    """Logprobs name a token by its bytes, also when they are half a character."""
    tokenizer: Tokenizer = request.getfixturevalue(name)

    assert token_bytes_of(tokenizer, tokenizer.token_to_id(piece)) == expected
