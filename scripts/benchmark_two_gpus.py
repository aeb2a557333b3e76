"""One model on two GPUs against one: steps, a workload with the cache on and off and shared pages read once or not;
what is spent in collectives, with these inside the CUDA graph or between graphs; two engines side by side against one
engine on both; and whether the tokens are the same.

Every engine has a process of its own, so that what one has measured is not lost with another. Leave NVLink's multicast
switched off where others share the host (NCCL_NVLS_ENABLE=0). Writes benchmarks/results/two_gpus.json.
"""

import argparse
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from benchmark_step import LONGEST, MODELS, make_batch, once_more, step_runner, time_step
from benchmark_throughput import NUM_RUNNING, shared_prefix
from processes import printed
from profiles import profiled, time_shares
from render_results import FOLDER, Figure, Results, device_name, own_command
from runs import ALL_ON, AUTOMATIC, OFF, Bench, name_on
from workloads import Item

from prefix_jax import LLM, SamplingParams
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.request import CompletionOutput
from prefix_jax.runner import Runner
from prefix_jax.step_batch import StepBatch

ENGINES = [("llama-3-8b", 1), ("llama-3-8b", 2), ("llama-2-13b", 1), ("llama-2-13b", 2), ("llama-2-70b", 2)]
FEWER = ("llama-2-70b",)  # a quarter of the workload's prompts will do
# Collectives take memory beside the part that JAX reserves, the more executables have them the more.
RESERVED = {("llama-2-70b", "steps"): "0.92", ("llama-2-70b", "in-graph"): "0.92", ("llama-2-70b", "workload"): "0.75"}
FASTER = ("llama-2-13b", 64), 1.5  # a decode step of this model and batch has to be so many times faster on two
IN_GRAPH = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
COLLECTIVE = ("nccl", "psum", "AllReduce", "all-reduce", "AllGather", "all-gather")  # parts of kernels' names
KINDS = ("steps", "in-graph", "workload", "side-by-side", "same")
TIE = 1e-4  # of log-probabilities
SAME = {  # whose heads do not divide between two, and whose do; so many layers: hidden, intermediate, heads, KV heads
    "9 / 3 heads": (8, 576, 1536, 9, 3),
    "32 / 8 heads": (4, 512, 1024, 32, 8),
}


# One engine, in a process of its own -----------------------------------------------------------------------------


def steps_alone(model: str, num_devices: int, args: argparse.Namespace, where: str = "") -> Iterator[Figure]:
    """With no executables but those of these steps. where: the collectives are."""
    runner = step_runner(model, args.dtype, [(n, n) for n in args.batch] + [(1, args.prefill)], num_devices)
    yield from step_figures(name_on(model, num_devices) + where, runner, num_devices, args)


def workload_figures(model: str, num_devices: int, args: argparse.Namespace) -> Iterator[Figure]:
    options = {"max_num_seqs": NUM_RUNNING} if args.scale == 1 else {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    bench = Bench(
        model,
        dtype=args.dtype,
        product_size=args.product,
        tensor_parallel_size=num_devices,
        max_model_len=min(LONGEST, MODELS[model].max_position),
        seed=0,
        **options,
    )
    yield Figure(f"{bench.name}: engine start", bench.start_seconds, "s")
    bench.warm_up()
    sizes = [size // args.scale for size in (250 if model in FEWER else 1000, 596, 104, 100)]
    workload = shared_prefix(*sizes)(bench.vocab_size, 0)
    for arm in (ALL_ON, AUTOMATIC, OFF):
        repeats = 1 if arm is OFF else args.repeats  # it does the same work each time, and much of it
        rates = [run.num_output_tokens / run.seconds for run in bench.measure(workload, [arm], repeats)[arm]]
        what = f"{bench.name}: {workload_name(sizes)}, {arm.name}"
        yield Figure.median(what, rates, "output tokens/s", better="higher")


def step_figures(what: str, runner: Runner, num_devices: int, args: argparse.Namespace) -> Iterator[Figure]:
    works = {f"decode step, B = {batch}": [(args.context - 1, 1)] * batch for batch in args.batch}
    works[f"prefill step of {args.prefill} tokens"] = [(0, args.prefill)]
    for name, chunks in works.items():
        if sum(-(-(start + length) // runner.page_size) for start, length in chunks) > runner.num_pages:
            continue  # there is no room for so many
        batch = make_batch(runner.batcher, runner.num_pages, chunks, runner.config.vocab_size)
        seconds = time_step(runner, batch, args.calls, args.repeats)
        yield Figure.median(f"{what}: {name}", [s * 1e3 for s in seconds], "ms")
        if num_devices > 1 and (share := collective_share(runner, once_more(batch), num_devices)) is not None:
            yield Figure(f"{what}: {name}, in collectives", 100 * share, "% of the time")


def collective_share(runner: Runner, batch: StepBatch, num_devices: int) -> float | None:
    """Of the time of a step; None where no profile of a device is to be had."""
    events = profiled(lambda: jax.block_until_ready([runner.dispatch(batch) for _ in range(5)]))
    if not events:
        return None
    spent = time_shares(events)[1].items()
    return sum(share for kernel, share in spent if any(part in kernel for part in COLLECTIVE)) / num_devices


def workload_name(sizes: Sequence[int]) -> str:
    num, shared, own, out = sizes
    return f"{num} x {shared + own} tokens, {shared} shared, {out} out"


def side_by_side_figures(model: str, args: argparse.Namespace) -> Iterator[Figure]:
    """Groups of prompts, each group on one of two engines of a device each, against one engine on both devices. Each
    engine runs as many sequences as it does by default."""
    groups, each, prefix, suffix, out = (max(2, size // args.scale) for size in (32, 16, 2048, 128, 128))
    workload = shared_prefix(groups * each, prefix, suffix, out, groups)(MODELS[model].vocab_size, 0)
    lead = [item.tokens[:prefix].tobytes() for item in workload.items]
    number = {head: i for i, head in enumerate(dict.fromkeys(lead))}
    halves = [
        [item for item, head in zip(workload.items, lead, strict=True) if number[head] % 2 == i] for i in range(2)
    ]
    common = {"load_format": "dummy", "dtype": args.dtype, "use_tqdm": False, "seed": 0}
    common |= {"max_model_len": min(LONGEST, MODELS[model].max_position)}
    common |= {"max_num_seqs": NUM_RUNNING} if args.scale == 1 else {"max_num_seqs": 8}
    what = f"{model}, {groups} groups x {each} x ({prefix} + {suffix}), {out} out"
    engines = [LLM(MODELS[model], devices=jax.devices()[i : i + 1], **common) for i in range(2)]
    yield from _speed(f"{what}: two engines of a GPU each", list(zip(engines, halves, strict=True)), args)
    del engines
    gc.collect()  # their memory is the next one's
    both = LLM(MODELS[model], tensor_parallel_size=2, **common)
    yield from _speed(f"{what}: one engine on two GPUs", [(both, workload.items)], args)


def _speed(what: str, parts: Sequence[tuple[LLM, list[Item]]], args: argparse.Namespace) -> Iterator[Figure]:
    """All parts at once, the first time to warm up."""
    rates = []
    for _ in range(args.repeats + 1):
        started, threads = time.perf_counter(), []
        for llm, items in parts:
            llm.reset_prefix_cache()
            params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=item.output_len) for item in items]
            prompts = [item.tokens.tolist() for item in items]
            ask = threading.Thread(target=llm.generate, args=(prompts, params), kwargs={"use_tqdm": False})
            ask.start()
            threads.append(ask)
        for thread in threads:
            thread.join()
        num = sum(item.output_len for _, items in parts for item in items)
        rates.append(num / (time.perf_counter() - started))
    yield Figure.median(what, rates[1:], "output tokens/s", better="higher")


def same_figures(shape: str, args: argparse.Namespace) -> Iterator[Figure]:
    """Of 64 greedy answers in float32, behind common beginnings, those that are the same on one device and on two, or
    part where two tokens are as good as equally likely: sums are made in another order."""
    num_layers, hidden, intermediate, num_heads, num_kv_heads = SAME[shape]
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=intermediate, num_layers=num_layers,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, max_position=2048,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    heads = rng.integers(0, 4096, (4, 256 // args.scale + 16))
    prompts = [[*heads[i % 4].tolist(), *rng.integers(0, 4096, 16).tolist()] for i in range(64)]
    sizes = {"num_pages": 2048, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=2)
    answers = []
    for size in (1, 2):
        llm = LLM(config, load_format="dummy", dtype="float32", tensor_parallel_size=size, use_tqdm=False, **sizes)
        answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
    pairs = list(zip(*answers, strict=True))
    same = sum(a.token_ids == b.token_ids or parts_at_tie(a, b) for a, b in pairs) / len(pairs)
    parted = sum(a.token_ids != b.token_ids for a, b in pairs)
    yield Figure(f"float32, {shape}: answers the same on one GPU and on two", same, "share", 1.0, better="higher")
    yield Figure(f"float32, {shape}: of these, parted where two tokens differ by less than {TIE:g}", parted, "")


def parts_at_tie(a: CompletionOutput, b: CompletionOutput) -> bool:
    """Whether the first token that differs was one of two whose log-probabilities did not."""
    first = next(i for i, pair in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if pair[0] != pair[1])
    best, second = sorted((entry.logprob for entry in a.logprobs[first].values()), reverse=True)[:2]
    return best - second < TIE


# The process that starts them ----------------------------------------------------------------------------------------


def planned(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Models, numbers of devices and kinds, one process for each."""
    engines = [engine for engine in ENGINES if args.models is None or engine[0] in args.models]
    engines = engines or [(model, num) for model in args.models for num in (1, 2)]
    found = [(model, num, kind) for model, num in engines for kind in ("steps", "workload")]
    found += [(model, 2, "in-graph") for model, num in engines if num == 2 and jax.devices()[0].platform != "cpu"]
    found += [(engines[0][0], 2, "side-by-side"), *((shape, 2, "same") for shape in SAME)]
    return [(model, str(num), kind) for model, num, kind in found if kind in args.kinds]


def environment(model: str, kind: str) -> dict[str, str]:
    reserved = RESERVED.get((model, kind))
    found = {"XLA_PYTHON_CLIENT_MEM_FRACTION": reserved} if reserved else {}
    if kind == "in-graph":
        found["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {IN_GRAPH}".strip()
    return found


def ratio_figures(rows: Sequence[Figure]) -> Iterator[Figure]:
    """Two GPUs against one, of all that ran on both."""
    by_name = {row.what: row for row in rows}
    (of_model, batch), must = FASTER
    for row in rows:
        model, _, what = row.what.partition(": ")
        two = by_name.get(f"{model} on 2 devices: {what}")
        if two is None or row.unit not in ("ms", "output tokens/s"):
            continue
        gains = [(a / b if row.unit == "ms" else b / a) for a, b in zip(row.repeats, two.repeats, strict=False)]
        goal = must if (model, what) == (of_model, f"decode step, B = {batch}") else None
        yield Figure.median(f"{model}, {what}: times as fast on two GPUs", gains, "x", must=goal, better="higher")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, help="only these (default: those of the project's table)")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of processes: only these")
    add("--dtype", default="bfloat16")
    add("--batch", type=int, nargs="+", default=[1, 64, 256])
    add("--context", type=int, default=1024, help="positions of each decoding sequence")
    add("--prefill", type=int, default=8192, help="tokens of the prefill step")
    add("--calls", type=int, default=10)
    add("--repeats", type=int, default=3)
    add("--scale", type=int, default=1, help="divide the sizes of the workloads, and claim nothing")
    add("--product", type=int, help="side of the matrices that measure the limits (default: 1024 on a CPU, else 8192)")
    add("--seconds", type=float, default=300, help="that one engine may take")
    add("--keep", action="store_true", help="keep the file's other rows")
    add("--folder", type=Path, help="where the file goes (default: benchmarks/results)")
    add("--run", nargs=3, metavar=("MODEL", "DEVICES", "KIND"), help=argparse.SUPPRESS)
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.run:
        model, num_devices, kind = args.run[0], int(args.run[1]), args.run[2]
        makers = {
            "steps": lambda: steps_alone(model, num_devices, args),
            "in-graph": lambda: steps_alone(model, num_devices, args, ", collectives in the graph"),
            "workload": lambda: workload_figures(model, num_devices, args),
            "side-by-side": lambda: side_by_side_figures(model, args),
            "same": lambda: same_figures(model, args),
        }
        for figure in makers[kind]():
            print(json.dumps(dataclasses.asdict(figure)), flush=True)
        return 0
    results = Results(
        "two_gpus",
        command=own_command("benchmark_two_gpus.py", argv),
        device=device_name(),
        folder=args.folder or FOLDER,
        keep=args.keep,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for model, num_devices, kind in planned(args):
        arguments = [__file__, *argv, "--run", model, num_devices, kind]
        try:
            for row in printed(arguments, env=environment(model, kind), seconds=args.seconds):
                results.add(Figure(**row))
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
    results.add(*ratio_figures([*results.kept, *results.rows]))
    results.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
