"""Each reason has its case, and whatever happened the explanation adds up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.explain import WORKER_REASONS, Explanation, TierRange, explain
from gateway.request_ring import RequestRecord
from protocol.generation import CacheReport, ChatPrompt, TokenPrompt
from protocol.tools import Tool
from tests.gateway.explained import chat, finished, ram

LONG = "You are careful. " * 40
FRAME = chat(LONG, "the first question")
NEXT = chat(LONG, "the first question", "an answer", "the second question")


def check(record: RequestRecord, *earlier: RequestRecord) -> Explanation:
    answer = explain(record, earlier)
    assert answer.reason_text
    assert answer.compared_with is None or answer.reason != "first_request"
    return answer


def test_the_first_request_has_nothing_to_compare_with() -> None:
    answer = check(finished(FRAME, cache=ram(0, "absent")))
    assert (answer.reason, answer.compared_with) == ("first_request", None)
    assert answer.tiers == (TierRange(from_token=0, to_token=answer.prompt_tokens, tier="none"),)


def test_a_whole_hit_needs_no_reason() -> None:
    """The last token is computed always."""
    earlier = finished(FRAME)
    answer = check(finished(FRAME, cache=ram(earlier.prompt_tokens - 1)), earlier)
    assert (answer.reason, answer.compared_with) == ("reused", earlier.request_id)
    assert answer.first_divergent_message is None
    assert answer.first_divergent_token is None
    assert [part.tier for part in answer.tiers] == ["ram", "none"]


def test_a_conversation_that_went_on() -> None:
    """What is new is no miss; it says where the new part begins."""
    earlier = finished(FRAME)
    answer = check(finished(NEXT, cache=ram(earlier.prompt_tokens)), earlier)
    assert answer.reason == "extended"
    assert answer.first_divergent_message is not None
    assert (answer.first_divergent_message.index, answer.first_divergent_message.role) == (2, "assistant")


def test_another_system_prompt() -> None:
    earlier = finished(FRAME)
    answer = check(finished(chat("Be short. " + LONG, "the first question"), cache=ram(0, "absent")), earlier)
    assert answer.reason == "system_changed"
    assert answer.first_divergent_message is not None
    assert answer.first_divergent_message.index == 0
    assert answer.first_divergent_token == (0, 16)


def test_another_message_names_it_and_its_grain() -> None:
    earlier = finished(NEXT)
    record = finished(
        chat(LONG, "the first question", "a mended answer", "the second question"), cache=ram(0, "absent")
    )
    shared = (len("<s>" + LONG + "<u>the first question<a>a")) // 16 * 16
    record = replace(record, cache=ram(shared, "absent"))
    answer = check(record, earlier)
    assert answer.reason == "messages_changed"
    assert answer.first_divergent_message is not None
    assert (answer.first_divergent_message.index, answer.first_divergent_message.role) == (2, "assistant")
    assert answer.first_divergent_token == (shared, shared + 16)
    assert "message 2 (assistant)" in answer.reason_text


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [("Today is 2026-01-12. ", "Today is 2026-01-13. ", "a date"), ("Run 1. ", "Run 2. ", "a number")],
)
def test_a_frame_that_differs_only_in_something_volatile(one: str, other: str, word: str) -> None:
    """K08: it is named, with the advice."""
    earlier = finished(chat(one + LONG, "question"))
    answer = check(finished(chat(other + LONG, "question"), cache=ram(0, "absent")), earlier)
    assert answer.reason == "volatile"
    assert word in answer.reason_text
    assert "move that to the end" in answer.reason_text


def test_a_volatile_text_prompt_is_named_too() -> None:
    """The legacy route has no messages, and no index of one."""
    earlier = finished("At 10:00 " + LONG)
    answer = check(finished("At 10:01 " + LONG, cache=ram(0, "absent")), earlier)
    assert (answer.reason, answer.first_divergent_message) == ("volatile", None)


def test_other_template_arguments_make_another_prompt() -> None:
    """The messages are equal and the chain is not."""
    thinking = ChatPrompt(messages=FRAME.messages, template_arguments={"enable_thinking": True})
    answer = check(finished(thinking, cache=ram(0, "absent")), finished(FRAME))
    assert (answer.reason, answer.first_divergent_message) == ("rendering_changed", None)
    assert answer.first_divergent_token == (0, 16)


@pytest.mark.parametrize("prompt", [FRAME, NEXT, chat(LONG, "another question")])
def test_other_tools_are_named(prompt: ChatPrompt) -> None:
    """Whatever the conversation does behind them, since they stand in front of it; a system prompt that changed too is
    named before them."""
    tool = Tool(name="look")
    earlier = finished(FRAME)
    answer = check(finished(replace(prompt, tools=(tool,)), cache=ram(0, "absent")), earlier)
    assert answer.reason == "tools_changed"
    both = replace(chat("Be short. " + LONG, "the first question"), tools=(tool,))
    assert check(finished(both, cache=ram(0, "absent")), earlier).reason == "system_changed"


def test_another_model_and_another_salt() -> None:
    """Neither shares blocks with the earlier request, and it is named as the reason."""
    answer = check(finished(FRAME, model="other", cache=ram(0, "absent")), finished(FRAME))
    assert answer.reason == "model_changed"
    answer = check(finished(FRAME, scope=b"narrowed", cache=ram(0, "absent")), finished(FRAME))
    assert answer.reason == "scope"


def test_a_salt_is_named_although_an_unrelated_request_used_it_too() -> None:
    """What has more in common is what it is compared with."""
    unrelated = finished(chat("Something else.", "else"), scope=b"narrowed")
    earlier = finished(FRAME)
    answer = check(finished(FRAME, scope=b"narrowed", cache=ram(0, "absent")), earlier, unrelated)
    assert (answer.reason, answer.compared_with) == ("scope", earlier.request_id)


@pytest.mark.parametrize(
    ("incarnation", "reused", "reason"), [(2, 0, "restarted"), (1, 0, "evicted"), (1, 512, "below_block")]
)
def test_a_prefix_that_was_there_and_is_no_more(incarnation: int, reused: int, reason: str) -> None:
    """More is in common than was reused: a restart, an eviction, or only whole blocks were left."""
    earlier = finished(NEXT)
    assert earlier.prompt_tokens - 512 > 32
    record = finished(NEXT, incarnation=incarnation, cache=ram(reused, "absent"))
    assert check(record, earlier).reason == reason


@pytest.mark.parametrize("reason", sorted(set(WORKER_REASONS) - {"absent"}))
def test_what_the_worker_says_goes_before_what_is_guessed(reason: str) -> None:
    """It knows; and each of its reasons has words for people."""
    answer = check(finished(FRAME, incarnation=2, cache=ram(0, reason)), finished(FRAME))
    assert (answer.reason, answer.reason_text) == (reason, WORKER_REASONS[reason])


def test_a_reason_of_a_newer_worker_is_passed_on() -> None:
    answer = check(finished(FRAME, cache=ram(0, "comet")), finished(FRAME))
    assert (answer.reason, answer.reason_text) == ("comet", "the model's process says: comet")


def test_the_terms_of_restore_or_recompute_are_passed_on() -> None:
    """Both, as the worker weighed them."""
    report = CacheReport(
        disk_tokens=256,
        restored_bytes=9,
        restore_seconds=0.5,
        expected_restore_seconds=0.4,
        expected_compute_seconds=8.0,
    )
    answer = check(finished(FRAME, cache=report), finished(FRAME))
    assert (answer.restored_bytes, answer.restore_seconds) == (9, 0.5)
    assert (answer.expected_restore_seconds, answer.expected_compute_seconds) == (0.4, 8.0)
    assert [part.tier for part in answer.tiers] == ["disk", "none"]


texts = st.text(alphabet="ab1-:", max_size=60)
prompts = st.one_of(
    st.lists(texts, min_size=1, max_size=4).map(lambda contents: chat(*contents)),
    texts,
    st.lists(st.integers(1, 3), max_size=60).map(lambda ids: TokenPrompt(token_ids=tuple(ids))),
)
reports = st.builds(
    CacheReport,
    ram_tokens=st.integers(0, 300),
    disk_tokens=st.integers(0, 300),
    miss_reason=st.sampled_from(["", *WORKER_REASONS, "comet"]),
)
records = st.builds(
    finished,
    prompts,
    cache=reports,
    scope=st.sampled_from([b"a", b"b"]),
    model=st.sampled_from(["m", "n"]),
    incarnation=st.integers(1, 2),
    chain=st.sampled_from([None, ()]),
)


@given(records, st.lists(records, max_size=5))
def test_every_explanation_adds_up(record: RequestRecord, earlier: list[RequestRecord]) -> None:
    """Tiers cover the prompt without gap or overlap; what is compared with is one of the earlier requests; the
    divergence lies behind what is in common, inside the prompt."""
    answer = check(record, *earlier)
    edges = [(part.from_token, part.to_token) for part in answer.tiers]
    assert [0, *[to for _, to in edges]] == [*[from_ for from_, _ in edges], answer.prompt_tokens]
    computed = sum(part.to_token - part.from_token for part in answer.tiers if part.tier == "none")
    assert answer.cached_tokens + computed == answer.prompt_tokens
    assert answer.compared_with in {None, *(other.request_id for other in earlier)}
    if answer.first_divergent_token is not None:
        start, end = answer.first_divergent_token
        assert answer.common_tokens == start < end <= answer.prompt_tokens
        assert end - start <= 16
    if answer.first_divergent_message is not None:
        mark = record.messages[answer.first_divergent_message.index]
        assert mark.role == answer.first_divergent_message.role
