"""Who starts first: what each policy promises, through the scheduler."""

import random

import pytest
from fake_device import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_jax.policies import Greedy, Policy


def starts(engine, max_steps, every_step=lambda engine: None) -> list[int]:
    """Runs; the orders of the sequences as they first started."""
    started: dict[int, None] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        every_step(engine)
        started |= dict.fromkeys(chunk.sequence.order for chunk in engine.step().chunks)
    assert not engine.has_work, engine.describe()
    engine.check_outputs()
    return list(started)


def groups_of(rng, num_groups, each, prefix, tail, alphabet=10_000) -> list[list[int]]:
    """Shuffled prompts that begin alike in groups."""
    stems = [[30_000 + i, *(rng.randrange(alphabet) for _ in range(prefix - 1))] for i in range(num_groups)]
    tails = ([20_000 + i, *(rng.randrange(alphabet) for _ in range(tail - 1))] for _ in stems for i in range(each))
    prompts = [stem + next(tails) for stem in stems for _ in range(each)]
    rng.shuffle(prompts)
    return prompts


def distinct_tokens(prompts) -> int:
    """Nodes of the trie of all prompts, token by token."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


def saved(prompts, policy, *, num_pages, num_seqs, page_size=4) -> float:
    """Tokens that need not be computed, as a share of those that a cache without bound saves."""
    engine = FakeEngine(num_pages, page_size, budget=256, num_seqs=num_seqs, max_len=60, policy=policy,
                        eviction="belady" if policy == "dfs" else "lru")  # fmt: skip
    engine.add_batch(prompts, 1)
    engine.run(4000)
    engine.check_outputs()
    total = sum(map(len, prompts))
    return (total - engine.scheduler.counts["computed_prompt_tokens"]) / (total - distinct_tokens(prompts))


def test_a_shuffled_batch_in_trie_order_saves_what_an_unbounded_cache_saves():
    """64 groups x 16 requests, 16 at once, a quarter of the distinct pages."""
    prompts = groups_of(random.Random(0), 64, 16, 32, 4)
    num_pages = 64 * (8 + 16) // 4
    assert saved(prompts, "dfs", num_pages=num_pages, num_seqs=16) == 1.0
    assert saved(prompts, "fifo", num_pages=num_pages, num_seqs=16) < 0.75


@pytest.mark.parametrize("policy", ["dfs", "lpm", "greedy"])
@pytest.mark.parametrize(("prefix", "share"), [(32, 0.99), (30, 0.9)])
def test_prompts_that_begin_alike_run_together(policy, prefix, share):
    """A prefix that ends inside a page costs its last tokens again for those that start in the step that fills it."""
    prompts = groups_of(random.Random(3), 16, 12, prefix, 4)
    assert saved(prompts, policy, num_pages=16 * (8 + 12) // 4, num_seqs=8) >= share
    assert saved(prompts, "fifo", num_pages=16 * (8 + 12) // 4, num_seqs=8) < 0.8


def test_64_at_once_on_an_uncached_prefix_compute_it_once():
    rng = random.Random(1)
    prefix = [rng.randrange(9) for _ in range(2048)]
    for policy in ("fifo", "greedy"):
        engine = FakeEngine(400, 16, budget=8192, num_seqs=64, max_len=2200, policy=policy)
        prompts = [prefix + [100 + i] + [rng.randrange(9) for _ in range(10)] for i in range(64)]
        engine.add_batch(prompts, 1)
        engine.run(20)
        assert engine.scheduler.counts["computed_prompt_tokens"] == 2048 + 64 * 11


def test_what_the_cache_holds_goes_first():
    engine = FakeEngine(200, 4, num_seqs=1, max_len=64, policy="dfs", eviction="belady")
    engine.add([5] * 20, 1)
    engine.run(10)
    engine.add_batch([[1] * 20, [5] * 8 + [6] * 12, [1] * 12 + [2] * 8, [5] * 21, [1] * 20 + [3]], 1)
    assert starts(engine, 100) == [4, 2, 1, 5, 3]


def test_the_longest_cached_prefix_goes_first():
    engine = FakeEngine(200, 4, budget=16, num_seqs=1, max_len=64, policy="lpm")
    engine.add([5] * 20, 1)
    engine.run(10)
    engine.add_batch([[1] * 20, [5] * 8 + [6] * 12, [2] * 20, [5] * 21], 1)
    assert starts(engine, 100) == [4, 2, 1, 3]


def test_a_cold_request_among_hot_ones_starts_within_the_bound():
    """Adversarial: four that hit arrive in every step, for 500 steps, and four fit."""
    longest = {}
    for policy in ("fifo", "lpm"):
        engine = FakeEngine(80, 4, budget=64, num_seqs=4, max_len=40, policy=policy)
        rng = random.Random(2)
        hot = [rng.randrange(5) for _ in range(24)]
        engine.add(hot, 1)
        engine.run(5)
        cold, arrived, first = engine.add([7] * 30, 1), {}, {}
        for step in range(3000):
            if step < 500:
                arrived |= {engine.add([*hot, i, step % 5, 1], 1).order: step for i in range(4)}
            if not engine.has_work:
                break
            for chunk in engine.step().chunks:
                first.setdefault(chunk.sequence.order, step)
        engine.check_outputs()
        arrived[cold.order] = 0
        waits = {order: first[order] - step for order, step in arrived.items()}
        longest[policy] = max(waits.values())
        assert waits[cold.order] <= 3, "two queues' worth of starts"
    assert longest["lpm"] <= 2 * longest["fifo"]


@given(st.integers(0, 2**32), st.sampled_from(["lpm", "greedy"]), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_each_starts_by_its_due_start(seed, policy, num_seqs):
    rng = random.Random(seed)
    engine = FakeEngine(600, 4, budget=64, num_seqs=num_seqs, max_len=40, policy=policy)
    prompts = groups_of(rng, 5, 12, 12, 6)

    def arrive(engine):
        for _ in range(rng.choice([0, 0, 1, 5]) if prompts else 0):
            if prompts:
                engine.add(prompts.pop(), 2)

    engine.add_batch([prompts.pop() for _ in range(rng.randint(1, 20))], 2)
    order = starts(engine, 1000, arrive)
    assert engine.scheduler.counts["preemptions"] == 0
    for position, start in enumerate(order, 1):
        sequence = engine.sequences[start]
        assert position <= sequence.due
        assert sequence.due <= 2 * (len(engine.sequences) + 1)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_packs_within_the_free_pages(seed):
    rng = random.Random(seed)
    engine = FakeEngine(rng.randint(20, 60), 4, num_seqs=4, max_len=60, policy="greedy")
    engine.add_batch(groups_of(rng, 3, 3, 16, 5, alphabet=3), 9)
    for _ in range(rng.randint(0, 6)):
        engine.step()
    batch = [engine.sequence(100 + i, prompt, 1) for i, prompt in enumerate(groups_of(rng, 6, 4, 12, 7, alphabet=3))]
    view, greedy = engine.scheduler.view, Greedy(4)
    greedy._follow(batch)
    chosen = list(greedy.packed(greedy.groups(batch, view), view))
    held = {node for table in engine.cache.tables for node in table.nodes}
    needed = 0
    pages = set()
    for sequence in chosen:
        path, node = (), engine.cache.trie.root(None)
        for start in range(0, (len(sequence.tokens) - 1) // 4 * 4, 4):
            key = sequence.tokens[start : start + 4].tobytes()
            node = node and node.child(key)
            path = (*path, key)
            if node not in held:
                pages.add(path)
        needed += -(-len(sequence.tokens) // 4) - (len(sequence.tokens) - 1) // 4
    assert needed + len(pages) <= view.num_free_pages
    assert chosen or view.num_free_pages < 6


def test_greedy_takes_the_group_that_holds_most_and_counts_a_shared_page_once():
    engine = FakeEngine(400, 4, budget=512, num_seqs=20, max_len=60, policy="greedy")
    many = [[1] * 16 + [i] for i in range(5)]  # 4 shared pages and 5 of their own: 9, though 25 apart
    long = [[2] * 24 + [3] * 20, [2] * 24 + [4] * 20]  # 6 and 2 x 5: 16
    alone = [[5] * 12]
    engine.add_batch([*many, *alone, *long], 1)
    plan = engine.step()
    assert [chunk.sequence.order for chunk in plan.chunks] == [6, 7, 0, 1, 2, 3, 4, 5]
    engine.run(10)
    engine.add([1, 2, 3], 1)
    engine.run(10)
    assert not engine.scheduler.policy.demands.roots[None].children, "nothing is kept of those that wait no more"


def test_the_higher_priority_goes_first():
    engine = FakeEngine(100, 4, budget=16, num_seqs=1, max_len=40, policy="priority")
    for i, priority in enumerate([0, 2, 1, 2, -1]):
        engine.add([i] * 6, 1, priority=priority)
    assert starts(engine, 100) == [1, 3, 2, 0, 4]


class Odd:
    """Names one twice, and some never."""

    def __call__(self, waiting, view):
        for sequence in waiting:
            if sequence.order % 3 == 0 and view.num_free_rows:
                yield sequence
                yield sequence


def test_a_policy_may_be_anybodys_and_need_not_be_a_good_one():
    assert isinstance(Odd(), Policy)
    engine = FakeEngine(100, 4, budget=32, num_seqs=3, max_len=40, policy=Odd())
    engine.add_batch([[i % 5, 1, 2] * 3 for i in range(10)], 3)
    order = starts(engine, 200)
    assert order[:3] == [0, 3, 6]
    assert sorted(order) == list(range(10))
