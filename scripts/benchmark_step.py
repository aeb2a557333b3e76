"""Times single steps of a model of true shapes with random weights, against the limits measured in the same run.

A decode step reads the weights and every sequence's K and V once: its limit is those bytes over the copy bandwidth. A
prefill step is arithmetic: its limit is the rate of a large matrix product. Writes benchmarks/results/step.json.
"""

import argparse
import dataclasses
from array import array

import jax
import jax.numpy as jnp
import numpy as np
from ceilings import measure_ceilings, seconds_per_call
from results import Figure, device_name, write_results

from pallas_kernels import default_implementation
from prefix_jax.kv_store import page_bytes
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.request import Request, SamplingParams, Sequence
from prefix_jax.runner import Runner, make_batcher
from prefix_jax.scheduler import Chunk, StepPlan
from prefix_jax.step_batch import Batcher, StepBatch
from prefix_jax.weights import load_model

MODELS = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    ),
    "llama-2-7b": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32,
        head_dim=128, max_position=4096, rms_norm_eps=1e-5,
    ),
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position=16384,
    ),
}  # fmt: skip


def make_batch(batcher: Batcher, cache: PrefixCache, chunks: list[tuple[int, int]], vocab: int) -> StepBatch:
    """A step of chunks (start, length) of random tokens, each on pages of its own."""
    rng = np.random.default_rng(0)
    rng.shuffle(cache.pool.free)
    plan = StepPlan()
    for row, (start, length) in enumerate(chunks):
        tokens = array("i", rng.integers(0, vocab, start + length).astype(np.int32).tobytes())
        request = Request(str(row), tuple(tokens), SamplingParams(temperature=0), max_len=len(tokens) + 1)
        sequence = Sequence(request, row, 0)
        sequence.table = cache.open(tokens, reads=False, publishes=False)
        assert cache.grow(sequence.table, len(tokens))
        plan.chunks.append(Chunk(sequence, row, start, length, samples=True, from_device=False))
        plan.num_tokens += length
    batch = batcher.build(plan)
    for chunk in plan.chunks:
        cache.close(chunk.sequence.table)
    return batch


def time_step(runner: Runner, batch: StepBatch, calls: int, repeats: int) -> list[float]:
    """Seconds of one step, `repeats` times; the same step again and again, which writes what is already there."""
    jax.block_until_ready(runner.dispatch(batch))
    again = dataclasses.replace(batch, early_changes=np.zeros((2, 0), np.int32))
    return [seconds_per_call(lambda: runner.dispatch(again), calls) for _ in range(repeats)]


def kv_copy_bytes(runner: Runner, num_pages: int) -> int:
    """Temporary memory of the largest step beyond what it needs over a store of one page: a copy would show."""
    largest = max(runner.batcher.buckets, key=lambda bucket: bucket.num_tokens)
    temporary = [runner.lower(largest, n).compile().memory_analysis().temp_size_in_bytes for n in (num_pages, 1)]
    return max(0, temporary[0] - temporary[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024, help="positions of each decoding sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the prefill step")
    parser.add_argument("--product", type=int, default=8192, help="side of the matrices that measure the limits")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    config, page_size, dtype = MODELS[args.model], 16, jnp.dtype(args.dtype)
    ceilings = measure_ceilings(args.product)
    attention = default_implementation()
    batcher = make_batcher(
        config,
        dtype,
        attention,
        page_size=page_size,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=args.prefill,
        max_model_len=max(args.context, args.prefill),
    )
    wanted = {f"decode_{batch}" for batch in args.batch} | {f"mixed_{args.prefill}"}
    batcher.buckets = [bucket for bucket in batcher.buckets if bucket.name in wanted]
    num_pages = max(max(args.batch) * -(-args.context // page_size), -(-args.prefill // page_size))
    model = load_model(config, config, dtype=dtype, load_format="dummy")
    runner = Runner(
        model,
        batcher,
        page_size=page_size,
        num_pages=num_pages,
        memory_fraction=0.9,
        attention=attention,
        use_tqdm=True,
    )
    cache = PrefixCache(num_pages, page_size)
    params = {id(p): p for p in runner.params}.values()
    weight_bytes = sum(p.nbytes for p in params)
    if not config.tie_word_embeddings:
        weight_bytes -= config.vocab_size * config.hidden_size * dtype.itemsize  # of the embedding a few rows are read
    rows = []
    for batch in args.batch:
        seconds = time_step(
            runner,
            make_batch(batcher, cache, [(args.context - 1, 1)] * batch, config.vocab_size),
            args.calls,
            args.repeats,
        )
        read = weight_bytes + batch * args.context * page_bytes(config, page_size, dtype) / page_size
        limit = read / ceilings["copy_bytes_per_s"]
        what = f"{args.model} decode step, B = {batch}, context {args.context}"
        rows.append(Figure.median(what, [s * 1e3 for s in seconds], "ms"))
        must = {"must": 1.35} if batch == 64 else {}
        rows.append(Figure.median(f"{what} ÷ (bytes / copy bandwidth)", [s / limit for s in seconds], "x", **must))
    length = args.prefill
    seconds = time_step(
        runner, make_batch(batcher, cache, [(0, length)], config.vocab_size), max(2, args.calls // 5), args.repeats
    )
    in_products = sum(p.size for p in params) - config.vocab_size * config.hidden_size * (
        1 if config.tie_word_embeddings else 2
    )
    operations = 2 * in_products * length + 2 * config.num_layers * config.num_heads * config.head_dim * length * (
        length + 1
    )
    what = f"{args.model} prefill step of {length} tokens"
    rows.append(Figure.median(what, [s * 1e3 for s in seconds], "ms"))
    rate = ceilings["product_flop_per_s"]
    rows.append(
        Figure.median(
            f"{what} ÷ matrix-product rate", [operations / s / rate for s in seconds], "x", must=0.70, better="higher"
        )
    )
    rows.append(Figure("bytes of K and V copied by a step", kv_copy_bytes(runner, num_pages), "bytes", must=0))
    write_results("step", rows, ceilings=ceilings, device=device_name())


if __name__ == "__main__":
    main()
