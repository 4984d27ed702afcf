"""The ring: bounded in time, number and bytes; an owner's own; no text in it."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.request_ring import GRAIN_MARK_BYTES, RequestRing, common_grains, common_messages, common_tokens
from protocol.generation import ChatMessage, ChatPrompt
from tests.gateway.explained import chat, finished


def ring(**changes: float) -> RequestRing:
    bounds = {"keep_seconds": 60.0, "max_per_owner": 4, "max_bytes": 100_000, **changes}
    return RequestRing(
        keep_seconds=bounds["keep_seconds"],
        max_per_owner=int(bounds["max_per_owner"]),
        max_bytes=int(bounds["max_bytes"]),
    )


def test_no_text_is_kept() -> None:
    """S02: a record encodes to hashes and numbers."""
    record = finished(chat("the marker of my system", "the marker of my question"), scope=b"the marker of my scope")
    assert b"marker" not in msgspec.msgpack.encode(record)


def test_an_owner_finds_its_own_only_and_only_in_time() -> None:
    """Another owner's id is as unknown as one that never was."""
    kept = ring()
    record = finished("one", owner="alice", at=0.0)
    kept.add(record, now=0.0)
    assert kept.find("alice", record.request_id, now=60.0) == record
    assert kept.find("bob", record.request_id, now=60.0) is None
    assert kept.find("alice", record.request_id, now=60.1) is None
    assert len(kept) == 0
    assert kept.size_bytes == 0


@given(
    st.lists(st.tuples(st.sampled_from(["alice", "bob", "carol"]), st.integers(0, 300)), max_size=40),
    st.integers(1, 6),
    st.integers(2_000, 12_000),
)
def test_all_bounds_hold_and_the_newest_stay(
    requests: list[tuple[str, int]], max_per_owner: int, max_bytes: int
) -> None:
    """However requests come, the books add up, and what is kept of an owner are its last ones without a gap."""
    kept = ring(max_per_owner=max_per_owner, max_bytes=max_bytes)
    records = [finished("x" * length, owner=owner, at=float(at)) for at, (owner, length) in enumerate(requests)]
    for at, record in enumerate(records):
        kept.add(record, now=float(at))
        assert kept.size_bytes <= max_bytes
    now = float(len(records))
    found = [record for record in records if kept.find(record.owner, record.request_id, now=now)]
    assert kept.size_bytes == sum(record.size_bytes for record in found)
    for owner in ("alice", "bob", "carol"):
        mine = [record for record in records if record.owner == owner]
        still = [record for record in found if record.owner == owner]
        assert len(still) <= max_per_owner
        assert still == mine[len(mine) - len(still) :]
        if still:
            assert list(kept.before(still[-1])) == still[:-1]
    kept.forget_owner("alice")
    assert not [record for record in found if kept.find("alice", record.request_id, now=now)]


def test_with_no_time_to_keep_nothing_is_kept() -> None:
    """`keep_minutes = 0` switches it off."""
    off = ring(keep_seconds=0.0)
    off.add(finished("one"), now=0.0)
    assert len(off) == 0


@given(st.text(alphabet="ab", max_size=80), st.text(alphabet="ab", max_size=80))
def test_chains_share_what_their_texts_share(one: str, other: str) -> None:
    """To the grain: the halving search equals counting from the start."""
    first, second = finished(one), finished(other)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    assert common_tokens(first, second) == shared // 16 * 16
    assert common_grains(first.grains, second.grains) * GRAIN_MARK_BYTES <= len(first.grains)


def test_every_field_of_a_message_counts() -> None:
    """Equal words of another role, name or thought are another message."""
    plain = ChatMessage(role="user", content="hi")
    others = (
        ChatMessage(role="assistant", content="hi"),
        ChatMessage(role="user", content="hi", name="ann"),
        ChatMessage(role="assistant", content="hi", reasoning_content="hm"),
    )
    for other in others:
        pair = [finished(ChatPrompt(messages=(message,))) for message in (plain, other)]
        assert common_messages(*pair) == 0


def test_only_the_frame_is_looked_at_for_dates() -> None:
    """The system's messages and the one after them: the rest of a long conversation costs a hash each."""
    record = finished(chat("system", "first 1", "answer 1", "second 2"))
    assert [mark.head is not None for mark in record.messages] == [True, True, False, False]
