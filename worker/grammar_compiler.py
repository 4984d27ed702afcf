"""llguidance: grammar text → a row's matcher, within limits of time and memory. Used on the text thread."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from worker.constrained import TokenizerUnsupported
from worker.grammars import GrammarRefused

log = structlog.get_logger()

_REMEMBERED_GRAMMARS = 32
_REASON_CHARACTERS = 300
_TRIAL_TOKENS = 24
_SHOWN_PLACE = re.compile(r"\s*(\d+ \||\^)")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


def _limits() -> LLParserLimits:
    """A tenth or so of what llguidance would allow: a pattern such as ((a{1000}){1000}){1000} then ends in 0.1 s and
    some 10 MB, not in 1 s and 200 MB; sixty objects with formats, patterns and enums stay far below.

    Errors are not verbose: those would quote the grammar and the answer.
    """
    return LLParserLimits(
        initial_lexer_fuel=100_000, max_grammar_size=50_000, max_lexer_states=50_000, verbose_errors=False
    )


class TokenMatcher:
    """See `worker.sequence.Matcher`. Whatever befalls the grammar, some token may always follow: its end."""

    def __init__(self, matcher: LLMatcher, end_mask: bytes) -> None:
        self._matcher = matcher
        self._end_mask = end_mask
        self._is_lost = False

    @property
    def binds(self) -> bool:
        return True

    def consume(self, token_id: int) -> None:
        # Behind the end only ends may come, which are no news; and what was lost stays so.
        if not self._is_lost and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def next_mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and not self._is_lost:
            # Its message may quote the grammar, and with it the client.
            log.warning("grammar_lost", reason=self._matcher.stop_reason())
            self._is_lost = True
        return self._end_mask if self._is_lost or mask.count(0) == len(mask) else mask


class GrammarCompiler:
    """Holds the vocabulary as llguidance wants it, built at the first need, and the latest grammars."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, end_token_ids: Iterable[int]) -> None:
        """`tokenizer` is the Hugging Face one, `vocabulary_size` the width of the logits: what lies behind the
        tokenizer's own tokens is never allowed."""
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_token_ids = sorted(token for token in end_token_ids if 0 <= token < vocabulary_size)
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        ends = bytearray(-(-vocabulary_size // 32) * 4)
        for token in self._end_token_ids:
            ends[token // 8] |= 1 << token % 8
        self._end_mask = bytes(ends)

    @property
    def is_usable(self) -> bool:
        """Whether anything can be compiled, as far as that is known before the vocabulary is built."""
        return _is_fast(self._tokenizer) and bool(self._end_token_ids)

    def special_ids(self, markers: Iterable[str]) -> dict[str, int]:
        """Those of the markers that are one special token, with its id. Raises TokenizerUnsupported."""
        vocabulary = self._built()
        ids = {marker: self._tokenizer.backend_tokenizer.token_to_id(marker) for marker in markers}
        return {
            marker: token for marker, token in ids.items() if token is not None and vocabulary.is_special_token(token)
        }

    def compile(self, grammar: str) -> TokenMatcher:
        """A matcher at the grammar's start. Raises GrammarRefused, TokenizerUnsupported."""
        matcher = self._known.get(grammar)
        if matcher is None:
            matcher = self._checked(grammar)
            self._known[grammar] = matcher
            if len(self._known) > _REMEMBERED_GRAMMARS:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return TokenMatcher(matcher.deep_copy(), self._end_mask)

    def _checked(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._built(), grammar, log_level=0, limits=_limits())
        trial = matcher if matcher.is_error() else _tried(matcher)
        if trial.is_error():
            raise GrammarRefused(_reason(trial))
        return matcher

    def _built(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._vocabulary_size, self._end_token_ids)
        return self._vocabulary


def _tried(matcher: LLMatcher) -> LLMatcher:
    """A copy that went some tokens ahead: what explodes, or allows nothing, is often found out only when it runs."""
    matcher.compute_bitmask()  # the first is the dearest, and copies need not make it again
    trial = matcher.deep_copy()
    for _ in range(_TRIAL_TOKENS):
        mask = int.from_bytes(trial.compute_bitmask(), "little")
        if mask == 0 or trial.is_stopped():
            break
        trial.consume_token((mask & -mask).bit_length() - 1)
    return trial


def _vocabulary(tokenizer: Any, vocabulary_size: int, end_token_ids: Sequence[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    if not _is_fast(tokenizer):
        raise TokenizerUnsupported("this model has no fast tokenizer, which constrained output needs")
    if not end_token_ids:
        raise TokenizerUnsupported("this model's folder names no end token, which constrained output needs")
    try:
        return from_tokenizer(tokenizer, n_vocab=vocabulary_size, eos_token=list(end_token_ids))
    except Exception as why:
        log.warning("no_constrained_output", error=type(why).__name__, reason=str(why)[:_REASON_CHARACTERS])
        raise TokenizerUnsupported("constrained output cannot read this model's kind of tokenizer") from why


def _is_fast(tokenizer: Any) -> bool:
    return isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer)


def _reason(matcher: LLMatcher) -> str:
    """What is wrong with the grammar, in one line. Only its own author reads this."""
    # Lines that show where in the document it is would show ours around the client's.
    lines = [line for line in matcher.get_error().splitlines() if not _SHOWN_PLACE.match(line)]
    said = _PLACE.sub("", " ".join(" ".join(lines).replace("<non-verbose/>", "").split()))
    if not said or said.startswith("NoExtension"):
        return "no answer can keep to it"
    return said[:_REASON_CHARACTERS]
