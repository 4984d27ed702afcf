"""Names and headers: what is a block and what is not."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.layout import (
    BadBlock,
    ForeignBlock,
    block_path,
    check_header,
    header_bytes,
    is_fingerprint,
    join_digests,
    parse_block_name,
    split_digests,
)
from protocol.block_file import BadMetadata, block_metadata, parse_metadata
from protocol.ids import BlockKey, Grain
from tests.cachestore.block_files import FINGERPRINT, block_bytes, chain, slot

GRAINS = chain("a", 16)
KEY = BlockKey(GRAINS[-1])
METADATA = block_metadata(FINGERPRINT, KEY, BlockKey(b""), GRAINS, 256)
TENSORS = {
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]},
}


def header(tensors: object, metadata: object = METADATA) -> bytes:
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()  # type: ignore[dict-item]
    return len(text).to_bytes(8, "little") + text


def check(head: bytes, data_bytes: int):
    return check_header(head, len(head) + data_bytes)


def test_a_written_block_is_read_back():
    """What the safetensors library writes with our metadata is a sound block with that identity."""
    data = block_bytes(*slot(GRAINS, 0))
    length = header_bytes(data[:8])
    found = check_header(data[:length], len(data))
    assert (found.fingerprint, found.key, found.parent, found.grains) == (FINGERPRINT, KEY, b"", GRAINS)


@pytest.mark.parametrize(
    ("why", "tensors", "data_bytes"),
    [
        ("one byte short", TENSORS, 15),
        ("one byte long", TENSORS, 17),
        ("no tensors", {}, 0),
        ("a gap", {**TENSORS, "c": {"dtype": "U8", "shape": [1], "data_offsets": [17, 18]}}, 18),
        ("an overlap", {**TENSORS, "c": {"dtype": "U8", "shape": [4], "data_offsets": [14, 18]}}, 18),
        ("backwards", {"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, -1]}}, 0),
        ("wrong shape", {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 12]}}, 12),
        ("negative shape", {"a": {"dtype": "U8", "shape": [-2, -6], "data_offsets": [0, 12]}}, 12),
        ("no offsets", {"a": {"dtype": "U8", "shape": [1]}}, 1),
        ("not a tensor", {"a": 5}, 1),
    ],
)
def test_tensors_that_do_not_fill_the_file_exactly_are_refused(why, tensors, data_bytes):
    """Every byte after the header belongs to exactly one tensor of the right size."""
    with pytest.raises(BadBlock):
        check(header(tensors), data_bytes)


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("no key", {"key": None}),
        ("short key", {"key": "ab"}),
        ("key is no hex", {"key": "zz" * 16}),
        ("key is not the last grain", {"key": "ab" * 16}),
        ("no grains", {"grains": ""}),
        ("wrong tokens", {"tokens": "255"}),
        ("no fingerprint", {"fingerprint": None}),
        ("bad parent", {"parent": "abc"}),
        ("no format", {"mlxd_format": None}),
        (
            "too many grains",
            block_metadata(FINGERPRINT, BlockKey(chain("a", 17)[-1]), BlockKey(b""), chain("a", 17), 272),
        ),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(why, change):
    """Each field is checked, and the fields against each other."""
    metadata = {name: value for name, value in {**METADATA, **change}.items() if value is not None}
    with pytest.raises(BadBlock):
        check(header(TENSORS, metadata), 16)


def test_another_disk_format_is_foreign_and_not_damaged():
    """An old block is told from a broken one: it is evicted, not quarantined."""
    with pytest.raises(ForeignBlock):
        check(header(TENSORS, {**METADATA, "mlxd_format": "2"}), 16)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_bad_block(data):
    """A file of any content is judged, never fatal."""
    try:
        length = header_bytes(data[:8])
        check_header(data[:length], len(data))
    except BadBlock:
        pass


@given(st.dictionaries(st.sampled_from([*METADATA, "more"]), st.text(max_size=40)))
def test_no_metadata_raises_anything_but_bad_metadata(changed):
    """The same for the metadata alone."""
    with contextlib.suppress(BadMetadata):
        parse_metadata({**METADATA, **changed})


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_block_name_gives_back_what_it_was_made_of(key, checksum):
    """Names are lossless: an index can be rebuilt from them."""
    path = block_path(FINGERPRINT, key, checksum)
    fingerprint, prefix, name = path.split("/")
    assert (fingerprint, prefix) == (FINGERPRINT, key[:1].hex())
    assert parse_block_name(name) == (key, checksum)
    assert path == path.lower()


@pytest.mark.parametrize("name", ["", "ab.safetensors", "ab" * 16 + ".safetensors", "x.tmp.safetensors", "A" * 65])
def test_other_names_are_no_blocks(name):
    """Only the full form is a block's name."""
    assert parse_block_name(name) is None


@given(st.text(max_size=140))
def test_a_fingerprint_is_one_harmless_path_component(text):
    """Whatever is accepted stays inside its own directory, on volumes that ignore case too."""
    if is_fingerprint(text):
        assert "/" not in text
        assert "\0" not in text
        assert not text.startswith(".")
        assert text == text.lower()


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=16))
def test_joined_digests_split_into_the_same(digests):
    """The index stores grains joined."""
    grains = tuple(Grain(digest) for digest in digests)
    assert split_digests(join_digests(grains)) == grains


def test_owner_and_time_to_live_come_back_and_may_be_absent():
    """A block of before them has neither; both survive in the file what the index does not."""
    kept = block_metadata(FINGERPRINT, KEY, BlockKey(b""), GRAINS, 256, owner="0011", ttl_seconds=90)
    assert (parse_metadata(kept).owner, parse_metadata(kept).ttl_seconds) == ("0011", 90.0)
    assert (parse_metadata(METADATA).owner, parse_metadata(METADATA).ttl_seconds) == ("", None)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_a_time_to_live_that_is_none_is_refused(text):
    """Nonsense in a file is not adopted."""
    with pytest.raises(BadMetadata, match="ttl_seconds"):
        parse_metadata({**METADATA, "ttl_seconds": text})
