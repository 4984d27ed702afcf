"""Is this disk worth it: measured rates against measured rates, in words that say which is faster."""

from gateway.cache_terms import AdminModelCache
from gateway.disk_worth import DiskWorth, disk_worth, kv_bytes_per_token, nearest_size
from protocol.disk_bench import BlockSpeed, DiskBench
from protocol.generation import PinnedPrefix, Pong
from protocol.ids import ModelName

MIB = 1024**2


def speed(block_bytes: int, rate: float) -> BlockSpeed:
    return BlockSpeed(
        block_bytes=block_bytes,
        files=1,
        write_seconds=1,
        cold_read_seconds=1,
        warm_read_seconds=1,
        write_bytes_per_second=rate,
        cold_read_bytes_per_second=rate,
        warm_read_bytes_per_second=rate,
    )


def bench(*speeds: BlockSpeed) -> DiskBench:
    return DiskBench(
        directory="d", free_bytes=1, page_cache="dropped", seconds=1.0, written_bytes=1, sizes=tuple(speeds)
    )


def books(
    rate: float, *, blocks: int = 4, size_bytes: int = 4 * 25_600_000, pins: tuple[PinnedPrefix, ...] = ()
) -> Pong:
    return Pong(
        nonce=1,
        steps=1,
        running_rows=0,
        waiting_requests=0,
        active_bytes=1,
        hot_cache_bytes=size_bytes,
        hot_cache_blocks=blocks,
        prefill_tokens_per_second=rate,
        pins=pins,
    )


def worth(rate: float, disk_rate: float) -> DiskWorth:
    row = AdminModelCache(model=ModelName("m"), state="ready", fingerprint=None, books=books(rate))
    (answer,) = disk_worth(bench(speed(24 * MIB, disk_rate)), [row])
    return answer


def test_the_faster_one_is_named_with_its_factor() -> None:
    """100 kB a token, 1,000 tokens: 0.1 s at 1 GB/s; against 1 s, 0.125 s and 0.05 s of computing."""
    assert worth(1000, 1e9).verdict == "worth_it"
    assert "10 times faster" in worth(1000, 1e9).text
    assert worth(8000, 1e9).verdict == "barely"
    slow = worth(20_000, 1e9)
    assert (slow.verdict, slow.restore_seconds, slow.compute_seconds) == ("not_worth_it", 0.1, 0.05)
    assert "2.0 times faster than this disk" in slow.text


def test_what_is_not_known_is_said() -> None:
    """No prefill yet, nothing hot, a disk that was not measured; and an absent model has no row."""
    assert worth(0, 1e9).verdict == "unknown"
    empty = AdminModelCache(
        model=ModelName("m"), state="ready", fingerprint=None, books=books(5, blocks=0, size_bytes=0)
    )
    absent = AdminModelCache(model=ModelName("n"), state="absent", fingerprint=None, books=None)
    assert [answer.verdict for answer in disk_worth(bench(speed(MIB, 1.0)), [empty, absent])] == ["unknown"]
    loaded = AdminModelCache(model=ModelName("m"), state="ready", fingerprint=None, books=books(5))
    assert [answer.verdict for answer in disk_worth(bench(), [loaded])] == ["unknown"]


def test_the_block_size_nearest_by_ratio_is_taken() -> None:
    sizes = bench(speed(1 * MIB, 1), speed(4 * MIB, 2), speed(32 * MIB, 3))
    chosen = [nearest_size(sizes, block * MIB) for block in (0.1, 1.9, 2.1, 12, 100)]
    assert [size.block_bytes // MIB for size in chosen if size] == [1, 1, 4, 32, 32]


def test_pins_tell_the_bytes_of_a_token_exactly() -> None:
    """Their tokens are known; of other blocks only that they are whole, mostly."""
    pin = PinnedPrefix(owner="o", name="n", tokens=10, size_bytes=1000)
    assert kv_bytes_per_token(books(1, pins=(pin,))) == 100
    assert kv_bytes_per_token(books(1, blocks=2, size_bytes=512)) == 1
