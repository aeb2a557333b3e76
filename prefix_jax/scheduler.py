"""Waiting and running sequences -> a step plan: which positions of which sequences are computed next.

A decode is a chunk of length one; nothing here asks which kind a chunk is. Only running sequences hold pages, and only
they may preempt. A sequence whose chunk is in the plan is never preempted in that plan.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefix_jax import policies
from prefix_jax.eviction import belady
from prefix_jax.forecast import Forecast
from prefix_jax.policies import Policy, View
from prefix_jax.prefix_cache import HitEnd, PageTable, PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Sequence

log = logging.getLogger(__name__)

COUNTED = (
    "prompt_tokens", "expected_tokens", "found_tokens", "cached_tokens", "adopted_tokens",
    "computed_tokens", "computed_prompt_tokens", "forked_tokens", "published_pages", "preemptions",
)  # fmt: skip


class Chunk(NamedTuple):
    """Positions [start, start + length) of a sequence, computed in one step from row `row` of the page table. `samples`
    says that the chunk reaches the sequence's end, so that its last position yields a token; `from_device` that the
    token at `start` is one which the previous step sampled and the host has not seen. The positions before
    `write_from` are computed for their logits alone: their K and V are in the store. The `num_scored` positions that
    end at `score_end` yield log-probabilities of the token behind each."""

    sequence: Sequence
    row: int
    start: int
    length: int
    samples: bool
    from_device: bool
    write_from: int = 0
    num_scored: int = 0
    score_end: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass
class StepPlan:
    """One step's chunks, and what to do before it: page copies (from, to), then pages to fill (page, values)."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_reads: int = 0  # positions whose logits are read, max_num_seqs at most
    num_scored: int = 0  # of these, for log-probabilities of the prompt; the others yield a token each
    arrivals: dict[int, Any] = field(default_factory=dict)

    def numbered_reads(self) -> Iterator[tuple[int, Chunk]]:
        """Every chunk with the number of its sample, if it has one, among the positions whose logits are read."""
        number = 0
        for chunk in self.chunks:
            yield number, chunk
            number += chunk.samples

    def numbered_scores(self) -> list[tuple[int, int]]:
        """The number of the first position that a chunk scores, which follow the samples, and the chunk's index."""
        number, numbered = self.num_reads - self.num_scored, []
        for index, chunk in enumerate(self.chunks) if self.num_scored else ():
            if chunk.num_scored:
                numbered.append((number, index))
                number += chunk.num_scored
        return numbered


class Scheduler:
    """Owns the queues, and the rows of the device's page table.

    max_num_seqs: sequences running at once. max_num_batched_tokens: positions computed in one step.
    """

    def __init__(
        self,
        cache: PrefixCache,
        prefixes: PrefixPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str | Policy = "fifo",
        caching: bool = True,
    ):
        self.cache = cache
        self.prefixes = prefixes
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.policy = policies.make_policy(policy, cache.page_size) if isinstance(policy, str) else policy
        self.view = View(cache)
        self.forecast: Forecast | None = None
        self.caching = caching
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # the oldest first
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.finished: deque[Sequence] = deque()  # since the engine last took them
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))

    def check_fits(self, length: int) -> None:
        """ValueError if a prompt of this many tokens can never fit into the pool."""
        needed, num_pages = -(-length // self.cache.page_size), self.cache.pool.num_pages
        if needed > num_pages:
            size = self.cache.page_size
            raise ValueError(f"a prompt of {length} tokens needs {needed} pages of {size}, the pool has {num_pages}")

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence whose prompt fits into the pool."""
        self.check_fits(sequence.prompt_len)
        self.view.queued(sequence, len(self.waiting))
        self.waiting.append(sequence)

    def add_batch(self, batch: list[Sequence]) -> None:
        """Queues sequences that are all there will be for a while: `dfs` and `belady` look ahead over all that wait."""
        self.view.longest_queue = max(self.view.longest_queue, len(self.waiting) + len(batch))
        for sequence in batch:
            self.add(sequence)
        depth_first = self.policy is policies.dfs
        if self.caching and (depth_first or self.cache.queue.policy is belady):
            for sequence in self.running:
                sequence.turn = None
            self.forecast = Forecast(self.cache, self.waiting, depth_first=depth_first)

    def schedule(self) -> StepPlan:
        """Plans the next step and takes the pages for it. The plan may be empty while a step is in flight."""
        self.cache.step += 1
        self.prefixes.drop_expired()
        plan = StepPlan()
        # Decodes first: a long prompt must not hold up those that are already answering. And the oldest first: who
        # comes early finds others to preempt.
        decodes: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            remaining = sequence.remaining
            if remaining:  # else its last token is in flight
                (prefills if remaining > 1 else decodes).append((sequence, remaining))
        for sequence, remaining in decodes + prefills:
            if sequence.row is not None and plan.num_tokens < self.max_num_batched_tokens:
                self._continue(sequence, remaining, plan)
        self._admit(plan)
        self.counts["computed_tokens"] += plan.num_tokens
        return plan

    def settle(self, sequence: Sequence) -> None:
        """After a step with this sequence has been dispatched and its token collected: publishes the pages that are
        full of tokens known by now."""
        if sequence.table is not None:
            self._publish(sequence, written=True)

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence wherever it is. A step in flight may still compute for it: what it yields is dropped."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.finished.append(sequence)
        if sequence.row is not None:
            self._release(sequence)
        elif sequence in self.waiting:
            self._leave(sequence, started=False)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages. It resumes later, by recomputing what the trie does not hold by then."""
        if self.forecast is not None:
            self.forecast.put_back(sequence)
        self._release(sequence)
        sequence.computed_len = 0
        self.waiting.append(sequence)
        self.counts["preemptions"] += 1

    # ------------------------------------------------------------------------------------------------------------------

    def _continue(self, sequence: Sequence, remaining: int, plan: StepPlan) -> None:
        """Plans the next chunk of a running sequence, from behind what others have published meanwhile."""
        if sequence.pending and sequence.rules is not None and sequence.rules.needs_tokens:
            return  # it cannot go on before it knows the token in flight
        if remaining > 1 and self.caching and sequence.request.reads and not sequence.is_scoring:
            adopted = self.cache.adopt(sequence.table, sequence.tokens, sequence.computed_len)
            self.counts["adopted_tokens"] += adopted - sequence.computed_len
            remaining -= adopted - sequence.computed_len
            sequence.computed_len = adopted
        length = self._chunk_len(sequence, remaining, plan)
        end = sequence.computed_len + length
        if length and (end <= len(sequence.table.pages) * self.cache.page_size or self._make_room(sequence, end)):
            self._plan_chunk(sequence, length, plan)

    def _chunk_len(self, sequence: Sequence, remaining: int, plan: StepPlan) -> int:
        """Positions for which the step has room, in its tokens and in the logits that are read."""
        reads = self.max_num_seqs - plan.num_reads
        if remaining == 1 and reads:
            return 1
        room = self.max_num_batched_tokens - plan.num_tokens
        return min(remaining, room, reads + max(0, sequence.next_read - sequence.computed_len))

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Pages for `length` positions: free ones, then unread leaves, then the pages of the youngest sequence that has
        no chunk yet. If that is this one it gives up its own, unless it runs alone: then pinned leaves go, and if not
        even all pages are enough it ends. So the oldest always gets on."""
        cache = self.cache
        while not cache.grow(sequence.table, length):
            youngest = max((other for other in self.running if other.planned_step != cache.step), key=lambda s: s.order)
            if youngest is not sequence:
                self.preempt(youngest)
            elif len(self.running) > 1:
                self.preempt(sequence)
                return False
            elif cache.grow(sequence.table, length, force=True):
                return True
            else:
                if not sequence.pending:  # else decided again once that token is collected: it is still the caller's
                    pages = -(-length // cache.page_size)
                    why = f"the next token needs {pages} pages, the pool has {cache.pool.num_pages}"
                    self.finish(sequence, "length", why)
                return False
        return True

    def _admit(self, plan: StepPlan) -> None:
        """Starts waiting sequences in the policy's order while rows, pages and the token budget last."""
        if not (self.waiting and self.free_rows) or plan.num_tokens >= self.max_num_batched_tokens:
            return
        if self.running and not self.view.num_free_pages:
            return  # everyone needs a page of its own
        self.view.num_free_rows = len(self.free_rows)
        for sequence in self.candidates():
            if not self.free_rows or plan.num_tokens >= self.max_num_batched_tokens:
                return
            if sequence.pending:
                return  # preempted with a step in flight: it keeps its place, and nobody takes the pages it left
            if self._waits_for_leader(sequence, plan):
                continue
            table = self._open(sequence)
            # All known positions at once: a prompt that is half in can then never be thrown out for its own rest.
            if not self.cache.grow(table, sequence.length, force=not self.running):
                self.cache.close(table)
                if not self.running:
                    self.finish(sequence, "length", f"{sequence.length} tokens do not fit into the pool")
                    continue
                return
            self._start(sequence, table, plan)

    def _waits_for_leader(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether its prompt is being computed for the first answer to its request, with which it is going to share."""
        leader = sequence.leader
        if leader is None or leader.finish_reason is not None or len(sequence.tokens) > sequence.prompt_len:
            return False
        if leader.table is None:
            return len(leader.tokens) == leader.prompt_len  # else it was preempted later: its pages may be found
        # A page is copied as earlier steps left it: not if this very step copies it, brings it back or computes it.
        if leader.table.step == self.cache.step:
            return True
        if leader.planned_step == self.cache.step:
            return any(chunk.sequence is leader and chunk.start < leader.prompt_len for chunk in plan.chunks)
        return leader.computed_len < leader.prompt_len

    def _open(self, sequence: Sequence) -> PageTable:
        request, leader = sequence.request, sequence.leader
        if leader is not None and leader.table is not None and len(sequence.tokens) == sequence.prompt_len:
            return self.cache.fork(leader.table, sequence.prompt_len)
        return self.cache.open(
            sequence.tokens,
            request.cache_salt,
            reads=self.caching and request.reads,
            publishes=self.caching and request.writes,
            priority=request.priority,
            ttl=request.ttl,
        )

    def candidates(self) -> Iterator[Sequence]:
        """The policy's choice, each once, and if none of it starts and nothing runs, the oldest. Whatever a policy
        does, no request is lost: where it fails, the rest comes in order of arrival."""
        left = dict.fromkeys(self.waiting)
        try:
            for sequence in self.policy(list(left), self.view):
                if sequence not in left:
                    break  # named twice, or nobody who waits
                del left[sequence]
                yield sequence
        except Exception:
            log.exception("the policy %r failed", self.policy)
            yield from policies.fifo(list(left), self.view)
        if not self.running and self.waiting:
            yield policies.fifo(self.waiting, self.view)[0]

    def _leave(self, sequence: Sequence, *, started: bool) -> None:
        self.waiting.remove(sequence)
        self.view.left(sequence, len(self.waiting), started=started)
        if self.forecast is not None:
            self.forecast.drop(sequence)

    def _start(self, sequence: Sequence, table: PageTable, plan: StepPlan) -> None:
        self._leave(sequence, started=True)
        insort(self.running, sequence, key=lambda other: other.order)
        sequence.row = self.free_rows.pop()
        sequence.table = table
        sequence.computed_len = min(table.cached_len, sequence.next_read)
        if table.copy is not None:
            plan.copies.append(table.copy)
        if self.caching:
            self._find_prefixes(sequence)
        if sequence.leader is not None and len(sequence.tokens) == sequence.prompt_len:
            self.counts["forked_tokens"] += sequence.computed_len
        else:
            self.counts["cached_tokens"] += sequence.computed_len
            if sequence.num_cached_tokens is None and sequence.leader is None:
                self._count_hit(sequence)
        if length := self._chunk_len(sequence, sequence.remaining, plan):
            self._plan_chunk(sequence, length, plan)

    def _find_prefixes(self, sequence: Sequence) -> None:
        """The declared prefixes that it begins with, those it declares itself included."""
        salt, prefix_pos = sequence.request.cache_salt, sequence.request.prefix_pos
        sequence.prefixes = self.prefixes.find(sequence.tokens, salt)
        if prefix_pos and sequence.request.writes:
            sequence.prefixes.append(self.prefixes.declare(sequence.tokens[:prefix_pos], salt))

    def _count_hit(self, sequence: Sequence) -> None:
        """What it found when it was admitted first, what a cache without end would have had for it, and why it did not
        find more."""
        table, reads = sequence.table, self.caching and sequence.request.reads
        sequence.num_cached_tokens = sequence.computed_len
        if sequence.computed_len < table.cached_len:
            sequence.hit_end = HitEnd("scored", sequence.computed_len)
        else:
            sequence.hit_end = self.cache.explain(table, sequence.tokens) if reads else HitEnd("off", 0)
        self.prefixes.count(sequence.prefixes, table.cached_len)
        self.counts["prompt_tokens"] += sequence.prompt_len
        self.counts["found_tokens"] += table.cached_len
        self.counts["expected_tokens"] += self.cache.expected_len(table, sequence.tokens)

    def _plan_chunk(self, sequence: Sequence, length: int, plan: StepPlan) -> None:
        """Appends a chunk and publishes the pages it fills, for all that come later in this very plan. A chunk that
        ends before its sequence does has used up the budget: nobody can start on the page that it leaves half full."""
        start, num_known = sequence.computed_len, len(sequence.tokens)
        end = start + length
        samples = end == num_known + sequence.pending
        from_device = start >= num_known
        chunk = Chunk(sequence, sequence.row, start, length, samples, from_device, sequence.table.cached_len)
        if sequence.scored_len < sequence.prompt_len:
            score_end = min(end, sequence.prompt_len - 1)
            num_scored = max(0, score_end - max(start, sequence.scored_len - 1))
            sequence.scored_len += num_scored
            plan.num_reads += num_scored
            plan.num_scored += num_scored
            chunk = chunk._replace(num_scored=num_scored, score_end=score_end)
        plan.chunks.append(chunk)
        plan.num_tokens += length
        plan.num_reads += samples
        if start < sequence.prompt_len:
            self.counts["computed_prompt_tokens"] += min(end, sequence.prompt_len) - start
        sequence.computed_len = end
        sequence.planned_step = self.cache.step
        self._publish(sequence, written=False)
        if samples:
            sequence.pending += 1

    def _publish(self, sequence: Sequence, *, written: bool) -> None:
        table, computed = sequence.table, sequence.computed_len
        if computed >= (len(table.nodes) + 1) * self.cache.page_size:
            end = min(computed, len(sequence.tokens))
            published = self.cache.publish(table, sequence.tokens, end, written=written)
            self.counts["published_pages"] += published
            sequence.num_published_tokens += published * self.cache.page_size
        for prefix in sequence.prefixes:
            self.prefixes.pin_published(prefix, table.nodes)

    def _release(self, sequence: Sequence) -> None:
        self.cache.close(sequence.table)
        self.running.remove(sequence)
        self.free_rows.append(sequence.row)
        sequence.table = sequence.row = None
        sequence.prefixes = []
