"""What the prefix cache gains, against the engine's own switches.

    hits      hit rates of 0 to 90 %: how many times faster, and of that how much the roofline's gain allows; at 0 %,
              the control, nothing is shared
    arms      cache off; prefix_pos declared; automatic; automatic and shared pages read once
    prefixes  lengths of the shared prefix        batches  how many share it
    policies  who starts and who is evicted, where memory is tight
    text      real text in float32: hit rates, and are the answers the same with the cache on and off

Writes benchmarks/results/prefix_caching.json row by row.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import workloads
from benchmark_throughput import shared_prefix
from profiles import profile_figures
from render_results import Figure
from runs import (
    ALL_ON,
    AUTOMATIC,
    DECLARED,
    OFF,
    VOID,
    Arm,
    Bench,
    Run,
    add_engine_options,
    add_profile_option,
    gain,
    make_bench,
    void_note,
    write_figures,
)
from workloads import Dialogue, expected_hit_rate

from prefix_jax import SamplingParams
from prefix_jax.default_model import default_model_path

PARTS = ("hits", "arms", "prefixes", "batches", "policies", "text")
RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
GAIN_GOALS = (0.92, 0.97)  # measured ÷ roofline's, llama-3-8b
TIGHT = (("fifo", "lru"), ("fifo", "lfu"), ("fifo", "cost"), ("greedy", "lru"), ("lpm", "lru"), ("dfs", "belady"))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of all parts; `scale` divides them for a first try, and then nothing has a goal."""

    num: int = 256
    prompt: int = 2048
    suffix: int = 64
    out: int = 128
    prefixes: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    batches: tuple[int, ...] = (1, 16, 64, 128, 256)
    groups: int = 32
    group: int = 8
    scale: int = 1

    @classmethod
    def divided(cls, scale: int) -> "Sizes":
        if scale == 1:
            return cls()
        full, small = cls(), lambda n, least=2: max(least, n // scale)
        prefixes = tuple(small(n) for n in full.prefixes[:3])
        sizes = {name: small(getattr(full, name)) for name in ("num", "prompt", "suffix", "out", "groups", "group")}
        return cls(**sizes, prefixes=prefixes, batches=(1, small(64), small(256, 4)), scale=scale)


def hit_figures(bench: Bench, sizes: Sizes, args: argparse.Namespace) -> Iterator[Figure]:
    """The arm without a cache does the same work at each rate, so it runs once at each."""
    shape = f"({sizes.prompt} in, {sizes.out} out)"
    for rate in args.rates:
        if time.monotonic() > args.until:
            return
        prefix = round(sizes.prompt * rate)
        workload = shared_prefix(sizes.num, prefix, sizes.prompt - prefix, sizes.out)(bench.vocab_size, args.seed)
        runs = bench.measure(workload, [ALL_ON, OFF], args.repeats, once=[OFF])
        what = f"{bench.name}, {rate:.0%} hits {shape}, {sizes.num} requests"
        for arm in (ALL_ON, OFF):
            yield bench.speed(f"{what}, {arm.name}", workload, runs[arm], {})
        yield bench.share(f"{what}, {ALL_ON.name}", workload, ALL_ON, runs[ALL_ON])
        off_share = bench.share(f"{what}, {OFF.name}", workload, OFF, runs[OFF])
        yield off_share
        yield from bench.hits(what, workload, runs[ALL_ON])
        if rate == 0:
            yield gain(f"{bench.name}, nothing shared {shape}: all on ÷ cache off", runs[OFF], runs[ALL_ON], off_share)
            continue
        measured = gain(f"{what}: all on ÷ cache off", runs[OFF], runs[ALL_ON], off_share)
        yield measured
        allowed = bench.limit_seconds(workload, OFF) / bench.limit_seconds(workload, ALL_ON)
        yield Figure(f"{what}: roofline's gain", allowed, "x", better="higher")
        has_goal = bench.name == "llama-3-8b" and sizes.scale == 1 and not void_note(off_share)
        must, aim = GAIN_GOALS if has_goal else (None, None)
        compared = Figure.median(
            f"{bench.name}, measured cache gain ÷ roofline's gain at {rate:.0%} hits {shape}{void_note(off_share)}",
            [ratio / allowed for ratio in measured.repeats], "x", better="higher", must=must, aim=aim,
        )  # fmt: skip
        yield compared
        if args.profile and not compared.reached and time.monotonic() <= args.until:
            yield from profile_figures(compared.what, lambda workload=workload: bench.run(workload, ALL_ON))


def arm_figures(bench: Bench, sizes: Sizes, args: argparse.Namespace) -> Iterator[Figure]:
    workload = shared_prefix(sizes.num, sizes.prompt, sizes.suffix, sizes.out)(bench.vocab_size, args.seed)
    runs = bench.measure(workload, [ALL_ON, AUTOMATIC, DECLARED, OFF], args.repeats, once=[OFF])
    what = f"{bench.name}, {sizes.num} x ({sizes.prompt} shared + {sizes.suffix}), {sizes.out} out"
    off_share = bench.share(f"{what}, {OFF.name}", workload, OFF, runs[OFF], must=VOID)
    for arm in (OFF, DECLARED, AUTOMATIC, ALL_ON):
        name = f"{what}, {arm_name(arm)}"
        yield bench.speed(name, workload, runs[arm], {})
        yield off_share if arm is OFF else bench.share(name, workload, arm, runs[arm])
        if arm is not OFF:
            yield gain(f"{name} ÷ cache off", runs[OFF], runs[arm], off_share)
    yield from bench.hits(what, workload, runs[ALL_ON])


def arm_name(arm: Arm) -> str:
    return "automatic + shared-prefix tiles" if arm is ALL_ON else arm.name


def sweep_figures(bench: Bench, shapes: Sequence[tuple[int, int]], sizes: Sizes, args, of: str) -> Iterator[Figure]:
    """shapes: (requests, tokens they share). The arm without a cache runs once for each."""
    for num, prefix in shapes:
        if time.monotonic() > args.until:
            return
        workload = shared_prefix(num, prefix, sizes.suffix, sizes.out)(bench.vocab_size, args.seed)
        workload = workload.fitting(bench.max_model_len)
        if not workload.items:
            continue
        runs = bench.measure(workload, [OFF, AUTOMATIC, ALL_ON], args.repeats, once=[OFF])
        what = f"{bench.name}, {of}: {num} x ({prefix} shared + {sizes.suffix}), {sizes.out} out"
        off_share = bench.share(f"{what}, {OFF.name}", workload, OFF, runs[OFF])
        for arm, ran in runs.items():
            yield bench.speed(f"{what}, {arm_name(arm)}", workload, ran, {})
        yield off_share
        yield gain(f"{what}: all on ÷ cache off", runs[OFF], runs[ALL_ON], off_share)


def policy_figures(bench: Bench, sizes: Sizes, args: argparse.Namespace) -> Iterator[Figure]:
    """Groups in random order, in a quarter of the pages that all prompts have."""
    made = shared_prefix(sizes.groups * sizes.group, sizes.prompt, sizes.suffix, 16, sizes.groups)
    workload = made(bench.vocab_size, args.seed)
    page_size = bench.llm.engine.config.page_size
    longest = -(-max(len(item.tokens) + item.output_len for item in workload.items) // page_size)
    num_pages = min(bench.num_pages, max(workloads.num_distinct(workload.prompts) // page_size // 4, 2 * longest))
    what = f"{bench.name}, {sizes.groups} groups x {sizes.group} x ({sizes.prompt} + {sizes.suffix}), 16 out"
    what += ", 1/4 of the pages"
    for policy, evicts in TIGHT:
        if time.monotonic() > args.until:
            return
        arm = Arm(f"{policy} + {evicts}", policy=policy, evicts=evicts, num_pages=num_pages)
        runs = [bench.run(workload, arm)]
        yield bench.speed(f"{what}, {arm.name}", workload, runs, {})
        yield Figure(f"{what}, {arm.name}: hit rate", runs[0].hit_rate, "share", better="higher")
        yield Figure(f"{what}, {arm.name}: preemptions", runs[0].num_preemptions, "")
    yield Figure(f"{what}: hit rate without limit", expected_hit_rate(workload.prompts), "share", better="higher")


# Real text -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Talk:
    """Everything that was asked in one arm, in order, and what came back."""

    prompts: list[list[int]]
    answers: list[list[int]]
    num_cached: int


def talk(bench: Bench, dialogues: Sequence[Dialogue], arm: Arm, max_tokens: int) -> Talk:
    """All first turns at once, then all second ones, and so on, the cache kept between them. A turn that would not fit
    into the context ends its dialogue."""
    bench.switch(arm)
    llm, mode = bench.llm, "readwrite" if arm.caches else "off"
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    chats: list[list[dict]] = [[] for _ in dialogues]
    prompts, answers, num_cached = [], [], 0
    for turn in range(max(len(dialogue.asks) for dialogue in dialogues)):
        going = []
        for chat, dialogue in zip(chats, dialogues, strict=True):
            if turn < len(dialogue.asks):
                chat.append({"role": "user", "content": dialogue.asks[turn]})
                ids = llm.tokenizer.encode_chat(chat)
                if len(ids) + max_tokens <= bench.max_model_len:
                    going.append((chat, dialogue, ids))
        outputs = llm.generate([ids for *_, ids in going], params, cache_mode=mode, use_tqdm=False)
        for (chat, dialogue, ids), output in zip(going, outputs, strict=True):
            said = output.outputs[0]
            chat.append({"role": "assistant", "content": dialogue.answers[turn] if dialogue.answers else said.text})
            prompts.append(ids)
            answers.append(said.token_ids)
            num_cached += output.num_cached_tokens
    return Talk(prompts, answers, num_cached)


def text_figures(bench: Bench, data: Path, args: argparse.Namespace) -> Iterator[Figure]:
    """MT-bench's two turns, ShareGPT's conversations, MMLU's questions behind five shots, as far as `data` has them."""
    llm, num, seed = bench.llm, args.num_texts, args.seed
    exact = {"must": 1.0} if llm.dtype.name == "float32" else {}
    sets: list[tuple[str, list[Dialogue]]] = []
    if (path := data / "mt_bench" / "question.jsonl").exists():
        sets.append(("MT-bench two-turn", workloads.mt_bench(path, num=num, seed=seed)))
    if (path := data / "sharegpt" / "sharegpt_clean_bench.json.gz").exists():
        found = workloads.sharegpt_dialogues(path, num=num, max_chars=args.max_chars, seed=seed)
        sets.append(("ShareGPT conversations", found))
    for name, dialogues in sets:
        if time.monotonic() > args.until:
            return
        if not dialogues:
            continue
        on, off = (talk(bench, dialogues, arm, args.max_tokens) for arm in (ALL_ON, OFF))
        what = f"{bench.name}, {llm.dtype.name}, {name}, {len(dialogues)} dialogues, {len(on.prompts)} turns"
        yield Figure(f"{what}: hit rate", on.num_cached / sum(map(len, on.prompts)), "share", better="higher")
        expected = expected_hit_rate(on.prompts, [answer[:-1] for answer in on.answers])
        yield Figure(f"{what}: hit rate expected from the ids", expected, "share", better="higher")
        yield same_answers(what, on, off, exact)
    if (data / "mmlu").is_dir() and time.monotonic() <= args.until:
        made = workloads.mmlu(
            data / "mmlu", num=num, encode=llm.tokenizer.encode, seed=seed, output_len=args.mmlu_tokens
        )
        workload = made.fitting(bench.max_model_len)
        if not workload.items:
            return
        on, off = (bench.run(workload, arm) for arm in (ALL_ON, OFF))
        what = f"{bench.name}, {llm.dtype.name}, MMLU 5-shot, {len(workload.items)} questions"
        yield from bench.hits(what, workload, [on])
        yield same_answers(what, on, off, exact)


def same_answers(what: str, on: Talk | Run, off: Talk | Run, goals: dict[str, float]) -> Figure:
    same = [a == b for a, b in zip(on.answers, off.answers, strict=True)]
    what = f"{what}: answers the same with the cache on and off"
    return Figure(what, sum(same) / len(same), "share", better="higher", **goals)


# The command ---------------------------------------------------------------------------------------------------------


def hit_rate(text: str) -> float:
    if not 0 <= (rate := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"a hit rate is at least 0 and below 1, got {text}")
    return rate


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rates", type=hit_rate, nargs="+", default=RATES, help="of hits (default: %(default)s)")
    add("--data", type=Path, help="a folder with mt_bench/, sharegpt/ and mmlu/, for real text")
    add("--num-texts", type=int, help="dialogues and questions of each set (default: all)")
    add("--max-tokens", type=int, default=64, help="of an answer in a dialogue")
    add("--mmlu-tokens", type=int, default=4)
    add("--max-chars", type=int, default=24_000, help="of a conversation")


def figures(bench: Bench, sizes: Sizes, parts: Sequence[str], args: argparse.Namespace) -> Iterator[Figure]:
    """The parts in the order asked for. args: seed, repeats, until (on time.monotonic), and those of `add_options`."""
    made = {
        "hits": lambda: hit_figures(bench, sizes, args),
        "arms": lambda: arm_figures(bench, sizes, args),
        "prefixes": lambda: sweep_figures(
            bench, [(max(1, sizes.num // 8), prefix) for prefix in sizes.prefixes], sizes, args, "prefix length"
        ),
        "batches": lambda: sweep_figures(bench, [(num, sizes.prompt) for num in sizes.batches], sizes, args, "batch"),
        "policies": lambda: policy_figures(bench, sizes, args),
        "text": lambda: text_figures(bench, args.data, args),
    }
    for part in parts:
        if time.monotonic() <= args.until:
            yield from made[part]()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, None)
    add_profile_option(parser)
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all but text; with --data, text alone")
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes, and claim nothing")
    args = parser.parse_args(argv)
    args.until = time.monotonic() + args.deadline
    parts = args.only or (["text"] if args.data else PARTS[:-1])
    try:
        if "text" in parts and args.data is None:
            raise ValueError("real text needs --data")
        args.model = args.model or (default_model_path() if "text" in parts else "llama-3-8b")
        sizes = Sizes.divided(args.scale)
        bench = make_bench(args)
        if "text" in parts and bench.llm.tokenizer is None:
            raise ValueError(f"real text needs a model with a tokenizer, got {args.model}")
    except (ValueError, OSError, MemoryError) as error:
        print(f"benchmark_prefix_caching.py: error: {error}", file=sys.stderr)
        return 2
    return write_figures("prefix_caching", bench, args, argv, figures(bench, sizes, parts, args))


if __name__ == "__main__":
    sys.exit(main())
