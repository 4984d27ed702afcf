"""What names a model's weights: a digest of its config and of samples of every tensor. I/O, but no MLX.

Read are the headers whole and 4 KiB at the beginning, the middle and the end of every tensor; of a large one as well at
least once in 8 MiB, since the experts of a layer often are one tensor. Of 300 tensors and 60 GB that is some 9,000
reads and 35 MB. So a layer, an expert or a fused adapter that is not the same shows; a few single weights may not.
"""

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protocol.kv_storage import KVQuantization

KV_LAYOUT = 2
"""Part of the fingerprint: change it when the meaning of a stored block changes, or of a sample."""

SAMPLE_BYTES = 4096
SAMPLED_EVERY_BYTES = 8 * 1024 * 1024
_HEADER_LENGTH_BYTES = 8


def fingerprint(path: Path) -> str:
    """Names the weights in this folder, not the folder: config, weight files, mlx-lm's minor version. 32 hex digits.

    The tokenizer and the chat template are no part of it: they decide which tokens a prompt has, not what their KV is.
    """
    digest = blake2b(digest_size=16)
    engine = ".".join(version("mlx-lm").split(".")[:2])
    digest.update(f"layout {KV_LAYOUT} mlx-lm {engine}\n".encode())
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("model*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            descriptor = stream.fileno()
            file_bytes = os.fstat(descriptor).st_size
            digest.update(f"{file.name} {file_bytes}\n".encode())
            header = _header(descriptor, file_bytes)
            digest.update(header)
            for start in _samples(header, file_bytes):
                digest.update(os.pread(descriptor, SAMPLE_BYTES, start))
    return digest.hexdigest()


def fingerprint_of_kv(weights: str, quantization: KVQuantization | None) -> str:
    """Names what these weights' blocks hold: quantized otherwise, the same tokens' blocks are other blocks."""
    if quantization is None:
        return weights
    digest = blake2b(f"{weights} kv {quantization.bits} {quantization.group_size}".encode(), digest_size=16)
    return digest.hexdigest()


def sample_starts(start: int, end: int) -> Iterator[int]:
    """Where the bytes [start, end) of a tensor are sampled, ascending: its first and last `SAMPLE_BYTES`, and others at
    even distances between them."""
    last = max(start, end - SAMPLE_BYTES)
    gaps = max(2, -(-(end - start) // SAMPLED_EVERY_BYTES))
    if last - start <= gaps * SAMPLE_BYTES:  # so small that it is read whole
        yield from range(start, end, SAMPLE_BYTES)
        return
    for gap in range(gaps + 1):
        yield start + (last - start) * gap // gaps


def _header(descriptor: int, file_bytes: int) -> bytes:
    length = int.from_bytes(os.pread(descriptor, _HEADER_LENGTH_BYTES, 0), "little")
    return os.pread(descriptor, min(length, file_bytes), _HEADER_LENGTH_BYTES)


def _samples(header: bytes, file_bytes: int) -> Iterator[int]:
    data = _HEADER_LENGTH_BYTES + len(header)
    for start, end in _tensors(header) or [(0, file_bytes - data)]:
        yield from sample_starts(data + start, data + end)


def _tensors(header: bytes) -> list[tuple[int, int]]:
    """Their offsets behind the header, in the file's order. Empty when the header is none: then the model is unusable
    for other reasons."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
