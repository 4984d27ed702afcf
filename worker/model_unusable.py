"""A folder that cannot be loaded, told from a fault that may be over at the next try."""

import contextlib
from collections.abc import Generator

import msgspec

from protocol.model_kind import UnsupportedFolder

_REASON_CHARACTERS = 500

_UNLOADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, FileNotFoundError),
    *(msgspec.MsgspecError, UnsupportedFolder),
)
"""What mlx-lm, transformers and our own readers raise for a folder they cannot make sense of. Not RuntimeError: MLX
raises that when memory is short, which may be over at the next try."""


class ModelUnusable(Exception):
    """This folder cannot be loaded, and the next try would say the same."""


@contextlib.contextmanager
def unusable_if_unloadable() -> Generator[None]:
    """Raise ModelUnusable for what a broken or unknown folder makes loaders raise."""
    try:
        yield
    except _UNLOADABLE as why:
        raise ModelUnusable(f"{type(why).__name__}: {' '.join(str(why).split())[:_REASON_CHARACTERS]}") from why
