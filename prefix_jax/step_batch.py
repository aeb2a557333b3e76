"""The seam: a step plan -> one packed int32 array in the shape of a bucket, and back into named arrays on the device.

T tokens, B rows (`max_num_seqs`; row B of the page table is scratch, as page 0 of the store is; tokens of row B + 1 are
written nowhere), P pages a row, K positions whose logits are read (`sample_…`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from prefix_jax.forest import Costs, PerChunk, Run, choose_runs
from prefix_jax.request import Sequence
from prefix_jax.scheduler import StepPlan
from prefix_jax.tile_plan import TILE_FIELDS, TilePlan, TileShape, run_pieces, tile_plan
from prefix_jax.token_rules import RuleRow, TokenRules, no_rules

SAMPLING_FIELDS = {  # of each row whose logits are read; where nothing is asked
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "num_logprobs": np.int32(-1),
}


MAX_EXECUTABLES = 24  # of the step, on a GPU
CHANGES_OF_PROMPT = 1024  # entries of the page table, which a long prompt changes at once


@dataclass(frozen=True)
class Tiling:
    """What the attention implementation wants of a plan. wide_rows: query tokens in a wide tile. narrow_programs,
    wide_programs: how many (tile, KV head) programs fill the device; with fewer, ranges are cut. 0: never cut.
    shared_programs: the same for wide tiles that run beside narrow ones, spare_programs fewer where these have more to
    read. costs: of tiles that read pages for several
    chunks; None: every chunk reads all of its own.

    fixed: where not 0, all tiles are wide and cut at its multiples, of which a sequence has at most max_splits, so that
    a row's bits depend on its sequence alone.
    """

    wide_rows: int
    narrow_programs: int = 0
    wide_programs: int = 0
    shared_programs: int = 0
    spare_programs: int = 0
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
    num_prompts: of "mixed", how many chunks of more than one token. num_changes: of the page table.
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
        fields["seed"] = (k, 2)
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

    for_gpu: mixed ones but the largest have room for few prompts, since the empty places of a list cost time, and for
    as many changed pages as a long prompt has, since a launch of its own costs more.
    """
    if for_gpu:
        sizes = _sizes_for_gpu(max_num_seqs, max_num_batched_tokens)
    else:
        decode = _sizes(1, min(max_num_seqs, max_num_batched_tokens), step)
        sizes = {"decode": decode, "shared": decode, "mixed": _sizes(smallest, max_num_batched_tokens, step)}
    if max_num_batched_tokens == 1:
        sizes["mixed"] = []
    if not tiling.costs or tiling.fixed:
        sizes["shared"] = []
    else:
        sizes["shared"] = [t for t in sizes["shared"] if t >= tiling.costs.min_sequences]
    buckets = []
    for kind, tokens in [(kind, t) for kind, of_kind in sizes.items() for t in of_kind]:
        prompts, changes = min(tokens // 2, max_num_seqs), 0
        if kind == "mixed" and for_gpu:
            changes = CHANGES_OF_PROMPT
            if tokens < max_num_batched_tokens:
                prompts = min(prompts, max(1, tokens // 32))
        buckets.append(_make_bucket(kind, tokens, max_num_seqs, prompts, changes, num_kv_heads, tiling))
    return buckets


def _sizes_for_gpu(max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, list[int]]:
    """Powers of two, but for the smallest: a step costs its weights at least, so that these are not worth an executable
    each. From some hundred tokens on a product costs by the token; so as many sizes between as `MAX_EXECUTABLES` leaves
    room for: most steps of a full engine have all its rows and a prompt or a few, and most of the others are those in
    which its sequences end one by one."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = {
        "decode": sorted({*(t for t in (1, 8, 32) if t < rows), *_sizes(min(64, rows), rows, 2)}),
        "shared": _sizes(min(64, rows), rows, 2),
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
    kind: str, num_tokens: int, max_num_seqs: int, prompts: int, changes: int, num_kv_heads: int, tiling: Tiling
) -> Bucket:
    samples = min(num_tokens, max_num_seqs)
    rows, costs = tiling.wide_rows, tiling.costs if kind != "decode" else None
    room_for = {"num_prompts": prompts if kind == "mixed" else 0, "num_changes": changes}
    if tiling.fixed:
        # Shared tiles take the places of own ones, and a token's ranges are as many either way.
        tiles = (samples + (num_tokens // rows if kind == "mixed" else 0)) * tiling.max_splits
        partials = num_tokens * tiling.max_splits
        room = {"partials": partials, "shared_tiles": tiles, "shared_partials": partials}
        shape = TileShape(tiles, rows, tiling.max_splits, fixed=tiling.fixed, **room)
        return Bucket(kind, num_tokens, samples, (shape,), **room_for)
    splits = tiling.splits(tiling.narrow_programs, samples, num_kv_heads)
    shapes = [TileShape(samples * splits, 1, splits, partials=samples * splits if splits > 1 or costs else 0)]
    shared = {}
    if costs:
        fill = max(1, (tiling.shared_programs if kind == "shared" else tiling.wide_programs) // num_kv_heads)
        # Empty tiles cost as well: room for some 320 programs in many small runs.
        shared = {
            "fill": fill,
            "spare": min(fill - 1, tiling.spare_programs // num_kv_heads) if kind == "shared" else 0,
            "shared_tiles": max(fill, min(samples // 8, 320 // num_kv_heads)) + -(-num_tokens // rows),
            "shared_partials": num_tokens + max(8 * samples, 1024),
        }
    if kind == "shared":
        shapes.append(TileShape(shared["shared_tiles"], rows, partials=shared["shared_partials"], **shared))
    if kind == "mixed":
        splits = tiling.splits(tiling.wide_programs, -(-num_tokens // rows), num_kv_heads)
        # A chunk fills whole tiles but for one; it has at least two tokens.
        tiles = (num_tokens // rows + prompts) * splits + shared.get("shared_tiles", 0)
        partials = num_tokens * splits if splits > 1 or costs else 0
        partials += shared.get("shared_partials", 0)
        shapes.append(TileShape(tiles, rows, splits, partials=partials, **shared))
    return Bucket(kind, num_tokens, samples, tuple(shapes), **room_for)


def _sizes(smallest: int, largest: int, step: int) -> list[int]:
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * step, largest))
    return sizes


@dataclass(frozen=True)
class StepBatch:
    """One step for the device. Before it, `copies` (page from, page to), then `arrivals` (page, values), and
    `early_changes` of the page table (flat index, page), which did not fit into the step, are to be applied, and
    `rules` of rows, and `bans` of rows whose other rules stay."""

    bucket: Bucket
    packed: Int[np.ndarray, " packed_len"]
    copies: list[tuple[int, int]]
    early_changes: Int[np.ndarray, "2 n"]
    arrivals: dict[int, Any]
    rules: dict[int, RuleRow] = field(default_factory=dict)
    bans: dict[int, UInt32[np.ndarray, " words"]] = field(default_factory=dict)
    wants_logprobs: bool = False


@dataclass(eq=False)
class _Decoded:
    """A step in which each of these rows decoded the token at `starts`, and how it was laid out."""

    bucket: Bucket
    rows: bytes
    starts: PerChunk
    runs: list[Run]
    pieces: bytes  # into how many ranges each run was cut
    packed: Int[np.ndarray, " packed_len"] | None = None

    def follows(self, last: _Decoded | None) -> bool:
        """Whether it is `last` with each sequence one token further."""
        return (
            last is not None
            and self.bucket is last.bucket
            and self.rows == last.rows
            and (self.runs is last.runs or not (self.runs or last.runs))
            and self.pieces == last.pieces
            and bool((self.starts == last.starts + 1).all())
        )


class Batcher:
    """Lays plans out in buckets. Keeps each row's sampling parameters between steps, its pages, and the runs of pages
    that rows share."""

    def __init__(
        self, buckets: list[Bucket], max_num_seqs: int, max_pages: int, page_size: int = 1, costs: Costs | None = None
    ):
        self.buckets = buckets
        self.max_num_seqs = max_num_seqs
        self.max_pages = max_pages
        self.page_size = page_size
        self.costs = costs
        self.nowhere = max_num_seqs + 1  # the row of tokens whose K and V are not written
        self.has_shared = any(bucket.kind == "shared" for bucket in buckets)
        # What padding has, and each row: fields of the batch.
        self.sampling = {name: (start, np.full(max_num_seqs, start)) for name, start in SAMPLING_FIELDS.items()}
        self.sampling["seed"] = (np.uint32(0), np.zeros((max_num_seqs, 2), np.uint32))
        self.page_table = np.zeros((max_num_seqs, max_pages), np.int32)  # as the device has it, of the rows in use
        self.forget_rows()

    def forget_rows(self) -> None:
        self.owners: list[Sequence | None] = [None] * self.max_num_seqs
        self.ruled: dict[int, TokenRules] = {}  # rows whose rules on the device are not empty
        self.ends: dict[int, list[int]] = {}  # of bad words, which rows ban on the device as their last tokens want it
        self.kept_for: tuple[bytes, bytes] | None = None  # rows and lengths whose runs are kept
        self.runs: list[Run] = []
        self.last: _Decoded | None = None
        self.covered = np.zeros(self.max_num_seqs, np.int64)  # columns of each row that lie in kept runs

    def bucket_of(self, num_chunks: int, num_tokens: int, num_prompts: int = 0, shares: bool = False) -> Bucket:
        """The smallest bucket that takes such a plan. num_prompts: chunks of more than one token; shares: with tiles
        for shared pages."""
        kind = "mixed" if num_chunks < num_tokens else "shared" if shares and self.has_shared else "decode"
        return next(
            bucket
            for bucket in self.buckets
            if bucket.kind == kind and bucket.num_tokens >= num_tokens and bucket.num_prompts >= num_prompts
        )

    def build(self, plan: StepPlan, bucket: Bucket | None = None) -> StepBatch:
        """The arrays of a plan in its bucket, or in a larger one; an empty plan gives a step of padding alone."""
        chunks = plan.chunks
        numbers = [(chunk.row, chunk.start, chunk.length, chunk.write_from) for chunk in chunks]
        rows, starts, lengths, written = np.array(numbers, np.int64).reshape(-1, 4).T
        changes = self._take_changes(plan)
        rules, bans = self._take_rules(plan)
        runs: list[Run] = []
        decoded = None
        if bucket is None:
            runs = self._shared_runs(rows, starts, lengths, changes)
            prompts = int((lengths > 1).sum())
            bucket = self.bucket_of(len(chunks), plan.num_tokens, prompts, shares=bool(runs))
            if 0 < plan.num_tokens == len(chunks) == plan.num_reads - plan.num_scored and (written <= starts).all():
                decoded = self._decoded(bucket, rows, starts, runs)
        if decoded is not None and decoded.follows(self.last):
            views = self._lay_out_again(plan, decoded)
        else:
            views = self._lay_out(plan, bucket, rows, starts, lengths, written, runs)
        early_changes = self._fill_changes(changes, views)
        packed = views["packed"]
        if decoded is not None:
            decoded.packed = packed
        self.last = decoded
        wants_logprobs = bool((views["num_logprobs"] >= 0).any())
        return StepBatch(bucket, packed, plan.copies, early_changes, plan.arrivals, rules, bans, wants_logprobs)

    def _lay_out(self, plan: StepPlan, bucket: Bucket, rows, starts, lengths, written, runs) -> dict[str, np.ndarray]:
        """Everything but the changes of the page table, and the packed array itself."""
        packed = np.zeros(bucket.packed_len, np.int32)
        views = bucket.unpack(packed)
        count = plan.num_tokens
        ends = np.cumsum(lengths)
        views["row"][:] = self.max_num_seqs
        views["row"][:count] = np.repeat(rows, lengths)
        for i in np.flatnonzero(written > starts):
            first = ends[i] - lengths[i]
            views["row"][first : min(first + written[i] - starts[i], ends[i])] = self.nowhere
        views["position"][:count] = np.arange(count) + np.repeat(starts - ends + lengths, lengths)
        self._fill_tokens(plan, ends, views)
        self._fill_reads(plan, rows, ends, starts + lengths, views)
        tiles = tile_plan(
            rows,
            starts,
            lengths,
            num_tokens=bucket.num_tokens,
            shapes=bucket.shapes,
            runs=runs,
            page_size=self.page_size,
        )
        bucket.fill_tiles(tiles, views)
        return views | {"packed": packed}

    def _decoded(self, bucket: Bucket, rows: PerChunk, starts: PerChunk, runs: list[Run]) -> _Decoded | None:
        """A step in which each sequence decodes, if all that changes from one to the next is where they stand: no range
        of a sequence's own is cut."""
        narrow = bucket.shapes[0]
        if narrow.rows > 1 or narrow.splits > 1:
            return None
        pieces = b""
        if runs:
            pieces = run_pieces(runs, starts, np.ones_like(starts), bucket.shapes[-1], self.page_size).tobytes()
        return _Decoded(bucket, rows.tobytes(), starts, runs, pieces)

    def _lay_out_again(self, plan: StepPlan, decoded: _Decoded) -> dict[str, np.ndarray]:
        """What `_lay_out` makes of a step that follows the last one."""
        packed, count = self.last.packed.copy(), plan.num_tokens
        views = decoded.bucket.unpack(packed)
        views["position"][:count] = decoded.starts
        views["sample_position"][:count] = views[f"{decoded.bucket.lists[0]}.end"][:count] = decoded.starts + 1
        views["token"][:] = 0
        self._fill_tokens(plan, np.arange(1, count + 1), views)
        return views | {"packed": packed}

    def _shared_runs(self, rows, starts, lengths, changes: Int[np.ndarray, "3 n"]) -> list[Run]:
        """The runs of pages that are worth tiles of their own; kept while the rows stay and no shared page changes."""
        if self.costs is None or len(rows) < 2:
            return []
        key = rows.tobytes(), lengths.tobytes()
        row, column, _ = changes
        if key == self.kept_for and not (column < self.covered[row]).any():
            filled = (starts % self.page_size == 0) & (starts > 0)  # pages that the rows now see whole
            row = np.concatenate([row, rows[filled]])
            column = np.concatenate([column, starts[filled] // self.page_size - 1])
            if not ((self.page_table[rows[:, None], column] == self.page_table[row, column]).sum(axis=0) > 1).any():
                return self.runs
        self.runs = self.find_runs(self.page_table[rows], starts, lengths)
        self.covered[:] = 0
        for run in self.runs:
            self.covered[rows[run.members]] = run.last
        self.kept_for = key
        return self.runs

    def find_runs(self, table: Int[np.ndarray, "chunks P"], starts: PerChunk, lengths: PerChunk) -> list[Run]:
        """The runs of these chunks, whose pages are in the table, that are worth tiles of their own and fit."""
        num_tokens = int(lengths.sum())
        decode = num_tokens == len(table)
        if decode and num_tokens < self.costs.min_sequences:
            return []
        prompts = int((lengths > 1).sum())
        wide = self.bucket_of(len(table), num_tokens, prompts, shares=True).shapes[-1]
        runs = choose_runs(
            table,
            starts // self.page_size,
            lengths,
            page_size=self.page_size,
            costs=self.costs,
            max_tiles=wide.shared_tiles,
            max_partials=wide.shared_partials,
        )
        return [] if decode and sum(run.gain for run in runs) < self.costs.launch else runs

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

    def _fill_reads(self, plan: StepPlan, rows: np.ndarray, ends: np.ndarray, positions: np.ndarray, views) -> None:
        """The positions whose logits are read: first those that yield a token of their row, and how it is to be drawn,
        then those that yield log-probabilities of a token that is known."""
        samples = np.array([chunk.samples for chunk in plan.chunks], bool)
        row, count = rows[samples], int(samples.sum())
        views["sample_row"][:] = self.max_num_seqs
        views["sample_row"][:count] = row
        views["sample_token"][:count] = ends[samples] - 1
        views["sample_position"][:count] = positions[samples]
        for name, (default, values) in self.sampling.items():
            views[name][:] = default.view(np.int32)
            views[name][:count] = values[row].view(np.int32)
        views["target"][:] = -1
        for first, index in plan.numbered_scores():
            chunk = plan.chunks[index]
            scored = np.arange(chunk.score_end - chunk.num_scored, chunk.score_end)
            here = slice(first, first + chunk.num_scored)
            views["sample_token"][here] = ends[index] - chunk.end + scored
            views["sample_position"][here] = scored + 1
            views["num_logprobs"][here] = chunk.sequence.request.sampling.prompt_logprobs
            views["target"][here] = chunk.sequence.tokens[scored[0] + 1 : scored[-1] + 2]

    def _take_rules(self, plan: StepPlan) -> tuple[dict[int, RuleRow], dict[int, UInt32[np.ndarray, " words"]]]:
        """The rows whose rules the device does not know yet: of new owners, and the bans of those whose last tokens
        begin another bad word than before."""
        rules: dict[int, RuleRow] = {}
        bans: dict[int, UInt32[np.ndarray, " words"]] = {}
        for chunk in plan.chunks:
            row, sequence = chunk.row, chunk.sequence
            own = sequence.rules
            if self.owners[row] is not sequence:
                self._set_owner(row, sequence)
                if own is not None:
                    rules[row] = own.row(sequence.tokens)
                    self.ends[row] = own.ends_of_phrases(sequence.tokens)
                elif (former := self.ruled.pop(row, None)) is not None:
                    rules[row] = no_rules(former.vocab_size)
            elif own is not None and own.needs_tokens:
                ends = own.ends_of_phrases(sequence.tokens)
                if ends != self.ends[row]:
                    bans[row], self.ends[row] = own.bans(ends), ends
            if own is not None:
                self.ruled[row] = own
        return rules, bans

    def _set_owner(self, row: int, sequence: Sequence) -> None:
        asked = sequence.request.sampling
        self.owners[row] = sequence
        self.last = None
        for name, (_, values) in self.sampling.items():
            if name != "seed":
                value = getattr(asked, "logprobs" if name == "num_logprobs" else name)
                values[row] = -1 if value is None else value
        self.sampling["top_k"][1][row] = max(asked.top_k, 0)
        self.sampling["seed"][1][row] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF

    def _take_changes(self, plan: StepPlan) -> Int[np.ndarray, "3 n"]:
        """What changed in the rows' pages since the device last heard: row, column, page."""
        rows: list[int] = []
        columns: list[int] = []
        pages: list[int] = []
        for chunk in plan.chunks:
            table = chunk.sequence.table
            if table.changed:
                if self.owners[chunk.row] is not chunk.sequence:
                    self.page_table[chunk.row] = 0  # pages of its last owner, which may be anybody's by now
                rows += [chunk.row] * len(table.changed)
                columns += table.changed
                pages += [table.pages[column] for column in table.changed]
                table.changed = []
        changes = np.array([rows, columns, pages], np.int64).reshape(3, -1)
        self.page_table[changes[0], changes[1]] = changes[2]
        return changes

    def _fill_changes(self, changes: Int[np.ndarray, "3 n"], views) -> Int[np.ndarray, "2 early"]:
        """Tells the device; returns (flat index, page) of the changes that do not fit into the step."""
        index = changes[0] * self.max_pages + changes[1]
        early = max(0, len(index) - len(views["change_index"]))
        fits = len(index) - early
        views["change_index"][:] = self.max_num_seqs * self.max_pages  # the scratch row
        views["change_index"][:fits] = index[early:]
        views["change_page"][:] = 0
        views["change_page"][:fits] = changes[2, early:]
        return np.stack([index[:early], changes[2, :early]]).astype(np.int32)
