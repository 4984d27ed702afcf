"""Token ids → text, one token at a time, never half a character.

Bytes are held back until they are a whole character. `tokenizers.DecodeStream` does the same but raises on some
sequences of byte tokens, which would end the worker; mlx-lm's own detokenizers strip a leading space of the answer,
which a completion needs.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer

_LONGEST_WAIT_TOKENS = 64
"""Tokens that spell no character for so long never will; to wait on would decode an ever longer window."""


class Detokenizer(Protocol):
    """One row's detokenizer."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        ...

    def flush(self) -> str:
        """The rest at the row's end: U+FFFD for a character that never became whole."""
        ...


class SlowTokenizer(Protocol):
    """What a tokenizer without a Rust half offers."""

    def decode(self, token_ids: list[int]) -> str: ...


class WindowDetokenizer:
    """Decodes a short window twice, with and without the new token, and takes the difference."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        before = self._decode(self._window[: self._emitted])
        self._window.append(token_id)
        after = self._decode(self._window)
        is_unfinished = after.endswith("\ufffd") or len(after) <= len(before)
        if is_unfinished and len(self._window) - self._emitted < _LONGEST_WAIT_TOKENS:
            return ""
        # Keep what was just emitted as the context of the next token: word-start marks depend on their neighbour.
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._window[: self._emitted])
        after = self._decode(self._window)
        self._window, self._emitted = [], 0
        return after[len(before) :]


def whole_text_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids → text, special tokens included, for a Hugging Face tokenizer.

    Its Rust half, where there is one, decodes a window in about a microsecond.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=False)
    slow: SlowTokenizer = tokenizer
    return slow.decode


def detokenizer_maker(tokenizer: Any) -> Callable[[], Detokenizer]:
    """For a Hugging Face tokenizer."""
    decode = whole_text_decoder(tokenizer)
    return lambda: WindowDetokenizer(decode)


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes one token stands for, also when they are only a part of a character."""
    text: str = tokenizer.decode([token_id])
    if "\ufffd" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(piece, str):
        return text.encode()
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return text.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it prints, else the next from U+0100."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()
