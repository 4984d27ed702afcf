"""Arithmetic on finished vectors: float32, little-endian, as bytes. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SMALLEST_LENGTH = 1e-12
"""Below it a vector has no direction, and stays as it is."""


def cut_vectors(vectors: Sequence[bytes], dimensions: int | None) -> bytes:
    """All vectors, one after another; cut to their first `dimensions` and of unit length again where that is given."""
    if dimensions is None:
        return b"".join(vectors)
    cut = _rows(vectors)[:, :dimensions]
    return _unit_length(cut).astype("<f4").tobytes()


def cosine_scores(query: bytes, documents: Sequence[bytes]) -> tuple[float, ...]:
    """How near each document's direction is to the query's: their cosine, from -1…1 moved to 0…1."""
    if not documents:
        return ()
    cosines = _unit_length(_rows(documents)) @ _unit_length(_rows([query]))[0]
    return tuple(float(score) for score in np.clip((cosines + 1) / 2, 0.0, 1.0))


def score_of(row: bytes) -> float:
    """A row that is one score."""
    return float(np.frombuffer(row, "<f4")[0])


def _rows(vectors: Sequence[bytes]) -> NDArray[np.float64]:
    return np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)


def _unit_length(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths < _SMALLEST_LENGTH, 1.0, lengths)
