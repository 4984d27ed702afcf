"""Which blocks a prompt can take up: from its digests to the run of blocks on disk that begins it."""

# ruff: noqa: S608 -- only the package's own constants are put into SQL; every value is bound

import itertools
import sqlite3
from collections.abc import Sequence

from cachestore.index_rows import COLUMNS, FROM, BlockRow, Match, block_row
from cachestore.layout import GRAINS_PER_BLOCK
from protocol.block_file import DIGEST_BYTES
from protocol.ids import BlockKey, Grain

_WHOLE_BYTES = GRAINS_PER_BLOCK * DIGEST_BYTES
_PARTS_LOOKED_AT = 64  # of many conversations that begin alike, those used last
_CHUNKS = (16, 128)  # keys asked for in one query: a short first one, since most walks end early


def walk(
    database: sqlite3.Connection, model: int, grains: Sequence[Grain], skip_blocks: int, parts: int = 1
) -> list[Match]:
    """The unbroken run of blocks on this chain after `skip_blocks`: whole ones, and then at most `parts` blocks
    that hold the start of the next one, best first."""
    matches: list[Match] = []
    parents = [BlockKey(b""), *(BlockKey(grain) for grain in grains[GRAINS_PER_BLOCK - 1 :: GRAINS_PER_BLOCK])]
    slot = skip_blocks
    whole_slots = len(parents) - 1
    chunk = iter(_CHUNKS)
    chunk_slots = next(chunk)
    while slot < whole_slots:
        wanted = parents[slot + 1 : slot + 1 + chunk_slots]
        found = _rows_by_key(database, model, wanted, chunk_slots)
        for key in wanted:
            row = found.get(key)
            if row is None or row.parent != parents[slot] or len(row.digests) != _WHOLE_BYTES:
                break
            matches.append(Match(row=row, grains=GRAINS_PER_BLOCK))
            slot += 1
        else:
            chunk_slots = next(chunk, chunk_slots)
            continue
        break
    if slot <= whole_slots:
        start = slot * GRAINS_PER_BLOCK
        slot_grains = grains[start : start + GRAINS_PER_BLOCK]
        if parts > 1:
            matches += _several_parts(database, model, parents[slot], slot_grains, parts)
        elif (part := _deepest_part(database, model, parents[slot], slot_grains)) is not None:
            matches.append(part)
    return matches


def _rows_by_key(
    database: sqlite3.Connection, model: int, keys: Sequence[BlockKey], slots: int
) -> dict[BlockKey, BlockRow]:
    padded = [*keys, *([keys[-1]] * (slots - len(keys)))]  # one SQL text per size, so that it stays prepared
    marks = ",".join("?" * slots)
    rows = database.execute(
        f"SELECT {COLUMNS} {FROM} WHERE b.model = ? AND NOT b.condemned AND b.key IN ({marks})", (model, *padded)
    )
    return {row.key: row for row in map(block_row, rows)}


def _deepest_part(database: sqlite3.Connection, model: int, parent: BlockKey, slot: Sequence[Grain]) -> Match | None:
    """The block that shares most grains with this slot; of two, one that ends there, since it serves whole."""
    shared = 0
    shares_most: BlockRow | None = None
    too_many = len(slot) + 1
    count = 1  # the first alone, since most walks end there; then by halves, since a shared grain implies those before
    while shared + 1 < too_many:
        row = _block_with(database, model, parent, slot[count - 1])
        if row is None:
            too_many = count
        else:
            shared, shares_most = count, row
        count = (shared + too_many) // 2
    return None if shares_most is None else Match(row=shares_most, grains=shared)


def _several_parts(
    database: sqlite3.Connection, model: int, parent: BlockKey, slot: Sequence[Grain], most: int
) -> list[Match]:
    """Blocks that share grains with this slot, those that share most first."""
    if not slot:
        return []
    rows = database.execute(
        f"SELECT {COLUMNS} FROM grains g CROSS JOIN blocks b ON b.id = g.block JOIN models m ON m.id = b.model"
        " WHERE g.grain = ? AND b.model = ? AND b.parent = ? AND NOT b.condemned ORDER BY b.last_used DESC LIMIT ?",
        (slot[0], model, parent, _PARTS_LOOKED_AT),
    )
    matches = [Match(row=row, grains=_shared(row, slot)) for row in map(block_row, rows)]
    return sorted(matches, key=lambda match: -match.grains)[:most]


def _block_with(database: sqlite3.Connection, model: int, parent: BlockKey, grain: Grain) -> BlockRow | None:
    return _one(
        database,
        f"SELECT {COLUMNS} {FROM} WHERE b.model = ? AND b.key = ? AND b.parent = ? AND NOT b.condemned",
        model,
        grain,
        parent,
    ) or _one(
        database,
        f"SELECT {COLUMNS} FROM grains g CROSS JOIN blocks b ON b.id = g.block JOIN models m ON m.id = b.model"
        " WHERE g.grain = ? AND b.model = ? AND b.parent = ? AND NOT b.condemned LIMIT 1",
        grain,
        model,
        parent,
    )


def _one(database: sqlite3.Connection, sql: str, *values: object) -> BlockRow | None:
    row = database.execute(sql, values).fetchone()
    return None if row is None else block_row(row)


def _shared(row: BlockRow, slot: Sequence[Grain]) -> int:
    """How many grains of a block lie on this slot, of which at least the first does."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(row.grains, slot, strict=False)))
