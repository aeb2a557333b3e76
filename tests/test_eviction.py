"""Which page goes next: each policy against a plain list of facts about pages; the one that knows the future against
every choice there is."""

import functools
import random
from array import array
from math import log2

import pytest
from fake_device import FakeEngine

from prefix_jax import eviction
from prefix_jax.eviction import HALF_LIFE, Cost, RecomputeTime
from prefix_jax.forecast import Forecast
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.request import Request, SamplingParams, Sequence

END = 1000  # no page ends with it, so nobody finds the page of the last token


def rank(policy, fact, depth):
    return {
        "lru": fact["last_use"],
        "lfu": (fact["uses"], fact["last_use"]),
        "fifo": fact["step"],
        "cost": log2((1 + (2 * depth - 1) / 2 / 32768) * fact["uses"]) + fact["last_use"] / HALF_LIFE,
        "belady": fact["last_use"],  # without a forecast
    }[policy]


class Book:
    """What there is to know about each page, by the tokens up to its end; pages hold one token."""

    def __init__(self, policy, num_pages):
        self.policy, self.num_pages = policy, num_pages
        self.facts: dict[tuple, dict] = {}
        self.held: list[list[tuple]] = []
        self.clock = 0

    def victims(self, count):
        facts, read = dict(self.facts), {path for paths in self.held for path in paths}
        for _ in range(count):
            parents = {path[:-1] for path in facts}
            leaves = [path for path in facts if path not in parents and path not in read]
            order = lambda path: (facts[path]["priority"], rank(self.policy, facts[path], len(path)))  # noqa: E731
            del facts[min(leaves, key=order)]
        return set(self.facts) - set(facts)

    def close(self, paths, priority):
        self.clock += 1
        self.held.remove(paths)
        for path in paths:
            self.facts[path]["last_use"] = self.clock
            self.facts[path]["priority"] = max(self.facts[path]["priority"], priority)


def paths_in(cache):
    found, stack = set(), [(root, ()) for root in cache.trie.roots.values()]
    while stack:
        node, path = stack.pop()
        for child in node.children:
            found.add((*path, *array("i", child.key)))
            stack.append((child, (*path, *array("i", child.key))))
    return found


@pytest.mark.parametrize("policy", eviction.POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_victims_are_the_leaves_that_rank_least(policy, seed):
    rng = random.Random(seed)
    cache, book, open_tables = PrefixCache(14, 1, policy), Book(policy, 14), []
    for _ in range(300):
        tokens = array("i", [rng.randrange(3) for _ in range(rng.randint(1, 5))])
        priority = rng.choice([0, 0, 0, 1, 2])
        cache.step += 1
        table = cache.open(tokens + array("i", [END]), priority=priority)
        paths = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        found, free = len(table.nodes), len(cache.pool)
        assert [path in book.facts for path in paths] == [i < found for i in range(len(paths))]
        for path in paths[:found]:
            book.facts[path]["uses"] += 1
        book.held.append(paths[:found])
        if cache.num_idle + free < len(tokens) + 1 - found:
            assert not cache.grow(table, len(tokens) + 1)
            book.close(paths[:found], priority)
            cache.close(table)
            continue
        for path in book.victims(max(0, len(tokens) + 1 - found - free)):
            del book.facts[path]
        assert cache.grow(table, len(tokens) + 1)
        assert paths_in(cache) == set(book.facts)
        cache.publish(table, tokens, len(tokens), written=False)
        for path in paths[found:]:
            book.facts[path] = {"uses": 1, "step": cache.step, "last_use": book.clock, "priority": 0}
        book.held[-1] = paths
        open_tables.append((table, paths, priority))
        while len(open_tables) > rng.randint(0, 2):
            table, paths, priority = open_tables.pop(rng.randrange(len(open_tables)))
            book.close(paths, priority)
            cache.close(table)
        cache.check()
    assert cache.num_evicted > 100


def serve(cache, tokens, **options):
    tokens = array("i", [*tokens, END])
    cache.step += 1
    table = cache.open(tokens, **options)
    found = len(table.nodes)
    assert cache.grow(table, len(tokens))
    cache.publish(table, tokens, len(tokens) - 1, written=False)
    cache.close(table)
    cache.check()
    return found


def test_what_has_expired_goes_first_and_what_is_dear_to_somebody_last():
    cache, now = PrefixCache(5, 1), 0.0
    cache.queue.now = lambda: now
    serve(cache, [1], priority=1)
    serve(cache, [2], priority=5, ttl=10.0)
    serve(cache, [3])
    serve(cache, [4])
    now = 9.0
    serve(cache, [5])
    assert paths_in(cache) == {(1,), (2,), (4,), (5,)}, "the least recently used of low priority"
    now = 10.0
    serve(cache, [6])
    assert paths_in(cache) == {(1,), (4,), (5,), (6,)}, "expired, whatever its priority"
    serve(cache, [4], ttl=1.0)
    now = 100.0
    serve(cache, [7])
    assert (4,) in paths_in(cache), "a use without an end of its own keeps it for good"


def test_an_expired_page_waits_for_the_pages_behind_it():
    cache, now = PrefixCache(4, 1), 0.0
    cache.queue.now = lambda: now
    serve(cache, [1], ttl=1.0)
    serve(cache, [1, 2, 3], ttl=9.0)
    now = 5.0
    serve(cache, [8])
    assert paths_in(cache) == {(1,), (1, 2), (8,)}


def test_the_dear_page_is_the_deep_and_often_used_one():
    """Recompute time x uses, halved over `HALF_LIFE` closed tables."""
    seconds = RecomputeTime()
    for start, length, time in ((0, 100, 1.0), (1000, 100, 2.0), (3000, 50, 2.0)):
        seconds.observe(length, length * (start + length / 2), time)
    assert seconds.linear == pytest.approx(0.01, rel=0.1)
    assert seconds(3000, 3050) == pytest.approx(2.0, rel=0.1)
    assert seconds(0, 10) < seconds(1000, 1010)
    rank = Cost(10, lambda start, end: start + 10.0)
    cache = PrefixCache(9, 1)
    serve(cache, [1, 2])
    first, second = sorted(cache.trie, key=lambda node: node.depth)
    assert rank(second) - rank(first) == pytest.approx(1), "twice the seconds, one more in the logarithm"
    first.uses = 4
    assert rank(first) - rank(second) == pytest.approx(1), "four times the uses, half the seconds"
    second.last_use += HALF_LIFE
    assert rank(first) == pytest.approx(rank(second))


def test_steps_that_are_all_alike_keep_the_proportion_and_tell_the_scale():
    """One second a token until the first fit would be what a prefix has saved by then."""
    seconds = RecomputeTime()
    ratio = seconds.attention / seconds.linear
    for _ in range(10):
        seconds.observe(8, 36.0, 0.5)
        assert seconds(0, 8) == pytest.approx(0.5, rel=0.01)
        assert seconds.attention / seconds.linear == pytest.approx(ratio)


def test_steps_that_take_longer_for_fewer_pairs_tell_the_scale_all_the_same():
    seconds = RecomputeTime()
    seconds.observe(8, 36.0, 0.5)
    seconds.observe(8, 8000.0, 0.4)
    assert seconds(0, 8) == pytest.approx(0.45, rel=0.2)
    assert seconds.linear > 0 and seconds.attention >= 0


def test_what_was_ranked_before_any_step_was_measured_is_no_dearer():
    """The scale of seconds falls from a guess to what is measured, and ranks of unread pages stay."""
    seconds = RecomputeTime()
    cache = PrefixCache(3, 1, "cost", seconds)
    serve(cache, [1])
    seconds.observe(100, 5000.0, 0.001)
    seconds.observe(100, 50_000.0, 0.002)
    serve(cache, [2])
    serve(cache, [3])
    assert paths_in(cache) == {(2,), (3,)}


def waiting(prompts):
    params = SamplingParams()
    return [Sequence(Request(str(i), (*prompt, END), params, 100), i, 0) for i, prompt in enumerate(prompts)]


def found_with_belady(prompts, num_pages):
    cache, batch = PrefixCache(num_pages, 1, "belady"), waiting(prompts)
    forecast, found = Forecast(cache, batch, depth_first=False), 0
    for sequence, prompt in zip(batch, prompts, strict=True):
        forecast.drop(sequence)
        found += serve(cache, prompt)
    return found


def most_that_can_be_found(prompts, num_pages):
    """Tries every choice of unread leaves."""

    @functools.cache
    def best(i, pages):
        if i == len(prompts):
            return 0
        own = {prompts[i][: k + 1] for k in range(len(prompts[i]))}
        needed = len(own - pages) + 1
        return len(own & pages) + max(best(i + 1, left | own) for left in shrunk(pages, own, num_pages - needed))

    @functools.cache
    def shrink(pages, own, size):
        if len(pages) <= size:
            return frozenset([pages])
        parents = {page[:-1] for page in pages}
        leaves = [page for page in pages if page not in parents and page not in own]
        return frozenset(left for leaf in leaves for left in shrink(pages - {leaf}, own, size))

    def shrunk(pages, own, size):
        return shrink(pages, frozenset(own), size)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_who_knows_the_future_finds_the_most_there_is(seed):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(2 + seed % 2) for _ in range(rng.randint(1, 3))) for _ in range(9)]
    num_pages = rng.randint(4, 6)
    assert found_with_belady(prompts, num_pages) == most_that_can_be_found(prompts, num_pages)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_who_knows_the_future_never_finds_less_than_who_looks_back(share, seed):
    rng = random.Random(seed)
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(12)]
    prompts = [rng.choice(stems)[: rng.choice([8, 12, 20])] + [rng.randrange(9) for _ in range(5)] for _ in range(150)]
    computed = {}
    for name in eviction.POLICIES:
        engine = FakeEngine(max(10, int(share * 500)), 4, num_seqs=4, max_len=40, eviction=name)
        engine.add_batch(prompts, 2)
        engine.run(1000)
        engine.check_outputs()
        computed[name] = engine.scheduler.counts["computed_prompt_tokens"]
    assert computed["belady"] == min(computed.values())


def test_an_aborted_or_preempted_sequence_leaves_the_forecast_right():
    engine = FakeEngine(40, 4, budget=32, num_seqs=3, max_len=40, policy="dfs", eviction="belady")
    rng = random.Random(7)
    stems = [[rng.randrange(5) for _ in range(12)] for _ in range(4)]
    engine.add_batch([rng.choice(stems) + [rng.randrange(5) for _ in range(9)] for _ in range(40)], 4)

    def disturb(engine):
        if rng.random() < 0.3 and engine.scheduler.running and len(engine.plans) < 200:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.1:
            engine.abort(rng.choice(engine.sequences))
        check_demand(engine.scheduler)

    engine.run(2000, disturb)
    engine.check_outputs()
    check_demand(engine.scheduler)


def check_demand(scheduler):
    """Each page's turns are those of the sequences that wait for it."""
    expected: dict[tuple, list[int]] = {}
    for sequence in scheduler.waiting:
        prompt = sequence.request.prompt_token_ids
        for end in range(4, len(prompt), 4):
            expected.setdefault(prompt[:end], []).append(sequence.turn)
    stack = [(demand, ()) for demand in scheduler.forecast.demands.roots.values()]
    while stack:
        demand, path = stack.pop()
        for key, child in demand.children.items():
            here = (*path, *array("i", key))
            assert sorted(-turn for turn in child.turns) == sorted(expected.pop(here, []))
            stack.append((child, here))
    assert not expected
