"""The header of a block file, which is a safetensors file: which bytes belong to which tensor.

    8 bytes: how long the JSON is · the JSON · the tensors, without a gap

Worker and cachestore read it with the same code, so what one of them takes for a whole file the other does too.
"""

from math import prod

import msgspec
from msgspec import Struct

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 4 * 1024 * 1024

_ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class BadHeader(Exception):
    """These bytes are no header of such a file. Says why in words that hold no content."""


class Tensor(Struct, frozen=True):
    """One tensor: its element type by safetensors' name, and where it lies, counted from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(Struct, frozen=True, kw_only=True):
    """All a header says. `tensors` stand in the order of the file."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA = msgspec.json.Decoder(dict[str, str])
_TENSOR = msgspec.json.Decoder(Tensor)


def header_bytes(start: bytes) -> int:
    """How many bytes of a file its header takes, length field included. `start` is its first 8 bytes.

    Raises BadHeader.
    """
    if len(start) != LENGTH_BYTES:
        raise BadHeader("shorter than a header's length field")
    length = int.from_bytes(start, "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise BadHeader(f"its header claims {length} bytes")
    return LENGTH_BYTES + length


def read_header(header: bytes) -> Header:
    """Read a whole header, length field included. Raises BadHeader."""
    try:
        fields = _HEADER.decode(header[LENGTH_BYTES:])
        metadata = _METADATA.decode(fields.pop("__metadata__", msgspec.Raw(b"{}")))
        tensors = [(name, _TENSOR.decode(raw)) for name, raw in fields.items()]
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as why:
        raise BadHeader(f"its header is not a safetensors header ({type(why).__name__})") from None
    tensors.sort(key=lambda named: named[1].data_offsets)
    return Header(metadata=metadata, tensors=dict(tensors))


def check_extents(header: Header, data_bytes: int) -> None:
    """Check that the tensors fill the `data_bytes` after the header exactly. Raises BadHeader."""
    if not header.tensors:
        raise BadHeader("it holds no tensors")
    expected_begin = 0
    for tensor in header.tensors.values():
        begin, end = tensor.data_offsets
        if begin != expected_begin or end < begin:
            raise BadHeader("its tensors overlap or leave a gap")
        if any(size < 0 for size in tensor.shape):
            raise BadHeader("a tensor has a negative size")
        bits = _ELEMENT_BITS.get(tensor.dtype)
        if bits is not None and prod(tensor.shape) * bits != (end - begin) * 8:
            raise BadHeader("a tensor's bytes do not match its shape")
        expected_begin = end
    if expected_begin != data_bytes:
        raise BadHeader(f"its tensors take {expected_begin} bytes, the file has {data_bytes} for them")
