"""Runs workloads through one engine, in several arms that differ in nothing that is compiled: with the cache and
without, prefixes declared, shared pages read once or not, other policies, fewer pages.

The engine is built and warmed up once. Every run begins with an empty cache.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import workloads
from benchmark_step import LONGEST, MODELS
from ceilings import device_ceilings
from render_results import FOLDER, Figure, Results, device_name, own_command
from rooflines import max_running, roofline
from serve_offline import use_compilation_cache
from workloads import Workload, expected_hit_rate

from prefix_jax import LLM, SamplingParams

VOID = 0.70  # of its roofline that the arm without a cache must reach, or what is measured against it means nothing


@dataclasses.dataclass(frozen=True)
class Arm:
    """caches: finds and leaves pages in the cache. declares: says what the prefix is (`prefix_pos`). reads_once: pages
    that running sequences share are read once for all of them. num_pages: of the pool; None: all there are.
    num_running: sequences at once, at most; None: as many as the engine takes."""

    name: str
    caches: bool = True
    declares: bool = False
    reads_once: bool = True
    policy: str = "fifo"
    evicts: str | None = None
    num_pages: int | None = None
    num_running: int | None = None


OFF = Arm("cache off", caches=False, reads_once=False)
DECLARED = Arm("prefix_pos declared", declares=True, reads_once=False)
AUTOMATIC = Arm("automatic", reads_once=False)
ALL_ON = Arm("all on")
GROUPED = Arm("all on, dfs", policy="dfs")


@dataclasses.dataclass(frozen=True)
class Run:
    seconds: float
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    answers: list[list[int]]

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


def name_on(model: str, num_devices: int) -> str:
    """What a model is called in rows of results."""
    return f"{model} on {num_devices} devices" if num_devices > 1 else model


class Bench:
    """An engine, what it is called, and the limits measured before it took the memory."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        tokenizer: Path | None = None,
        product_size: int | None = None,
        **engine,
    ):
        """model: one of benchmark_step.MODELS, whose weights are then random, or a path. product_size: the side of the
        matrices that measure the limits, which are those of all devices together; None: what suits the device.
        ValueError as LLM raises it."""
        use_compilation_cache()
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        source, self.name = MODELS.get(model, model), model if model in MODELS else Path(model).stem
        if model in MODELS:
            load_format = "dummy"
        num_devices = engine.get("tensor_parallel_size", 1)
        self.name = name_on(self.name, num_devices)
        self.ceilings = {name: num_devices * limit for name, limit in device_ceilings(product_size).items()}
        started = time.monotonic()
        self.llm = LLM(source, load_format=load_format, dtype=dtype, tokenizer=tokenizer, use_tqdm=False, **engine)
        self.start_seconds = time.monotonic() - started
        self.config = self.llm.model_config
        self.vocab_size = self.config.vocab_size
        self.costs = self.llm.engine.batcher.costs
        self.max_num_seqs = self.llm.engine.max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.max_model_len

    @property
    def num_pages(self) -> int:
        return self.llm.engine.runner.num_pages

    def num_running(self, arm: Arm) -> int:
        return min(arm.num_running or self.max_num_seqs, self.max_num_seqs)

    def switch(self, arm: Arm) -> None:
        """Goes on as `arm` says, with an empty cache. ValueError for more pages than the store has."""
        engine = self.llm.engine
        num_pages = arm.num_pages or self.num_pages
        if num_pages > self.num_pages:
            raise ValueError(f"{arm.name}: {num_pages} pages, the store has {self.num_pages}")
        config = dataclasses.replace(engine.config, schedule_policy=arm.policy, eviction_policy=arm.evicts)
        sizes = num_pages, self.num_running(arm)
        if config != engine.config or sizes != (engine.cache.pool.num_pages, engine.max_num_seqs):
            engine.config, engine.max_num_seqs = config, self.num_running(arm)
            engine.call(engine.start_over)
            # The rest of the pool is out of reach: nobody ever gives these pages back.
            engine.cache.pool.take(self.num_pages - num_pages)
            engine.cache.pool.num_pages = num_pages
        engine.batcher.costs = self.costs if arm.reads_once else None
        engine.batcher.forget_runs()  # found with the other costs; the rows' rules stay on the device
        self.llm.reset_prefix_cache()

    def run(self, workload: Workload, arm: Arm, asked: Mapping[str, Any] = MappingProxyType({})) -> Run:
        """Asks everything at once; every answer has the length that was asked for. asked: of SamplingParams, instead
        of the greedy answer."""
        self.switch(arm)
        plain = {"temperature": 0, "ignore_eos": True}
        params = [SamplingParams(**plain | {"max_tokens": item.output_len} | asked) for item in workload.items]
        prompts = [item.tokens.tolist() for item in workload.items]
        declared = [item.shared_len or None if arm.declares else None for item in workload.items]
        mode = "readwrite" if arm.caches else "off"
        before = self.llm.stats["preemptions"]
        gc.collect()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, declared, cache_mode=mode, use_tqdm=False)
        seconds = time.perf_counter() - started
        answers = [answer.token_ids for output in outputs for answer in output.outputs]
        return Run(
            seconds,
            sum(map(len, answers)),
            workload.num_prompt_tokens,
            sum(output.num_cached_tokens for output in outputs),
            int(self.llm.stats["preemptions"] - before),
            answers,
        )

    def measure(
        self, workload: Workload, arms: Sequence[Arm], repeats: int, once: Sequence[Arm] = ()
    ) -> dict[Arm, list[Run]]:
        """Each arm `repeats` times, in turn; those in `once` in the first turn alone."""
        runs: dict[Arm, list[Run]] = {arm: [] for arm in arms}
        for turn in range(repeats):
            for arm in arms:
                if not turn or arm not in once:
                    runs[arm].append(self.run(workload, arm))
        return runs

    def warm_up(self, num: int = 64) -> None:
        """Prompts that are never asked again, so that nothing is done for the first time while a clock runs."""
        length = min(256, self.max_model_len // 2)
        half, vocab = length // 2, self.vocab_size
        other = workloads.prefix_repetition(
            num=num, prefix_len=half, suffix_len=half, output_len=8, vocab_size=vocab, seed=2**31
        )
        for arm in (ALL_ON, OFF):
            self.run(other, arm)

    def limit_seconds(self, workload: Workload, arm: Arm) -> float:
        """The workload's roofline in this arm."""
        pool = (arm.num_pages or self.num_pages) * self.llm.engine.config.page_size
        running = max_running(workload.items, self.num_running(arm), pool, caches=arm.caches)
        itemsize, reads_once = self.llm.dtype.itemsize, arm.caches and arm.reads_once and self.costs is not None
        made = roofline(workload.items, self.config, itemsize, running, caches=arm.caches, reads_once=reads_once)
        return made.seconds(self.ceilings)

    # Figures ----------------------------------------------------------------------------------------------------------

    def speed(self, what: str, workload: Workload, runs: Sequence[Run], goals: Mapping[str, float | None]) -> Figure:
        """Output tokens per second; of a workload that yields one token each, prompt tokens."""
        if all(item.output_len == 1 for item in workload.items):
            return Figure.median(
                what, [run.num_prompt_tokens / run.seconds for run in runs], "prompt tokens/s", better="higher", **goals
            )
        rates = [run.num_output_tokens / run.seconds for run in runs]
        return Figure.median(what, rates, "output tokens/s", better="higher", **goals)

    def share(self, what: str, workload: Workload, arm: Arm, runs: Sequence[Run], must: float | None = None) -> Figure:
        limit = self.limit_seconds(workload, arm)
        shares = [limit / run.seconds for run in runs]
        return Figure.median(f"{what}: share of its roofline", shares, "x", better="higher", must=must)

    def hits(self, what: str, workload: Workload, runs: Sequence[Run]) -> Iterator[Figure]:
        rates = [run.hit_rate for run in runs]
        yield Figure.median(f"{what}: hit rate", rates, "share", better="higher")
        yield Figure(
            f"{what}: hit rate expected from the ids", expected_hit_rate(workload.prompts), "share", better="higher"
        )


def gain(what: str, off: Sequence[Run], on: Sequence[Run], off_share: Figure, **goals: float | None) -> Figure:
    """How many times faster. Void, and without a goal, where the arm without a cache was slow for no reason."""
    ratios = [a / b for a, b in zip(cycle_to(seconds(off), len(on)), seconds(on), strict=True)]
    note = void_note(off_share)
    what, goals = what + note, {} if note else goals
    return Figure.median(what, ratios, "x", better="higher", **goals)


def void_note(off_share: Figure) -> str:
    """What is said behind the name of a ratio that means nothing."""
    return "" if off_share.value >= VOID else f" (void: cache off reaches {off_share.value:.0%} of its roofline)"


def seconds(runs: Sequence[Run]) -> list[float]:
    return [run.seconds for run in runs]


def cycle_to(values: Sequence[float], length: int) -> list[float]:
    return [values[i % len(values)] for i in range(length)]


# Options that the scripts share -----------------------------------------------------------------------------------


def add_engine_options(parser: argparse.ArgumentParser, model: str | None) -> None:
    add = parser.add_argument
    default = model or "llama-3-8b, for real text SmolLM2-135M-Instruct"
    sizes = f"sizes with random weights: {', '.join(MODELS)}"
    add("--model", default=model, help=f"a folder or GGUF file, or {sizes} (default: {default})")
    add("--tokenizer", type=Path, help="folder, GGUF file or tokenizer.json, gzipped or not (default: the model's own)")
    add("--dtype", default="auto", help="float32 or bfloat16 (auto: float32 on a CPU)")
    add("--load-format", default="auto", help='"dummy": random weights for the config')
    add("--tensor-parallel-size", type=int, default=1, help="devices that share the model")
    add("--max-model-len", type=int)
    add("--max-num-seqs", type=int)
    add("--max-num-batched-tokens", type=int)
    add("--num-pages", type=int)
    add("--page-size", type=int, default=16)
    add("--memory-fraction", type=float, default=0.9)
    add("--product", type=int, help="side of the matrices that measure the limits (default: 1024 on a CPU, else 8192)")
    add("--repeats", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--deadline", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    add("--keep", action="store_true", help="keep the file's other rows")
    add("--folder", type=Path, help="where the file goes (default: benchmarks/results)")
    add("--plot", action="store_true", help="draw the file's rows into a PNG beside it")


def add_profile_option(parser: argparse.ArgumentParser) -> None:
    what = "of tables and hit rates: one more run of what misses its goal shows where the time goes"
    parser.add_argument("--profile", action="store_true", help=what)


def make_bench(args: argparse.Namespace, **options) -> Bench:
    """The engine that the options ask for; of mere sizes, with as long a context as any part needs."""
    names = ("dtype", "load_format", "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    names += ("num_pages", "page_size", "memory_fraction")
    options = {name: getattr(args, name) for name in names} | options
    if args.model in MODELS and options["max_model_len"] is None:
        options["max_model_len"] = min(LONGEST, MODELS[args.model].max_position)
    if args.tokenizer and not args.tokenizer.name.removesuffix(".gz").endswith(".json"):
        options["tokenizer"] = args.tokenizer
    return Bench(str(args.model), product_size=args.product, seed=0, **options)


# What is written ------------------------------------------------------------------------------------------------------


def start_figure(bench: Bench) -> Figure:
    return Figure(f"{bench.name}, engine start, compilation and warm-up", bench.start_seconds, "s")


def open_results(
    name: str, bench: Bench, args: argparse.Namespace, argv: Sequence[str] | None, script: str | None = None
) -> Results:
    return Results(
        name,
        command=own_command(script or f"benchmark_{name}.py", argv),
        ceilings=bench.ceilings,
        device=device_name(),
        folder=args.folder or FOLDER,
        keep=args.keep,
    )


def finish(results: Results, args: argparse.Namespace) -> int:
    """The picture, if asked for, and the last line. 0 also where goals are missed: the rows say so."""
    if args.plot:
        from plot_results import draw

        draw(results.path)
    results.close()
    return 0


def write_figures(
    name: str, bench: Bench, args: argparse.Namespace, argv: Sequence[str] | None, figures: Iterator[Figure]
) -> int:
    """One file, row by row as they are measured, on an engine that is warm. The exit status."""
    results = open_results(name, bench, args, argv)
    results.add(start_figure(bench))
    bench.warm_up()
    for figure in figures:
        results.add(figure)
    return finish(results, args)
