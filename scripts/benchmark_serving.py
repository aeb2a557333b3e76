"""Serving in process: requests that arrive while others run, and what each of them waits for.

They come at random at each of the --request-rate s (Poisson), or at the times of a trace (--request-rate trace, with
mooncake, azure or custom). For each rate, with the cache and without: time to first token, time per output token, end
to end, at the 50th, 90th and 99th percentile; and goodput, the requests a second whose first token and whose tokens
after it came within the limits. The clock of a request starts when it arrives, not when the engine gets to it.

Writes benchmarks/results/serving.json row by row.
"""

import argparse
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from benchmark_throughput import add_dataset_options, describe, load_workload
from render_results import Figure
from runs import ALL_ON, OFF, Arm, Bench, add_engine_options, make_bench, write_figures
from workloads import Item, Workload, expected_hit_rate, poisson

from prefix_jax import SamplingParams
from prefix_jax.request import Request

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one request, in seconds: to its first token, for each token after it (None if there is none), to its end."""

    first_token: float
    per_token: float | None
    whole: float

    def within(self, first_token: float, per_token: float) -> bool:
        return self.first_token <= first_token and (self.per_token is None or self.per_token <= per_token)


@dataclasses.dataclass(frozen=True)
class Served:
    timings: list[Timing]
    seconds: float  # from the first arrival to the last token
    num_output_tokens: int
    hit_rate: float


def serve(bench: Bench, items: Sequence[Item], arm: Arm) -> Served:
    """Hands each request to the engine when its time has come, between two steps."""
    bench.switch(arm)
    engine, mode = bench.llm.engine, "readwrite" if arm.caches else "off"
    coming = sorted(enumerate(items), key=lambda pair: -pair[1].arrival)
    made = {}
    for number, item in coming:
        params = SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True)
        tokens = tuple(item.tokens)
        made[number] = Request(f"serve-{number}", tokens, params, len(tokens) + item.output_len, cache_mode=mode)
    outputs = []
    gc.collect()
    with engine.lock:
        started = time.monotonic()
        while coming or engine.has_work:
            now = time.monotonic() - started
            while coming and coming[-1][1].arrival <= now:
                number, item = coming.pop()
                engine.add(dataclasses.replace(made[number], arrival_time=started + item.arrival))
            if engine.has_work:
                engine.step()
                outputs += engine.ready
                engine.ready.clear()
            else:
                time.sleep(max(0.0, coming[-1][1].arrival - now))
    timings = []
    for output in outputs:
        times, num = output.metrics, len(output.outputs[0].token_ids)
        rest = (times.finished_time - times.first_token_time) / (num - 1) if num > 1 else None
        first, whole = times.first_token_time - times.arrival_time, times.finished_time - times.arrival_time
        timings.append(Timing(first, rest, whole))
    num_prompt_tokens = sum(len(item.tokens) for item in items)
    return Served(
        timings,
        max(output.metrics.finished_time for output in outputs) - started - min(item.arrival for item in items),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs) / num_prompt_tokens,
    )


def serving_figures(
    bench: Bench, workload: Workload, rates: Sequence[float | None], args: argparse.Namespace
) -> Iterator[Figure]:
    """rates: requests a second; None: the workload's own times. args: seed, arms, seconds, ttft_ms, tpot_ms, until."""
    for rate in rates:
        for arm in args.arms:
            if time.monotonic() > args.until:
                return
            items = workload.items
            if rate is not None:
                num = len(items) if rate == math.inf else max(8, round(rate * args.seconds))
                items = poisson(items[:num], rate, args.seed)
            served = serve(bench, items, arm)
            shown = "the trace's times" if rate is None else f"{rate:g} requests/s"
            what = f"{bench.name}, {describe(dataclasses.replace(workload, items=items))}, {shown}, {arm.name}"
            yield from timing_figures(what, served, args.ttft_ms, args.tpot_ms)
            if arm.caches:
                expected = expected_hit_rate([item.tokens for item in items])
                yield Figure(f"{what}: hit rate", served.hit_rate, "share", better="higher")
                yield Figure(f"{what}: hit rate expected from the ids", expected, "share", better="higher")


def timing_figures(what: str, served: Served, ttft_ms: float, tpot_ms: float) -> Iterator[Figure]:
    columns = {
        "time to first token": [timing.first_token for timing in served.timings],
        "time per output token": [timing.per_token for timing in served.timings if timing.per_token is not None],
        "end to end": [timing.whole for timing in served.timings],
    }
    for name, values in columns.items():
        for percent in PERCENTILES if values else ():
            yield Figure(f"{what}: {name}, p{percent}", 1e3 * float(np.percentile(values, percent)), "ms")
    good = sum(timing.within(ttft_ms / 1e3, tpot_ms / 1e3) for timing in served.timings)
    limits = f"first token within {ttft_ms:g} ms and {tpot_ms:g} ms a token"
    yield Figure(f"{what}: goodput, {limits}", good / served.seconds, "requests/s", better="higher")
    yield Figure(f"{what}: throughput", served.num_output_tokens / served.seconds, "output tokens/s", better="higher")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--request-rate", nargs="+", type=parse_rate, default=[20.0, 40.0, 80.0], help='requests/s, "inf" or "trace"')
    add("--seconds", type=float, default=10.0, help="for which requests arrive, at each rate")
    add("--ttft-ms", type=float, default=500.0, help="goodput: limit of the time to first token")
    add("--tpot-ms", type=float, default=50.0, help="goodput: limit of the time per output token")
    add(
        "--no-off",
        dest="arms",
        action="store_const",
        const=(ALL_ON,),
        default=(ALL_ON, OFF),
        help="with the cache only",
    )


def parse_rate(text: str) -> float | None:
    """None for a trace's own times."""
    if text == "trace":
        return None
    rate = float(text)
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"a rate is more than 0, got {text}")
    return rate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "llama-3-8b")
    add_dataset_options(parser)
    add_options(parser)
    parser.set_defaults(dataset_name="prefix-repetition", prefix_len=596, input_len=104, output_len=100)
    args = parser.parse_args(argv)
    args.until = time.monotonic() + args.deadline
    try:
        bench = make_bench(args)
        workload = load_workload(args, bench)
        if None in args.request_rate and not any(item.arrival for item in workload.items):
            raise ValueError(f"--request-rate trace needs a dataset with times, got {workload.name}")
    except (ValueError, OSError, MemoryError) as error:
        print(f"benchmark_serving.py: error: {error}", file=sys.stderr)
        return 2
    return write_figures("serving", bench, args, argv, serving_figures(bench, workload, args.request_rate, args))


if __name__ == "__main__":
    sys.exit(main())
