"""The loop: admit, schedule, run, collect; one step in flight. It knows requests and tokens, not their origin."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import jax
import numpy as np

from pallas_kernels import default_implementation, is_compiled
from pallas_kernels.logprobs import Logprobs
from prefix_jax import eviction
from prefix_jax.commands import Commands
from prefix_jax.engine_config import EngineConfig
from prefix_jax.host_tier import HostTier
from prefix_jax.kv_store import measure_scales, page_bytes
from prefix_jax.models.llama import Llama
from prefix_jax.output_text import OutputText
from prefix_jax.outputs import OutputMaker
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Request, RequestOutput, SamplingParams, Sequence, TokenLogprobs, refused_output
from prefix_jax.runner import Runner
from prefix_jax.scheduler import Chunk, Scheduler, StepPlan
from prefix_jax.step import NOT_FINITE
from prefix_jax.tiling import make_batcher
from prefix_jax.token_rules import TokenRules
from prefix_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)
GOLDEN = 0x9E3779B97F4A7C15  # odd: the seeds of a request's answers differ
LARGE_MEMORY = 50 * 2**30  # bytes that JAX may take, three quarters of the device's unless told otherwise
STAGED_BYTES = 2**29  # of the device's memory, for pages that come back before their sequence is admitted
SAMPLE_TEXT = Path(__file__).parent / "data" / "system_prompt.txt"  # over which the range of K and V is measured


def default_max_num_seqs(on_gpu: bool) -> int:
    """On a GPU 256, or 1,024 where JAX may take 50 GiB or more, as vLLM does from 70 GiB on; on a CPU 32."""
    if not on_gpu:
        return 32
    stats = jax.local_devices()[0].memory_stats() or {}
    return 1024 if stats.get("bytes_limit", 0) >= LARGE_MEMORY else 256


@dataclass(frozen=True)
class InFlight:
    """A step the device is computing: its plan, and each row's token once it is done."""

    plan: StepPlan
    tokens: jax.Array
    logprobs: Logprobs | None = None
    spilled: Iterable[Any] = ()  # pages read into host memory before it


class Engine:
    """Runs requests over one model. One thread at a time calls `step`, holding `lock`; any may `call` and `abort`."""

    def __init__(self, model: Llama, tokenizer: Tokenizer | None, config: EngineConfig, *, use_tqdm: bool = False):
        self.config = config
        self.tokenizer = tokenizer
        self.eos_id = tokenizer.eos_id if tokenizer else None  # the one that needs no naming when it ends an answer
        stated = frozenset(model.config.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
        self.eos_ids = stated & frozenset(range(model.config.vocab_size))  # no others are ever drawn
        attention = config.attention or default_implementation()
        scales = None
        if config.kv_dtype is not None:
            scales = measure_scales(model, self._sample_tokens(model.config.vocab_size))
            attention = "pallas" if attention == "pallas_hopper" else attention  # the kernel for Hopper takes one dtype
        on_gpu = is_compiled(attention)
        self.max_model_len = min(config.max_model_len or model.config.max_position, model.config.max_position)
        self.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 512)
        self.max_num_seqs = min(config.max_num_seqs or default_max_num_seqs(on_gpu), self.max_num_batched_tokens)
        self.batcher = make_batcher(
            model.split.local,
            model.dtype,
            attention,
            page_size=config.page_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            forest=config.forest,
            bitwise=config.bitwise,
        )
        started = time.monotonic()
        self.runner = Runner(
            model,
            self.batcher,
            page_size=config.page_size,
            num_pages=config.num_pages,
            memory_fraction=config.memory_fraction,
            attention=attention,
            scales=scales,
            processors=tuple(config.logits_processors.values()),
            use_tqdm=use_tqdm,
        )
        self.tier = self._make_tier()
        self.warmup_seconds = time.monotonic() - started
        self.random = random.Random(config.seed)
        self.sequences: dict[str, list[Sequence]] = {}  # of unfinished requests, by their ids
        self.streamed: deque[Sequence] = deque()  # those with new tokens to give out
        self.ready: deque[RequestOutput] = deque()  # what is to be given out
        self.lock = RLock()
        self.commands = Commands(self.lock, self._start_over_anywhere)
        self.outputs = OutputMaker(tokenizer)
        self.num_added = 0
        self.num_steps = 0
        self.in_flight: InFlight | None = None
        self.recovering = False
        self.recompute = eviction.RecomputeTime()
        self.collected_time: float | None = None  # of the step before the one in flight
        self.prefixes: PrefixPool | None = None
        self.prefetched: Sequence | None = None
        self._make_host_half()

    def _sample_tokens(self, vocab_size: int) -> list[int]:
        """Some text, or without a tokenizer any tokens."""
        if self.tokenizer is None:
            return np.random.default_rng(0).integers(0, vocab_size, 256).tolist()
        return self.tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8"))[:512]

    def _make_tier(self) -> HostTier | None:
        config, runner = self.config, self.runner
        if not (config.host_memory_gib and config.enable_prefix_caching):
            return None
        page = page_bytes(runner.split.padded, config.page_size, runner.kv_dtype)
        max_pages = int(config.host_memory_gib * 2**30 // page)
        if not max_pages:
            raise ValueError(f"host_memory_gib = {config.host_memory_gib} is less than one page of {page:,} bytes")
        runner.warm_page_moves()
        return HostTier(max_pages, runner.to_device, max_staged=STAGED_BYTES // page)

    def _make_host_half(self) -> None:
        config, num_pages = self.config, self.runner.num_pages
        evicts = config.eviction_policy or ("belady" if config.schedule_policy == "dfs" else "lru")
        self.cache = PrefixCache(
            num_pages,
            config.page_size,
            evicts,
            self.recompute,
            self.tier,
            salt_quota=config.salt_quota,
            salt_floor=config.salt_floor,
        )
        if self.prefixes is None:
            self.prefixes = PrefixPool(self.cache, int(num_pages * config.pin_fraction))
            self.prefixes.call, self.prefixes.seconds = self.call, self.recompute_seconds
        else:  # after a failure: what was declared stays
            self.prefixes.attach(self.cache)
        self.scheduler = Scheduler(
            self.cache,
            self.prefixes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=config.schedule_policy,
            caching=config.enable_prefix_caching,
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is left to compute or, where an interrupt came between, to give out."""
        return bool(self.sequences or self.ready) or self.in_flight is not None

    def add(self, request: Request) -> None:
        """Queues a request. ValueError if its id is in use, or its prompt can never fit into the pool."""
        self._check_new([request])
        sequences = self._make_sequences(request)
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._register(sequences)

    def add_batch(self, requests: list[Request]) -> None:
        """Queues all or, with ValueError, none. What is known together can be planned together."""
        self._check_new(requests)
        batch = [self._make_sequences(request) for request in requests]
        self.scheduler.add_batch([sequence for sequences in batch for sequence in sequences])
        for sequences in batch:
            self._register(sequences)

    def _check_new(self, requests: list[Request]) -> None:
        ids = set(self.sequences)
        for request in requests:
            if request.request_id in ids:
                raise ValueError(f"request id {request.request_id!r} is in use")
            ids.add(request.request_id)
            if (length := len(request.prompt_token_ids)) > self.max_model_len:
                raise ValueError(f"a prompt of {length} tokens, max_model_len is {self.max_model_len}")
            self.scheduler.check_fits(length)

    def _make_sequences(self, request: Request) -> list[Sequence]:
        """The answers to a request, the first of which leads."""
        sampling = request.sampling
        seed = self.random.getrandbits(64) if sampling.seed is None else sampling.seed
        rules = self.make_rules(sampling, len(request.prompt_token_ids))
        sequences: list[Sequence] = []
        for index in range(sampling.n):
            of_index = (int(seed) + index * GOLDEN) % 2**64
            sequence = Sequence(request, self.num_added, of_index, index, sequences[0] if sequences else None)
            sequence.rules = rules
            if self.tokenizer is not None and (sampling.stop or (request.streams and sampling.detokenize)):
                sequence.text = OutputText(self.tokenizer, request.prompt_token_ids, sampling)
            self.num_added += 1
            sequences.append(sequence)
        return sequences

    def make_rules(self, sampling: SamplingParams, prompt_len: int) -> TokenRules | None:
        """None where it asks for nothing; ValueError where it leaves no token."""
        if not sampling.has_rules:
            return None
        known = self.config.logits_processors
        numbers = [
            number
            for number, (name, process) in enumerate(known.items())
            if name in sampling.logits_processors or process in sampling.logits_processors
        ]
        return TokenRules(
            sampling,
            prompt_len,
            self.runner.config.vocab_size,
            end_ids={*sampling.stop_token_ids, *self.eos_ids},
            bad_words=[ids for word in sampling.bad_words for ids in self.tokenizer.encode_word(word)],
            processors=numbers,
        )

    def _register(self, sequences: list[Sequence]) -> None:
        request = sequences[0].request
        self.sequences[request.request_id] = sequences
        sequences[0].num_unfinished = len(sequences)
        for sequence in sequences:
            if request.max_len <= sequence.prompt_len <= sequence.scored_len:
                self._finish_at_prompt(sequence)

    def _finish_at_prompt(self, sequence: Sequence) -> None:
        full = f"the prompt fills the context of {self.max_model_len} tokens"
        self.scheduler.finish(sequence, "length", None if sequence.request.sampling.max_tokens == 0 else full)

    def call(self, do: Callable[[], Any]) -> Any:
        """What `do` returns or raises, done between two steps. Safe from any thread; waits for a step at most."""
        return self.commands.call(do)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; unknown and finished ones are left alone. Safe from any thread."""
        self.commands.put(lambda: self._abort(request_id))

    def drop(self, request_ids: Iterable[str]) -> None:
        """Ends requests before the next step, without an output: nobody waits for it. Safe from any thread, and from a
        finalizer that runs inside a step."""
        ids = frozenset(request_ids)
        self.commands.put(lambda: self._drop(ids))

    def set_params(self, model: Llama) -> None:
        """Goes on with other weights of the same shapes. Nothing that the former ones computed is used any more, and
        unfinished sequences go on from the tokens they have. Between two steps: use `call`. If that fails, the former
        weights stay."""
        scales = self.runner.scales
        if self.config.kv_dtype is not None:
            scales = measure_scales(model, self._sample_tokens(model.config.vocab_size))
        with suppress(RuntimeError):
            self._collect()
        self.runner.set_params(model)
        self.runner.scales = scales
        if self.tier is not None:
            self.tier.clear()
        self.cache.change_weights()
        self.start_over()

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """To compute so many positions of a prompt, as measured so far; None before any step."""
        return self.recompute(0, num_tokens) if self.recompute.is_measured else None

    def step(self) -> None:
        """Starts the next step while the device computes the last, then collects that one. What finished or grew is
        then in `ready`, until somebody takes it."""
        self.commands.run()
        try:
            plan = self.scheduler.schedule()
            launched = self._launch(plan)
            self._prefetch()
            self._collect()
            self.in_flight, self.recovering = launched, False
            if launched is None:
                self.collected_time = None
        except (RuntimeError, MemoryError) as error:  # XLA's errors are RuntimeErrors
            self._recover(error)
        except BaseException:  # an interrupt: pages may be published that no step is going to write
            self.start_over()
            raise
        if self.config.check:
            self.cache.check()
        self._make_outputs()

    # ------------------------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> InFlight | None:
        """Starts a step, the pages that the plan evicts and brings back moved before it. None for an empty plan."""
        self.spill()
        if self.tier is not None:
            plan.arrivals = self.tier.take_arrivals()
        if not plan.chunks:
            self.runner.write_pages(plan.arrivals)
            return None
        self.num_steps += 1
        spilled = self.tier.take_unsettled() if self.tier is not None else ()
        tokens, logprobs = self.runner.dispatch(self.batcher.build(plan))
        if plan.num_tokens > len(plan.chunks):
            for chunk in plan.chunks:
                chunk.sequence.list_prompt()  # for its results, while the device computes
        return InFlight(plan, tokens, logprobs, spilled)

    def spill(self) -> None:
        """Reads evicted pages into host memory, before anything is written into them. If that fails they are lost."""
        if self.tier is None or not self.tier.departures:
            return
        departures = self.tier.take_departures()
        try:
            self.tier.keep(departures.values(), self.runner.read_pages(list(departures)))
        except (RuntimeError, MemoryError) as error:
            log.warning("%d evicted pages do not reach host memory: %s", len(departures), error)
            self.tier.lose(departures.values())

    def _prefetch(self) -> None:
        """Starts the way back of the pages that whoever is admitted next finds in host memory."""
        waiting = self.scheduler.waiting
        if not (self.tier and waiting):
            return
        head = next(self.scheduler.candidates(), None)
        if head is not None and head is not self.prefetched:
            self.cache.prefetch(head.tokens, head.request.cache_salt)
            self.prefetched = head

    def _collect(self) -> None:
        """Reads the tokens of the step in flight and hands each to its sequence."""
        if self.in_flight is None:
            self.collected_time = time.monotonic()  # the step that has just started is the first of some
            return
        tokens = np.asarray(self.in_flight.tokens).tolist()
        logprobs = _LogprobsReader(self.in_flight.logprobs) if self.in_flight.logprobs is not None else None
        if self.in_flight.spilled:
            self.tier.settle(self.in_flight.spilled, self.runner.to_host)
        plan, self.in_flight = self.in_flight.plan, None
        now = time.monotonic()
        self._observe(plan, now)
        for first, index in plan.numbered_scores():  # before the first token may end the answer
            self._take_scores(plan.chunks[index], first, logprobs)
        for read, chunk in plan.numbered_reads():
            sequence, sampling = chunk.sequence, chunk.sequence.request.sampling
            sequence.pending -= chunk.samples
            if sequence.finish_reason is not None:
                continue  # aborted, or found finished one step late: the token is dropped
            if chunk.samples and tokens[chunk.row] == NOT_FINITE:
                self._refuse_not_finite(sequence)
                continue
            if chunk.samples:
                sequence.tokens.append(tokens[chunk.row])
                sequence.first_token_time = sequence.first_token_time or now
                if sampling.logprobs is not None:
                    found = logprobs.read(read, sequence.tokens[-1], sampling.logprobs)
                    sequence.logprobs.append(found)
                    sequence.cumulative_logprob += found.logprob
            self.scheduler.settle(sequence)
            if chunk.samples:
                self._finish_if_done(sequence)

    def _take_scores(self, chunk: Chunk, first: int, logprobs: _LogprobsReader) -> None:
        """Of the prompt's tokens behind the positions that the chunk scored."""
        sequence = chunk.sequence
        if sequence.finish_reason is not None:
            return
        begin = chunk.score_end - chunk.num_scored + 1
        for i, token in enumerate(sequence.tokens[begin : chunk.score_end + 1]):
            found = logprobs.read(first + i, token, sequence.request.sampling.prompt_logprobs)
            sequence.prompt_logprobs.append(found)
        done = sequence.request.score_from + len(sequence.prompt_logprobs) == sequence.prompt_len
        if done and sequence.request.max_len <= sequence.prompt_len:
            self._finish_at_prompt(sequence)

    def _observe(self, plan: StepPlan, now: float) -> None:
        """While one step follows the other, the time between their results is what the step took."""
        if self.collected_time is not None:
            pairs = sum(chunk.length * (chunk.start + chunk.end) / 2 for chunk in plan.chunks)
            self.recompute.observe(plan.num_tokens, pairs, now - self.collected_time)
        self.collected_time = now

    def _finish_if_done(self, sequence: Sequence) -> None:
        sampling, token = sequence.request.sampling, sequence.tokens[-1]
        if sequence.request.streams:
            self.streamed.append(sequence)
        is_eos = token in self.eos_ids and not sampling.ignore_eos
        ends = is_eos or token in sampling.stop_token_ids
        stop = None
        try:
            if sequence.text is not None and not ends:
                stop = sequence.text.push(token)
            elif sequence.text is not None and sampling.include_stop_str_in_output:
                sequence.text.add(token)
        except Exception as error:  # of the tokenizer
            self._refuse(sequence.request, error)
            return
        if ends:
            self.scheduler.finish(sequence, "stop", None if is_eos and token == self.eos_id else token)
        elif stop is not None:
            self.scheduler.finish(sequence, "stop", stop)
        elif len(sequence.tokens) - sequence.prompt_len == sampling.max_tokens:
            self.scheduler.finish(sequence, "length")
        elif len(sequence.tokens) >= sequence.request.max_len:
            self.scheduler.finish(sequence, "length", f"the context of {self.max_model_len} tokens is full")
        elif sequence.rules is not None and sequence.rules.leave_none(sequence.tokens):
            self.scheduler.finish(sequence, "length", "allowed_token_ids and bad_words leave no token")

    def _abort(self, request_id: str) -> None:
        for sequence in self.sequences.get(request_id, ()):
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, "abort")

    def _drop(self, ids: frozenset[str]) -> None:
        for request_id in ids:
            self._abort(request_id)
            self.sequences.pop(request_id, None)
        finished = self.scheduler.finished
        self.scheduler.finished = deque(sequence for sequence in finished if sequence.request.request_id not in ids)
        if not self.sequences:
            self.collected_time = None  # nobody waits for the step in flight: it may be collected any time later

    def _make_outputs(self) -> None:
        """Of what finished, and of what streams. Nothing leaves its queue before its output is ready: whatever
        interrupts, the next step goes on from there."""
        while self.streamed:
            if self.streamed[0].finish_reason is None:
                self._make_output([self.streamed[0]], finished=False)
            self.streamed.popleft()
        while self.scheduler.finished:
            sequence = self.scheduler.finished[0]
            request = sequence.request
            if (answers := self.sequences.get(request.request_id)) is not None:  # else it has ended with an error
                sequence.finished_time = time.monotonic()
                is_last = answers[0].num_unfinished == 1
                if is_last or request.streams:
                    self._make_output([sequence] if request.streams else answers, finished=is_last)
                answers[0].num_unfinished -= 1
                if is_last:
                    self.sequences.pop(request.request_id, None)
            self.scheduler.finished.popleft()

    def _make_output(self, answers: list[Sequence], *, finished: bool) -> None:
        request = answers[0].request
        try:
            self.ready.append(self.outputs.make(request, answers, finished=finished))
        except Exception as error:
            self._refuse(request, error)

    def _refuse(self, request: Request, error: Exception) -> None:
        """Ends a request with an error of its own, and no other."""
        log.error("request %s cannot go on", request.request_id, exc_info=error)
        self._abort(request.request_id)
        self.ready.append(refused_output(request.request_id, request.prompt, str(error)))
        self.sequences.pop(request.request_id, None)

    def _refuse_not_finite(self, sequence: Sequence) -> None:
        """Ends a request whose hidden states left the range of their dtype, and forgets its pages."""
        nodes = list(sequence.table.nodes) if sequence.table is not None else []
        dtype, position = self.runner.dtype.name, len(sequence.tokens) - 1
        self._refuse(
            sequence.request, ArithmeticError(f"the hidden state at position {position} is not finite in {dtype}")
        )
        self.cache.forget(nodes)

    def _recover(self, error: Exception) -> None:
        """The device failed and may have lost the store, which was donated: a fresh one, an empty cache, and every
        unfinished sequence resumes by recompute with the tokens it has. A second failure in a row is raised."""
        again, self.recovering = self.recovering, True
        with suppress(RuntimeError, MemoryError):
            self._collect()  # what the step before computed is not lost
        self.start_over()
        if again:
            raise error
        log.warning("a step failed, its sequences start over from their tokens: %s", error)

    def _start_over_anywhere(self) -> None:
        """In a thread that may never have stepped."""
        with jax.default_device(self.runner.devices[0]):
            self.start_over()

    def start_over(self) -> None:
        """A fresh device and an empty cache; unfinished sequences wait again with the tokens they have."""
        self.in_flight = self.collected_time = self.prefetched = None
        if self.tier is not None:
            self.tier.recover()
        finished, counts, cache = self.scheduler.finished, self.scheduler.counts, self.cache
        self.batcher.forget_rows()
        self._make_host_half()
        self.cache.remember(cache)
        self.scheduler.finished, self.scheduler.counts = finished, counts
        sequences = (sequence for answers in self.sequences.values() for sequence in answers)
        unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.reset()
        self.scheduler.add_batch(unfinished)
        self.runner.reset()  # last: if there is no memory, the next step tries it again


class _LogprobsReader:
    """The log-probabilities of one step, on the host."""

    def __init__(self, found: Logprobs):
        self.logprob, self.rank, self.top_tokens, self.top_logprobs = map(np.asarray, found)

    def read(self, index: int, token: int, num_top: int) -> TokenLogprobs:
        top = self.top_tokens[index, :num_top].tolist(), self.top_logprobs[index, :num_top].tolist()
        return TokenLogprobs(token, float(self.logprob[index]), int(self.rank[index]), *top)
