"""Token ids → the chain of digests that names a prefix.

`digest[i] = BLAKE2b(key = scope, digest[i-1] + tokens[i])`, one per GRAIN_TOKENS tokens, rooted in the model's
fingerprint. Equal digests mean equal tokens *and* equal history, model and scope; without the scope's secret nobody
can compute another scope's digests.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from protocol.ids import GRAIN_TOKENS, BlockKey, Grain

DIGEST_BYTES = 16


class Root(NamedTuple):
    """Where the chains of one model and one scope start, and the secret that continues them."""

    digest: BlockKey
    secret: bytes


def root(fingerprint: str, scope: bytes) -> Root:
    """The start of every chain of this model in this scope. `scope` is the secret salt, of any length."""
    secret = blake2b(scope, digest_size=32, person=b"mlxd-scope").digest()
    return Root(BlockKey(_digest(secret, fingerprint.encode())), secret)


def grains(secret: bytes, parent: bytes, token_ids: Sequence[int]) -> tuple[Grain, ...]:
    """The chain below `parent`: one digest per *complete* run of GRAIN_TOKENS tokens."""
    chain: list[Grain] = []
    digest = parent
    for start in range(0, len(token_ids) - GRAIN_TOKENS + 1, GRAIN_TOKENS):
        digest = _digest(secret, digest + _packed(token_ids[start : start + GRAIN_TOKENS]))
        chain.append(Grain(digest))
    return tuple(chain)


def block_key(secret: bytes, parent: bytes, chain: tuple[Grain, ...], token_ids: Sequence[int]) -> BlockKey:
    """The key of a block: its last grain, continued by the tokens that fill no whole grain, if there are any."""
    last = chain[-1] if chain else parent
    rest = token_ids[len(chain) * GRAIN_TOKENS :]
    return BlockKey(_digest(secret, last + _packed(rest)) if rest else last)


def _digest(secret: bytes, data: bytes) -> bytes:
    return blake2b(data, key=secret, digest_size=DIGEST_BYTES).digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()
