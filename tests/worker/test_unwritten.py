"""Refused blocks: a miss is told why its prefix is not on disk, as long as that is so."""

import pytest

from protocol.ids import BlockKey
from worker.unwritten import Unwritten

BLOCK, GRAIN, OTHER = BlockKey(b"block"), BlockKey(b"grain"), BlockKey(b"other")


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("write_budget", "budget"),
        ("quota", "quota"),
        ("no_space", "no_space"),
        ("read_only", "read_only"),
        ("timeout", ""),
        ("forgotten", ""),
        ("", ""),
    ],
)
def test_a_refusal_is_told_in_the_words_of_explanations(refusal: str, told: str) -> None:
    """By the block's last grain, whatever stands around it. What passes by itself is not kept."""
    unwritten = Unwritten()
    unwritten.sent(BLOCK, GRAIN)
    unwritten.answered(BLOCK, refusal)

    assert unwritten.why([OTHER, GRAIN]) == told
    assert unwritten.why([OTHER]) == ""


@pytest.mark.parametrize("later", ["", "timeout"])
def test_a_later_answer_ends_it(later: str) -> None:
    """What was written in the end, or failed for another reason, was not refused any more."""
    unwritten = Unwritten()
    for refusal in ("write_budget", later):
        unwritten.sent(BLOCK, GRAIN)
        unwritten.answered(BLOCK, refusal)

    assert unwritten.why([GRAIN]) == ""


def test_only_what_was_sent_is_remembered_and_not_for_ever() -> None:
    """An answer too many changes nothing; the oldest refusals make room."""
    unwritten = Unwritten()
    unwritten.answered(BLOCK, "write_budget")
    assert unwritten.why([BLOCK]) == ""
    keys = [BlockKey(number.to_bytes(16, "big")) for number in range(9000)]
    for key in keys:
        unwritten.sent(key, key)
        unwritten.answered(key, "quota")

    assert unwritten.why(keys[:100]) == ""
    assert unwritten.why(keys[-1:]) == "quota"
