"""This engine and others on one device: each runs the same file of token ids and lengths in a process of its own, one
after the other, and the ratios are printed.

    transformers   its continuous batching, prefix sharing on, with flash attention where that is installed
    vllm           its defaults, with as many sequences at once as this engine

All weights are random where --model names sizes. Every repeat asks for other tokens (each id moved by the same amount),
so that a cache which outlives a repeat finds nothing of the one before. Writes benchmarks/results/peers.json.
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import workloads
from benchmark_step import MODELS
from benchmark_throughput import add_dataset_options, describe, make_workload
from processes import printed
from render_results import FOLDER, Figure, Results, device_name, own_command
from runs import ALL_ON, add_engine_options, finish, make_bench
from workloads import Item, Workload

from prefix_jax.models.llama import LlamaConfig
from prefix_jax.weights import read_config

PEERS = ("transformers", "vllm")
OURS = "prefix-jax"


def moved(workload: Workload, amount: int, vocab_size: int) -> Workload:
    """The same lengths and the same sharing in other tokens."""
    items = [
        dataclasses.replace(item, tokens=array("i", ((token + amount) % vocab_size for token in item.tokens)))
        for item in workload.items
    ]
    return dataclasses.replace(workload, items=items)


def repeats_of(workload: Workload, args: argparse.Namespace, vocab_size: int) -> list[Workload]:
    """A small one to warm up with, then one for each repeat."""
    all_of_them = [moved(workload, 1 + turn, vocab_size) for turn in range(args.repeats + 1)]
    warm_up = dataclasses.replace(all_of_them[0], items=all_of_them[0].items[:32])
    return [warm_up, *all_of_them[1:]]


# In a process of its own ----------------------------------------------------------------------------------------------


def run_ours(workload: Workload, args: argparse.Namespace) -> Iterator[dict]:
    started = time.monotonic()
    bench = make_bench(args)
    yield {"ceilings": bench.ceilings, "device": device_name()}
    fits = workload.fitting(bench.max_model_len)
    if len(fits.items) < len(workload.items):
        raise ValueError(
            f"{len(workload.items) - len(fits.items)} requests are longer than {bench.max_model_len} tokens"
        )
    for number, one in enumerate(repeats_of(workload, args, bench.vocab_size)):
        run = bench.run(one, ALL_ON)
        if number == 0:
            yield {"start_seconds": time.monotonic() - started, "name": OURS}
        else:
            yield {"seconds": run.seconds, "num_output_tokens": run.num_output_tokens}


def run_transformers(workload: Workload, args: argparse.Namespace) -> Iterator[dict]:
    import torch
    import transformers
    from transformers.generation import ContinuousBatchingConfig, GenerationConfig

    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "paged|flash_attention_2" if flash else "paged|sdpa"
    dtype = {"auto": torch.bfloat16 if device == "cuda" else torch.float32}.get(args.dtype) or getattr(
        torch, args.dtype
    )
    options = {"attn_implementation": attention, "dtype": dtype}
    torch.manual_seed(0)
    with torch.device(device):
        if args.model in MODELS:
            config = transformers.LlamaConfig(**hf_config(MODELS[args.model]))
            model = transformers.LlamaForCausalLM._from_config(config, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.model, **options)
    generation = GenerationConfig(
        max_new_tokens=max(item.output_len for item in workload.items), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig()
    if device == "cpu":  # where it would take most of the host's memory: room for all requests at once, as here
        blocks = sum(-(-(len(item.tokens) + item.output_len) // batching.block_size) for item in workload.items)
        batching = ContinuousBatchingConfig(num_blocks=blocks + 1, max_batch_tokens=512)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        for number, one in enumerate(repeats_of(workload, args, model.config.vocab_size)):
            before = time.perf_counter()
            num_tokens = continuous_batch(manager, one.items)
            if number == 0:
                name = f"transformers {transformers.__version__} ({attention.replace('|', ' ')})"
                yield {"start_seconds": time.monotonic() - started, "name": name}
            else:
                yield {"seconds": time.perf_counter() - before, "num_output_tokens": num_tokens}


def continuous_batch(manager, items: Sequence[Item]) -> int:
    """Output tokens of all requests, asked at once. RuntimeError if one is lost."""
    by_length: dict[int, list[list[int]]] = {}
    for item in items:
        by_length.setdefault(item.output_len, []).append(item.tokens.tolist())
    for length, prompts in by_length.items():
        manager.add_requests(prompts, max_new_tokens=length)  # which sorts them, so that prefixes meet
    num_done = num_tokens = 0
    while num_done < len(items):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"the generation thread ended after {num_done} of {len(items)} requests")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            num_done += 1
            num_tokens += len(result.generated_tokens)
    return num_tokens


def run_vllm(workload: Workload, args: argparse.Namespace) -> Iterator[dict]:
    import vllm

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = args.model
        if args.model in MODELS:
            content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
            Path(folder, "config.json").write_text(json.dumps(content | hf_config(MODELS[args.model])))
            source = folder
        llm = vllm.LLM(
            model=source,
            load_format="dummy" if args.model in MODELS else "auto",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=max(len(item.tokens) + item.output_len for item in workload.items),
            max_num_seqs=args.max_num_seqs or 256,
            enable_prefix_caching=True,
        )
        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        for number, one in enumerate(repeats_of(workload, args, vocab_size)):
            prompts = [{"prompt_token_ids": item.tokens.tolist()} for item in one.items]
            params = [
                vllm.SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True, detokenize=False)
                for item in one.items
            ]
            before = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            spent = time.perf_counter() - before
            if number == 0:
                yield {"start_seconds": time.monotonic() - started, "name": f"vllm {vllm.__version__}"}
            else:
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                yield {"seconds": spent, "num_output_tokens": num_tokens}


RUNNERS: dict[str, Callable[[Workload, argparse.Namespace], Iterator[dict]]] = {
    OURS: run_ours, "transformers": run_transformers, "vllm": run_vllm,
}  # fmt: skip


def hf_config(config: LlamaConfig) -> dict:
    """The contents of a Hugging Face config.json. ValueError for a model that is more than a plain Llama."""
    content = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if LlamaConfig.from_hf(content) != config:
        raise ValueError(f"peers are given the sizes of plain Llamas alone, got {config}")
    return content


# The process that starts them -------------------------------------------------------------------------------------


def run_apart(name: str, file: Path, arguments: Sequence[str], seconds: float) -> list[dict]:
    """What a process of its own has printed, as far as it came."""
    found = []
    try:
        for row in printed([__file__, *arguments, "--run", name, "--workload", str(file)], seconds=seconds):
            found.append(row)
    except subprocess.CalledProcessError as error:
        print(f"{name}, {len(rates_of(found))} runs done: {error}", file=sys.stderr)
    return found


def rates_of(found: Sequence[dict]) -> list[float]:
    return [row["num_output_tokens"] / row["seconds"] for row in found if "seconds" in row]


def name_of(found: Sequence[dict]) -> str:
    return next(row["name"] for row in found if "name" in row)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "llama-3-8b")
    add_dataset_options(parser)
    add = parser.add_argument
    add("--peers", nargs="+", choices=PEERS, help="default: those that are installed")
    add("--timeout", type=float, default=300.0, help="seconds for each process")
    add("--run", choices=RUNNERS, help=argparse.SUPPRESS)
    add("--workload", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(dataset_name="prefix-repetition", prefix_len=596, input_len=104, output_len=100, repeats=2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.run:
        workload = workloads.custom(args.workload, num=None, encode=text_only, output_len=None)
        for row in RUNNERS[args.run](workload, args):
            print(json.dumps(row), flush=True)
        return 0
    peers = args.peers or [name for name in PEERS if importlib.util.find_spec(name)]
    try:
        workload = make_workload(args, read_config(MODELS.get(args.model, args.model)).vocab_size, None)
    except (ValueError, OSError) as error:
        print(f"benchmark_peers.py: error: {error}", file=sys.stderr)
        return 2
    if not peers:
        print(f"benchmark_peers.py: none of {', '.join(PEERS)} is installed: this engine runs alone", file=sys.stderr)
    arguments = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "workload.jsonl")
        workloads.write_custom(workload, file)
        ours = run_apart(OURS, file, arguments, args.timeout)
        if not rates_of(ours):
            return 1
        results = Results(
            "peers",
            command=own_command("benchmark_peers.py", argv),
            ceilings=ours[0]["ceilings"],
            device=ours[0]["device"],
            folder=args.folder or FOLDER,
            keep=args.keep,
        )
        what = f"{Path(args.model).stem}, {describe(workload)}"
        results.add(*speed_figures(what, ours))
        for peer in peers:
            theirs = run_apart(peer, file, arguments, args.timeout)
            if rates_of(theirs):
                results.add(*speed_figures(what, theirs))
                mine, other = (statistics.median(rates_of(found)) for found in (ours, theirs))
                ratio = Figure(f"{what}: {OURS} ÷ {name_of(theirs)}", mine / other, "x", better="higher")
                results.add(ratio)
    return finish(results, args)


def speed_figures(what: str, found: Sequence[dict]) -> Iterator[Figure]:
    name, start = name_of(found), next(row["start_seconds"] for row in found if "start_seconds" in row)
    yield Figure.median(f"{what}, {name}", rates_of(found), "output tokens/s", better="higher")
    yield Figure(f"{what}, {name}: process start to the end of the warm-up", start, "s")


def text_only(text: str) -> Sequence[int]:
    raise ValueError("the workload file holds token ids")


if __name__ == "__main__":
    sys.exit(main())
