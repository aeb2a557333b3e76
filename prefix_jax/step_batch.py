"""The seam: a step plan -> one packed int32 array in the shape of a bucket, and back into named arrays on the device.

T tokens, B rows (`max_num_seqs`; row B of the page table is scratch, as page 0 of the store is), P pages a row, K
samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from prefix_jax.request import Sequence
from prefix_jax.scheduler import StepPlan
from prefix_jax.tile_plan import TileShape, tile_plan


@dataclass(frozen=True)
class Tiling:
    """What the attention implementation wants of a plan. wide_rows: query tokens in a wide tile. narrow_programs,
    wide_programs: how many (tile, KV head) programs fill the device; with fewer, ranges are cut. 0: never cut."""

    wide_rows: int
    narrow_programs: int = 0
    wide_programs: int = 0
    max_splits: int = 32

    def splits(self, programs: int, tiles: int, num_kv_heads: int) -> int:
        return max(1, min(self.max_splits, programs // (tiles * num_kv_heads)))


def tiling_for(attention: str, wide_rows: int) -> Tiling:
    """On a GPU decodes fill it with four programs for each of some 132 multiprocessors, wide tiles with two."""
    return Tiling(wide_rows, 528, 264) if attention.startswith("pallas") else Tiling(wide_rows)


@dataclass(frozen=True)
class Bucket:
    """A padded shape that is compiled: up to `num_tokens` tokens, of which up to `num_samples` yield a token. One tile
    shape: a step of chunks of one token; two: narrow and wide tiles. num_partials: partial results of cut ranges."""

    num_tokens: int
    num_samples: int
    shapes: tuple[TileShape, ...]
    num_partials: int

    @property
    def takes_chunks(self) -> bool:
        return len(self.shapes) > 1

    @property
    def name(self) -> str:
        return f"{'mixed' if self.takes_chunks else 'decode'}_{self.num_tokens}"

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array in the packed one, in order."""
        t, k = self.num_tokens, self.num_samples
        fields: dict[str, tuple[int, ...]] = dict.fromkeys(("token", "source", "position", "row"), (t,))
        fields |= dict.fromkeys(("change_index", "change_page"), (t,))
        fields |= dict.fromkeys(
            ("sample_token", "sample_row", "sample_position", "temperature", "top_k", "top_p"), (k,)
        )
        fields["seed"] = (k, 2)
        for kind, shape in zip(("narrow", "wide"), self.shapes, strict=False):
            fields |= {f"{kind}.{name}": (shape.tiles,) for name in ("row", "start", "end")}
            fields[f"{kind}.token"] = fields[f"{kind}.partial"] = (shape.tiles, shape.rows)
        if self.num_partials:
            fields |= dict.fromkeys(("merge.token", "merge.first", "merge.count"), (t,))
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


def make_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, num_kv_heads: int, tiling: Tiling, step: int = 2
) -> list[Bucket]:
    """Decode buckets up to `max_num_seqs`, mixed ones up to `max_num_batched_tokens`, each `step` times the one
    before."""
    decode = _sizes(1, min(max_num_seqs, max_num_batched_tokens), step)
    mixed = _sizes(16, max_num_batched_tokens, step) if max_num_batched_tokens > 1 else []
    buckets = []
    for num_tokens, takes_chunks in [(t, False) for t in decode] + [(t, True) for t in mixed]:
        samples = min(num_tokens, max_num_seqs)
        splits = tiling.splits(tiling.narrow_programs, samples, num_kv_heads)
        shapes = [TileShape(samples * splits, 1, splits)]
        if takes_chunks:
            rows = tiling.wide_rows
            splits = tiling.splits(tiling.wide_programs, -(-num_tokens // rows), num_kv_heads)
            # A chunk fills whole tiles but for one; it has at least two tokens.
            tiles = num_tokens // rows + min(num_tokens // 2, max_num_seqs)
            shapes.append(TileShape(tiles * splits, rows, splits))
        splits = max(shape.splits for shape in shapes)
        buckets.append(Bucket(num_tokens, samples, tuple(shapes), num_tokens * splits if splits > 1 else 0))
    return buckets


def _sizes(smallest: int, largest: int, step: int) -> list[int]:
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * step, largest))
    return sizes


@dataclass(frozen=True)
class StepBatch:
    """One step for the device. Before it, `copies` (page from, page to) and `early_changes` of the page table (flat
    index, page), which did not fit into the step, are to be applied."""

    bucket: Bucket
    packed: Int[np.ndarray, " packed_len"]
    copies: list[tuple[int, int]]
    early_changes: Int[np.ndarray, "2 n"]


class Batcher:
    """Lays plans out in buckets. Keeps each row's sampling parameters between steps."""

    def __init__(self, buckets: list[Bucket], max_num_seqs: int, max_pages: int):
        self.buckets = buckets
        self.decode = [bucket for bucket in buckets if not bucket.takes_chunks]
        self.mixed = [bucket for bucket in buckets if bucket.takes_chunks]
        self.max_num_seqs = max_num_seqs
        self.max_pages = max_pages
        self.forget_rows()
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.seed = np.zeros((max_num_seqs, 2), np.uint32)

    def forget_rows(self) -> None:
        self.owners: list[Sequence | None] = [None] * self.max_num_seqs

    def bucket_of(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that takes the plan."""
        buckets = self.decode if len(plan.chunks) == plan.num_tokens else self.mixed
        return next(bucket for bucket in buckets if bucket.num_tokens >= plan.num_tokens)

    def build(self, plan: StepPlan, bucket: Bucket | None = None) -> StepBatch:
        """The arrays of a plan in its bucket, or in a larger one; an empty plan gives a step of padding alone."""
        bucket = bucket or self.bucket_of(plan)
        chunks = plan.chunks
        rows = np.array([chunk.row for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        lengths = np.array([chunk.length for chunk in chunks], np.int64)
        packed = np.zeros(bucket.packed_len, np.int32)
        views = bucket.unpack(packed)

        count = plan.num_tokens
        ends = np.cumsum(lengths)
        views["row"][:] = self.max_num_seqs
        views["row"][:count] = np.repeat(rows, lengths)
        views["position"][:count] = np.arange(count) + np.repeat(starts - ends + lengths, lengths)
        self._fill_tokens(plan, ends, views)
        self._fill_samples(plan, rows, ends, starts + lengths, views)
        early_changes = self._fill_changes(plan, views)
        tiles = tile_plan(
            rows, starts, lengths, num_tokens=bucket.num_tokens, shapes=bucket.shapes, num_partials=bucket.num_partials
        )
        for kind, tile_list in zip(("narrow", "wide"), tiles.lists, strict=False):
            for name in ("token", "row", "start", "end", "partial"):
                views[f"{kind}.{name}"][...] = getattr(tile_list, name)
        if bucket.num_partials:
            views["merge.token"][:] = bucket.num_tokens
            for name in ("token", "first", "count"):
                values = getattr(tiles.merge, name)
                views[f"merge.{name}"][: len(values)] = values
        return StepBatch(bucket, packed, plan.copies, early_changes)

    def _fill_tokens(self, plan: StepPlan, ends: np.ndarray, views: Mapping[str, np.ndarray]) -> None:
        """Tokens the host knows; for the others, the row whose last sampled token it is (`source`)."""
        token, source = views["token"], views["source"]
        source[:] = self.max_num_seqs
        for chunk, end in zip(plan.chunks, ends.tolist(), strict=True):
            if chunk.from_device:
                source[end - 1] = chunk.row
            elif chunk.length == 1:
                token[end - 1] = chunk.sequence.tokens[chunk.start]
            else:
                token[end - chunk.length : end] = chunk.sequence.tokens[chunk.start : chunk.end]

    def _fill_samples(self, plan: StepPlan, rows: np.ndarray, ends: np.ndarray, positions: np.ndarray, views) -> None:
        """The rows that yield a token, and how each is to be sampled."""
        for chunk in plan.chunks:
            if self.owners[chunk.row] is not chunk.sequence:
                self._set_owner(chunk.row, chunk.sequence)
        samples = np.array([chunk.samples for chunk in plan.chunks], bool)
        row, count = rows[samples], int(samples.sum())
        views["sample_row"][:] = self.max_num_seqs
        views["sample_row"][:count] = row
        views["sample_token"][:count] = ends[samples] - 1
        views["sample_position"][:count] = positions[samples]
        views["temperature"][:count] = self.temperature[row].view(np.int32)
        views["top_p"][:] = np.float32(1).view(np.int32)
        views["top_p"][:count] = self.top_p[row].view(np.int32)
        views["top_k"][:count] = self.top_k[row]
        views["seed"][:count] = self.seed[row].view(np.int32)

    def _set_owner(self, row: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.owners[row] = sequence
        self.temperature[row] = sampling.temperature
        self.top_k[row] = max(sampling.top_k, 0)
        self.top_p[row] = sampling.top_p
        self.seed[row] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF

    def _fill_changes(self, plan: StepPlan, views: Mapping[str, np.ndarray]) -> Int[np.ndarray, "2 n"]:
        """What changed in the rows' pages since the device last heard; returns what does not fit into the step."""
        index: list[int] = []
        pages: list[int] = []
        for chunk in plan.chunks:
            table = chunk.sequence.table
            if table.changed:
                offset = chunk.row * self.max_pages
                index += [offset + column for column in table.changed]
                pages += [table.pages[column] for column in table.changed]
                table.changed = []
        fits = min(len(index), len(views["change_index"]))
        early = len(index) - fits
        views["change_index"][:] = self.max_num_seqs * self.max_pages  # the scratch row
        views["change_index"][:fits] = index[early:]
        views["change_page"][:fits] = pages[early:]
        return np.array([index[:early], pages[:early]], np.int32)
