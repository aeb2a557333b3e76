"""Models other than Llama, with random weights of their true shapes: the original's workload on Baichuan2-13B (ALiBi, a
KV head for each query head), on which its own gain was 2 to 3, and decode steps of Mistral-7B (sliding window) and
Qwen3-8B (norms of queries and keys) against their limit, beside Llama-3-8B's. Writes benchmarks/results/models.json.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmark_throughput as throughput
from benchmark_step import MODELS, decode_figures, step_runner
from ceilings import device_ceilings
from render_results import FOLDER, Figure, Results, device_name, own_command
from runs import Bench, finish, start_figure

OVER_LIMIT = "÷ (bytes / copy bandwidth)"


def workload_figures(args: argparse.Namespace, until: float) -> Iterator[Figure]:
    """The original's workload, in an engine that ends with it."""
    sizes = {"max_num_seqs": throughput.NUM_RUNNING} if args.scale == 1 else {}
    bench = Bench(args.workload, dtype=args.dtype, product_size=args.product, max_model_len=1024, seed=0, **sizes)
    yield start_figure(bench)
    bench.warm_up()
    lines = throughput.table_lines(None, args.scale)[:1]
    yield from throughput.table_figures(bench, lines, repeats=args.repeats, seed=0, until=until, profile=True)


def step_figures(models: Sequence[str], ceilings: dict[str, float], args: argparse.Namespace) -> Iterator[Figure]:
    """Decode steps of each; the first is what the others' shares of the limit are compared with."""
    first: dict[str, Figure] = {}
    for model in models:
        runner = step_runner(model, args.dtype, [(batch, batch) for batch in args.batch])
        for figure in decode_figures(model, runner, args.batch, args.context, ceilings, args):
            yield figure
            what = figure.what.removeprefix(model)
            if OVER_LIMIT not in what:
                continue
            if model == models[0]:
                first[what] = figure
            else:
                times = [a / b for a, b in zip(figure.repeats, first[what].repeats, strict=True)]
                yield Figure.median(f"{figure.what} ÷ {models[0]}'s", times, "x", must=1.05, aim=1.0)
        del runner
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", default="baichuan2-13b", choices=MODELS, help="the model that the workload runs on")
    add("--only", nargs="+", choices=("workload", "steps"), default=["workload", "steps"])
    add("--steps", nargs="*", default=["llama-3-8b", "mistral-7b", "qwen3-8b"], choices=MODELS)
    add("--dtype", default="bfloat16")
    add("--batch", type=int, nargs="+", default=[1, 64, 256])
    add("--context", type=int, default=1024, help="positions of each decoding sequence")
    add("--calls", type=int, default=20)
    add("--repeats", type=int, default=3)
    add("--scale", type=int, default=1, help="divide all sizes of the workload, and claim nothing")
    add("--product", type=int, help="side of the matrices that measure the limits (default: 1024 on a CPU, else 8192)")
    add("--deadline", type=float, default=float("inf"), help="seconds after which no arm is begun")
    add("--keep", action="store_true", help="keep the file's other rows")
    add("--folder", type=Path, help="where the file goes (default: benchmarks/results)")
    add("--plot", action="store_true", help="draw the file's rows into a PNG beside it")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.deadline
    limits = device_ceilings(args.product)
    command = own_command("benchmark_models.py", argv)
    folder = args.folder or FOLDER
    results = Results("models", command=command, ceilings=limits, device=device_name(), folder=folder, keep=args.keep)
    if "workload" in args.only:
        for figure in workload_figures(args, until):
            results.add(figure)
        gc.collect()
    if "steps" in args.only:
        for figure in step_figures(args.steps, limits, args):
            results.add(figure)
    return finish(results, args)


if __name__ == "__main__":
    sys.exit(main())
