"""Block files: what is used is what was hashed, and a file that is not the block it should be is refused."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import save

from protocol.block_file import block_metadata
from protocol.blocks import LeasedBlock
from protocol.ids import BlockKey, Grain
from tests.worker.block_files import leased_file, read_whole
from worker.chain_reading import BlockDamaged
from worker.mlx_block_files import BlockFile, write_block
from worker.mlx_blocks import KVArrays, block_bytes
from worker.prefix_index import Block, State

DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.int64, mx.uint8, mx.bool_)


def block_of(arrays: KVArrays, tokens: int, states: dict[int, KVArrays] | None = None) -> Block[KVArrays]:
    """A nameless block of `tokens` tokens."""
    return Block(
        key=BlockKey(b""),
        parent=BlockKey(b""),
        start=0,
        token_ids=tuple(range(tokens)),
        grains=(),
        payload=arrays,
        kv_bytes=block_bytes(arrays),
        states={after: State(kept, block_bytes(kept)) for after, kept in (states or {}).items()},
    )


def noise(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    array = (mx.random.normal(shape, key=mx.random.key(seed)) * 50).astype(dtype)
    mx.eval(array)
    return array


def simple(tokens: int = 32, *, seed: int = 0) -> Block[KVArrays]:
    shape = (3, 2, tokens, 8)
    arrays = {"keys0": noise(shape, mx.bfloat16, seed), "values0": noise(shape, mx.bfloat16, seed + 1)}
    return block_of(arrays, tokens)


def use(leased: LeasedBlock) -> bytes:
    """What a cold cache does with a file; the checksum of what it would use."""
    reading = BlockFile(leased)
    reading.finish()
    return reading.checksum()


def test_a_tail_on_disk_holds_whole_grains(tmp_path: Path) -> None:
    """Only the tokens that have a name are written, and no byte of the others; a reader takes as many as it needs."""
    block = simple(100)
    path = tmp_path / "block.safetensors"
    leased = leased_file(path, block, 96)

    with safe_open(str(path), "np") as file:
        assert file.metadata()["tokens"] == "96"
        assert file.get_slice("keys0").get_shape() == [3, 2, 96, 8]
    part = read_whole(replace(leased, grains=3))
    assert part.kv_bytes == block_bytes(part.payload)
    assert mx.array_equal(part.payload["values0"], block.payload["values0"][:, :, :48]).item()


def test_a_staged_file_keeps_its_mode(tmp_path: Path) -> None:
    """0600: the KV of a prompt is as private as the prompt."""
    path = tmp_path / "block.safetensors"
    path.touch(0o600)
    write_block(str(path), simple(16), 16, {})

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=0, max_size=3),
    states=st.lists(st.sampled_from([16, 32]), max_size=2, unique=True),
    width=st.integers(1, 9),
    grains=st.integers(1, 2),
)
def test_the_checksum_is_that_of_the_whole_file(
    tmp_path: Path, dtypes: list[mx.Dtype], states: list[int], width: int, grains: int
) -> None:
    """Of every type, with states that have scalars and empty arrays, used whole or in part, or of no array at all."""
    arrays = {f"keys{number}": noise((1, 2, 32, width), dtype, number) for number, dtype in enumerate(dtypes)}
    kept: dict[int, KVArrays] = {
        after: {
            "0.keys": noise((1, 1, 5, width), mx.float16, after),
            "0.numbers": mx.array([after, 7], mx.int64),
            "1.scalar": mx.array(3.5),
            "1.empty": mx.zeros((0, width)),
        }
        for after in states
    }
    leased = leased_file(tmp_path / "block.safetensors", block_of(arrays, 32, kept), 32)

    parts = read_whole(replace(leased, grains=grains))
    assert sorted(parts.states) == sorted(after for after in states if after <= grains * 16)
    assert set(parts.payload) == set(arrays)
    for after, state in parts.states.items():
        assert all(mx.array_equal(state.payload[name], kept[after][name]).item() for name in kept[after])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(tmp_path: Path, where: float, bit: int) -> None:
    """Wherever it is, header, arrays or a state that is not even used: refused, or of another checksum."""
    path = tmp_path / "block.safetensors"
    leased = leased_file(path, block_of(simple().payload, 32, {32: {"0.keys": mx.ones((4,))}}), 32)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)

    try:
        checksum = use(replace(leased, grains=1))
    except BlockDamaged:
        return
    assert checksum != leased.checksum


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _another_blocks(path: Path) -> None:
    grains = (Grain(b"z" * 16),)
    write_block(str(path), simple(16), 16, block_metadata("f" * 32, BlockKey(grains[-1]), BlockKey(b""), grains, 16))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"nonsense" * 10, b"\xff" * 40])
def test_a_file_that_is_no_block_is_refused(tmp_path: Path, content: bytes) -> None:
    """K06: whatever it holds."""
    path = tmp_path / "block.safetensors"
    leased = leased_file(path, simple(), 32)
    path.write_bytes(content)

    with pytest.raises(BlockDamaged):
        use(leased)


@pytest.mark.parametrize("damage", [_shorter, _longer, _another_blocks, _directory, _pipe])
def test_another_thing_in_its_place_is_refused_without_its_checksum(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Also a block that was verified before: between lease and reading the file can change."""
    path = tmp_path / "block.safetensors"
    leased = replace(leased_file(path, simple(), 32), checksum=b"")
    damage(path)

    with pytest.raises(BlockDamaged):
        use(leased)


def test_a_file_that_is_gone_is_missing(tmp_path: Path) -> None:
    """Not damage: somebody deleted it."""
    leased = leased_file(tmp_path / "block.safetensors", simple(), 32)
    Path(leased.path).unlink()

    with pytest.raises(FileNotFoundError):
        use(leased)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A block is a file of its own."""
    path = tmp_path / "block.safetensors"
    leased = leased_file(tmp_path / "other.safetensors", simple(), 32)
    path.symlink_to(leased.path)

    with pytest.raises(OSError, match="symbolic links"):
        use(replace(leased, path=str(path)))


@pytest.mark.parametrize("kept_bytes", [0, 100, 4096])
def test_a_file_that_ends_early_while_it_is_read_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    """Truncated when its reading had begun: never memory that nobody wrote, and the next file is read as ever."""
    shape = (8, 8, 256, 64)
    block = block_of({"keys0": noise(shape, mx.float32, 1), "values0": noise(shape, mx.float32, 2)}, 256)
    path, other = tmp_path / "block.safetensors", tmp_path / "other.safetensors"
    leased, sound = leased_file(path, block, 256), leased_file(other, block, 256)
    reading = BlockFile(leased)
    os.truncate(path, kept_bytes)

    with pytest.raises(BlockDamaged):
        reading.finish()
    assert mx.array_equal(read_whole(sound).payload["keys0"], block.payload["keys0"]).item()


def test_a_file_swapped_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Another file under the same name, whole and of the same size."""
    path, other = tmp_path / "block.safetensors", tmp_path / "other.safetensors"
    leased = replace(leased_file(path, simple(), 32), checksum=b"")
    leased_file(other, simple(seed=5), 32)
    reading = BlockFile(leased)
    other.rename(path)

    with pytest.raises(BlockDamaged, match="changed"):
        reading.finish()


@pytest.mark.parametrize("at", ["load", "async_eval", "eval"])
def test_what_mlx_cannot_do_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Memory that could not be had, say: the file is as it was, so its block is not taken for a damaged one."""
    leased = leased_file(tmp_path / "block.safetensors", simple(), 32)

    def fails(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 8 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(f"worker.mlx_block_files.mx.{at}", fails)
        with pytest.raises(RuntimeError, match="allocate"):
            use(leased)
    assert use(leased) == leased.checksum


def test_the_bytes_read_are_those_of_the_file(tmp_path: Path) -> None:
    """Also where only its first tokens are used: so the disk's speed is measured."""
    leased = leased_file(tmp_path / "block.safetensors", simple(), 32)

    assert BlockFile(replace(leased, grains=1)).file_bytes == Path(leased.path).stat().st_size


def test_a_block_with_fewer_tokens_than_it_should_have_is_refused(tmp_path: Path) -> None:
    """K06: never KV that is not there."""
    leased = leased_file(tmp_path / "block.safetensors", simple(), 32)

    with pytest.raises(BlockDamaged, match="32 tokens instead of 48"):
        use(replace(leased, grains=3))


def test_a_type_that_mlx_does_not_know_is_refused(tmp_path: Path) -> None:
    """Bytes alone say nothing of what they mean."""
    path = tmp_path / "block.safetensors"
    leased = leased_file(path, simple(16), 16)
    grains = (Grain((1).to_bytes(16, "big")),)
    metadata = block_metadata("f" * 32, leased.key, BlockKey(b""), grains, 16)
    data = save({"keys0": numpy.zeros((1, 1, 16, 1), numpy.float32)}, metadata)
    path.write_bytes(data.replace(b'"F32"', b'"F99"'))

    with pytest.raises(BlockDamaged):
        use(leased)


def test_any_thread_may_use_and_check_what_one_has_read(tmp_path: Path) -> None:
    """Lazy arrays would belong to the thread that made them."""
    block = simple(256)
    leased = leased_file(tmp_path / "block.safetensors", block, 256)
    readings: list[BlockFile] = []

    def read() -> None:
        reading = BlockFile(replace(leased, grains=3))
        reading.finish()
        readings.append(reading)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()

    [reading] = readings
    assert reading.checksum() == leased.checksum
    assert mx.array_equal(reading.finish().payload["keys0"], block.payload["keys0"][:, :, :48]).item()
