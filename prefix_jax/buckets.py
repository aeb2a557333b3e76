"""The padded shapes that are compiled: how many there are, what each has room for, and how its arrays lie in one.

T tokens, B rows (`max_num_seqs`), K positions whose logits are read (`sample_…`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prefix_jax.forest import Costs
from prefix_jax.tile_plan import TILE_FIELDS, TilePlan, TileShape

SAMPLING_FIELDS = {  # of each row whose logits are read; where nothing is asked
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "num_logprobs": np.int32(-1),
}
MAX_EXECUTABLES = 24  # of the step, on a GPU, beyond which no size between powers of two is added
CHANGES_OF_PROMPT = 1024  # entries of the page table, which a long prompt changes at once


@dataclass(frozen=True)
class Tiling:
    """What the attention implementation wants of a plan. wide_rows: query tokens in a wide tile. narrow_programs,
    wide_programs: how many (tile, KV head) programs fill the device; with fewer, ranges are cut. 0: never cut.
    shared_programs: the same for wide tiles that run beside narrow ones, spare_programs fewer where these take longer;
    own_time: of one position of a KV head in all narrow tiles, in positions of a wide one. costs: of tiles that read
    pages for several chunks; None: every chunk reads all of its own.

    fixed: where not 0, all tiles are wide and cut at its multiples, of which a sequence has at most max_splits, so that
    a row's bits depend on its sequence alone.
    """

    wide_rows: int
    narrow_programs: int = 0
    wide_programs: int = 0
    shared_programs: int = 0
    spare_programs: int = 0
    own_time: float = 0.0
    max_splits: int = 32
    costs: Costs | None = None
    fixed: int = 0

    def splits(self, programs: int, tiles: int, num_kv_heads: int) -> int:
        return max(1, min(self.max_splits, programs // (tiles * num_kv_heads)))


@dataclass(frozen=True)
class Bucket:
    """A padded shape that is compiled: up to `num_tokens` tokens, of which up to `num_samples` yield a token.

    kind: "decode" takes chunks of one token, "shared" these and tiles of pages that they share, "mixed" any chunks.
    shapes: of the narrow tiles and, but for "decode", the wide ones; or where all tiles are wide, of these alone.
    num_prompts: of "mixed", how many chunks may have more than one token. num_changes: of the page table.
    """

    kind: str
    num_tokens: int
    num_samples: int
    shapes: tuple[TileShape, ...]
    num_prompts: int = 0
    num_changes: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.num_tokens}"

    @property
    def lists(self) -> tuple[str, ...]:
        """Names of its tile lists, each of one shape."""
        return ("narrow", "wide")[: len(self.shapes)]

    @property
    def merges(self) -> bool:
        """Whether a range may be cut."""
        return any(shape.partials for shape in self.shapes)

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array in the packed one, in order."""
        t, k = self.num_tokens, self.num_samples
        fields: dict[str, tuple[int, ...]] = dict.fromkeys(("token", "source", "position", "row"), (t,))
        fields |= dict.fromkeys(("change_index", "change_page"), (max(t, self.num_changes),))
        fields |= dict.fromkeys(("sample_token", "sample_row", "sample_position", "target", *SAMPLING_FIELDS), (k,))
        fields |= {"seed": (k, 2), "num_tokens": (1,)}
        for kind, shape in zip(self.lists, self.shapes, strict=True):
            fields |= {f"{kind}.{name}": (shape.tiles,) for name in ("row", "start", "end")}
            fields[f"{kind}.token"] = fields[f"{kind}.partial"] = (shape.tiles, shape.rows)
        if self.merges:
            fields["merge.token"] = (t,)
            fields["merge.first"] = fields["merge.count"] = (len(self.shapes), t)
        return fields

    @cached_property
    def packed_len(self) -> int:
        return sum(math.prod(shape) for shape in self.fields.values())

    def unpack(self, packed: Any) -> dict[str, Any]:
        """Named views of the packed array, on the host (to fill them) or the device (to read them)."""
        views, offset = {}, 0
        for name, shape in self.fields.items():
            views[name] = packed[offset : offset + math.prod(shape)].reshape(shape)
            offset += math.prod(shape)
        return views

    def fill_tiles(self, plan: TilePlan, views: Mapping[str, np.ndarray]) -> None:
        """Lays a tile plan out in an unpacked batch."""
        for kind, tiles in zip(self.lists, plan.lists, strict=True):
            for name in TILE_FIELDS:
                views[f"{kind}.{name}"][...] = getattr(tiles, name)
        if self.merges:
            views["merge.token"][:] = self.num_tokens
            for name in ("token", "first", "count"):
                values = getattr(plan.merge, name)
                views[f"merge.{name}"][..., : values.shape[-1]] = values


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_kv_heads: int,
    tiling: Tiling,
    *,
    step: int = 2,
    smallest: int = 16,
    for_gpu: bool = False,
) -> list[Bucket]:
    """Decode and shared buckets up to `max_num_seqs`, mixed ones up to `max_num_batched_tokens`, each `step` times the
    one before; for_gpu: those of `_sizes_for_gpu`.

    for_gpu: mixed ones have room for as many changed pages as a long prompt has, since a launch of its own costs more.
    Those of fewer tokens than a wide tile take one prompt: room for more would be empty tiles, in each of which a layer
    starts a program for every KV head.
    """
    least = tiling.costs.min_sequences if tiling.costs and not tiling.fixed else max_num_seqs + 1  # to share pages
    if for_gpu:
        sizes = _sizes_for_gpu(max_num_seqs, max_num_batched_tokens, least)
    else:
        decode = _sizes(1, min(max_num_seqs, max_num_batched_tokens), step)
        shared, mixed = [t for t in decode if t >= least], _sizes(smallest, max_num_batched_tokens, step)
        sizes = {"decode": decode, "shared": shared, "mixed": mixed}
    if max_num_batched_tokens == 1:
        sizes["mixed"] = []

    def room(kind: str, tokens: int) -> dict[str, int]:
        if kind != "mixed":
            return {}
        one = for_gpu and not tiling.fixed and tokens < min(tiling.wide_rows, max_num_batched_tokens)
        changes = CHANGES_OF_PROMPT if for_gpu else 0
        return {"num_prompts": 1 if one else min(tokens // 2, max_num_seqs), "num_changes": changes}

    return [
        _make_bucket(kind, t, min(t, max_num_seqs), num_kv_heads, tiling, room(kind, t))
        for kind, of_kind in sizes.items()
        for t in of_kind
    ]


def _sizes_for_gpu(max_num_seqs: int, max_num_batched_tokens: int, least: int) -> dict[str, list[int]]:
    """Powers of two, but for the smallest: a step costs its weights at least, so that these are not worth an executable
    each. From some hundred tokens on a product costs by the token; so as many sizes between as `MAX_EXECUTABLES` leaves
    room for: most steps of a full engine have all its rows and a prompt or a few, and most of the others are those in
    which its sequences end one by one."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = {
        "decode": sorted({*(t for t in (1, 8, 32) if t < rows), *_sizes(min(64, rows), rows, 2)}),
        "shared": [t for t in _sizes(min(64, rows), rows, 2) if t >= least],
        "mixed": sorted({min(16, max_num_batched_tokens), *_sizes(128, max_num_batched_tokens, 2)}),
    }
    between = [("mixed", 64), ("decode", 16)]
    if rows >= 128:
        eighths = ("mixed", 12), ("decode", 6), ("decode", 3), ("mixed", 10), ("mixed", 24)  # of the rows
        between[:0] = [(kind, rows * n // 8) for kind, n in eighths]
    for kind, tokens in between:
        if sum(map(len, sizes.values())) < MAX_EXECUTABLES and tokens < sizes[kind][-1]:
            sizes[kind] = sorted({*sizes[kind], tokens})
    return sizes


def _make_bucket(
    kind: str, num_tokens: int, samples: int, num_kv_heads: int, tiling: Tiling, room: Mapping[str, int]
) -> Bucket:
    rows, costs = tiling.wide_rows, tiling.costs if kind != "decode" else None
    if tiling.fixed:
        # Shared tiles take the places of own ones, and a token's ranges are as many either way.
        tiles = (samples + (num_tokens // rows if kind == "mixed" else 0)) * tiling.max_splits
        partials = num_tokens * tiling.max_splits
        limits = {"partials": partials, "shared_tiles": tiles, "shared_partials": partials}
        shape = TileShape(tiles, rows, tiling.max_splits, fixed=tiling.fixed, **limits)
        return Bucket(kind, num_tokens, samples, (shape,), **room)
    splits = tiling.splits(tiling.narrow_programs, samples, num_kv_heads)
    shapes = [TileShape(samples * splits, 1, splits, partials=samples * splits if splits > 1 or costs else 0)]
    shared = {}
    if costs:
        fill = max(1, (tiling.shared_programs if kind == "shared" else tiling.wide_programs) // num_kv_heads)
        # Empty tiles cost as well: room for some 320 programs in many small runs.
        shared = {
            "fill": fill,
            "shared_tiles": max(fill, min(samples // 8, 320 // num_kv_heads)) + -(-num_tokens // rows),
            "shared_partials": num_tokens + max(8 * samples, 1024),
        }
    if kind == "shared":
        spare, own_time = min(fill - 1, tiling.spare_programs // num_kv_heads), tiling.own_time * num_kv_heads
        shared |= {"spare": spare, "own_time": own_time}
        shapes.append(TileShape(shared["shared_tiles"], rows, partials=shared["shared_partials"], **shared))
    if kind == "mixed":
        splits = tiling.splits(tiling.wide_programs, -(-num_tokens // rows), num_kv_heads)
        # A prompt fills whole tiles but for one.
        tiles = (num_tokens // rows + room["num_prompts"]) * splits + shared.get("shared_tiles", 0)
        partials = num_tokens * splits if splits > 1 or costs else 0
        partials += shared.get("shared_partials", 0)
        shapes.append(TileShape(tiles, rows, splits, partials=partials, **shared))
    return Bucket(kind, num_tokens, samples, tuple(shapes), **room)


def _sizes(smallest: int, largest: int, step: int) -> list[int]:
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * step, largest))
    return sizes
