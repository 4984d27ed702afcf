# pyright: basic
"""Block files: the arrays of a block as safetensors, written whole and read whole.

A file holds `keys0`, `values0`, … and, for models whose layers cannot all be cut, the states kept inside the block,
named `state<tokens>.<leaf>.<part>`.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash

from protocol.block_file import BadMetadata, parse_metadata
from protocol.block_header import LENGTH_BYTES, BadHeader, Header, check_extents, header_bytes, read_header
from protocol.blocks import LeasedBlock
from protocol.flushing import flush_file
from protocol.ids import GRAIN_TOKENS
from worker.chain_reading import BlockDamaged
from worker.mlx_blocks import KVArrays, block_bytes
from worker.prefix_index import Block, BlockParts, State

_STATE_NAME = re.compile(r"state(\d+)\.(.+)")

_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16,
    "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
    "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip


def write_block(path: str, block: Block[KVArrays], tokens: int, metadata: dict[str, str]) -> None:
    """Write the first `tokens` tokens of a block as safetensors. Any thread: the arrays are evaluated already.

    They are on the disk then. The cachestore flushes what it publishes, too, on the thread that answers everybody's
    lookups: after this, that takes no time.
    """
    arrays = {name: _first_tokens(array, tokens) for name, array in block.payload.items()}
    for after, state in block.states.items():
        # Only what ends on the grain grid can be found on disk.
        if after <= tokens and after % GRAIN_TOKENS == 0:
            arrays |= {f"state{after}.{name}": array for name, array in state.payload.items()}
    if not arrays:
        arrays = {"empty": mx.zeros(1)}  # a file must hold something; such a block only says that its tokens are known
    mx.save_safetensors(path, arrays, metadata)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        flush_file(descriptor)
    finally:
        os.close(descriptor)


class BlockFile:
    """One block file on its way into memory; see `worker.chain_reading.BlockReading`."""

    def __init__(self, leased: LeasedBlock) -> None:
        """Begin to read. Raises OSError, RuntimeError when MLX could not though the file is as it was, and BlockDamaged
        for what is no file of this block."""
        self._path = Path(leased.path)
        self._tokens = leased.grains * GRAIN_TOKENS
        self._status, self._header_bytes, self._header = _header(leased)
        try:
            # MLX opens the file once more and reads only when asked, so below it is told at once, and then compared.
            self._arrays: KVArrays = mx.load(leased.path)  # pyright: ignore[reportAttributeAccessIssue]
            mx.async_eval(self._arrays)
        except RuntimeError:
            self._check_unchanged()
            raise
        if not _is_as_announced(self._arrays, self._header):
            raise BlockDamaged("its arrays are not those of its header")

    @property
    def file_bytes(self) -> int:
        return self._status.st_size

    def finish(self) -> BlockParts[KVArrays]:
        """The first tokens of the block, evaluated here, so that any thread may use them."""
        kv: KVArrays = {}
        states: dict[int, KVArrays] = {}
        try:
            mx.eval(self._arrays)
        except RuntimeError:
            self._check_unchanged()  # else it is not the file's fault: memory that could not be had, most likely
            raise
        self._check_unchanged()
        for name, array in self._arrays.items():
            if match := _STATE_NAME.fullmatch(name):
                if int(match[1]) <= self._tokens:
                    states.setdefault(int(match[1]), {})[match[2]] = array
            elif name != "empty":
                kv[name] = _first_tokens(array, self._tokens)
        mx.eval(kv)
        return BlockParts(
            payload=kv,
            kv_bytes=block_bytes(kv),
            states={after: State(arrays, block_bytes(arrays)) for after, arrays in states.items()},
        )

    def checksum(self) -> bytes:
        """The xxh3-128 of the header as it was read and of the arrays' memory, in the order of the file. Any thread."""
        digest = xxhash.xxh3_128(self._header_bytes)
        for name in self._header.tensors:
            array: Any = self._arrays[name]  # its type does not say that it is a buffer
            digest.update(memoryview(array))  # no copy, and no lock of Python's is held meanwhile
        return digest.digest()

    def _check_unchanged(self) -> None:
        if _identity(self._path.stat()) != _identity(self._status):
            raise BlockDamaged("it changed while it was read")


def _header(leased: LeasedBlock) -> tuple[os.stat_result, bytes, Header]:
    """Which file this is, its header's bytes and what they say. The tensors of a sound one fill the file."""
    descriptor = os.open(leased.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BlockDamaged("it is not a regular file")
        length = header_bytes(os.pread(descriptor, LENGTH_BYTES, 0))
        head = os.pread(descriptor, length, 0)
        header = read_header(head)
        check_extents(header, status.st_size - len(head))
        if parse_metadata(header.metadata).key != leased.key:
            raise BlockDamaged("it is another block's file")
        if unknown := sorted({tensor.dtype for tensor in header.tensors.values()} - _DTYPES.keys()):
            raise BlockDamaged(f"it holds {', '.join(unknown)}, which MLX does not know")
    except (BadHeader, BadMetadata) as why:
        raise BlockDamaged(str(why)) from None
    finally:
        os.close(descriptor)
    return status, head, header


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _is_as_announced(arrays: KVArrays, header: Header) -> bool:
    """Whether what MLX found in the file has the header's names, shapes and types: the checksum is over bytes alone."""
    found = {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}
    return found == {name: (_DTYPES.get(tensor.dtype), tensor.shape) for name, tensor in header.tensors.items()}


def _first_tokens(array: mx.array, tokens: int) -> mx.array:
    held = array.shape[2]
    if held < tokens:
        raise BlockDamaged(f"it holds {held} tokens instead of {tokens}")
    return array if held == tokens else mx.contiguous(array[:, :, :tokens])
