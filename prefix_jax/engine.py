"""The loop: admit, schedule, run, collect; one step in flight. It knows requests and tokens, not their origin."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from threading import RLock
from typing import Any

import jax
import numpy as np

from pallas_kernels import default_implementation, is_compiled
from pallas_kernels.logprobs import Logprobs
from prefix_jax import eviction, policies
from prefix_jax.host_tier import HostTier
from prefix_jax.kv_store import measure_scales, page_bytes
from prefix_jax.models.llama import Llama
from prefix_jax.output_text import OutputText
from prefix_jax.prefix_cache import HitEnd, PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    TokenLogprobs,
    refused_output,
)
from prefix_jax.runner import Runner
from prefix_jax.sampler import LogitsProcessor
from prefix_jax.scheduler import Chunk, Scheduler, StepPlan
from prefix_jax.tiling import make_batcher
from prefix_jax.token_rules import TokenRules
from prefix_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)
GOLDEN = 0x9E3779B97F4A7C15  # odd: the seeds of a request's answers differ
STAGED_BYTES = 2**29  # of the device's memory, for pages that come back before their sequence is admitted
SAMPLE_TEXT = Path(__file__).parent / "data" / "system_prompt.txt"  # over which the range of K and V is measured


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, apart from what model it runs. None is chosen for the device.

    page_size: positions in a page. num_pages: in the pool; None: what `memory_fraction` of the device leaves free.
    max_model_len: positions of prompt and output together; None: the model's. max_num_seqs: sequences running at once.
    max_num_batched_tokens: positions computed in one step. schedule_policy: who waits less, by name (fifo, greedy, lpm,
    dfs, priority), or a policies.Policy. eviction_policy: which unread page goes first (lru, lfu, fifo, cost, belady);
    None: belady with dfs, else lru. pin_fraction: of the pool, for declared prefixes. salt_quota, salt_floor: pages;
    what a cache_salt has beyond its quota is evicted first, what is within its floor last. attention: the
    implementation, by name. host_memory_gib: of the host's memory, where evicted pages go and come back from. kv_dtype:
    "float8_e4m3fn" halves the bytes of K and V, at a loss. forest: read pages that running sequences share once for all
    of them. bitwise: attention whose bits depend on the sequence alone, however it is chunked and whatever it shares;
    slower. logits_processors: by name, functions of one row's logits (sampler.LogitsProcessor) that JAX can trace, for
    requests that name them. check: recount the cache after every step, for debugging.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    schedule_policy: str | policies.Policy = "fifo"
    eviction_policy: str | None = None
    pin_fraction: float = 0.5
    salt_quota: int | None = None
    salt_floor: int = 0
    attention: str | None = None
    host_memory_gib: float = 0.0
    kv_dtype: str | None = None
    forest: bool | None = None
    bitwise: bool = False
    logits_processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)
    seed: int | None = 0
    check: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is None and name != "page_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("memory_fraction", "pin_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)!r}")
        for name, default in (("salt_quota", None), ("salt_floor", 0)):
            value = getattr(self, name)
            if value != default and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of pages, got {value!r}")
        if self.salt_quota is not None and self.salt_floor > self.salt_quota:
            raise ValueError(f"salt_floor must be at most salt_quota, got {self.salt_floor} and {self.salt_quota}")
        gib = self.host_memory_gib
        if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 <= gib < math.inf:
            raise ValueError(f"host_memory_gib must be a number, 0 or more, got {gib!r}")
        if self.kv_dtype not in (None, "float8_e4m3fn"):
            raise ValueError(f'kv_dtype must be None, for the model\'s own, or "float8_e4m3fn", got {self.kv_dtype!r}')
        if not callable(self.schedule_policy) and self.schedule_policy not in policies.POLICIES:
            names = ", ".join(policies.POLICIES)
            raise ValueError(f"schedule_policy must be one of {names}, or a Policy, got {self.schedule_policy!r}")
        processors = self.logits_processors
        if not isinstance(processors, Mapping) or not all(map(callable, processors.values())) or len(processors) > 30:
            raise ValueError(f"logits_processors must be a dict of name to function, at most 30, got {processors!r}")
        if self.eviction_policy not in (None, *eviction.POLICIES):
            names = ", ".join(eviction.POLICIES)
            raise ValueError(f"eviction_policy must be one of {names}, got {self.eviction_policy!r}")


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
        self.eos_ids = frozenset(model.config.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
        attention = config.attention or default_implementation()
        scales = None
        if config.kv_dtype is not None:
            scales = measure_scales(model, self._sample_tokens(model.config.vocab_size))
            attention = "pallas" if attention == "pallas_hopper" else attention  # the kernel for Hopper takes one dtype
        on_gpu = is_compiled(attention)
        self.max_model_len = min(config.max_model_len or model.config.max_position, model.config.max_position)
        self.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 512)
        self.max_num_seqs = min(config.max_num_seqs or (256 if on_gpu else 32), self.max_num_batched_tokens)
        self.batcher = make_batcher(
            model.config,
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
        self.streamed: list[Sequence] = []  # those with new tokens to give out
        self.lock = RLock()
        self.commands: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()
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
        page = page_bytes(runner.config, config.page_size, runner.kv_dtype)
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
        return bool(self.sequences) or self.in_flight is not None

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
        rules = self._make_rules(request) if sampling.has_rules else None
        sequences: list[Sequence] = []
        for index in range(sampling.n):
            of_index = (seed + index * GOLDEN) % 2**64
            sequence = Sequence(request, self.num_added, of_index, index, sequences[0] if sequences else None)
            sequence.rules = rules
            if self.tokenizer is not None and (sampling.stop or (request.streams and sampling.detokenize)):
                sequence.text = OutputText(self.tokenizer, request.prompt_token_ids, sampling)
            self.num_added += 1
            sequences.append(sequence)
        return sequences

    def _make_rules(self, request: Request) -> TokenRules:
        sampling, known = request.sampling, self.config.logits_processors
        numbers = [
            number
            for number, (name, process) in enumerate(known.items())
            if name in sampling.logits_processors or process in sampling.logits_processors
        ]
        return TokenRules(
            sampling,
            len(request.prompt_token_ids),
            self.runner.config.vocab_size,
            end_ids={*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)},
            bad_words=[ids for word in sampling.bad_words for ids in self.tokenizer.encode_word(word)],
            processors=numbers,
        )

    def _register(self, sequences: list[Sequence]) -> None:
        request = sequences[0].request
        self.sequences[request.request_id] = sequences
        for sequence in sequences:
            if request.max_len <= sequence.prompt_len <= sequence.scored_len:
                self._finish_at_prompt(sequence)

    def _finish_at_prompt(self, sequence: Sequence) -> None:
        full = f"the prompt fills the context of {self.max_model_len} tokens"
        self.scheduler.finish(sequence, "length", None if sequence.request.sampling.max_tokens == 0 else full)

    def call(self, do: Callable[[], Any]) -> Any:
        """What `do` returns or raises, done between two steps. Safe from any thread; waits for a step at most."""
        future: Future = Future()
        self.commands.put((do, future))
        try:
            while not future.done():
                if self.lock.acquire(timeout=0.001):  # else whoever steps does it
                    try:
                        self._do_commands()
                    finally:
                        self.lock.release()
        except BaseException:  # an interrupt: nobody waits for it any more
            future.cancel()
            raise
        return future.result()

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; unknown and finished ones are left alone. Safe from any thread."""
        self.commands.put((lambda: self._abort(request_id), Future()))

    def set_params(self, model: Llama) -> None:
        """Goes on with other weights of the same shapes. Nothing that the former ones computed is used any more, and
        unfinished sequences go on from the tokens they have. Between two steps: use `call`."""
        self.runner.set_params(model)
        if self.config.kv_dtype is not None:
            self.runner.scales = measure_scales(model, self._sample_tokens(model.config.vocab_size))
        with suppress(RuntimeError):
            self._collect()
        former = self.cache.history
        if self.tier is not None:
            self.tier.clear()
        self.start_over()
        self.cache.former = former

    def recompute_seconds(self, num_tokens: int) -> float | None:
        """To compute so many positions of a prompt, as measured so far; None before any step."""
        return self.recompute(0, num_tokens) if self.recompute.is_measured else None

    def step(self) -> list[RequestOutput]:
        """Starts the next step while the device computes the last, then collects that one. Returns what finished."""
        self._do_commands()
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
        return self._take_outputs()

    # ------------------------------------------------------------------------------------------------------------------

    def _do_commands(self) -> None:
        while not self.commands.empty():
            do, future = self.commands.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # an interrupt of this thread, which the one that waits has to know of too
                future.set_exception(RuntimeError(f"interrupted: {error!r}"))
                raise

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
        for read, chunk in plan.numbered_reads():
            sequence, sampling = chunk.sequence, chunk.sequence.request.sampling
            sequence.pending -= chunk.samples
            if sequence.finish_reason is not None:
                continue  # aborted, or found finished one step late: the token is dropped
            if chunk.samples:
                sequence.tokens.append(tokens[chunk.row])
                sequence.first_token_time = sequence.first_token_time or now
                if sampling.logprobs is not None:
                    sequence.logprobs.append(logprobs.read(read, sequence.tokens[-1], sampling.logprobs))
            self.scheduler.settle(sequence)
            if chunk.samples:
                self._finish_if_done(sequence)
        for first, index in plan.numbered_scores():
            self._take_scores(plan.chunks[index], first, logprobs)

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
        if token in self.eos_ids and not sampling.ignore_eos:
            self.scheduler.finish(sequence, "stop")
        elif token in sampling.stop_token_ids:
            self.scheduler.finish(sequence, "stop", token)
        elif sequence.text is not None and (stop := sequence.text.push(token)) is not None:
            self.scheduler.finish(sequence, "stop", stop)
        elif len(sequence.tokens) >= sequence.request.max_len:
            self.scheduler.finish(sequence, "length")

    def _abort(self, request_id: str) -> None:
        for sequence in self.sequences.get(request_id, ()):
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, "abort")

    def _take_outputs(self) -> list[RequestOutput]:
        """Of what finished, and of what streams. One that cannot be made ends with its error; no other is lost."""
        outputs = []
        while self.streamed:
            sequence = self.streamed.pop(0)
            if sequence.finish_reason is None:
                outputs.append(self._output(sequence.request, [sequence], finished=False))
        while self.scheduler.finished:
            sequence = self.scheduler.finished[0]
            sequence.finished_time = sequence.finished_time or time.monotonic()
            request = sequence.request
            answers = self.sequences[request.request_id]
            left = (other.request for other in self.scheduler.finished[1:]) if len(answers) > 1 else ()
            finished = all(answer.finish_reason is not None for answer in answers) and request not in left
            try:
                if finished or request.streams:
                    outputs.append(self._output(request, [sequence] if request.streams else answers, finished=finished))
            except Exception as error:
                log.exception("the output of request %s cannot be made", request.request_id)
                self._abort(request.request_id)
                outputs.append(refused_output(request.request_id, request.prompt, str(error)))
                finished = True
            del self.scheduler.finished[0]
            if finished:
                del self.sequences[request.request_id]
        return outputs

    def _output(self, request: Request, answers: list[Sequence], *, finished: bool) -> RequestOutput:
        """Of all answers to a request, or of what is new in one of them."""
        leader = answers[0].leader or answers[0]
        scored = None
        if leader.is_scoring and finished:
            unscored = len(request.prompt_token_ids) - len(leader.prompt_logprobs)
            scored = [None] * unscored + [self._spell_logprobs(found) for found in leader.prompt_logprobs]
        return RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            [self._completion(answer) for answer in answers],
            num_cached_tokens=leader.num_cached_tokens or 0,
            num_published_tokens=sum(answer.num_published_tokens for answer in answers),
            hit_end=self._spell(leader.hit_end),
            prompt_logprobs=scored,
            metrics=RequestMetrics(request.arrival_time, leader.first_token_time, answers[-1].finished_time),
            seed=leader.seed,
            finished=finished,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        """An answer, or where it streams what is new in it."""
        first = sequence.num_given
        token_ids = sequence.output_token_ids[first:]
        if sequence.request.streams:
            sequence.num_given += len(token_ids)
        asked = sequence.request.sampling.logprobs is not None
        return CompletionOutput(
            sequence.index,
            self._text(sequence),
            token_ids,
            sequence.finish_reason,
            sequence.stop_reason,
            logprobs=[self._spell_logprobs(found) for found in sequence.logprobs[first:]] if asked else None,
            cumulative_logprob=sum(found.logprob for found in sequence.logprobs) if asked else None,
        )

    def _spell(self, end: HitEnd | None) -> HitEnd | None:
        """With its tokens as text."""
        if end is None or self.tokenizer is None or end.token is None:
            return end
        return replace(end, text=self._spell_token(end.token), cached_text=self._spell_token(end.cached_token))

    def _spell_token(self, token: int | None) -> str | None:
        if token is None or self.tokenizer is None:
            return None
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _spell_logprobs(self, found: TokenLogprobs) -> PositionLogprobs:
        likeliest = zip(found.top_tokens, found.top_logprobs, strict=True)
        spelled = {found.token: Logprob(found.logprob, found.rank, self._spell_token(found.token))}
        for rank, (token, logprob) in enumerate(likeliest, start=1):
            spelled.setdefault(token, Logprob(logprob, rank, self._spell_token(token)))
        return spelled

    def _text(self, sequence: Sequence) -> str:
        """All of it, or where it streams what is new and certain."""
        request = sequence.request
        if sequence.text is not None:
            if sequence.finish_reason is not None:
                sequence.text.finish()
            return sequence.text.take()
        token_ids = sequence.output_token_ids
        if sequence.finish_reason == "stop":
            token_ids.pop()  # the token that ended it is no text
        if self.tokenizer is None or not token_ids or not request.sampling.detokenize:
            return ""
        sampling = request.sampling
        return self.tokenizer.decode_output(
            request.prompt_token_ids,
            token_ids,
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
        )

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

    def start_over(self) -> None:
        """A fresh device and an empty cache; unfinished sequences wait again with the tokens they have."""
        self.in_flight = self.collected_time = self.prefetched = None
        if self.tier is not None:
            self.tier.recover()
        finished, counts = self.scheduler.finished, self.scheduler.counts
        self.runner.reset()
        self.batcher.forget_rows()
        self._make_host_half()
        self.scheduler.finished, self.scheduler.counts = finished, counts
        sequences = (sequence for answers in self.sequences.values() for sequence in answers)
        unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.reset()
        self.scheduler.add_batch(unfinished)


class _LogprobsReader:
    """The log-probabilities of one step, on the host."""

    def __init__(self, found: Logprobs):
        self.logprob, self.rank, self.top_tokens, self.top_logprobs = map(np.asarray, found)

    def read(self, index: int, token: int, num_top: int) -> TokenLogprobs:
        top = self.top_tokens[index, :num_top].tolist(), self.top_logprobs[index, :num_top].tolist()
        return TokenLogprobs(token, float(self.logprob[index]), int(self.rank[index]), *top)
