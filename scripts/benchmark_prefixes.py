"""What the prefix cache saves, and what it costs: counts of the scheduler without a model, times of the trie, and with
--model or --shapes the throughput of an engine that finds nothing to reuse, and a prefix saved, loaded, recomputed.

--data is a folder with mmlu/, mooncake/ and tokenizers/; without it their rows are left out. Writes
benchmarks/results/prefixes.json.
"""

import argparse
import gc
import random
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from benchmark_host import collect
from benchmark_step import MODELS
from page_moves import page_move_figures
from render_results import TABLE_HEAD, Figure, Results, device_name
from workloads import mmlu, num_distinct, text_encoder

from prefix_jax import LLM, SamplingParams
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool
from prefix_jax.request import Request
from prefix_jax.request import Sequence as Running
from prefix_jax.scheduler import Scheduler

PAGE_SIZE = 16
SEQS = 8  # running at once in the offline batch


class DryRun:
    """An engine's host half: every step takes no time."""

    def __init__(
        self, num_pages: int, *, max_num_seqs: int = 64, budget: int = 8192, policy: str = "fifo", evicts: str = "lru"
    ):
        self.cache = PrefixCache(num_pages, PAGE_SIZE, evicts)
        self.scheduler = Scheduler(
            self.cache,
            PrefixPool(self.cache, 0),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            policy=policy,
        )
        self.num_steps = self.num_added = 0
        self.rng = random.Random(0)  # of the tokens that steps yield
        self.waited: dict[str, int] = {}  # steps until each was admitted
        self.added_at: dict[Running, int] = {}

    def add(self, prompts: Iterable[Sequence[int]], max_tokens: int = 1) -> None:
        batch = []
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=max_tokens)
            request = Request(str(self.num_added), tuple(prompt), sampling, len(prompt) + max_tokens)
            batch.append(Running(request, self.num_added, 0))
            self.added_at[batch[-1]] = self.num_steps
            self.num_added += 1
        self.scheduler.add_batch(batch)

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.num_steps += 1
        for sequence in [s for s in self.added_at if s.row is not None]:
            self.waited[sequence.request.request_id] = self.num_steps - 1 - self.added_at.pop(sequence)
        collect(self.scheduler, plan, self.rng)
        for chunk in plan.chunks:
            if chunk.samples and len(chunk.sequence.tokens) >= chunk.sequence.request.max_len:
                self.scheduler.finish(chunk.sequence, "length")
        self.scheduler.finished.clear()

    def run(self) -> int:
        """To the end; prompt tokens that were computed."""
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        self.cache.check()
        return self.scheduler.counts["computed_prompt_tokens"]


def tokens(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(100_000), k=length)


# Counts ---------------------------------------------------------------------------------------------------------------


def at_once() -> float:
    rng = random.Random(1)
    shared = tokens(rng, 2048)
    prompts = [shared + tokens(rng, 64) for _ in range(64)]
    run = DryRun(20_000)
    run.add(prompts)
    return run.run() / num_distinct(prompts)


def offline_batch(policy: str, stem_len: int = 1024) -> float:
    """64 groups of 16 in any order, in a quarter of the pages that all their prompts have: of the tokens that a cache
    without end saves, the share that is saved."""
    rng = random.Random(2)
    stems = [tokens(rng, stem_len) for _ in range(64)]
    prompts = [stem + tokens(rng, 64) for stem in stems for _ in range(16)]
    rng.shuffle(prompts)
    total, distinct = sum(map(len, prompts)), num_distinct(prompts)
    run = DryRun(
        distinct // PAGE_SIZE // 4, max_num_seqs=SEQS, policy=policy, evicts="belady" if policy == "dfs" else "lru"
    )
    run.add(prompts)
    return (total - run.run()) / (total - distinct)


def longest_waits() -> dict[str, int]:
    """Steps that the longest wait took. Four run at once; a prompt that shares nothing comes first, then two
    that share a cached prefix with every step, for a while."""
    longest = {}
    for policy in ("fifo", "lpm"):
        rng = random.Random(3)
        hot = tokens(rng, 1024)
        run = DryRun(4096, max_num_seqs=4, policy=policy)
        run.add([hot + tokens(rng, 8)])
        run.run()
        run.add([hot + tokens(rng, 8) for _ in range(8)], 4)
        run.add([tokens(rng, 1024)], 4)
        for _ in range(500):
            if len(run.scheduler.waiting) < 100:
                run.add([hot + tokens(rng, 8) for _ in range(2)], 4)
            run.step()
        run.run()
        longest[policy] = max(run.waited.values())
    return longest


# Times ----------------------------------------------------------------------------------------------------------------


def open_and_publish(evicts: str, repeats: int = 30) -> list[float]:
    """Milliseconds for a prompt of 8,192 tokens in a trie of 100,000 nodes; each evicts as many as it brings."""
    rng = np.random.default_rng(4)
    cache = PrefixCache(100_000, PAGE_SIZE, evicts)
    spent = []
    while len(spent) < repeats:
        prompt = array("i", rng.integers(0, 100_000, 8192).astype(np.int32).tobytes())
        cache.step += 1
        started = time.perf_counter()
        table = cache.open(prompt)
        assert cache.grow(table, len(prompt))
        cache.publish(table, prompt, len(prompt), written=False)
        taken = (time.perf_counter() - started) * 1e3
        cache.close(table)
        if cache.num_evicted > 512:
            spent.append(taken)
    return spent


def gib_of_a_million_pages() -> float:
    """Of host memory, in a process of its own."""
    script = (
        "import benchmark_prefixes as b, numpy as n; from array import array; before = b.used_gib();"
        "cache = b.PrefixCache(1_000_000, b.PAGE_SIZE); rng = n.random.default_rng(0)\n"
        "for _ in range(1_000_000 // 500):\n"
        "    t = array('i', rng.integers(0, 9**6, 8000).astype(n.int32).tobytes()); cache.step += 1\n"
        "    table = cache.open(t); cache.grow(table, 8000); cache.publish(table, t, 8000, written=False)\n"
        "    cache.close(table)\n"
        "assert len(cache.pool) == 0; print(b.used_gib() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def used_gib() -> float:
    """Of host memory by this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def without_reuse(model: str | LlamaConfig, repeats: int) -> list[float]:
    """Throughput with the cache on, of that with it off: prompts that share nothing, both engines in turn."""
    load_format = "dummy" if isinstance(model, LlamaConfig) else "auto"
    on, off = (
        LLM(
            model,
            load_format=load_format,
            enable_prefix_caching=caching,
            num_pages=4096,
            max_model_len=1024,
            use_tqdm=False,
        )
        for caching in (True, False)
    )
    rng, ratios = random.Random(5), []
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for _ in range(repeats + 1):
        prompts = [rng.choices(range(on.model_config.vocab_size), k=128) for _ in range(on.engine.max_num_seqs)]
        taken = []
        for llm in (on, off):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            taken.append(time.perf_counter() - started)
        ratios.append(taken[1] / taken[0])
    return ratios[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mmlu/, mooncake/ and tokenizers/")
    parser.add_argument("--model", help="folder or GGUF file, for the throughput without reuse")
    parser.add_argument("--shapes", choices=MODELS, help="instead, random weights of true shapes; pages move as well")
    parser.add_argument("--length", type=int, default=8192, help="of the prefix whose pages move")
    parser.add_argument("--folder", help="where it is saved; default: the temporary folder")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    results = Results("prefixes", device=device_name(), keep=True)
    print(TABLE_HEAD)
    for part in args.only:
        for figure in PARTS[part](args):
            results.add(figure)
    results.close()


def order_and_trie(args: argparse.Namespace) -> Iterator[Figure]:
    longest = longest_waits()
    what = "longest wait under lpm ÷ under fifo, adversarial arrivals"
    yield Figure(what, longest["lpm"] / longest["fifo"], "x", must=2)
    for evicts in ("lru", "cost"):
        what = f"open + publish of 8,192 tokens, 100,000 nodes present, {evicts}"
        yield Figure.median(what, open_and_publish(evicts), "ms", must=4)
    yield Figure("a million pages, host memory", gib_of_a_million_pages(), "GiB", must=2)


def traces(args: argparse.Namespace) -> Iterator[Figure]:
    if args.data:
        started = time.perf_counter()
        trace = args.data / "mooncake" / "conversation_trace.jsonl.gz"
        command = [sys.executable, str(Path(__file__).with_name("simulate_cache.py")), str(trace), "--page-size", "512"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield Figure("Mooncake conversation trace, whole, page size 512", time.perf_counter() - started, "s", must=60)


def no_reuse(args: argparse.Namespace) -> Iterator[Figure]:
    if model := MODELS.get(args.shapes, args.model):
        what = f"no reuse: throughput with the cache on ÷ off, {args.shapes or Path(args.model).stem}"
        yield Figure.median(what, without_reuse(model, args.repeats), "x", must=0.99, aim=0.998, better="higher")
        gc.collect()


def page_moves(args: argparse.Namespace) -> Iterator[Figure]:
    if args.shapes:
        yield from page_move_figures(MODELS[args.shapes], args.length, args.folder)


def counts(args: argparse.Namespace) -> Iterator[Figure]:
    data = args.data
    goals = {"must": 1.02, "aim": 1.0}
    what = "prefill tokens computed ÷ distinct, 64 requests at once on an uncached 2K prefix"
    yield Figure(what, at_once(), "x", **goals)
    if data:
        encode = text_encoder(data / "tokenizers" / "llama3.tokenizer.json.gz")
        prompts = mmlu(data / "mmlu", num=None, encode=encode).prompts
        run = DryRun(sum(map(len, prompts)) // PAGE_SIZE + 10_000)
        run.add(prompts)
        what = f"prefill tokens computed ÷ distinct, MMLU 5-shot, {len(prompts)} questions"
        yield Figure(what, run.run() / num_distinct(prompts), "x", **goals)
    batch = f"64 x 16 shuffled, a quarter of the pages, {SEQS} at once: saved ÷ saved without limit"
    goals = {"must": 0.97, "aim": 0.99}
    for policy in ("dfs", "fifo", "lpm", "greedy"):
        yield Figure(
            f"{batch}, {policy}", offline_batch(policy), "x", better="higher", **(goals if policy == "dfs" else {})
        )
    what = f"{batch}, dfs, stems that end inside a page"
    yield Figure(what, offline_batch("dfs", 1015), "x", better="higher", **goals)


PARTS = {"counts": counts, "trie": order_and_trie, "trace": traces, "no-reuse": no_reuse, "moves": page_moves}

if __name__ == "__main__":
    main()
