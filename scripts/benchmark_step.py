"""Times single steps of models of true shapes with random weights, and the engine around them, against the limits
measured in the same run.

A decode step reads the weights and every sequence's K and V once: its limit is those bytes over the copy bandwidth. A
prefill step is arithmetic: its limit is the rate of a large matrix product. Writes benchmarks/results/step.json.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ceilings import measure_ceilings, seconds_per_call
from jax.sharding import Mesh
from processes import printed
from profiles import profile_figures, profiled, time_shares
from render_results import FOLDER, Figure, Results, device_name
from rooflines import decode_bytes, prefill_operations

from pallas_kernels import default_implementation
from prefix_jax import LLM, SamplingParams
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.models.split import AXIS
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.request import Request, Sequence
from prefix_jax.runner import Runner
from prefix_jax.scheduler import Chunk, StepPlan
from prefix_jax.step_batch import Batcher, StepBatch
from prefix_jax.tiling import make_batcher
from prefix_jax.weights import load_model

MODELS = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    ),
    "llama-2-7b": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, num_kv_heads=32,
        head_dim=128, max_position=16384, rms_norm_eps=1e-5,
    ),
    "mistral-7b": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position=32768, rms_norm_eps=1e-5, window=4096, local_layers=(True,) * 32,
    ),
    "qwen3-8b": LlamaConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, max_position=40960, rope_theta=1e6, qk_norm=True,
    ),
    "baichuan2-13b": LlamaConfig(
        vocab_size=125696, hidden_size=5120, intermediate_size=13696, num_layers=40, num_heads=40, num_kv_heads=40,
        head_dim=128, max_position=4096, alibi=True, norm_head=True,
    ),
    "llama-2-70b": LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8,
        head_dim=128, max_position=16384, rms_norm_eps=1e-5,
    ),
    "llama-2-13b": LlamaConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40,
        head_dim=128, max_position=16384, rms_norm_eps=1e-5,
    ),
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position=16384,
    ),
}  # fmt: skip
LONGEST = 16384 + 512  # tokens of prompt and output that any benchmark asks for
FP8 = "float8_e4m3fn"
PARTS = ("decode", "shared", "prefill", "first", "idle", "copy", "second", "fp8")
PROFILED = 8  # steps in a row
DECODE = {1: (1.22, 1.12), 64: (1.18, 1.10), 256: (1.24, 1.16)}  # of the limit, at context 1024: must, aim
# Milliseconds of vLLM 0.26.0 on one H200, its defaults, over contexts of 1024 to 1312.
PEER_CONTEXT = 1168
PEER = {("llama-3-8b", 1): 4.95, ("llama-3-8b", 64): 7.77, ("llama-3-8b", 256): 18.0, ("llama-2-7b", 64): 14.4}


def make_batch(
    batcher: Batcher, num_pages: int, chunks: list[tuple[int, int]], vocab: int, shared: int = 0
) -> StepBatch:
    """A step of chunks (start, length) of random tokens, each on pages of its own but for the first `shared` positions,
    which are the first one's."""
    rng = np.random.default_rng(0)
    cache = PrefixCache(num_pages, batcher.page_size)
    rng.shuffle(cache.pool.free)
    plan, columns = StepPlan(), shared // batcher.page_size
    batcher.forget_rows()
    for row, (start, length) in enumerate(chunks):
        tokens = array("i", rng.integers(0, vocab, start + length).astype(np.int32).tobytes())
        request = Request(str(row), tuple(tokens), SamplingParams(temperature=0), max_len=len(tokens) + 1)
        sequence = Sequence(request, row, 0)
        sequence.table = cache.open(tokens, reads=False, publishes=False)
        skipped = columns * batcher.page_size if row else 0
        assert cache.grow(sequence.table, len(tokens) - skipped)
        if skipped:
            sequence.table.pages[:0] = plan.chunks[0].sequence.table.pages[:columns]
            sequence.table.changed = list(range(len(sequence.table.pages)))
        plan.chunks.append(Chunk(sequence, row, start, length, samples=True, from_device=False))
        plan.num_tokens += length
    batch = batcher.build(plan)
    batcher.forget_rows()
    return batch


def once_more(batch: StepBatch) -> StepBatch:
    """The same step where the device knows its pages already."""
    return dataclasses.replace(batch, early_changes=np.zeros((2, 0), np.int32))


def time_step(runner: Runner, batch: StepBatch, calls: int, repeats: int) -> list[float]:
    """Seconds of one step, `repeats` times; the same step again and again, which writes what is already there."""
    jax.block_until_ready(runner.dispatch(batch))
    again = once_more(batch)
    return [seconds_per_call(lambda: runner.dispatch(again), calls) for _ in range(repeats)]


def kv_copy_bytes(runner: Runner) -> int:
    """Temporary memory of the largest step beyond what it needs over a store of one page: a copy would show."""
    temporary = [
        runner.compile(runner.batcher.largest, n).memory_analysis().temp_size_in_bytes for n in (runner.num_pages, 1)
    ]
    return max(0, temporary[0] - temporary[1])


def decode_figures(model: str, runner: Runner, batches, context: int, ceilings, args) -> Iterator[Figure]:
    """Decode steps against their limit and the peer."""
    for batch in batches:
        for length in (context, context + PEER_CONTEXT - 1024):
            work = make_batch(runner.batcher, runner.num_pages, [(length - 1, 1)] * batch, runner.config.vocab_size)
            seconds = time_step(runner, work, args.calls, args.repeats)
            what = f"{model} decode step, B = {batch}, context {length}"
            yield Figure.median(what, [s * 1e3 for s in seconds], "ms")
            sizes = runner.dtype.itemsize, batch * length, runner.kv_dtype.itemsize
            limit = decode_bytes(runner.config, *sizes) / ceilings["copy_bytes_per_s"]
            must, aim = DECODE.get(batch, (None, None)) if length == 1024 and model == "llama-3-8b" else (None, None)
            over = [s / limit for s in seconds]
            yield Figure.median(f"{what} ÷ (bytes / copy bandwidth)", over, "x", must=must, aim=aim)
            if length == context:
                again = once_more(work)
                yield from profile_figures(
                    what, lambda again=again: jax.block_until_ready([runner.dispatch(again) for _ in range(PROFILED)])
                )
            if length == PEER_CONTEXT and (peer := PEER.get((model, batch))):
                over = [s * 1e3 / peer for s in seconds]
                yield Figure.median(f"{what} ÷ vLLM 0.26's", over, "x", must=0.90, aim=0.82)


def prefill_figures(model: str, runner: Runner, length: int, rate: float, args) -> Iterator[Figure]:
    """One prompt in one step, against the rate of a large product."""
    work = make_batch(runner.batcher, runner.num_pages, [(0, length)], runner.config.vocab_size)
    seconds = time_step(runner, work, max(2, args.calls // 5), args.repeats)
    what = f"{model} prefill step of {length} tokens"
    yield Figure.median(what, [s * 1e3 for s in seconds], "ms")
    share = [prefill_operations(runner.config, length) / s / rate for s in seconds]
    yield Figure.median(f"{what} ÷ matrix-product rate", share, "x", must=0.88, aim=0.95, better="higher")
    again = once_more(work)
    yield from profile_figures(what, lambda: jax.block_until_ready(runner.dispatch(again)))


def shared_figures(model: str, runner: Runner, batch: int, prefixes, args) -> list[Figure]:
    """Decode steps whose sequences share a prefix, 128 positions of their own each, with and without shared tiles."""
    rows, costs = [], runner.batcher.costs
    for prefix in prefixes:
        seconds = {}
        for name, chosen in (("shared", costs), ("plain", None)):
            runner.batcher.costs = chosen
            chunks = [(prefix + 127, 1)] * batch
            work = make_batch(runner.batcher, runner.num_pages, chunks, runner.config.vocab_size, shared=prefix)
            seconds[name] = time_step(runner, work, args.calls // 2, args.repeats)
        runner.batcher.costs = costs
        what = f"{model} decode step, B = {batch}, own 128, prefix {prefix}"
        rows += [
            Figure.median(f"{what}, {name} tiles", [s * 1e3 for s in taken], "ms") for name, taken in seconds.items()
        ]
        gain = [a / b for a, b in zip(seconds["plain"], seconds["shared"], strict=True)]
        rows.append(Figure.median(f"{what}: plain ÷ shared", gain, "x", better="higher"))
    return rows


def idle_shares(llm: LLM, batch: int, context: int, repeats: int) -> list[float]:
    """The device's idle share while the engine decodes: of the time from the first kernel to the last that a profile of
    16 steps shows. Empty where no profile of a device is to be had."""
    engine, rng = llm.engine, np.random.default_rng(1)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    for i in range(batch):
        tokens = tuple(rng.integers(0, llm.model_config.vocab_size, context - i % 16).tolist())
        engine.add(Request(f"idle-{i}", tokens, params, max_len=engine.max_model_len))
    while any(s.remaining > 1 or s.row is None for answers in engine.sequences.values() for s in answers):
        engine.step()
    shares = []
    for _ in range(repeats):
        for _ in range(3):
            engine.step()
        if events := profiled(lambda: [engine.step() for _ in range(16)]):
            shares.append(time_shares(events)[0])
    assert len(engine.sequences) == batch, "some have ended"
    engine.drop(engine.sequences)
    engine.step()
    return shares


def first_token_times(llm: LLM, cached: int, new: int, repeats: int, seed: int) -> list[float]:
    """Milliseconds to the only token of one request whose first `cached` tokens, always the same, the cache holds. No
    seed twice: the others would be there too."""
    draw = lambda n, rng: rng.integers(0, llm.model_config.vocab_size, n).tolist()  # noqa: E731
    prefix, params = (
        draw(cached, np.random.default_rng(2)),
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    )
    rng = np.random.default_rng([2, seed])
    llm.generate([[*prefix, *draw(1, rng)]], params, use_tqdm=False)
    spent = []
    for _ in range(repeats):
        prompt = [*prefix, *draw(new, rng)]
        started = time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        spent.append((time.perf_counter() - started) * 1e3)
        assert output.num_cached_tokens == cached
    return spent


def first_token_figures(llm: LLM, args) -> Iterator[Figure]:
    """One request of which 16 tokens are new: its whole time, and of that the device's, against a decode step."""
    runner, length, new = llm.engine.runner, args.prefill, 16
    what = f"time to first token, {length} of {length + new} tokens cached, one request"
    single, alone = (
        make_batch(runner.batcher, runner.num_pages, [chunk], runner.config.vocab_size)
        for chunk in ((args.context - 1, 1), (length, new))
    )
    single_ms, alone_ms = (
        statistics.median(time_step(runner, work, args.calls, args.repeats)) * 1e3 for work in (single, alone)
    )
    again = once_more(alone)
    yield from profile_figures(f"{what}: the step alone", lambda: jax.block_until_ready(runner.dispatch(again)))
    runner.reset()
    first = first_token_times(llm, length, new, 4 * args.repeats, 0)  # of some ms each, which differ by a tenth
    yield Figure.median(what, first, "ms")
    yield Figure(f"{what}: the step alone", alone_ms, "ms")
    yield Figure.median(f"{what} ÷ decode step, B = 1", [ms / single_ms for ms in first], "x", must=2, aim=1.5)
    asked = f"{what}, asked {args.repeats} times"
    yield from profile_figures(asked, lambda: first_token_times(llm, length, new, args.repeats, 1))


def step_runner(model: str, dtype: str, steps: SequenceOf[tuple[int, int]], num_devices: int = 1) -> Runner:
    """Random weights, and of an engine's executables those alone that steps of so many (chunks, tokens) run."""
    mesh = Mesh(np.array(jax.local_devices()[:num_devices]), (AXIS,)) if num_devices > 1 else None
    length, attention = min(LONGEST, MODELS[model].max_position), default_implementation()
    config = MODELS[model].for_length(length)
    weights = load_model(config, config, load_format="dummy", dtype=jnp.dtype(dtype), mesh=mesh)
    batcher = make_batcher(
        weights.split.local,
        weights.dtype,
        attention,
        page_size=16,
        max_num_seqs=max(chunks for chunks, _ in steps),
        max_num_batched_tokens=max(tokens for _, tokens in steps),
        max_model_len=length,
    )
    batcher.buckets = [batcher.bucket_of(*step) for step in steps]
    batcher.costs = None  # nothing is shared
    return Runner(weights, batcher, page_size=16, num_pages=None, memory_fraction=0.9, attention=attention)


def start_engine(model: str, dtype: str, **options) -> LLM:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    context = min(LONGEST, MODELS[model].max_position)
    return LLM(MODELS[model], load_format="dummy", dtype=dtype, max_model_len=context, use_tqdm=False, **options)


def measure(args) -> Iterator[dict | Figure]:
    """All that one process can measure, as it comes: the limits, then the figures. It starts with an empty compilation
    cache."""
    ceilings = measure_ceilings(args.product)  # before the engine takes the memory
    yield ceilings | {"device": device_name()}
    started = time.time()
    llm = start_engine(args.model, args.dtype)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    yield Figure("engine start to first token, compilation cache empty", time.time() - started, "s")
    yield Figure("executables of the step", len(llm.engine.runner.steps), "", must=24)
    runner = llm.engine.runner
    if "decode" in args.only:
        yield from decode_figures(args.model, runner, args.batch, args.context, ceilings, args)
    if "shared" in args.only:
        yield from shared_figures(args.model, runner, max(args.batch), args.prefix, args)
    if "prefill" in args.only:
        yield from prefill_figures(args.model, runner, args.prefill, ceilings["product_flop_per_s"], args)
    if "first" in args.only:
        yield from first_token_figures(llm, args)
    if "idle" in args.only and (shares := idle_shares(llm, max(args.batch), args.context, 3)):
        what = f"device idle share, {max(args.batch)} sequences decode"
        yield Figure.median(what, [100 * s for s in shares], "%", must=3, aim=1)
    if "copy" in args.only:
        yield Figure("bytes of K and V copied by a step", kv_copy_bytes(runner), "bytes", must=0)
    del llm, runner
    if "second" in args.only:
        batch = sorted(args.batch)[len(args.batch) // 2]
        yield from other_engine_figures(args.second, args.second, batch, ceilings, args)
    if "fp8" in args.only:
        what, options = f"{args.model}, K and V in {FP8},", {"kv_dtype": FP8, "forest": False}
        yield from other_engine_figures(what, args.model, max(args.batch), ceilings, args, **options)


def other_engine_figures(what: str, model: str, batch: int, ceilings, args, **options) -> Iterator[Figure]:
    """Decode steps of an engine made for them alone; the one before must be gone."""
    gc.collect()
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": batch}
    runner = start_engine(model, args.dtype, **sizes, **options).engine.runner
    yield from decode_figures(what, runner, [batch], args.context, ceilings, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--second", default="llama-2-7b", choices=MODELS, help="a model whose B = 64 step is timed too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024, help="positions of each decoding sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the prefill step")
    parser.add_argument("--prefix", type=int, nargs="*", default=[2048, 8192], help="positions shared by a decode step")
    parser.add_argument("--product", type=int, default=8192, help="side of the matrices that measure the limits")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the file's other rows stay")
    parser.add_argument("--cache", metavar="FOLDER", help="for the compilation cache: an empty one, which stays")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: benchmarks/results)")
    parser.add_argument("--measure", action="store_true", help="print the figures of one process as JSON, no more")
    parser.add_argument("--first-token", action="store_true", help="only start an engine and ask it for one token")
    args = parser.parse_args()
    if args.first_token:
        start_engine(args.model, args.dtype).generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        return
    if args.measure:
        for found in measure(args):
            print(json.dumps(dataclasses.asdict(found) if isinstance(found, Figure) else found), flush=True)
        return

    # The second process finds the executables of the first. What one has measured before it fails is not lost.
    failed = False
    with contextlib.ExitStack() as stack:
        cache = args.cache or stack.enter_context(tempfile.TemporaryDirectory())
        if os.path.isdir(cache) and os.listdir(cache):
            parser.error(f"--cache {cache} is not empty")
        env = {"JAX_COMPILATION_CACHE_DIR": cache}
        rows = printed([__file__, *sys.argv[1:], "--measure"], env=env)
        ceilings = next(rows)
        device, keep = ceilings.pop("device"), len(args.only) < len(PARTS)
        results = Results("step", device=device, ceilings=ceilings, keep=keep, folder=args.folder or FOLDER)
        try:
            for row in rows:
                results.add(Figure(**row))
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            failed = True
        started = time.time()
        command = [sys.executable, __file__, "--model", args.model, "--dtype", args.dtype, "--first-token"]
        if subprocess.run(command, env=os.environ | env).returncode:
            failed = True
        else:
            what = "process start to first token, compilation cache filled"
            results.add(Figure(what, time.time() - started, "s", must=40, aim=20))
    results.close()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
