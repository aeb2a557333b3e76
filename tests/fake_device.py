"""An engine without a model: the real host half over a device that keeps, in each slot, what its keys would depend on.

A slot holds a number made of its token, its position and the number in the slot before it, read through the page table
of the row that wrote it. A sampled token is made of all numbers that its row reads. So a wrong page, copy, table entry
or order of events gives wrong tokens, and a freed page is poisoned as soon as the device's order of events allows it.
"""

import numpy as np

from prefix_jax.buckets import Tiling, make_buckets
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Request, SamplingParams, Sequence
from prefix_jax.scheduler import Scheduler, StepPlan
from prefix_jax.step_batch import Batcher, StepBatch

POISON = -1


def slot_content(before, token, position):
    return hash((before, token, position))


def sampled_token(contents, vocab_size):
    return hash(tuple(contents)) % vocab_size


def alone(prompt, max_len, vocab_size, stops=()):
    """What a sequence that has the device to itself says; recomputes everything."""
    tokens, contents = list(prompt), []
    while len(tokens) < max_len:
        for position in range(len(contents), len(tokens)):
            contents.append(slot_content(contents[-1] if contents else 0, tokens[position], position))
        tokens.append(sampled_token(contents, vocab_size))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """Runs packed step batches the way the runner does, one after the other."""

    def __init__(self, cache: PrefixCache, batcher: Batcher, vocab_size: int):
        self.page_size, self.vocab_size, self.batcher = cache.page_size, vocab_size, batcher
        self.store = np.full(((cache.pool.num_pages + 1), cache.page_size), POISON, object)
        self.table = np.zeros((batcher.max_num_seqs + 1, batcher.max_pages), np.int64)
        self.last_tokens = np.zeros(batcher.max_num_seqs + 1, np.int64)
        self.freed: set[int] = set()
        give = cache.pool.give
        cache.pool.give = lambda pages: (self.freed.update(pages), give(pages))[1]

    def dispatch(self, batch: StepBatch) -> np.ndarray:
        views = batch.bucket.unpack(batch.packed)
        flat = self.table.reshape(-1)
        flat[batch.early_changes[0]] = batch.early_changes[1]
        sources, targets = zip(*batch.copies, strict=True) if batch.copies else ((), ())
        assert len(set(targets)) == len(targets), "two copies into one page"
        copied = [self.store[page].copy() for page in sources]
        self.store[sorted(self.freed)] = POISON
        self.freed.clear()
        for page, slots in zip(targets, copied, strict=True):
            self.store[page] = slots
        flat[views["change_index"]] = views["change_page"]
        self._write(views)
        for k, row in enumerate(views["sample_row"].tolist()):
            if row < self.batcher.max_num_seqs:
                self.last_tokens[row] = sampled_token(self._read(row, views["sample_position"][k]), self.vocab_size)
        return self.last_tokens.copy()

    def _write(self, views) -> None:
        """Every layer writes before it reads, so a position sees all earlier ones, also those of this very step."""
        known = views["source"] >= self.batcher.max_num_seqs
        tokens = np.where(known, views["token"], self.last_tokens[views["source"]]).tolist()
        rows, positions = views["row"].tolist(), views["position"].tolist()
        written = set()
        for t in sorted(range(len(tokens)), key=positions.__getitem__):
            row, position = rows[t], positions[t]
            if row == self.batcher.nowhere:
                continue  # computed for its logits alone
            if row == self.batcher.max_num_seqs:
                assert self.table[row, position // self.page_size] == 0, "padding writes to the scratch page"
                continue
            before = self.store[self._slot(row, position - 1)] if position else 0
            assert before != POISON, f"row {row} reads a slot before {position} that nobody wrote"
            slot = self._slot(row, position)
            assert slot[0] > 0, f"row {row} writes position {position} to the scratch page"
            assert slot not in written, f"slot {slot} is written twice in a step"
            written.add(slot)
            self.store[slot] = slot_content(before, tokens[t], position)

    def _slot(self, row: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self.page_size)
        return int(self.table[row, page]), offset

    def _read(self, row: int, length: int) -> list[int]:
        pages = self.table[row, : -(-length // self.page_size)]
        return self.store[pages].reshape(-1)[:length].tolist()


class FakeEngine:
    """The engine's loop: the next step is dispatched before the last one's tokens are read."""

    def __init__(
        self, num_pages, page_size=4, *, budget=64, num_seqs=8, max_len=64, vocab_size=5, caching=True, max_pinned=None,
        policy="fifo", eviction="lru"
    ):  # fmt: skip
        self.cache = PrefixCache(num_pages, page_size, eviction)
        self.prefixes = PrefixPool(self.cache, num_pages // 2 if max_pinned is None else max_pinned)
        self.scheduler = Scheduler(
            self.cache,
            self.prefixes,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            caching=caching,
            policy=policy,
        )
        self.max_len, self.vocab_size, self.caching = max_len, vocab_size, caching
        buckets = make_buckets(num_seqs, budget, 1, Tiling(4))
        self.batcher = Batcher(buckets, num_seqs, -(-max_len // page_size))
        self.device = FakeDevice(self.cache, self.batcher, vocab_size)
        self.in_flight: tuple[StepPlan, np.ndarray] | None = None
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.plans: list[StepPlan] = []

    def add(self, prompt, max_tokens=None, **options) -> Sequence:
        sequence = self.sequence(len(self.sequences), prompt, max_tokens, **options)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def add_answers(self, prompt, count, max_tokens=None, **options) -> list[Sequence]:
        """Several answers to one prompt, which share its pages."""
        answers: list[Sequence] = []
        for index in range(count):
            leader = answers[0] if answers else None
            sequence = self.sequence(len(self.sequences), prompt, max_tokens, index=index, leader=leader, **options)
            answers.append(sequence)
            self.scheduler.add(sequence)
            self.sequences.append(sequence)
        return answers

    def add_batch(self, prompts, max_tokens=None) -> None:
        batch = [self.sequence(len(self.sequences) + i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
        self.scheduler.add_batch(batch)
        self.sequences += batch

    def sequence(
        self, order, prompt, max_tokens=None, *, stops=(), prefix_pos=0, salt=None, index=0, leader=None, **options
    ) -> Sequence:
        max_len = self.max_len if max_tokens is None else min(len(prompt) + max_tokens, self.max_len)
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stops))
        request = Request(
            str(order),
            tuple(prompt),
            sampling,
            max_len,
            prefix_pos=prefix_pos,
            cache_salt=salt,
            **options,
        )
        return Sequence(request, order, 0, index, leader)

    def abort(self, sequence) -> None:
        if sequence.finish_reason is None:
            self.scheduler.finish(sequence, "abort")

    @property
    def has_work(self) -> bool:
        return len(self.finished) < len(self.sequences) or self.in_flight is not None

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        launched = (plan, self.device.dispatch(self.batcher.build(plan))) if plan.chunks else None
        for chunk in plan.chunks:
            pages = chunk.sequence.table.pages
            assert self.device.table[chunk.row, : len(pages)].tolist() == pages, "the device knows the row's pages"
        self.collect()
        self.in_flight = launched
        self.finished += self.scheduler.finished
        self.scheduler.finished.clear()
        self.plans.append(plan)
        self.check()
        return plan

    def collect(self) -> None:
        if self.in_flight is None:
            return
        plan, tokens = self.in_flight
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.pending -= chunk.samples
            if sequence.finish_reason is not None:
                continue
            if chunk.samples:
                sequence.tokens.append(int(tokens[chunk.row]))
            self.scheduler.settle(sequence)
            if chunk.samples and sequence.tokens[-1] in sequence.request.sampling.stop_token_ids:
                self.scheduler.finish(sequence, "stop", sequence.tokens[-1])
            elif chunk.samples and len(sequence.tokens) >= sequence.request.max_len:
                self.scheduler.finish(sequence, "length")

    def check_plan(self, plan: StepPlan) -> None:
        """No gap and no overlap in what is computed, within the budget, one row for one sequence."""
        assert plan.num_tokens == sum(chunk.length for chunk in plan.chunks) <= self.scheduler.max_num_batched_tokens
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks)
        if not all(chunk.samples for chunk in plan.chunks):
            assert plan.num_tokens == self.scheduler.max_num_batched_tokens, "or two could fill the same page"
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.length > 0
            assert chunk.row == sequence.row
            assert sequence.computed_len == chunk.end <= min(sequence.length, sequence.request.max_len - 1)
            assert len(sequence.table.pages) * self.cache.page_size >= chunk.end
            assert chunk.from_device == (chunk.start == len(sequence.tokens))
            assert chunk.samples == (chunk.end == sequence.length - chunk.samples)

    def check(self) -> None:
        self.cache.check()
        scheduler = self.scheduler
        rows = [sequence.row for sequence in scheduler.running]
        orders = [sequence.order for sequence in scheduler.running]
        assert orders == sorted(orders), "who came first is planned first, also after a preemption"
        assert sorted(rows + scheduler.free_rows) == list(range(scheduler.max_num_seqs))
        assert {sequence.table for sequence in scheduler.running} == self.cache.tables, "only running ones hold pages"
        assert all(sequence.table is None and sequence.row is None for sequence in scheduler.waiting)

    def run(self, max_steps, every_step=lambda engine: None) -> None:
        """Runs until nothing is left to do; more than `max_steps` steps is a hang."""
        for _ in range(max_steps):
            if not self.has_work:
                break
            every_step(self)
            self.step()
        assert not self.has_work, f"still working after {max_steps} steps: {self.describe()}"
        assert not self.cache.tables, "at idle nobody reads"
        assert len(self.cache.pool) + self.cache.num_idle + self.cache.num_pinned == self.cache.pool.num_pages

    def describe(self) -> str:
        state = [(s.order, s.row, s.computed_len, s.length, s.pending) for s in self.sequences if not s.finish_reason]
        return f"(order, row, computed, length, pending) {state}, {len(self.cache.pool)} pages free"

    def expected(self, sequence) -> list[int]:
        request = sequence.request
        stops = request.sampling.stop_token_ids
        return alone(request.prompt_token_ids, request.max_len, self.vocab_size, stops)

    def check_outputs(self) -> None:
        """Each sequence says what it says alone; those that were aborted, or filled the whole pool, a part of it."""
        for sequence in self.sequences:
            said, expected = sequence.output_token_ids, self.expected(sequence)
            if sequence.finish_reason == "abort":
                assert said == expected[: len(said)]
            elif sequence.stop_reason is not None and sequence.finish_reason == "length":
                assert said == expected[: len(said)]
                capacity = self.cache.pool.num_pages * self.cache.page_size
                assert len(sequence.tokens) == capacity + 1, "every page was full before it gave up"
            else:
                assert said == expected
