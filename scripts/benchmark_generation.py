"""What a caller's wishes about tokens cost: 256 rows that all ask for penalties, top_p and a seed, for
log-probabilities, for several answers, against rows that ask for nothing; and scores behind one prompt.

Every arm asks for the same numbers of tokens, on one engine, in turn, with an empty cache. Writes
benchmarks/results/generation.json row by row.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import workloads
from render_results import Figure
from runs import ALL_ON, Bench, add_engine_options, make_bench, write_figures
from workloads import Workload

RULES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
ARMS: dict[str, tuple[dict[str, Any], float | None]] = {  # what every row asks for; at least so much of plain greedy
    "penalties + top_p + seed": (RULES | SAMPLED, 0.95),
    "penalties": (RULES, None),
    "top_p + seed": (SAMPLED, None),
    "top_k + min_p + seed": ({"temperature": 0.8, "top_k": 50, "min_p": 0.02, "seed": 1}, None),
    "bias + bans + min_tokens": ({"logit_bias": {5: 1.0}, "allowed_token_ids": range(256), "min_tokens": 8}, None),
    "5 log-probabilities": ({"logprobs": 5}, None),
}


GOAL_OF = ("llama-3-8b", 256)


def rate(bench: Bench, workload: Workload, asked: dict[str, Any]) -> float:
    """Output tokens per second."""
    run = bench.run(workload, ALL_ON, asked)
    return run.num_output_tokens / run.seconds


def generation_figures(bench: Bench, args: argparse.Namespace) -> Iterator[Figure]:
    """Of `--num-prompts` prompts of `--input-len` tokens with nothing in common, each answered at `--output-len`."""
    name, num = bench.name, args.num_prompts
    lengths = [(args.input_len, args.output_len)] * num
    workload = workloads.random_lengths(lengths, vocab_size=bench.vocab_size, seed=args.seed)
    size = f"{name}, {num} x {args.input_len}, {args.output_len} out"
    for asked in ({}, *(asked for asked, _ in ARMS.values())):
        rate(bench, workloads.random_lengths([(4, 8)] * 4, vocab_size=bench.vocab_size, seed=2**31), asked)
    rates: dict[str, list[float]] = {"plain": []} | {arm: [] for arm in ARMS}
    for _ in range(args.repeats):
        rates["plain"].append(rate(bench, workload, {}))
        for arm, (asked, _) in ARMS.items():
            rates[arm].append(rate(bench, workload, asked))
    yield Figure.median(f"{size}: plain greedy", rates["plain"], "output tokens/s", better="higher")
    for arm, (_, must) in ARMS.items():
        shares = [a / b for a, b in zip(rates[arm], rates["plain"], strict=True)]
        must = must if (name, num) == GOAL_OF else None
        yield Figure.median(f"{size}: {arm} ÷ plain greedy", shares, "x", must=must, better="higher")
    yield from answers_figures(bench, args, size)
    yield from score_figures(bench, args)


def answers_figures(bench: Bench, args: argparse.Namespace, size: str) -> Iterator[Figure]:
    """Four answers to a prompt, against four requests with the same prompt that find it in the cache."""
    few = workloads.random_lengths(
        [(args.input_len, args.output_len)] * max(1, args.num_prompts // 4), vocab_size=bench.vocab_size, seed=args.seed
    )
    fourfold = Workload(few.name, [item for item in few.items for _ in range(4)])
    pairs = [(rate(bench, few, {**SAMPLED, "n": 4}), rate(bench, fourfold, SAMPLED)) for _ in range(args.repeats)]
    yield Figure.median(f"{size}: n = 4 ÷ 4 requests", [a / b for a, b in pairs], "x", better="higher")


def score_figures(bench: Bench, args: argparse.Namespace) -> Iterator[Figure]:
    """Continuations of 16 tokens behind one prompt: what an evaluation harness asks for."""
    rng = np.random.default_rng(args.seed)
    num = args.num_prompts
    prompt = rng.integers(0, bench.vocab_size, args.input_len).tolist()
    tails = rng.integers(0, bench.vocab_size, (num, 16)).tolist()
    rates = []
    for _ in range(args.repeats):
        bench.switch(ALL_ON)
        gc.collect()
        started = time.perf_counter()
        scores = bench.llm.score([prompt], tails, use_tqdm=False)
        rates.append(len(scores) / (time.perf_counter() - started))
    what = f"{bench.name}, {num} continuations of 16 tokens behind one prompt of {args.input_len}"
    yield Figure.median(what, rates, "scores/s", better="higher")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "llama-3-8b")
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        bench = make_bench(args, max_num_seqs=args.max_num_seqs or args.num_prompts)
    except (ValueError, OSError, MemoryError) as error:
        print(f"benchmark_generation.py: error: {error}", file=sys.stderr)
        return 2
    return write_figures("generation", bench, args, argv, generation_figures(bench, args))


if __name__ == "__main__":
    sys.exit(main())
