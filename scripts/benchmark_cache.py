"""What policies and evictions save, counted through the real scheduler over a device that computes nothing; and what a
large cache costs the host. Writes benchmarks/results/cache.json.

--mooncake FILE adds the replay of that trace by simulate_cache.py.
"""

import argparse
import random
import resource
import time
from array import array
from pathlib import Path

import simulate_cache
from benchmark_host import collect, milliseconds_since, random_tokens
from results import Figure, write_results

from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Request, SamplingParams, Sequence
from prefix_jax.scheduler import Scheduler, StepPlan

PAGE_SIZE = 16
NUM_GROUPS, GROUP_SIZE, PREFIX_LEN, TAIL_LEN = 64, 16, 1024, 64
NUM_SEQS = 32
MILLION = 1_000_000


def run_batch(prompts: list[array], num_pages: int, num_seqs: int, policy: str, evicts: str) -> int:
    """Prompt tokens computed until each prompt has one token of output."""
    cache, rng = PrefixCache(num_pages, PAGE_SIZE, evicts), random.Random(1)
    scheduler = Scheduler(
        cache, PrefixPool(cache, 0), max_num_seqs=num_seqs, max_num_batched_tokens=8192, policy=policy
    )
    params = SamplingParams(max_tokens=1)
    batch = [
        Sequence(Request(str(i), tuple(prompt), params, len(prompt) + 1), i, 0) for i, prompt in enumerate(prompts)
    ]
    scheduler.add_batch(batch)
    in_flight = StepPlan()
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        collect(scheduler, in_flight, rng)
        for chunk in in_flight.chunks:
            if chunk.samples:
                scheduler.finish(chunk.sequence, "length")
        in_flight = plan
    cache.check()
    return scheduler.counts["computed_prompt_tokens"]


def shared_batch(policy: str, evicts: str, tail_of_page: int = 0) -> Figure:
    """A shuffled batch of groups in a quarter of its working set."""
    rng, prompts = random.Random(0), []
    prefix_len = PREFIX_LEN - tail_of_page
    for _ in range(NUM_GROUPS):
        prefix = random_tokens(rng, prefix_len)
        prompts += [prefix + array("i", [40_000 + i]) + random_tokens(rng, TAIL_LEN - 1) for i in range(GROUP_SIZE)]
    rng.shuffle(prompts)
    total, distinct = sum(map(len, prompts)), NUM_GROUPS * (prefix_len + GROUP_SIZE * TAIL_LEN)
    num_pages = NUM_GROUPS * (PREFIX_LEN + GROUP_SIZE * TAIL_LEN) // PAGE_SIZE // 4
    saved = (total - run_batch(prompts, num_pages, NUM_SEQS, policy, evicts)) / (total - distinct)
    what = f"{NUM_GROUPS} groups x {GROUP_SIZE} of {prefix_len} + {TAIL_LEN}, pool 25 %, max_num_seqs {NUM_SEQS}, "
    goals = {"must": 0.97, "aim": 0.99} if policy == "dfs" else {}
    return Figure(f"{what}{policy} and {evicts}: saved ÷ savable", saved, "x", better="higher", **goals)


def sharing_at_once() -> Figure:
    rng = random.Random(0)
    prefix = random_tokens(rng, 2048)
    prompts = [prefix + array("i", [40_000 + i]) + random_tokens(rng, 99) for i in range(64)]
    computed = run_batch(prompts, 1000, 64, "fifo", "lru")
    return Figure(
        "64 at once on an uncached prefix of 2,048: computed ÷ distinct", computed / (2048 + 6400), "x", must=1.02
    )


def time_large_cache(evicts: str) -> Figure:
    """A full pool: each prompt evicts as many pages as it brings."""
    rng, times = random.Random(0), []
    cache, head = PrefixCache(100_000, PAGE_SIZE, evicts), random_tokens(rng, 8)
    for i in range(240):
        tokens = head + random_tokens(rng, 8184)
        cache.step += 1
        start = time.perf_counter()
        table = cache.open(tokens)
        assert cache.grow(table, 8192)
        cache.publish(table, tokens, 8192, written=False)
        if i >= 200:
            times.append(milliseconds_since(start))
        cache.close(table)
    return Figure.median(f"open + publish of 8,192 tokens among 100,000 nodes, {evicts}", times, "ms", must=4.0)


def memory_of_a_million_pages() -> Figure:
    """Of the whole process, with 1,250 prompts of 800 pages in the pool at the end, and the forecast of all of them."""
    asks = [simulate_cache.Ask(array("i", range(i * 800, (i + 1) * 800)), 800 * PAGE_SIZE) for i in range(1300)]
    simulate_cache.Replay(MILLION, PAGE_SIZE, "fifo", "belady", 64).run(asks, 64)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Figure("a million pages simulated, belady: memory of the process", gib, "GiB", must=2.0)


def time_mooncake(path: str) -> Figure:
    start = time.perf_counter()
    assert simulate_cache.main([path]) == 0
    seconds = time.perf_counter() - start
    return Figure("the Mooncake trace at page 512, 5 evictions x 3 pools", seconds, "s", must=60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mooncake", metavar="FILE")
    args = parser.parse_args()
    pairs = [("dfs", "belady"), ("lpm", "lru"), ("greedy", "lru"), ("fifo", "belady"), ("fifo", "lru")]
    rows = [shared_batch(*pair) for pair in pairs]
    rows += [shared_batch("dfs", "belady", tail_of_page=9), sharing_at_once()]
    rows += [time_large_cache(evicts) for evicts in ("lru", "cost")]
    rows += [memory_of_a_million_pages()]
    rows += [time_mooncake(args.mooncake)] if args.mooncake else []
    trace = f" --mooncake {Path(args.mooncake).name}" if args.mooncake else ""
    write_results("cache", rows, command=f"python scripts/benchmark_cache.py{trace}")


if __name__ == "__main__":
    main()
