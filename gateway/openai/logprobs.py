"""Log probabilities in the words of OpenAI's two generation routes. Decides only."""

from collections.abc import Sequence

from gateway.openai.answers import LegacyLogprobsObject, TokenObject, TopToken
from protocol.generation import ChosenLogprob

_LOWEST_LOGPROB = -9999.0


def token_object(token: ChosenLogprob) -> TokenObject:
    """A drawn token of the chat route."""
    return TokenObject(
        token=token.chosen.token,
        bytes=list(token.chosen.token_bytes),
        logprob=_finite(token.chosen.logprob),
        top_logprobs=[
            TopToken(token=other.token, bytes=list(other.token_bytes), logprob=_finite(other.logprob))
            for other in token.top
        ],
    )


class Offsets:
    """Where tokens begin in the text, in characters. A token that begins inside a character counts as at that one."""

    def __init__(self) -> None:
        self._characters = 0

    def next(self, token_bytes: bytes) -> int:
        begins_inside = bool(token_bytes) and _is_continuation(token_bytes[0])
        offset = max(0, self._characters - 1) if begins_inside else self._characters
        self._characters += sum(not _is_continuation(byte) for byte in token_bytes)
        return offset


def legacy_logprobs(
    tokens: Sequence[ChosenLogprob], offsets: Offsets, top_logprobs: int | None
) -> LegacyLogprobsObject:
    """Of the legacy route: parallel lists."""
    return LegacyLogprobsObject(
        tokens=[token.chosen.token for token in tokens],
        token_logprobs=[_finite(token.chosen.logprob) for token in tokens],
        top_logprobs=[_legacy_top(token) for token in tokens] if top_logprobs else None,
        text_offset=[offsets.next(token.chosen.token_bytes) for token in tokens],
    )


def _legacy_top(token: ChosenLogprob) -> dict[str, float]:
    """The alternatives and, as OpenAI has it, always the drawn token too."""
    return {other.token: _finite(other.logprob) for other in (*token.top, token.chosen)}


def _finite(logprob: float) -> float:
    """JSON has no infinity, and clients' types no null here. OpenAI has this number in its place."""
    return max(_LOWEST_LOGPROB, logprob)


def _is_continuation(byte: int) -> bool:
    """Of UTF-8: a byte that begins no character."""
    return byte & 0b1100_0000 == 0b1000_0000
