"""Times the host half alone, without a device: what the loop does in Python between two steps.

Run it on an idle machine; writes benchmarks/results/host.json.
"""

import argparse
import random
import time
from array import array

from render_results import Figure, write_results

from prefix_jax.buckets import Tiling, make_buckets
from prefix_jax.forest import Costs
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Request, SamplingParams, Sequence
from prefix_jax.scheduler import Scheduler, StepPlan
from prefix_jax.step_batch import Batcher

PAGE_SIZE = 16
PROMPT_LEN = 8192
NUM_PAGES = 40_000
NUM_SEQS = 256
CONTEXT_LEN = 1024
TOKEN_BUDGET = 8192
REPEATS = 60
# As for Llama-3-8B on an H200, whose sequences read what they share together.
TILING = Tiling(32, 528, 132, 264, costs=Costs(32, wide=2.6, tile=200.0, partial=11.2, launch=10_000.0))


def random_tokens(rng: random.Random, length: int) -> array:
    return array("i", rng.choices(range(32_000), k=length))


def time_prompts() -> tuple[list[float], list[float]]:
    """Milliseconds to open, grow and publish prompts that nobody has seen; then to open each again, all of it cached.

    They begin alike for half a page, so that each open also looks for the longest head among the pages of the others.
    """
    rng = random.Random(0)
    cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
    head = random_tokens(rng, PAGE_SIZE // 2)
    cold, warm = [], []
    for _ in range(REPEATS):
        tokens = head + random_tokens(rng, PROMPT_LEN - len(head))
        cache.step += 1
        start = time.perf_counter()
        table = cache.open(tokens)
        assert cache.grow(table, PROMPT_LEN)
        cache.publish(table, tokens, PROMPT_LEN, written=False)
        cold.append(milliseconds_since(start))
        cache.close(table)
        cache.step += 1
        start = time.perf_counter()
        table = cache.open(tokens)
        warm.append(milliseconds_since(start))
        assert table.cached_len == PROMPT_LEN - 1
        cache.close(table)
    cache.check()
    return cold, warm


def time_decode_steps() -> list[float]:
    """Milliseconds to plan and lay out a step in which each of 256 sequences decodes, with one step in flight.

    They share a prefix and stand at different offsets in their pages, so that in each step some of them open a page.
    """
    rng = random.Random(1)
    cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
    scheduler = Scheduler(cache, PrefixPool(cache, 0), max_num_seqs=NUM_SEQS, max_num_batched_tokens=TOKEN_BUDGET)
    buckets = make_buckets(NUM_SEQS, TOKEN_BUDGET, 8, TILING, smallest=64)
    batcher = Batcher(buckets, NUM_SEQS, 2 * CONTEXT_LEN // PAGE_SIZE, PAGE_SIZE, TILING.costs)
    shared = random_tokens(rng, CONTEXT_LEN // 2)
    for order in range(NUM_SEQS):
        prompt = shared + random_tokens(rng, CONTEXT_LEN // 2 - order % PAGE_SIZE)
        request = Request(str(order), tuple(prompt), SamplingParams(max_tokens=None), max_len=2 * CONTEXT_LEN)
        scheduler.add(Sequence(request, order, seed=order))
    spent, in_flight = [], StepPlan()
    while len(spent) < REPEATS:
        start = time.perf_counter()
        plan = scheduler.schedule()
        batch = batcher.build(plan)
        if batch.bucket.kind == "shared":
            spent.append(milliseconds_since(start))
        collect(scheduler, in_flight, rng)
        in_flight = plan
    return spent


def collect(scheduler: Scheduler, plan: StepPlan, rng: random.Random) -> None:
    """What the engine does with a finished step: a token for each sequence that yielded one."""
    for chunk in plan.chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(rng.randrange(32_000))
            chunk.sequence.pending -= 1
        scheduler.settle(chunk.sequence)


def milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cold, warm = time_prompts()
    steps = time_decode_steps()
    rows = [
        Figure.median("open + publish of an 8,192-token prompt at page 16", cold, "ms", must=4.0),
        Figure.median("open of the same prompt when all of it is cached", warm, "ms"),
        Figure.median("schedule + tile plan + step batch for 256 decoding sequences", steps, "ms", must=2.0),
    ]
    write_results("host", rows)


if __name__ == "__main__":
    main()
