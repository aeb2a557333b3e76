"""Offline throughput: all requests at once, as many output tokens a second as the engine can.

One dataset, with the options that vLLM's benchmark has:

    python scripts/benchmark_throughput.py --model M --dataset-name sharegpt --dataset-path F --num-prompts 1000

or with --table the project's own set of workloads, one engine for all of them:

    python scripts/benchmark_throughput.py --model llama-3-8b --table

Beside each speed stand its share of the roofline (rooflines.py), the hit rate, and the one expected from the token ids.
Writes benchmarks/results/throughput.json row by row.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import workloads
from profiles import profile_figures
from render_results import Figure, device_name
from runs import (
    ALL_ON,
    GROUPED,
    OFF,
    VOID,
    Arm,
    Bench,
    add_engine_options,
    add_profile_option,
    gain,
    make_bench,
    write_figures,
)
from workloads import Workload, text_encoder

from prefix_jax.tokenizer import Tokenizer

NUM_RUNNING = 256  # at most, in the lines of the table that say so
# On one H200 with its defaults, but up to 1,024 sequences, 16,384 tokens a step and 85 % of the memory; measured once.
PEER, PEER_DEVICE = "vLLM 0.26", "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Line:
    """One workload of the table. `make` takes a vocabulary's size and a seed; `goals` are must and aim by model, and
    `gains` those of the same ÷ cache off. num_running: sequences at once; None: as many as the engine takes."""

    what: str
    make: Callable[[int, int], Workload]
    arm: Arm = ALL_ON
    goals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    gains: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    has_off: bool = False  # is run with the cache off as well
    models: tuple[str, ...] | None = None  # that it is for; None: all
    peer: dict[str, float] = dataclasses.field(default_factory=dict)  # what PEER reached, by model
    num_running: int | None = NUM_RUNNING


def shared_prefix(num: int, prefix: int, suffix: int, out: int, groups: int = 1) -> Callable[[int, int], Workload]:
    return lambda vocab_size, seed: workloads.prefix_repetition(
        num=num, prefix_len=prefix, suffix_len=suffix, output_len=out, groups=groups, vocab_size=vocab_size, seed=seed
    )


def leaves(levels: Sequence[tuple[int, int]], out: int) -> Callable[[int, int], Workload]:
    return lambda vocab_size, seed: workloads.tree(levels, output_len=out, vocab_size=vocab_size, seed=seed)


def prefill(num: int, length: int) -> Callable[[int, int], Workload]:
    return lambda vocab_size, seed: workloads.random_lengths([(length, 1)] * num, vocab_size=vocab_size, seed=seed)


def sharegpt_lengths(path: Path, num: int) -> Callable[[int, int], Workload]:
    """Always the same ones: they are shuffled with seed 0."""
    return lambda vocab_size, seed: workloads.sharegpt(
        path, num=num, seed=0, encode=text_encoder(None, vocab_size), vocab_size=vocab_size
    )


def table_lines(lengths: Path | None, scale: int = 1) -> list[Line]:
    """The project's table. lengths: of ShareGPT requests, a file for `workloads.sharegpt`; without it that line is left
    out. scale: a divisor of all sizes, for a first try; nothing then has a goal."""

    def small(size: int, least: int = 2) -> int:
        return size if scale == 1 else max(least, size // scale)

    num, prompt, shared, out = small(1000), small(700), small(596), small(100)
    lines = [
        Line(
            f"original: {num} x {prompt} tokens, {shared} shared, {out} out",
            shared_prefix(num, shared, prompt - shared, out),
            goals={"llama-3-8b": (16_500, 19_000), "llama-2-7b": (12_000, 15_000)},
            has_off=True,
            gains={"llama-3-8b": (3.3, 3.7), "llama-2-7b": (3.2, 3.8), "baichuan2-13b": (3.3, 4.0)},
            peer={"llama-3-8b": 13_100, "llama-2-7b": 7_970},
        )
    ]
    shapes = {
        2048: ({"llama-3-8b": (18_000, 23_000), "llama-2-7b": (13_000, 18_000)}, (10_100, 4_140)),
        8192: ({"llama-3-8b": (12_000, 17_000), "llama-2-7b": (9_000, 14_000)}, (4_340, 1_300)),
    }
    for prefix, (goals, peer) in shapes.items():
        n, p, suffix, out = small(256), small(prefix), small(64), small(128)
        what, make = f"{n} x ({p} shared + {suffix}), {out} out", shared_prefix(n, p, suffix, out)
        lines.append(Line(what, make, goals=goals, peer=dict(zip(goals, peer, strict=True))))
    big = ("llama-3-8b",)
    levels = [(1, small(512)), (small(4), small(1024)), (small(8) * small(4), small(256))]
    levels.append((levels[-1][0] * small(8), small(64)))
    path = " → ".join(f"{count} x {length}" if count > 1 else str(length) for count, length in levels)
    out = small(128)
    lines.append(
        Line(
            f"tree {path}, {out} out",
            leaves(levels, out),
            goals={"llama-3-8b": (15_000, 19_000)},
            models=big,
        )
    )
    groups, each, prefix, suffix, longer = small(64), small(16), small(2048), small(128), small(256)
    lines.append(
        Line(
            f"{groups} groups x {each} x ({prefix} + {suffix}), {longer} out, grouped by the engine",
            shared_prefix(groups * each, prefix, suffix, longer, groups),
            arm=GROUPED,
            goals={"llama-3-8b": (13_000, 16_500)},
            peer={"llama-3-8b": 8_260},
            models=big,
        )
    )
    num, length = small(16), small(8192)
    lines.append(
        Line(
            f"{num} x {length} prefill",
            prefill(num, length),
            goals={"llama-3-8b": (42_000, 48_000)},
            peer={"llama-3-8b": 38_100},
            models=big,
        )
    )
    if lengths:
        num = small(1000)
        lines.append(
            Line(
                f"{num} ShareGPT lengths",
                sharegpt_lengths(lengths, num),
                goals={"llama-3-8b": (18_500, 21_000)},
                peer={"llama-3-8b": 16_700},
                models=big,
                num_running=None,
            )
        )
    if scale == 1:
        return lines
    return [dataclasses.replace(line, goals={}, gains={}, peer={}, models=None) for line in lines]


def add_table_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scale", type=int, default=1, help="of the table: divide all sizes, and claim nothing")
    add("--lines", nargs="+", metavar="TEXT", help="of the table: only lines whose name has one of these")


def chosen_lines(args: argparse.Namespace, lengths: Path | None) -> list[Line]:
    """ValueError if there are none."""
    lines = table_lines(lengths, args.scale)
    chosen = [line for line in lines if not args.lines or any(text in line.what for text in args.lines)]
    if not chosen:
        raise ValueError(f"no line has {' or '.join(args.lines)}: {'; '.join(line.what for line in lines)}")
    return chosen


def table_figures(
    bench: Bench, lines: Sequence[Line], *, repeats: int, seed: int, until: float = float("inf"), profile: bool = False
) -> Iterator[Figure]:
    """Every line's rows. until: on time.monotonic; nothing is begun after it. profile: one more run of each line that
    misses its goal shows where the time goes."""
    for line in lines:
        if time.monotonic() > until or (line.models is not None and bench.name not in line.models):
            continue
        workload = line.make(bench.vocab_size, seed).fitting(bench.max_model_len)
        if not workload.items:
            continue
        on, off = (dataclasses.replace(arm, num_running=line.num_running) for arm in (line.arm, OFF))
        arms = [on, off] if line.has_off else [on]
        runs = bench.measure(workload, arms, repeats, once=[off])  # which does the same work each time, and much of it
        what = f"{bench.name}, {line.what}"
        figures = list(arm_figures(bench, what, workload, on, runs[on], line.goals.get(bench.name)))
        yield from figures
        if (peer := line.peer.get(bench.name)) and device_name() == PEER_DEVICE:
            over = [rate / peer for rate in figures[0].repeats]
            yield Figure.median(f"{what} ÷ {PEER}'s", over, "x", better="higher")
        if profile and not figures[0].reached:
            fewer = dataclasses.replace(workload, items=workload.items[:NUM_RUNNING])
            yield from profile_figures(what, lambda fewer=fewer, on=on: bench.run(fewer, on))
        if line.has_off:
            yield from arm_figures(bench, f"{what}, {OFF.name}", workload, off, runs[off])
            share = bench.share(what, workload, off, runs[off])
            must, aim = line.gains.get(bench.name, (None, None))
            yield gain(f"{what}: all on ÷ cache off", runs[off], runs[on], share, must=must, aim=aim)


def arm_figures(bench: Bench, what: str, workload: Workload, arm: Arm, runs, goals=None) -> Iterator[Figure]:
    must, aim = goals or (None, None)
    yield bench.speed(what, workload, runs, {"must": must, "aim": aim})
    yield bench.share(what, workload, arm, runs, must=None if arm.caches else VOID)
    if arm.caches:
        yield from bench.hits(what, workload, runs)
    if preempted := [run.num_preemptions for run in runs if run.num_preemptions]:
        yield Figure(f"{what}: preemptions, at most", max(preempted), "")


# One dataset ----------------------------------------------------------------------------------------------------------


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--dataset-name",
        choices=[*workloads.MADE, *workloads.READ],
        help="default: sharegpt if there is a file, else random",
    )
    add("--dataset-path", "--dataset", type=Path, help="the file, or for mmlu the folder")
    add("--num-prompts", type=int, default=1000)
    add("--input-len", type=int, default=1024, help="tokens of a prompt; behind its prefix, if it has one")
    add("--output-len", type=int, help="default: as the dataset says, or 128")
    add("--prefix-len", type=int, default=0, help="tokens that prompts share")
    add("--num-prefixes", type=int, help="default: 1 for prefix-repetition, 16 for generated-shared-prefix")


def load_workload(args: argparse.Namespace, bench: Bench) -> Workload:
    """The dataset, as far as it fits into the model; says what was left out. ValueError if nothing is left, or its
    tokens are not the model's."""
    made = make_workload(args, bench.vocab_size, bench.llm.tokenizer)
    workload = made.fitting(bench.max_model_len)
    for reason, count in workload.skipped.items():
        print(f"{count} requests left out: {reason}")
    if not workload.items:
        raise ValueError(f"no request of {args.dataset_path or workload.name} is left")
    if len(workload.items) < args.num_prompts:
        print(f"{len(workload.items)} requests, {args.num_prompts} were asked for")
    if (highest := max(max(item.tokens) for item in workload.items)) >= bench.vocab_size:
        raise ValueError(f"the tokenizer does not fit the model: id {highest}, the model embeds {bench.vocab_size}")
    return workload


def make_workload(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Workload:
    """The dataset that the options name, in tokens of --tokenizer, or the model's own. ValueError for options that do
    not go together."""
    name = args.dataset_name or ("sharegpt" if args.dataset_path else "random")
    seed, num = args.seed, args.num_prompts
    if name in workloads.READ and args.dataset_path is None:
        raise ValueError(f"--dataset-name {name} needs --dataset-path")
    encode = tokenizer.encode if tokenizer and not args.tokenizer else text_encoder(args.tokenizer, vocab_size)
    path, out = args.dataset_path, args.output_len or 128
    if name == "sharegpt":
        options = {"encode": encode, "vocab_size": vocab_size, "output_len": args.output_len}
        return workloads.sharegpt(path, num=num, seed=seed, **options)
    if name == "conversations":
        return workloads.conversations(path, num=num, seed=seed, encode=encode, output_len=args.output_len)
    if name in ("mooncake", "azure"):
        read = workloads.mooncake if name == "mooncake" else workloads.azure
        return read(path, num=num, seed=seed, vocab_size=vocab_size)
    if name == "mmlu":
        return workloads.mmlu(path, num=num, encode=encode, seed=seed, output_len=args.output_len or 1)
    if name == "custom":
        return workloads.custom(path, num=num, encode=encode, output_len=args.output_len)
    if name == "tree":
        levels = [(1, 512), (4, 1024), (32, 256), (256, 64)]
        return workloads.tree(levels, output_len=out, vocab_size=vocab_size, seed=seed)
    if name == "random" and not args.prefix_len:
        return workloads.random_lengths([(args.input_len, out)] * num, vocab_size=vocab_size, seed=seed)
    groups = args.num_prefixes or (16 if name == "generated-shared-prefix" else 1)
    made = shared_prefix(num, args.prefix_len, args.input_len, out, min(groups, num))(vocab_size, seed)
    return dataclasses.replace(made, name=name)


def describe(workload: Workload) -> str:
    num = len(workload.items)
    mean_in, mean_out = workload.num_prompt_tokens / num, workload.num_output_tokens / num
    return f"{workload.name}: {num} requests, {mean_in:.0f} tokens in and {mean_out:.0f} out on average"


def dataset_figures(bench: Bench, workload: Workload, arms: Sequence[Arm], repeats: int) -> Iterator[Figure]:
    runs = bench.measure(workload, arms, repeats)
    for arm in arms:
        what = f"{bench.name}, {describe(workload)}, {arm.name}"
        yield from arm_figures(bench, what, workload, arm, runs[arm])
    if set(arms) >= {ALL_ON, OFF}:
        share = bench.share("", workload, OFF, runs[OFF])
        yield gain(f"{bench.name}, {describe(workload)}: all on ÷ cache off", runs[OFF], runs[ALL_ON], share)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "llama-3-8b")
    add_profile_option(parser)
    add_dataset_options(parser)
    parser.add_argument("--no-enable-prefix-caching", action="store_true", help="only the arm without a cache")
    parser.add_argument("--table", action="store_true", help="the project's set; --dataset-path: of ShareGPT lengths")
    add_table_options(parser)
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        lines = chosen_lines(args, args.dataset_path) if args.table else []
        bench = make_bench(args)
        if not args.table:
            workload = load_workload(args, bench)
    except (ValueError, OSError, MemoryError) as error:
        print(f"benchmark_throughput.py: error: {error}", file=sys.stderr)
        return 2
    if args.table:
        until = started + args.deadline
        options = {"repeats": args.repeats, "seed": args.seed, "until": until, "profile": args.profile}
        figures = table_figures(bench, lines, **options)
    else:
        arms = [OFF] if args.no_enable_prefix_caching else [ALL_ON, OFF]
        figures = dataset_figures(bench, workload, arms, args.repeats)
    return write_figures("throughput", bench, args, argv, figures)


if __name__ == "__main__":
    sys.exit(main())
