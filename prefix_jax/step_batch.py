"""The seam: a step plan -> one packed int32 array in the shape of a bucket, and back into named arrays on the device.

T tokens, B rows (`max_num_seqs`; row B of the page table is scratch, as page 0 of the store is; tokens of row B + 1 are
written nowhere), P pages a row, K positions whose logits are read (`sample_…`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from prefix_jax.buckets import SAMPLING_FIELDS, Bucket
from prefix_jax.forest import Costs, PerChunk, Run, choose_runs
from prefix_jax.request import Sequence
from prefix_jax.scheduler import StepPlan
from prefix_jax.tile_plan import run_pieces, tile_plan
from prefix_jax.token_rules import RuleRow, TokenRules, no_rules


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
        """As for a fresh device: what rows were told of pages and rules holds no more."""
        self.owners: list[Sequence | None] = [None] * self.max_num_seqs
        self.ruled: dict[int, TokenRules] = {}  # rows whose rules on the device are not empty
        self.ends: dict[int, list[int]] = {}  # of bad words, which rows ban on the device as their last tokens want it
        self.forget_runs()

    def forget_runs(self) -> None:
        self.kept_for: tuple[bytes, bytes] | None = None  # rows and lengths whose runs are kept
        self.runs: list[Run] = []
        self.last: _Decoded | None = None
        self.covered = np.zeros(self.max_num_seqs, np.int64)  # columns of each row that lie in kept runs

    @property
    def largest(self) -> Bucket:
        """The one that needs the most memory."""
        return max(self.buckets, key=lambda bucket: (bucket.num_tokens, bucket.packed_len))

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
            bucket = self.bucket_of(len(chunks), plan.num_tokens, int((lengths > 1).sum()), shares=bool(runs))
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
        views["num_tokens"][:] = count
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
        wide = self.bucket_of(len(table), num_tokens, int((lengths > 1).sum()), shares=True).shapes[-1]
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
