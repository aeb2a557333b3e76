"""Chunks -> attention tiles. A tile is a few query tokens against one range of one row of the page table.

A chunk of one token becomes a narrow tile (one row), a longer one becomes wide tiles of consecutive tokens. Where a
step has too few tiles to fill the device, each tile's range is cut; the cut depends on the bucket and on the range's
own length only, so that a row gives the same bits whatever its neighbours are. It knows rows, positions and capacities,
never requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

IntN = Int[np.ndarray, " N"]
PerChunk = Int[np.ndarray, " chunks"]

RANGE_STEP = 64  # cut ranges end at multiples of this: whole steps of the kernel's loop


@dataclass(frozen=True)
class TileShape:
    """The capacity of one tile list: up to `tiles` tiles of `rows` query tokens, each range cut into at most `splits`
    ranges of at least `min_range` positions; the last one may be shorter."""

    tiles: int
    rows: int
    splits: int = 1
    min_range: int = 256


@dataclass(frozen=True)
class TileList:
    """Arrays as pallas_kernels.Tiles wants them, filled up with empty tiles."""

    token: Int[np.ndarray, "N R"]
    row: IntN
    start: IntN
    end: IntN
    partial: Int[np.ndarray, "N R"]


@dataclass(frozen=True)
class MergeList:
    """Arrays as pallas_kernels.Merge wants them: the tokens whose range was cut."""

    token: IntN
    first: IntN
    count: IntN


@dataclass(frozen=True)
class TilePlan:
    """One tile list for each shape given, and the merge of what they cut."""

    lists: tuple[TileList, ...]
    merge: MergeList


def tile_plan(
    rows: PerChunk,
    starts: PerChunk,
    lengths: PerChunk,
    *,
    num_tokens: int,
    shapes: tuple[TileShape, ...],
    num_partials: int,
) -> TilePlan:
    """Plain tiles: every token's range, [0, its position], in tiles of its own chunk.

    rows, starts, lengths: of each chunk, whose tokens follow one another in the step. shapes: the narrow list's, and
    optionally the wide list's; without a wide list every token is a narrow tile. num_tokens: T, the padding's token.
    """
    firsts = np.cumsum(lengths) - lengths
    narrow = lengths == 1 if len(shapes) > 1 else np.ones(len(lengths), bool)
    lists, merges, num_cut = [], [], 0
    for shape, chosen in zip(shapes, (narrow, ~narrow), strict=False):
        tiles = _cut_chunks(rows[chosen], starts[chosen], lengths[chosen], firsts[chosen], shape.rows)
        tile_list, merge, num_cut = _cut_ranges(tiles, shape, num_tokens, num_partials, num_cut)
        lists.append(tile_list)
        merges.append(merge)
    assert num_cut <= num_partials, f"{num_cut} partial results, room for {num_partials}"
    token, first, count = np.concatenate(merges, axis=1)
    return TilePlan(tuple(lists), MergeList(token, first, count))


def _cut_chunks(
    rows: PerChunk, starts: PerChunk, lengths: PerChunk, firsts: PerChunk, width: int
) -> Int[np.ndarray, "4 uncut"]:
    """Tiles of up to `width` consecutive tokens: (row, end of the range, first token, number of tokens)."""
    per_chunk = -(-lengths // width)
    chunk = np.repeat(np.arange(len(rows)), per_chunk)
    offset = (np.arange(len(chunk)) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)) * width
    count = np.minimum(lengths[chunk] - offset, width)
    return np.stack([rows[chunk], starts[chunk] + offset + count, firsts[chunk] + offset, count])


def _cut_ranges(
    tiles: Int[np.ndarray, "4 uncut"], shape: TileShape, num_tokens: int, num_partials: int, num_cut: int
) -> tuple[TileList, Int[np.ndarray, "3 M"], int]:
    """Cuts long ranges, lays the tiles out in the capacity, and numbers the partial results: those of one token follow
    one another in position order."""
    row, end, first, count = tiles
    splits = np.clip(end // shape.min_range, 1, shape.splits)
    size = -(-end // (splits * RANGE_STEP)) * RANGE_STEP
    splits = -(-end // size)
    tile = np.repeat(np.arange(len(row)), splits)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)

    assert len(tile) <= shape.tiles, f"{len(tile)} tiles, room for {shape.tiles}"
    lane = np.arange(shape.rows)
    token = np.full((shape.tiles, shape.rows), num_tokens, np.int32)
    token[: len(tile)] = np.where(lane < count[tile, None], first[tile, None] + lane, num_tokens)
    partial = np.full((shape.tiles, shape.rows), num_partials, np.int32)
    results = np.where(splits > 1, splits * count, 0)
    base = num_cut + np.cumsum(results) - results
    is_cut = (splits[tile, None] > 1) & (lane < count[tile, None])
    partial[: len(tile)] = np.where(
        is_cut, base[tile, None] + lane * splits[tile, None] + number[:, None], num_partials
    )

    cut = splits > 1
    owner = np.repeat(np.flatnonzero(cut), count[cut])
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count[cut]) - count[cut], count[cut])
    merge = np.stack([first[owner] + nth, base[owner] + nth * splits[owner], splits[owner]])
    start = number * size[tile]
    stop = np.minimum(start + size[tile], end[tile])
    columns = (_padded(values, shape.tiles) for values in (row[tile], start, stop))
    return TileList(token, *columns, partial), merge, num_cut + int(results.sum())


def _padded(values: Int[np.ndarray, " n"], capacity: int) -> Int[np.ndarray, " capacity"]:
    padded = np.zeros(capacity, np.int32)
    padded[: len(values)] = values
    return padded
