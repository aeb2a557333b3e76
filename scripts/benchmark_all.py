"""Everything that one engine can measure, in one process: the table of benchmark_throughput.py, the parts of
benchmark_prefix_caching.py, benchmark_serving.py, and benchmark_generation.py. It is built, compiled and warmed up
once.

Each file is written row by row, and keeps the rows of other commands and machines.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmark_generation as generation
import benchmark_prefix_caching as prefix_caching
import benchmark_serving as serving
import benchmark_throughput as throughput
from benchmark_throughput import shared_prefix
from render_results import Figure
from runs import Bench, add_engine_options, add_profile_option, finish, make_bench, open_results, start_figure

FILES = {"throughput": "throughput", "serving": "serving", "generation": "generation"} | dict.fromkeys(
    prefix_caching.PARTS, "prefix_caching"
)


def part_figures(part: str, bench: Bench, args: argparse.Namespace) -> Iterator[Figure]:
    if part == "throughput":
        lines = throughput.chosen_lines(args, args.lengths)
        options = {"repeats": args.repeats, "seed": args.seed, "until": args.until, "profile": args.profile}
        yield from throughput.table_figures(bench, lines, **options)
    elif part == "serving":
        size = prefix_caching.Sizes.divided(args.scale)
        num = max([8, *(round(rate * args.seconds) for rate in args.request_rate)])
        workload = shared_prefix(num, 596 // size.scale, 104 // size.scale, 100 // size.scale)(
            bench.vocab_size, args.seed
        )
        yield from serving.serving_figures(bench, workload, args.request_rate, args)
    elif part == "generation":
        sizes = {
            "num_prompts": max(4, 256 // args.scale),
            "input_len": 512 // args.scale,
            "output_len": 128 // args.scale,
        }
        yield from generation.generation_figures(bench, argparse.Namespace(**vars(args), **sizes))
    else:
        sizes = prefix_caching.Sizes.divided(args.scale)
        yield from prefix_caching.figures(bench, sizes, [part], args)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "llama-3-8b")
    add_profile_option(parser)
    prefix_caching.add_options(parser)
    serving.add_options(parser)
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="of ShareGPT requests, for the table")
    parser.add_argument("--only", nargs="+", choices=FILES, default=["throughput", "arms", "serving"])
    throughput.add_table_options(parser)
    parser.set_defaults(keep=True)
    args = parser.parse_args(argv)
    args.until = time.monotonic() + args.deadline
    try:
        throughput.chosen_lines(args, args.lengths)
        if "text" in args.only and args.data is None:
            raise ValueError("real text needs --data")
        bench = make_bench(args)
        if "text" in args.only and bench.llm.tokenizer is None:
            raise ValueError(f"real text needs a model with a tokenizer, got {args.model}")
    except (ValueError, OSError, MemoryError) as error:
        print(f"benchmark_all.py: error: {error}", file=sys.stderr)
        return 2
    files = {name: open_results(name, bench, args, argv, "benchmark_all.py") for name in map(FILES.get, args.only)}
    for file in files.values():
        file.add(start_figure(bench))
    bench.warm_up()
    for part in args.only:
        for figure in part_figures(part, bench, args):
            files[FILES[part]].add(figure)
    for file in files.values():
        finish(file, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
