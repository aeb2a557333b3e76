"""Named cases of paged attention, for tests, tuning and benchmarks alike, and the arrays that belong to them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tiles import Merge, Scales, Tiles


@dataclasses.dataclass(frozen=True)
class Case:
    """sequences: (computed, new) positions of each; `new` query tokens follow `computed` cached positions.

    shared: leading positions (a multiple of page_size) whose pages all sequences share, read once for all of them.
    cut: the longest range of a tile, 0 for no limit.
    scatter: tokens and ranges are thrown into tiles at random instead of in order.
    tile_rows: R of the wide tile list; a tile of one token goes to the narrow one. beside: the wide list has cut tokens
        alone, and runs beside the narrow one.
    softcap, window, alibi: of the scores; slopes are then 2 ** -(h + 1). quantized: K and V in float8_e4m3fn.
    """

    name: str
    why: str
    sequences: tuple[tuple[int, int], ...]
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    tile_rows: int = 8
    shared: int = 0
    cut: int = 0
    scatter: bool = False
    beside: bool = False
    softcap: float | None = None
    window: int | None = None
    alibi: bool = False
    quantized: bool = False

    def __str__(self) -> str:
        return self.name


EDGES = (0, 14, 15, 16, 62, 63, 64, 512)  # decode contexts of 1, 15, 16, 17, 63, 64, 65 and 513 positions
DECODE = tuple((n, 1) for n in EDGES)
CHUNKS = ((0, 33), (48, 17), (130, 9))
MIXED = ((40, 1), (0, 33), (48, 17), (130, 1), (7, 9))

CASES = (
    Case("decode", "contexts at page and block edges; one token is not even one row of a matrix", DECODE),
    Case("decode_mha", "a group of one", DECODE[:4], group=1, num_kv_heads=3),
    Case("decode_group_3", "rows that are no power of two, as in SmolLM2", DECODE[2:7], group=3, num_kv_heads=3),
    Case("decode_group_8", "as in Llama-3-70B", DECODE[:3], group=8, num_kv_heads=1, head_dim=128),
    Case("head_dim_8", "smaller than the matrix units take; 5 rows a token", CHUNKS, group=5, head_dim=8),
    Case("head_dim_80", "no power of two", CHUNKS, group=1, head_dim=80),
    Case("head_dim_96", "no power of two", CHUNKS, group=3, num_kv_heads=1, head_dim=96),
    Case("head_dim_128", "as in Llama-3", CHUNKS, head_dim=128),
    Case("head_dim_256", "the largest", CHUNKS, num_kv_heads=1, head_dim=256),
    Case("page_size_1", "every position is elsewhere", CHUNKS, page_size=1),
    Case("page_size_4", "many pages in a block; 7 rows a token, as in Qwen2-7B", CHUNKS, group=7, page_size=4),
    Case("page_size_256", "many blocks in a page", CHUNKS, page_size=256),
    Case("prefill", "lengths around tiles, pages and blocks", tuple((0, n) for n in (1, 7, 15, 16, 17, 63, 65))),
    Case("prefill_group_3", "24 rows of 32", ((0, 65), (0, 16)), group=3, num_kv_heads=3),
    Case("prefill_wide", "128 matrix rows", ((0, 65), (70, 33)), group=4, tile_rows=32),
    Case("prefill_odd_rows", "7 tokens x 3 heads", ((0, 30), (70, 9)), group=3, tile_rows=7),
    Case("chunk", "new tokens on cached ones, from inside a page too", ((64, 16), (37, 21), (513, 9), (15, 2))),
    Case("mixed", "both tile lists in one step", MIXED),
    Case("decode_cut", "few sequences, ranges cut to fill the device", ((300, 1), (17, 1), (64, 1)), cut=64),
    Case("decode_cut_far", "more partials than a step of the merge", ((512, 1), (100, 1)), cut=48, head_dim=128),
    Case("prefill_cut", "tokens that see nothing of a later range", ((0, 70), (64, 30)), cut=16, group=3),
    Case("mixed_cut", "cut and whole tokens in both lists", MIXED, cut=48),
    Case("shared_decode", "one shared range for all, one own range each", ((100, 1), (64, 1), (70, 1)), shared=64),
    Case(
        "shared_beside", "wide tiles of cut tokens alone", tuple((64 + n, 1) for n in range(7)), shared=64, beside=True
    ),
    Case(
        "shared_beside_cut", "both lists cut", ((200, 1), (470, 1), (165, 1)), shared=160, cut=64, beside=True, group=3
    ),
    Case("shared_many", "more sequences than rows of a tile", tuple((32 + n, 1) for n in range(11)), shared=32),
    Case("shared_cut", "the shared range is cut as well", ((200, 1), (170, 1), (160, 1)), shared=160, cut=64, group=1),
    Case("shared_chunk", "chunks over a shared prefix", ((32, 9), (40, 3), (33, 1)), shared=32),
    Case("softcap", "as in Gemma 2; small enough to bite", MIXED, softcap=2.0),
    Case("window", "as in Mistral: inside a block, a page, a chunk", MIXED, window=37, group=1),
    Case("window_1", "a query that sees itself alone", CHUNKS, window=1, cut=16),
    Case("alibi", "as in MPT", MIXED, alibi=True, group=3, head_dim=80),
    Case("all_scoring", "with cut ranges", MIXED, softcap=5.0, window=50, alibi=True, cut=48),
    Case("quantized", "K and V in one byte, with a scale for each KV head", MIXED, quantized=True, cut=48),
    Case(
        "quantized_capped", "where scales cannot be folded into the unit", MIXED, quantized=True, softcap=2.0, group=3
    ),
    Case("scatter", "any tokens of a sequence in any tile, any ranges", MIXED, scatter=True),
    Case("scatter_page_4", "the same, D padded", CHUNKS, scatter=True, page_size=4, group=3, head_dim=80),
)

WIDE = {"num_kv_heads": 2, "head_dim": 128, "group": 4, "tile_rows": 32}
HOPPER_CASES = (  # wide tiles of 128 matrix rows, as the kernel for Hopper wants them
    Case("hopper_prefill", "tiles partly filled, ranges that end inside a page", ((0, 65), (70, 33)), **WIDE),
    Case("hopper_chunk", "D = 64", ((64, 16), (37, 21), (513, 9), (15, 2)), **WIDE | {"head_dim": 64}),
    Case(
        "hopper_cut", "whole and cut tokens, some of which see nothing of a range", ((0, 70), (64, 30)), cut=48, **WIDE
    ),
    Case(
        "hopper_shared", "a range of many sequences, cut", ((300, 2), (270, 1), (260, 2)), shared=256, cut=128, **WIDE
    ),
    Case("hopper_beside", "cut tokens alone", ((300, 1), (270, 1), (291, 1)), shared=256, cut=128, beside=True, **WIDE),
    Case("hopper_mixed", "8 query heads", MIXED, cut=48, **WIDE | {"group": 8, "tile_rows": 16, "num_kv_heads": 1}),
    Case("hopper_scatter", "ranges that start anywhere", MIXED, scatter=True, **WIDE),
    Case("hopper_mha", "one query head", ((0, 140), (30, 9)), **WIDE | {"group": 1, "tile_rows": 128, "head_dim": 64}),
    Case("hopper_group_2", "two", ((0, 140), (30, 9)), cut=96, **WIDE | {"group": 2, "tile_rows": 64}),
    Case("hopper_page_24", "pages that divide no step", ((0, 65), (70, 33)), page_size=24, **WIDE),
    Case("hopper_page_256", "a page of two steps", ((0, 65), (170, 33)), page_size=256, **WIDE),
    Case("hopper_long", "many steps", ((700, 40), (0, 300)), **WIDE),
)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arguments of paged_attention; `row` [T] is each token's row of the page table, `idle` marks tokens in no tile;
    `options` are those of the scores."""

    q: jax.Array
    k_slots: jax.Array
    v_slots: jax.Array
    positions: jax.Array
    page_table: jax.Array
    tile_lists: tuple[Tiles, ...]
    merge: Merge | None
    row: jax.Array
    idle: np.ndarray
    options: dict[str, Any]

    @property
    def arguments(self) -> tuple:
        return self.q, self.k_slots, self.v_slots, self.positions, self.page_table, self.tile_lists, self.merge


def build(case: Case, dtype: jax.typing.DTypeLike, seed: int = 0) -> Arrays:
    """Random arrays for the case. Pages are permuted; slots that hold no position of any sequence are NaN.

    Among those are page 0, the tails of last pages and some pages in no table. Two query tokens at the end are in no
    tile, each tile list ends in empty tiles, and the merge ends in padding.
    """
    rng = np.random.default_rng(seed)
    page_table, num_pages = _page_table(case, rng)
    row = np.repeat(np.arange(len(case.sequences)), [new for _, new in case.sequences])
    positions = np.concatenate([np.arange(done, done + new) for done, new in case.sequences])
    row, positions = np.append(row, [len(case.sequences)] * 2), np.append(positions, [0, 0])
    tile_lists, merge = lay_out(_pieces(case, rng), len(row), case.tile_rows, case.beside)

    owned = np.zeros(num_pages * case.page_size, bool)
    for b, (done, new) in enumerate(case.sequences):
        p = np.arange(done + new)
        owned[page_table[b, p // case.page_size] * case.page_size + p % case.page_size] = True

    def normal(*shape, where=True, scales=1.0, dtype=dtype):
        values = rng.standard_normal((*shape, case.head_dim), np.float32)
        return jnp.asarray(np.where(where, values, np.float32(np.nan)) / scales).astype(dtype)

    scales, kv_dtype = None, dtype
    if case.quantized:
        scales = Scales(*(jnp.asarray(rng.uniform(0.01, 0.1, case.num_kv_heads), jnp.float32) for _ in range(2)))
        kv_dtype = jnp.float8_e4m3fn

    def slots(scale):
        scale = 1.0 if scale is None else np.asarray(scale)[:, None]
        return normal(len(owned), case.num_kv_heads, where=owned[:, None, None], scales=scale, dtype=kv_dtype)

    slopes = jnp.exp2(-1.0 - jnp.arange(case.num_kv_heads * case.group, dtype=jnp.float32))
    return Arrays(
        q=normal(len(row), case.num_kv_heads * case.group),
        k_slots=slots(scales and scales.k),
        v_slots=slots(scales and scales.v),
        positions=jnp.asarray(positions, jnp.int32),
        page_table=jnp.asarray(page_table, jnp.int32),
        tile_lists=tile_lists,
        merge=merge,
        row=jnp.asarray(row, jnp.int32),
        idle=np.arange(len(row)) >= len(row) - 2,
        options={"softcap": case.softcap, "window": case.window, "alibi_slopes": slopes if case.alibi else None}
        | {"scales": scales},
    )


def _page_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Page table with a scratch row of zeros at the end, and the number of pages."""
    counts = [-(-(done + new) // case.page_size) for done, new in case.sequences]
    shared = case.shared // case.page_size
    num_pages = 1 + sum(counts) + 3
    free = list(1 + rng.permutation(num_pages - 1))
    table = np.zeros((len(counts) + 1, max(counts)), np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = [free.pop() for _ in range(count)]
    table[:-1, :shared] = table[0, :shared]
    return table, num_pages


Piece = tuple[np.ndarray, int, int, int]  # query tokens, row of the page table, start, end


def _pieces(case: Case, rng: np.random.Generator) -> list[Piece]:
    """The case's work: every token against every range it has to see."""
    ranges, first = [], 0  # tokens, row, start, end, before they are cut into tiles
    for b, (done, new) in enumerate(case.sequences):
        tokens = np.arange(first, first + new)
        if case.scatter:
            tokens = rng.permutation(tokens)
        first += new
        for i in range(0, new, case.tile_rows):
            part = tokens[i : i + case.tile_rows]
            end = done + new if case.scatter else done + min(i + case.tile_rows, new)
            ranges.append((part, b, case.shared, end))
    if case.shared:
        ranges += [
            (np.arange(i, min(i + case.tile_rows, first)), 0, 0, case.shared) for i in range(0, first, case.tile_rows)
        ]
    pieces = []
    for tokens, b, start, end in ranges:
        edges = np.arange(start, end, case.cut or end)
        if case.scatter:
            edges = np.unique(np.append(rng.integers(start, end, 3), start))
        pieces += [(tokens, b, int(s), int(e)) for s, e in zip(edges, [*edges[1:], end], strict=True)]
    return pieces


def lay_out(
    pieces: list[Piece], num_tokens: int, tile_rows: int, beside: bool = False
) -> tuple[tuple[Tiles, ...], Merge | None]:
    """Pieces as a narrow (R = 1) and a wide tile list, where there are such tiles, and the merge of cut tokens. beside:
    the wide list has cut tokens alone, and says so."""
    ranges: dict[int, int] = {}
    for tokens, *_ in pieces:
        for t in tokens.tolist():
            ranges[t] = ranges.get(t, 0) + 1
    tile_lists, firsts, counts = [], [], []
    for rows, members in (
        (1, [p for p in pieces if len(p[0]) == 1]),
        (tile_rows, [p for p in pieces if len(p[0]) > 1]),
    ):
        if not members:
            continue
        starts: dict[int, list[int]] = {}  # of the cut tokens' ranges in this list
        for tokens, _, start, _ in members:
            for t in tokens.tolist():
                if ranges[t] > 1:
                    starts.setdefault(t, []).append(start)
        count = np.array([len(starts.get(t, [])) for t in range(num_tokens)])
        first = np.cumsum(count) - count
        num_partials = int(count.sum()) + 3
        token = np.full((len(members) + 2, rows), num_tokens, np.int32)
        partial = np.full_like(token, num_partials)
        row, start, end = np.zeros((3, len(token)), np.int32)
        for n, (tokens, b, s, e) in enumerate(members):
            token[n, : len(tokens)], row[n], start[n], end[n] = tokens, b, s, e
            for r, t in enumerate(tokens.tolist()):
                if t in starts:
                    partial[n, r] = first[t] + sorted(starts[t]).index(s)
        fields = map(jnp.asarray, (token, row, start, end))
        only_cut = beside and rows > 1
        cut = {"partial": jnp.asarray(partial), "num_partials": num_partials, "only_cut": only_cut} if starts else {}
        tile_lists.append(Tiles(*fields, **cut))
        firsts.append(first)
        counts.append(count)
    cut = [t for t, number in ranges.items() if number > 1]
    if not cut:
        return tuple(tile_lists), None
    first, count = (np.array(values)[:, [*cut, 0]] for values in (firsts, counts))
    count[:, -1] = 0  # padding
    token = np.array([*cut, num_tokens])
    return tuple(tile_lists), Merge(*(jnp.asarray(a, jnp.int32) for a in (token, first, count)))
