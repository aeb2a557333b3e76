"""Which pages several chunks share, and which of these are worth reading once for all: a forest of runs.

A run is a range of columns of the page table whose ids are equal in all its members. Runs nest: members of one may
share more behind it. Found from the ids alone, by sorting the rows and comparing neighbours. It knows rows and columns,
never requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

PerChunk = Int[np.ndarray, " chunks"]


@dataclass(frozen=True)
class Costs:
    """Measured times, in units of one position that a tile of one token reads.

    wide: of a position that a tile of many tokens reads; tile: of such a tile, whatever it reads. partial: of one
    partial result of a token, written and merged.
    launch: of attending in more launches than a plan without runs has. wide_rows: query tokens of a wide tile.
    min_sequences: fewer that decode are not worth an executable that takes runs. step: runs end at multiples of so many
    columns.
    """

    wide_rows: int
    wide: float
    tile: float
    partial: float
    launch: float
    min_sequences: int = 16
    step: int = 1


@dataclass(frozen=True)
class Run:
    """Columns [first, last) of the page table, equal in the rows of all `members`, which are indices of chunks."""

    members: Int[np.ndarray, " members"]
    first: int
    last: int
    gain: float


def shared_runs(
    table: Int[np.ndarray, "chunks P"], limits: PerChunk, step: int = 1
) -> tuple[Int[np.ndarray, " n"], list[tuple[int, int, int, list[int]]]]:
    """All maximal runs of equal leading columns, below each chunk's limit, in multiples of `step` columns.

    Returns an order of the chunks that may share and, for each run, (begin, end, columns, children): the members are
    order[begin:end], they agree in columns [0, columns), and children are the indices of the runs inside it, which
    stand before it.
    """
    _, inverse, counts = np.unique(table[:, 0], return_inverse=True, return_counts=True)
    order = np.flatnonzero((counts[inverse] > 1) & (limits > 0))  # whoever is alone in the first column shares nothing
    if len(order) < 2:
        return order, []
    width = int(limits[order].max())
    rows = np.ascontiguousarray(table[order, :width], np.int32)
    ends = np.flatnonzero(limits[order] < width)
    rows[ends, limits[order[ends]]] = ~order[ends]  # nobody else's: behind its limit a row agrees with none
    # Bytes in memory order: equal heads come together, and that is all the order has to do.
    by_bytes = np.argsort(rows.view(np.dtype((np.void, 4 * width))).ravel())
    order, rows = order[by_bytes], rows[by_bytes]
    differs = rows[1:] != rows[:-1]
    agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), width)  # columns, with the next row

    runs: list[tuple[int, int, int, list[int]]] = []
    open_runs: list[tuple[int, int, list[int]]] = [(0, 0, [])]  # (columns, begin, children), ever deeper
    for i, columns in enumerate([*(agreed // step * step).tolist(), 0]):
        begin, child = i, None
        while open_runs[-1][0] > columns:
            depth, begin, children = open_runs.pop()
            if child is not None:
                children.append(child)
            runs.append((begin, i + 1, depth, children))
            child = len(runs) - 1
        if open_runs[-1][0] < columns:
            open_runs.append((columns, begin, []))
        if child is not None:
            open_runs[-1][2].append(child)
    return order, runs


def choose_runs(
    table: Int[np.ndarray, "chunks P"],
    limits: PerChunk,
    lengths: PerChunk,
    *,
    page_size: int,
    costs: Costs,
    max_tiles: int,
    max_partials: int,
) -> list[Run]:
    """The runs worth a tile of their own, outer ones first; together they fit into so many tiles and partial results.

    table: each chunk's row. limits: its leading columns that any of its tokens may see whole. lengths: its tokens.
    """
    limits = np.where(_gains(limits * page_size, lengths, costs), limits, 0)
    order, runs = shared_runs(table, limits, costs.step)
    tokens = lengths[order]
    narrow = tokens == 1
    alone = np.where(narrow, 1.0, costs.wide * -(-tokens // costs.wide_rows))  # cost of a position, in own tiles
    tokens_before, alone_before = (np.concatenate([[0], np.cumsum(x)]).tolist() for x in (tokens, alone))
    sizes = [tokens_before[end] - tokens_before[begin] for begin, end, *_ in runs]
    tiles = [-(-size // costs.wide_rows) for size in sizes]
    best, apart = [], []  # of each run: cost of a position at best, and without a tile of this run
    for i, (begin, end, _, children) in enumerate(runs):
        cost = alone_before[end] - alone_before[begin]
        for child in children:
            first, last = runs[child][:2]
            cost += best[child] - (alone_before[last] - alone_before[first])
        apart.append(cost)
        best.append(min(cost, costs.wide * tiles[i]))

    covered = np.zeros(len(order), np.int64)
    chosen = []
    for i in reversed(range(len(runs))):
        begin, end, columns, _ = runs[i]
        first = int(covered[begin])
        gain = (columns - first) * page_size * (apart[i] - best[i]) - sizes[i] * costs.partial - tiles[i] * costs.tile
        if gain > 0:
            chosen.append((gain, i))
            covered[begin:end] = columns
    return _what_fits(order, runs, chosen, tiles, sizes, max_tiles, max_partials)


def _gains(positions: PerChunk, lengths: PerChunk, costs: Costs) -> Bool[np.ndarray, " chunks"]:
    """Whether a chunk gains if so many positions are read in tiles with others': one token from being read once, more
    tokens from what is empty in the tiles they would have alone."""
    tiles = lengths / costs.wide_rows
    saved = positions * costs.wide * (np.ceil(tiles) - tiles)
    return (lengths == 1) | (saved > lengths * costs.partial + tiles * costs.tile)


def _what_fits(order, runs, chosen, tiles, sizes, max_tiles, max_partials) -> list[Run]:
    """The most gainful runs that fit; what an outer run would have covered, those inside it cover then."""
    kept = set()
    for _, i in sorted(chosen, reverse=True):
        if tiles[i] <= max_tiles and sizes[i] <= max_partials:
            kept.add(i)
            max_tiles -= tiles[i]
            max_partials -= sizes[i]
    covered = np.zeros(len(order), np.int64)
    result = []
    for gain, i in chosen:
        if i in kept:
            begin, end, columns, _ = runs[i]
            result.append(Run(np.sort(order[begin:end]), int(covered[begin]), columns, gain))
            covered[begin:end] = columns
    return result
