"""Digests name a prefix, all of it, and only to who knows the scope."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import BLOCK_TOKENS, GRAIN_TOKENS, BlockKey
from worker import hashing

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=100)


def grains(token_ids: list[int], *, fingerprint: str = "model", scope: bytes = b"") -> tuple[bytes, ...]:
    root = hashing.root(fingerprint, scope)
    return hashing.grains(root.secret, root.digest, token_ids)


def test_digests_outlive_this_process() -> None:
    """They are file names: another run, machine or release must compute the same."""
    root = hashing.root("model", b"scope")

    assert root.digest.hex() == "5829e131ef9aaa7f3dd6a9d711349943"
    assert hashing.grains(root.secret, root.digest, list(range(16)))[0].hex() == "165c334607ce0af1c43d7c1fcab525e4"


@given(TOKENS)
def test_one_digest_for_each_complete_grain(token_ids: list[int]) -> None:
    """Tokens beyond the last complete grain change nothing."""
    chain = grains(token_ids)

    assert len(chain) == len(token_ids) // GRAIN_TOKENS
    assert grains(token_ids[: len(chain) * GRAIN_TOKENS]) == chain
    assert all(len(digest) == 16 for digest in chain)
    assert len(set(chain)) == len(chain)


@given(TOKENS, TOKENS)
def test_equal_digests_mean_equal_tokens(first: list[int], second: list[int]) -> None:
    """Two chains agree exactly as far as the whole grains of their common prefix."""
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    agreed = sum(a == b for a, b in zip(grains(first), grains(second), strict=False))

    assert agreed == common // GRAIN_TOKENS


@given(
    st.lists(st.integers(0, 1000), min_size=GRAIN_TOKENS, max_size=64), st.binary(max_size=80), st.binary(max_size=80)
)
def test_scopes_never_meet(token_ids: list[int], one: bytes, other: bytes) -> None:
    """S04: equal prompts of two scopes share no digest."""
    if one != other:
        assert not set(grains(token_ids, scope=one)) & set(grains(token_ids, scope=other))


def test_models_never_meet() -> None:
    """K04: another fingerprint, another chain."""
    tokens = list(range(32))

    assert not set(grains(tokens, fingerprint="a")) & set(grains(tokens, fingerprint="b"))


def test_history_is_in_the_digest() -> None:
    """The same grain after other tokens has another name."""
    same = list(range(GRAIN_TOKENS))

    assert grains([0] * GRAIN_TOKENS + same)[1] != grains([1] * GRAIN_TOKENS + same)[1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=BLOCK_TOKENS + 40))
def test_a_chain_continues_from_a_block(token_ids: list[int]) -> None:
    """Hashing block by block gives what hashing at once gives."""
    root = hashing.root("model", b"")
    at_once = hashing.grains(root.secret, root.digest, token_ids)
    first = hashing.grains(root.secret, root.digest, token_ids[:BLOCK_TOKENS])
    key = hashing.block_key(root.secret, root.digest, first, token_ids[:BLOCK_TOKENS])
    rest = hashing.grains(root.secret, key, token_ids[BLOCK_TOKENS:]) if len(token_ids) > BLOCK_TOKENS else ()

    assert first + rest == at_once


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), st.lists(st.integers(0, 5), min_size=1, max_size=50))
def test_a_block_key_names_every_token(first: list[int], second: list[int]) -> None:
    """Also those that fill no grain; a block of whole grains is named by its last grain."""
    root = hashing.root("model", b"")

    def key(tokens: list[int]) -> BlockKey:
        return hashing.block_key(
            root.secret, root.digest, hashing.grains(root.secret, root.digest, tokens), tuple(tokens)
        )

    assert (key(first) == key(second)) == (first == second)
    if len(first) % GRAIN_TOKENS == 0:
        assert key(first) == hashing.grains(root.secret, root.digest, first)[-1]
