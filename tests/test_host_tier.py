"""Evicted pages come back from host memory as they left, or are computed again; nothing else changes."""

import random
from array import array

import jax
import numpy as np
import pytest
from engines import (
    TINY,
    add,
    branches,
    cached_of,
    check_greedy,
    drain,
    forget,
    generate,
    greedy,
    make_llm,
    random_prompts,
    tokens_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefix_jax import LLM
from prefix_jax.engine_config import EngineConfig
from prefix_jax.host_tier import HostTier
from prefix_jax.kv_store import page_bytes
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.saved_prefixes import SavedPrefix, load_prefixes, save_prefixes

PAGE = 2 * 2 * 4 * 2 * 16 * 4  # bytes of 4 positions in 2 layers, 2 KV heads of 16, float32
SMALL_POOL = {**TINY, "page_size": 4, "num_pages": 16, "max_model_len": 64, "max_num_batched_tokens": 32}


def tiered(pages: int = 64, **options) -> LLM:
    return make_llm(**{**SMALL_POOL, **options}, host_memory_gib=pages * PAGE / 2**30)


def test_the_budget_is_in_pages_of_all_layers():
    llm = tiered(7)
    assert page_bytes(llm.model_config, 4, np.float32) == PAGE
    assert llm.engine.tier.max_pages == 7
    with pytest.raises(ValueError, match="less than one page"):
        make_llm(**SMALL_POOL, host_memory_gib=1e-9)
    for bad in (-1, True, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="host_memory_gib must be a number, 0 or more, got"):
            EngineConfig(host_memory_gib=bad)


@pytest.mark.parametrize("memory", ["unpinned", "pinned"])
def test_what_was_evicted_comes_back(memory, monkeypatch):
    llm = tiered()
    if memory == "pinned":
        pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        monkeypatch.setitem(llm.engine.runner.__dict__, "host_memory", pinned)
    a, b, c = random_prompts(1, 40, 40, 40)
    outputs = []
    for prompt in (a, b, c, a, b, c):
        outputs += generate(llm, [prompt], greedy(4))
    # Each fills 10 pages of 16. Of its own, a later one finds what is left on the device and, behind it, the rest.
    assert cached_of(outputs) == [0, 0, 0, 36, 36, 36]
    assert tokens_of(outputs)[:3] == tokens_of(outputs)[3:]
    check_greedy(outputs)
    assert llm.stats["host_hit_pages"] > 15
    kinds = {getattr(getattr(e.values, "sharding", None), "memory_kind", None) for e in llm.engine.tier.entries}
    assert kinds == {"pinned_host" if memory == "pinned" else None}
    forget(llm)


def check_same(llm, plain, prompts, params) -> None:
    """Together and one by one: the tokens that an engine without a second tier says."""
    want = tokens_of(generate(plain, prompts, params))
    assert tokens_of(generate(llm, prompts, params)) == want
    for prompt, one, expected in zip(prompts, params, want, strict=True):
        assert tokens_of(generate(llm, [prompt], [one])) == [expected]


@pytest.mark.parametrize("pages", [1, 5, 64, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_random_work_in_a_tight_pool(seed, pages):
    """Branches, repeats, preemptions, salts: the engine recounts cache and tier after each step."""
    llm, plain = tiered(pages, max_num_seqs=4), make_llm(**{**SMALL_POOL, "max_num_seqs": 4})
    rng = random.Random(seed)
    prompts = branches(rng, seed, 16, repeats=0.4)
    params = [greedy(rng.randrange(1, 15)) for _ in prompts]
    salted = [{"prompt_token_ids": p, "cache_salt": rng.choice([None, "a"])} for p in prompts]
    check_same(llm, plain, salted, params)
    assert llm.stats["evicted_pages"] > 16 and len(llm.engine.tier) <= pages
    assert pages < 64 or llm.stats["host_hit_pages"] > 20


def test_hits_are_those_of_a_pool_without_end():
    """One by one, in pages: what the tier holds is found as if it had never left."""
    llm, large = tiered(1000), make_llm(**{**SMALL_POOL, "num_pages": 1000})
    stems = random_prompts(3, 24, 40)
    prompts = [stem[:cut] + tail for stem in stems for cut in (7, 16, 24) for tail in random_prompts(4, 3, 9)] * 2
    for prompt in random.Random(0).sample(prompts, len(prompts)):
        want, got = (generate(engine, [prompt], greedy(3)) for engine in (large, llm))
        assert tokens_of(got) == tokens_of(want)
        (found,), (most,) = cached_of(got), cached_of(want)
        assert most // 4 * 4 <= found <= most, "whole pages come back, the head of one is copied on the device alone"
    assert llm.stats["host_hit_pages"] > 20


def test_a_preempted_sequence_takes_its_pages_back():
    llm = tiered()
    (a, b), others = random_prompts(5, 40, 20), random_prompts(6, 30, 30)
    (want,) = tokens_of(generate(llm, [a], greedy(8)))
    forget(llm)
    add(llm, "a", a, greedy(8))
    for _ in range(4):
        llm.engine.step()
    scheduler = llm.engine.scheduler
    scheduler.preempt(scheduler.running[0])
    rows, scheduler.free_rows = scheduler.free_rows, []
    llm.engine.step()
    llm.engine.cache.grow(table := llm.engine.cache.open(array("i", others[0]), "other"), 64)  # all pages
    llm.engine.step()
    assert not list(llm.engine.cache.trie) and len(llm.engine.tier) >= 10
    llm.engine.cache.close(table)
    scheduler.free_rows = rows
    before = llm.stats["computed_prompt_tokens"]
    assert drain(llm)["a"].outputs[0].token_ids == want
    assert llm.stats["computed_prompt_tokens"] == before and llm.stats["host_hit_pages"] >= 10
    assert generate(llm, [b])


def test_the_head_of_the_queue_is_fetched_while_it_waits(monkeypatch):
    llm = tiered(max_num_seqs=1)
    a, b, c = random_prompts(7, 40, 40, 40)
    generate(llm, [a], greedy(1))
    generate(llm, [b], greedy(1))
    generate(llm, [c], greedy(1))
    moved = []
    to_device = llm.engine.tier.to_device
    monkeypatch.setattr(llm.engine.tier, "to_device", lambda pages: moved.append(len(pages)) or to_device(pages))
    add(llm, "c", c, greedy(6))
    add(llm, "a", a, greedy(2))
    llm.engine.step()
    llm.engine.step()
    staged = len(llm.engine.tier.staged)
    assert staged == 9 and moved[-1] == 9, "a waits for the one row, and its pages are on their way"
    moved.clear()
    outputs = drain(llm)
    assert outputs["a"].num_cached_tokens == 36 and sum(moved) == 0 and not llm.engine.tier.staged
    assert llm.stats["host_hit_pages"] == 9
    check_greedy(list(outputs.values()))


def test_the_last_step_may_read_a_page_that_leaves_in_the_next_plan():
    """The order of a launch: what leaves is read, heads are copied, what comes is written, the step runs."""
    llm = tiered(page_size=4, max_num_seqs=4)
    stem, (tail,) = random_prompts(8, 40)[0], random_prompts(9, 12)
    for _ in range(6):
        for cut in (38, 37, 22, 39, 40):
            outputs = generate(llm, [stem[:cut], [*tail, *stem[:20]], stem[:cut] + tail], greedy(3))
            check_greedy(outputs)


# Faults ---------------------------------------------------------------------------------------------------------------


def fail(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize("what", ["read_pages", "to_device", "write_pages"])
@pytest.mark.parametrize("times", [1, 100])
def test_a_move_that_fails_costs_time_alone(what, times, monkeypatch, caplog):
    llm = tiered()
    prompts = random_prompts(10, 40, 40, 40)
    want = [tokens_of(generate(llm, [prompt], greedy(4)))[0] for prompt in prompts]
    owner = llm.engine.tier if what == "to_device" else llm.engine.runner
    move, calls = getattr(owner, what), []

    def sometimes(*args):
        calls.append(args)
        return fail() if len(calls) <= times and (what != "write_pages" or len(calls) == 1) else move(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, what, sometimes)
        for _ in range(2):
            for prompt, tokens in zip(prompts, want, strict=True):
                assert tokens_of(generate(llm, [prompt], greedy(4))) == [tokens]
    assert calls and caplog.text
    assert tokens_of(generate(llm, prompts, greedy(4))) == want
    llm.engine.cache.check()


def fail_once(monkeypatch, owner, name) -> None:
    call, calls = getattr(owner, name), []

    def once(*args):
        calls.append(args)
        return fail() if len(calls) == 1 else call(*args)

    monkeypatch.setattr(owner, name, once)


def test_after_a_failed_step_the_tier_still_has_what_was_settled(monkeypatch):
    llm = tiered()
    prompts = random_prompts(11, 40, 40, 40)
    want = [tokens_of(generate(llm, [prompt], greedy(4)))[0] for prompt in prompts]
    settled = [entry for entry in llm.engine.tier.entries if entry.settled]
    assert len(settled) == len(llm.engine.tier) > 10, "at rest all is settled"
    with monkeypatch.context() as patch:
        fail_once(patch, llm.engine.runner, "dispatch")
        outputs = generate(llm, [prompts[0]], greedy(4))
    assert tokens_of(outputs) == want[:1]
    assert cached_of(outputs)[0] >= 32 and llm.stats["host_hit_pages"] > 0, "the pages that came back survived"
    assert [tokens_of(generate(llm, [prompt], greedy(4)))[0] for prompt in prompts] == want


def test_what_leaves_before_a_step_that_fails_is_forgotten(monkeypatch):
    llm = tiered()
    a, b = random_prompts(12, 40, 60)
    generate(llm, [a], greedy(4))
    assert not llm.engine.tier.entries
    with monkeypatch.context() as patch:
        fail_once(patch, llm.engine.runner, "dispatch")
        generate(llm, [b], greedy(2))
    assert len(llm.engine.tier) == 0, "nobody knows whether these bytes are right"
    assert cached_of(generate(llm, [a], greedy(4))) == [0]


def test_forgetting_is_complete():
    llm = tiered()
    prompts = random_prompts(13, 40, 40)
    for prompt in prompts:
        generate(llm, [prompt], greedy(4))
    assert len(llm.engine.tier)
    llm.reset_prefix_cache()
    assert len(llm.engine.tier) == 0 and not llm.engine.tier.roots
    assert cached_of(generate(llm, prompts[:1])) == [0]


def test_loading_saved_prefixes_sends_others_into_the_tier(tmp_path):
    llm = tiered()
    a, b = random_prompts(14, 40, 40)
    generate(llm, [a], greedy(1))
    save_prefixes(tmp_path, llm.engine, [SavedPrefix("a", array("i", a))])
    forget(llm)
    (want,) = tokens_of(generate(llm, [b], greedy(4)))
    (loaded,) = load_prefixes(tmp_path, llm.engine)
    assert loaded.num_pages == 10 and len(llm.engine.tier) > 0
    llm.engine.cache.check()
    again = generate(llm, [b], greedy(4))
    assert tokens_of(again) == [want] and cached_of(again) == [36]
    check_greedy(generate(llm, [a], greedy(4)))


def test_without_a_budget_there_is_no_tier():
    llm = make_llm(**SMALL_POOL)
    assert llm.engine.tier is None and llm.stats["host_pages"] == llm.stats["host_hit_pages"] == 0
    assert make_llm(**SMALL_POOL, enable_prefix_caching=False, host_memory_gib=1.0).engine.tier is None


# Cache and tier against a store of contents ---------------------------------------------------------------------------


class TierMachine(RuleBasedStateMachine):
    """Random sequences through a cache with a tier; a page holds the tokens that its content depends on."""

    @initialize(size=st.sampled_from([1, 2, 4]), num_pages=st.integers(3, 9), max_pages=st.integers(1, 12))
    def start(self, size, num_pages, max_pages):
        self.fail = False
        self.tier = HostTier(max_pages, self.to_device, max_staged=3)
        self.cache = PrefixCache(num_pages, size, tier=self.tier)
        self.store: dict[int, tuple] = {}
        self.held: list[tuple] = []
        self.returned = 0

    def to_device(self, values):
        if self.fail:
            raise RuntimeError("no room")
        assert all(value is not None for value in values)
        return list(values)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        namespace=st.sampled_from([None, None, "salt"]),
        keep=st.booleans(),
        faults=st.sampled_from([""] * 6 + ["read", "device", "step"]),
    )
    def serve(self, tokens, namespace, keep, faults):
        cache, size, tokens = self.cache, self.cache.page_size, array("i", tokens)
        cache.step += 1
        self.fail = faults == "device"
        table = cache.open(tokens, namespace)
        cache.check()
        admitted = cache.grow(table, len(tokens))
        if not admitted:
            cache.close(table)
        departures = self.tier.take_departures()
        if faults == "read":
            self.tier.lose(departures.values())
        else:
            self.tier.keep(departures.values(), [self.store[page] for page in departures])
        copied = self.store[table.copy[0]] if admitted and table.copy else None
        self.store |= self.tier.take_arrivals()
        unsettled = self.tier.take_unsettled()
        if faults == "step":
            self.fresh_start()
            return
        if admitted:
            paths = [(namespace, *tokens[: (i + 1) * size]) for i in range(len(table.pages))]
            cached, rest = divmod(table.cached_len, size)
            assert [self.store[page] for page in table.pages[:cached]] == paths[:cached]
            if rest:
                assert copied[: 1 + cached * size + rest] == (namespace, *tokens[: cached * size + rest])
            for page, path in list(zip(table.pages, paths, strict=True))[len(table.nodes) :]:
                self.store[page] = path
            cache.publish(table, tokens, len(tokens), written=False)
            self.held.append((table, tokens))
        self.tier.settle(unsettled, lambda value: value)
        if admitted and not keep:
            cache.close(self.held.pop()[0])

    def fresh_start(self):
        """As the engine recovers."""
        self.tier.recover()
        self.cache = PrefixCache(self.cache.pool.num_pages, self.cache.page_size, tier=self.tier)
        self.store, self.held = {}, []

    @rule(data=st.data())
    def close(self, data):
        if self.held:
            self.cache.close(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[0])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), namespace=st.sampled_from([None, "salt"]))
    def prefetch(self, tokens, namespace):
        self.cache.prefetch(array("i", tokens), namespace)

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def all_is_counted(self):
        if hasattr(self, "cache"):
            self.cache.check()
            for entry in self.tier.entries:
                assert entry.values[-len(entry.key) // 4 :] == tuple(array("i", entry.key))


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
