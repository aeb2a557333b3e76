"""Times attention alone, on random data in permuted pages, with the plans the engine makes: plain decode against the
copy bandwidth, shared prefixes against the plain plan, prefill in operations per second, and the planning itself.

Every work runs over several layers' K and V in turn, so that none of it lies in the cache from the run before, and all
works are timed in turn. Writes benchmarks/results/kernels.json.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from ceilings import measure_ceilings
from profiles import profile_figures
from render_results import Figure, device_name, write_results

from pallas_kernels import BESIDE_OPTIONS, Config, HopperConfig, default_implementation, is_compiled, paged_attention
from prefix_jax.buckets import Bucket
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.step import batch_merge, batch_tiles
from prefix_jax.step_batch import Batcher
from prefix_jax.tile_plan import tile_plan
from prefix_jax.tiling import make_batcher, tile_configs

PAGE_SIZE = 16
NUM_LAYERS, CALLS, RUNS = 4, 16, 6  # CALLS attentions in one executable, RUNS of these behind one another


@dataclasses.dataclass(frozen=True)
class Work:
    """One step's attention: chunks (start, length) over rows of a page table whose pages may be shared."""

    what: str
    table: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    group: int = 4
    num_kv_heads: int = 8
    head_dim: int = 128
    forest: bool = True
    level: int | None = None  # only rows that agree in so many columns share, and no more than these
    one_list: bool = False  # own ranges in wide tiles too, all in one launch

    @property
    def config(self) -> LlamaConfig:
        heads = self.num_kv_heads * self.group
        return LlamaConfig(
            vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
        )  # fmt: skip

    def batcher(self, implementation: str) -> Batcher:
        return make_batcher(
            self.config,
            jnp.bfloat16,
            implementation,
            page_size=PAGE_SIZE,
            max_num_seqs=len(self.table),
            max_num_batched_tokens=max(int(self.lengths.sum()), 64),
            max_model_len=PAGE_SIZE * self.table.shape[1],
            forest=self.forest,
        )

    def plan(self, batcher: Batcher) -> tuple[Bucket, np.ndarray]:
        """The bucket and the packed arrays of attention, as the engine would make them."""
        num_tokens = int(self.lengths.sum())
        table = self.table if self.level is None else self._visible()
        runs = batcher.find_runs(table, self.starts, self.lengths) if self.forest else []
        prompts = int((self.lengths > 1).sum())
        bucket = batcher.bucket_of(len(self.table), num_tokens, prompts, shares=bool(runs))
        if self.one_list:
            wide, more = bucket.shapes[-1], bucket.num_tokens
            wide = dataclasses.replace(wide, tiles=wide.tiles + more, partials=wide.partials + more)
            bucket = dataclasses.replace(bucket, shapes=(wide,))
        rows = np.arange(len(self.table))
        plan = tile_plan(
            rows, self.starts, self.lengths, num_tokens=bucket.num_tokens, shapes=bucket.shapes,
            runs=runs, page_size=PAGE_SIZE,
        )  # fmt: skip
        packed = np.zeros(bucket.packed_len, np.int32)
        bucket.fill_tiles(plan, bucket.unpack(packed))
        return bucket, packed

    def _visible(self) -> np.ndarray:
        """The table as it would be if rows shared at one level alone."""
        num_rows, width = self.table.shape
        group = np.unique(self.table[:, self.level - 1], return_inverse=True)[1]
        owner = np.where(np.arange(width) < self.level, group[:, None], num_rows + np.arange(num_rows)[:, None])
        return (self.table + 10**6 * owner).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What an executable is compiled for: a bucket, and arrays that hold every work of it."""

    bucket: Bucket
    config: LlamaConfig
    configs: tuple[Config | HopperConfig, ...]  # of the bucket's tile lists
    num_rows: int
    num_columns: int
    num_slots: int

    def compile(self, implementation: str):
        """`CALLS` attentions, one behind the other, over the layers in turn."""
        bucket, config = self.bucket, self.config

        @jax.jit  # traced and lowered once
        def attend(q, packed, position, table, k_slots, v_slots):
            batch = bucket.unpack(packed)
            return paged_attention(
                q, k_slots, v_slots, position, table, batch_tiles(batch, bucket), batch_merge(batch, bucket),
                page_size=PAGE_SIZE, implementation=implementation, configs=self.configs,
            )  # fmt: skip

        def run(q, packed, position, table, layers):
            for i in range(CALLS):
                q = attend(q, packed, position, table, *layers[i % NUM_LAYERS])
            return q

        slots = jax.ShapeDtypeStruct((self.num_slots, config.num_kv_heads, config.head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((bucket.num_tokens, config.num_heads, config.head_dim), jnp.bfloat16)
        packed, position, table = (
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((bucket.packed_len,), (bucket.num_tokens,), (self.num_rows, self.num_columns))
        )
        lowered = jax.jit(run, donate_argnums=0).lower(q, packed, position, table, [(slots, slots)] * NUM_LAYERS)
        beside = is_compiled(implementation) and bucket.kind == "shared"
        return lowered.compile(compiler_options=BESIDE_OPTIONS if beside else None)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A work with its executable and the arrays it takes, on the device."""

    work: Work
    shape: Shape
    arrays: tuple

    def random_q(self, seed: int) -> jax.Array:
        shape = self.shape.bucket.num_tokens, self.shape.config.num_heads, self.shape.config.head_dim
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def prepare(works: Sequence[Work], implementation: str) -> list[Prepared]:
    """Works with the same bucket and heads get one executable, whose table and slots have room for each of them."""
    plans = [work.plan(work.batcher(implementation)) for work in works]
    keys = [(bucket, work.config) for work, (bucket, _) in zip(works, plans, strict=True)]
    num_slots = {config: 0 for _, config in keys}
    num_columns = dict.fromkeys(keys, 0)
    for work, key in zip(works, keys, strict=True):
        num_slots[key[1]] = max(num_slots[key[1]], (int(work.table.max()) + 1) * PAGE_SIZE)
        num_columns[key] = max(num_columns[key], work.table.shape[1])
    prepared = []
    for work, key, (bucket, packed) in zip(works, keys, plans, strict=True):
        table = np.zeros((len(work.table), num_columns[key]), np.int32)
        table[:, : work.table.shape[1]] = work.table
        position = np.zeros(bucket.num_tokens, np.int32)
        ends = np.cumsum(work.lengths)
        position[: ends[-1]] = np.arange(ends[-1]) + np.repeat(work.starts - ends + work.lengths, work.lengths)
        configs = tuple(tile_configs(bucket, key[1], jnp.bfloat16, implementation, PAGE_SIZE))
        shape = Shape(bucket, key[1], configs, *table.shape, num_slots[key[1]])
        prepared.append(Prepared(work, shape, tuple(map(jnp.asarray, (packed, position, table)))))
    return prepared


def random_layers(config: LlamaConfig, num_slots: int) -> list[tuple[jax.Array, jax.Array]]:
    shape = num_slots, config.num_kv_heads, config.head_dim
    make = jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))
    keys = jax.random.split(jax.random.key(0), 2 * NUM_LAYERS)
    return [(make(keys[2 * i]), make(keys[2 * i + 1])) for i in range(NUM_LAYERS)]


def time_works(
    prepared: Sequence[Prepared], implementation: str, repeats: int, explained: Container[str] = ()
) -> tuple[list[list[float]], dict[str, np.ndarray], list[Figure]]:
    """Seconds of one call of each work, `repeats` times, all works over the same heads in turn; what those of 256 rows
    give, by name; and profiles of the works of these names."""
    shapes = list(dict.fromkeys(p.shape for p in prepared))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = dict(zip(shapes, pool.map(lambda shape: shape.compile(implementation), shapes), strict=True))
    seconds: list[list[float]] = [[] for _ in prepared]
    outputs: dict[str, np.ndarray] = {}
    profiles: list[Figure] = []
    for config in dict.fromkeys(shape.config for shape in shapes):
        mine = [(p, taken) for p, taken in zip(prepared, seconds, strict=True) if p.shape.config == config]
        layers = random_layers(config, mine[0][0].shape.num_slots)
        for repeat in range(repeats + 1):
            for p, taken in mine:
                run = runs[p.shape]
                q = jax.block_until_ready(run(p.random_q(repeat), *p.arrays, layers))
                if not repeat and len(p.work.table) == 256:
                    outputs[p.work.what] = np.asarray(q, np.float32)
                started = time.perf_counter()
                for _ in range(RUNS):
                    q = run(q, *p.arrays, layers)
                jax.block_until_ready(q)
                if repeat:
                    taken.append((time.perf_counter() - started) / (RUNS * CALLS))
                elif p.work.what in explained:
                    call = functools.partial(run, p.random_q(repeat), *p.arrays, layers)
                    profiles += profile_figures(p.work.what, lambda call=call: jax.block_until_ready(call()))
    return seconds, outputs, profiles


# Works ---------------------------------------------------------------------------------------------------------------


def tree(branches: Sequence[int], columns: Sequence[int], own: int, seed: int = 0) -> np.ndarray:
    """Pages of rows under a tree: at each level so many branches with so many columns of their own; permuted."""
    num_rows, parts, used = int(np.prod(branches)), [], 0
    for level, width in enumerate([*columns, own]):
        groups = int(np.prod(branches[: level + 1])) if level < len(columns) else num_rows
        parts.append(np.repeat(used + np.arange(groups * width).reshape(groups, width), num_rows // groups, axis=0))
        used += groups * width
    pages = 1 + np.random.default_rng(seed).permutation(used)
    return pages[np.concatenate(parts, axis=1)].astype(np.int32)


def decode(what: str, table: np.ndarray, **options) -> Work:
    """Each row decodes the last position of its pages."""
    starts = np.full(len(table), table.shape[1] * PAGE_SIZE - 1)
    return Work(what, table, starts, np.ones(len(table), int), **options)


def plain(batch: int, context: int, **options) -> Work:
    heads = "MHA 32/32" if options else "GQA 32/8"
    table = tree([1, batch], [0], context // PAGE_SIZE)
    return decode(f"plain decode attention {batch} x {context}, {heads}", table, forest=False, **options)


def shared(batch: int, prefix: int, own: int, forest: bool, **options) -> Work:
    heads = "MHA" if options else "GQA-4"
    table = tree([1, batch], [prefix // PAGE_SIZE], own // PAGE_SIZE)
    plan = "shared" if forest else "plain"
    return decode(f"{plan} B = {batch}, own {own}, prefix {prefix}, {heads}", table, forest=forest, **options)


def prefill(new: int, cached: int, **options) -> Work:
    table = tree([1, 1], [0], (new + cached) // PAGE_SIZE)
    return Work(
        f"prefill attention, {new} new on {cached} cached", table, np.array([cached]), np.array([new]), **options
    )


MHA = {"group": 1, "num_kv_heads": 32}
PLAIN = {
    (64, 4096, False): 0.94, (256, 1024, False): 0.90, (64, 1024, False): 0.85, (8, 8192, False): 0.85,
    (64, 1024, True): 0.88,
}  # fmt: skip
SHARED = {(2048, False): (4.5, 6), (8192, False): (9, 12), (2048, True): (8, 8), (8192, True): (20, 30)}
PREFILL = {(4096, 0): 290, (4096, 8192): 320}
SWEEP = [(b, c, False) for b in (1, 8, 64, 256) for c in (256, 1024, 4096, 16384) if b * c <= 2**19]
GAINS = [(prefix, mha) for mha in (False, True) for prefix in (256, 512, 1024, 4096, 16384)]


def tree_works() -> list[Work]:
    """512 -> 4 x 1024 -> 32 x 256 -> 256 x 64."""
    columns = [32, 64, 16]
    table = tree([1, 4, 8, 8], columns, 4)
    levels = {"root": 32, "level 2": 96, "level 3": 112, "all levels": None}
    return [decode(f"tree, {name}", table, level=at) for name, at in levels.items()]


def time_planning(num_seqs: int, implementation: str, repeats: int = 30) -> list[float]:
    """Milliseconds to find, choose and cut the runs of sequences of 8,192 positions, from nothing."""
    table = tree([1, 8, num_seqs // 64, 8], [128, 256, 96], 32)
    work = decode("", table)
    batcher = work.batcher(implementation)
    spent = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work.plan(batcher)
        spent.append((time.perf_counter() - started) * 1e3)
    return spent[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default=default_implementation())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--product", type=int, default=8192, help="side of the matrices that measure the limits")
    parser.add_argument("--small", action="store_true", help="a few tiny works, to try the script without a GPU")
    args = parser.parse_args()
    ceilings = measure_ceilings(args.product)
    bandwidth = ceilings["copy_bytes_per_s"]
    options = {False: {}, True: MHA}

    plains = {key: plain(key[0], key[1], **options[key[2]]) for key in [*PLAIN, *SWEEP]}
    shareds = {
        key: [shared(256, key[0], 128, forest, **options[key[1]]) for forest in (False, True)]
        for key in [*SHARED, *GAINS]
    }
    prefills = {key: prefill(*key) for key in PREFILL}
    nothing = [
        dataclasses.replace(plain(256, 1024), what=f"nothing shared, forest {name}", forest=forest)
        for forest, name in ((False, "off"), (True, "on"))
    ]
    trees = tree_works()
    pair = shareds[2048, False]
    single = dataclasses.replace(pair[1], what="one launch of wide tiles, prefix 2048", one_list=True)
    works = [*plains.values(), *(w for pair in shareds.values() for w in pair), *prefills.values(), *nothing, *trees]
    works.append(single)
    if args.small:
        plains, shareds, prefills = {(4, 64, False): plain(4, 64)}, {}, {}
        works = [*plains.values(), *trees]
    started = time.perf_counter()
    works = list({work.what: work for work in works}.values())
    explained = [work.what for work in (*(shareds[key][1] for key in SHARED if key in shareds), *trees)]
    times, outputs, profiles = time_works(
        prepare(works, args.implementation), args.implementation, args.repeats, explained
    )
    seconds = {work.what: taken for work, taken in zip(works, times, strict=True)}
    print(f"timed {len(seconds)} works in {time.perf_counter() - started:.0f} s")

    rows = []
    for key, work in plains.items():
        batch, context, _ = key
        read = batch * context * work.num_kv_heads * work.head_dim * 4
        rates = [read / s / bandwidth for s in seconds[work.what]]
        goals = {"must": PLAIN[key], "aim": 0.97} if key in PLAIN else {}
        rows.append(Figure.median(f"{work.what} / copy bandwidth", rates, "x", better="higher", **goals))
    for key, (off, on) in shareds.items():
        gains = [a / b for a, b in zip(seconds[off.what], seconds[on.what], strict=True)]
        must, aim = SHARED.get(key, (None, None))
        what = f"shared ÷ plain, {on.what.removeprefix('shared ')}"
        rows.append(Figure.median(what, gains, "x", must=must, aim=aim, better="higher"))
        rows += [Figure.median(w.what, [s * 1e6 for s in seconds[w.what]], "µs") for w in (off, on)]
    if not args.small:
        root, *levels, every = (seconds[work.what] for work in trees)
        best = min([root, *levels], key=statistics.median)
        for what, other, must, aim in (("root-only sharing", root, 4, 5), ("best single level", best, 1.4, 1.6)):
            ratios = [a / b for a, b in zip(other, every, strict=True)]
            rows.append(Figure.median(f"tree: {what} ÷ all levels", ratios, "x", must=must, aim=aim, better="higher"))
        ratios = [b / a for a, b in zip(seconds[single.what], seconds[pair[1].what], strict=True)]
        rows.append(Figure.median("shared tiles beside own ones ÷ all as wide tiles in one launch", ratios, "x"))
        off, on = (seconds[work.what] for work in nothing)
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        rows.append(Figure.median("nothing shared: forest on ÷ forest off", ratios, "x", must=1.01, aim=1.0))
    for key, work in prefills.items():
        new, cached = key
        pairs = new * cached + new * (new + 1) // 2
        rates = [4 * work.head_dim * pairs * work.num_kv_heads * work.group / s / 1e12 for s in seconds[work.what]]
        rows.append(Figure.median(work.what, rates, "TFLOP/s", must=PREFILL[key], aim=420, better="higher"))
    what = "largest difference of outputs, shared and plain tiles, after 16 calls"
    pairs = [(outputs[off.what], outputs[on.what]) for off, on in shareds.values()]
    rows.append(Figure(what, max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0), ""))
    for num_seqs, must, aim in ((256, 2, 1), (1024, 6, 3)):
        what = f"host: tile plan from nothing, forest on, {num_seqs} sequences of 8192"
        rows.append(Figure.median(what, time_planning(num_seqs, args.implementation), "ms", must=must, aim=aim))
    rows += [Figure.median(work.what, [s * 1e6 for s in seconds[work.what]], "µs") for work in trees]
    rows += profiles
    if not args.small:
        write_results("kernels", rows, ceilings=ceilings, device=device_name())


if __name__ == "__main__":
    main()
