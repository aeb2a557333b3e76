"""Chunks -> attention tiles. A tile is a few query tokens against one range of one row of the page table.

A chunk of one token becomes a narrow tile (one row), a longer one becomes wide tiles of consecutive tokens. Pages that
several chunks share become wide tiles of all their tokens, and what is left of each chunk is its own. Where a step has
too few tiles to fill the device, ranges are cut: a chunk's own range by the bucket and its own length only, so that
without shared tiles a row gives the same bits whatever its neighbours are. It knows rows, positions and capacities,
never requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Int

from prefix_jax.forest import Run

IntN = Int[np.ndarray, " N"]
PerChunk = Int[np.ndarray, " chunks"]
PerTile = Int[np.ndarray, " n"]

RANGE_STEP = 64  # cut ranges end at multiples of this: whole steps of the kernel's loop
MIN_SHARED_RANGE = 256  # positions; below, a partial result costs more than a fuller device gives


@dataclass(frozen=True)
class TileShape:
    """The capacity of one tile list: up to `tiles` tiles of `rows` query tokens, each range cut into at most `splits`
    ranges of at least `min_range` positions; the last one may be shorter. fixed: where not 0, ranges are cut at its
    multiples instead. partials: room for results of cut tokens.

    shared_tiles, shared_partials: what of these is kept for ranges that chunks share. fill: tiles that fill the device,
    which such ranges are cut into. own_time: of what the chunks read for themselves beside these tiles, the time that a
    position takes, in positions of a tile; so much earlier every second tile ends, or where that is too early, `spare`
    fewer fill the device.
    """

    tiles: int
    rows: int
    splits: int = 1
    min_range: int = 128
    fixed: int = 0
    partials: int = 0
    shared_tiles: int = 0
    shared_partials: int = 0
    fill: int = 1
    spare: int = 0
    own_time: float = 0.0


@dataclass(frozen=True)
class TileList:
    """Arrays as pallas_kernels.Tiles wants them, filled up with empty tiles."""

    token: Int[np.ndarray, "N R"]
    row: IntN
    start: IntN
    end: IntN
    partial: Int[np.ndarray, "N R"]


TILE_FIELDS = tuple(field.name for field in fields(TileList))


@dataclass(frozen=True)
class MergeList:
    """Arrays as pallas_kernels.Merge wants them: the tokens whose range was cut."""

    token: Int[np.ndarray, " M"]
    first: Int[np.ndarray, "L M"]
    count: Int[np.ndarray, "L M"]


@dataclass(frozen=True)
class TilePlan:
    """One tile list for each shape given, and the merge of what they cut."""

    lists: tuple[TileList, ...]
    merge: MergeList


@dataclass(frozen=True)
class _Ranges:
    """Tiles before they are numbered. token: query tokens and padding (-1). number: which of the token's ranges in this
    list each is, in the order of positions."""

    token: Int[np.ndarray, "n R"]
    row: PerTile
    start: PerTile
    end: PerTile
    number: Int[np.ndarray, "n R"]


def tile_plan(
    rows: PerChunk,
    starts: PerChunk,
    lengths: PerChunk,
    *,
    num_tokens: int,
    shapes: tuple[TileShape, ...],
    runs: Sequence[Run] = (),
    page_size: int = 1,
) -> TilePlan:
    """Every token's range, [0, its position], in tiles of runs of shared pages and of its own chunk.

    rows, starts, lengths: of each chunk, whose tokens follow one another in the step. shapes: the narrow list's, and
    optionally the wide list's; without a wide list every token is a narrow tile. num_tokens: T, the padding's token.
    runs: outer ones first, each before every one of its members' starts.
    """
    firsts = np.cumsum(lengths) - lengths
    num_ranges = np.zeros((len(shapes), num_tokens), np.int64)  # of each token in each list
    begins = _own_begins(runs, len(rows), page_size)
    found: list[list[_Ranges]] = [[] for _ in shapes]
    if runs:
        pieces, shorter = run_pieces(runs, starts, lengths, shapes[-1], page_size)
        found[-1].append(
            _share(runs, pieces, shorter, rows, firsts, lengths, num_ranges[-1], shapes[-1].rows, page_size)
        )
    narrow = lengths == 1 if len(shapes) > 1 else np.ones(len(lengths), bool)
    for shape, ranges, counts, chosen in zip(shapes, found, num_ranges, (narrow, ~narrow), strict=False):
        if not chosen.any():
            continue
        tiles = _cut_chunks(*(x[chosen] for x in (rows, begins, starts, lengths, firsts)), shape.rows)
        ranges.append(_cut_ranges(*tiles, counts, shape))

    cut = np.flatnonzero(num_ranges.sum(axis=0) > 1)
    counts = np.zeros_like(num_ranges)
    counts[:, cut] = num_ranges[:, cut]
    bases = np.cumsum(counts, axis=1) - counts
    lists = tuple(
        _lay_out(ranges, np.where(count > 0, base, shape.partials), num_tokens, int(count.sum()), shape)
        for ranges, base, count, shape in zip(found, bases, counts, shapes, strict=True)
    )
    return TilePlan(lists, MergeList(cut, bases[:, cut], counts[:, cut]))


def _within(counts: PerTile) -> Int[np.ndarray, " total"]:
    """0, 1, … below each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _tokens(firsts: PerTile, lengths: PerTile) -> Int[np.ndarray, " tokens"]:
    """The tokens of some chunks, chunk by chunk."""
    return np.repeat(firsts, lengths) + _within(lengths)


def _own_begins(runs: Sequence[Run], num_chunks: int, page_size: int) -> PerChunk:
    """Where what each chunk reads for itself begins, behind its runs."""
    begins = np.zeros(num_chunks, np.int64)
    for run in runs:
        begins[run.members] = run.last * page_size
    return begins


def run_pieces(
    runs: Sequence[Run], starts: PerChunk, lengths: PerChunk, wide: TileShape, page_size: int
) -> Int[np.ndarray, "2 runs"]:
    """Into how many ranges each run is cut: as many as fill the device once, if they and their results fit. And how
    many positions every second range is shorter than those before and behind it."""
    own = int((starts + lengths - _own_begins(runs, len(starts), page_size)).sum())  # positions read besides
    tokens = np.array([lengths[run.members].sum() for run in runs])
    size = np.array([run.last - run.first for run in runs]) * page_size
    if wide.fixed:
        return np.stack([size // wide.fixed, np.zeros_like(size)])
    tiles = -(-tokens // wide.rows)

    least = max(MIN_SHARED_RANGE, page_size)  # a shorter one might have no edge of a page within

    def pieces_for(fill: int) -> Int[np.ndarray, " runs"]:
        longest = max(least, int(tiles @ size) // fill)
        while True:
            pieces = np.maximum(1, size // longest)
            if pieces.max() == 1 or (pieces @ tokens <= wide.shared_partials and pieces @ tiles <= wide.shared_tiles):
                return pieces
            longest *= 2

    pieces = pieces_for(wide.fill)
    # In steps, so that a plan stays as it is for some tokens.
    shorter = np.where(pieces > 1, int(own * wide.own_time) // MIN_SHARED_RANGE * MIN_SHARED_RANGE, 0)
    if (size - (pieces + 1) // 2 * shorter < pieces * least)[pieces > 1].any():
        pieces, shorter = pieces_for(wide.fill - wide.spare), np.zeros_like(size)
    return np.stack([pieces, shorter])


def _share(
    runs: Sequence[Run], pieces: Int[np.ndarray, " runs"], shorter: Int[np.ndarray, " runs"], rows: PerChunk,
    firsts: PerChunk, lengths: PerChunk, num_ranges: Int[np.ndarray, " T"], width: int, page_size: int,
) -> _Ranges:  # fmt: skip
    """Tiles of up to `width` of the tokens of each run, over each of its pieces; counts them in `num_ranges`."""
    members = np.concatenate([run.members for run in runs])
    run_of = np.repeat(np.repeat(np.arange(len(runs)), [len(run.members) for run in runs]), lengths[members])
    tokens = _tokens(firsts[members], lengths[members])
    per_run = np.bincount(run_of, minlength=len(runs))
    groups = -(-per_run // width)
    lane = np.repeat((np.cumsum(groups) - groups) * width, per_run) + _within(per_run)
    token, number = np.full(groups.sum() * width, -1), np.zeros(groups.sum() * width, np.int64)
    token[lane] = tokens
    # Pieces of outer runs come first: the runs are in that order, and so are the entries of each token.
    by_token = np.argsort(tokens, kind="stable")
    taken = np.cumsum(pieces[run_of[by_token]]) - pieces[run_of[by_token]]
    _, starts, counts = np.unique(tokens[by_token], return_index=True, return_counts=True)
    number[lane[by_token]] = taken - np.repeat(taken[starts], counts)
    num_ranges += np.bincount(tokens, pieces[run_of], minlength=len(num_ranges)).astype(np.int64)

    run_of_group = np.repeat(np.arange(len(runs)), groups)
    group = np.repeat(np.arange(len(run_of_group)), pieces[run_of_group])
    run, piece = run_of_group[group], _within(pieces[run_of_group])
    first, last = (np.array([getattr(run, name) for run in runs]) * page_size for name in ("first", "last"))
    step = max(RANGE_STEP, page_size)

    def edge(i):
        stretched = (last - first + pieces // 2 * shorter)[run] * i // pieces[run] - i // 2 * shorter[run]
        inner = (first[run] + stretched + step // 2) // step * step
        return np.where(i == 0, first[run], np.where(i == pieces[run], last[run], inner))

    return _Ranges(
        token.reshape(-1, width)[group],
        rows[[run.members[0] for run in runs]][run],
        edge(piece),
        edge(piece + 1),
        number.reshape(-1, width)[group] + piece[:, None],
    )


def _cut_chunks(
    rows: PerChunk, begins: PerChunk, starts: PerChunk, lengths: PerChunk, firsts: PerChunk, width: int
) -> tuple[PerTile, PerTile, PerTile, PerTile, PerTile]:
    """Tiles of up to `width` consecutive tokens: row, begin and end of the range, first token, number of tokens."""
    per_chunk = -(-lengths // width)
    chunk = np.repeat(np.arange(len(rows)), per_chunk)
    offset = _within(per_chunk) * width
    count = np.minimum(lengths[chunk] - offset, width)
    return rows[chunk], begins[chunk], starts[chunk] + offset + count, firsts[chunk] + offset, count


def _cut_ranges(
    row: PerTile, begin: PerTile, end: PerTile, first: PerTile, count: PerTile, num_ranges: Int[np.ndarray, " T"],
    shape: TileShape,
) -> _Ranges:  # fmt: skip
    """Cuts long ranges, by their length alone or at fixed places; counts them in `num_ranges`."""
    length = end - begin
    splits = np.clip(length // shape.min_range, 1, shape.splits)
    size = -(-length // (splits * RANGE_STEP)) * RANGE_STEP
    size = np.full_like(size, shape.fixed) if shape.fixed else size
    splits = -(-length // size)
    tile = np.repeat(np.arange(len(row)), splits)
    piece = _within(splits)
    lane = np.arange(shape.rows)
    token = np.where(lane < count[tile, None], first[tile, None] + lane, -1)
    number = num_ranges[token] + piece[:, None]
    num_ranges[_tokens(first, count)] += np.repeat(splits, count)
    start = begin[tile] + piece * size[tile]
    return _Ranges(token, row[tile], start, np.minimum(start + size[tile], end[tile]), number)


def _lay_out(
    ranges: list[_Ranges], base: Int[np.ndarray, " T"], num_tokens: int, num_cut: int, shape: TileShape
) -> TileList:
    """The tiles in the capacity of their list, the longest last, where the kernels begin, filled up with empty ones.
    base: each token's first partial result in this list, of num_cut."""
    token = np.full((shape.tiles, shape.rows), num_tokens, np.int32)
    partial = np.full((shape.tiles, shape.rows), shape.partials, np.int32)
    columns = np.zeros((3, shape.tiles), np.int32)
    if not ranges:
        return TileList(token, *columns, partial)
    names = ("token", "number", "row", "start", "end")
    tokens, number, row, start, end = (np.concatenate([getattr(part, name) for part in ranges]) for name in names)
    assert len(row) <= shape.tiles, f"{len(row)} tiles, room for {shape.tiles}"
    assert num_cut <= shape.partials, f"{num_cut} partial results, room for {shape.partials}"
    order = np.argsort(end - start, kind="stable") if shape.rows > 1 else slice(None)
    is_real = tokens[order] >= 0
    token[: len(row)] = np.where(is_real, tokens[order], num_tokens)
    numbered = np.minimum(base[tokens[order]] + number[order], shape.partials)
    partial[: len(row)] = np.where(is_real, numbered, shape.partials)
    columns[:, : len(row)] = row[order], start[order], end[order]
    return TileList(token, *columns, partial)
