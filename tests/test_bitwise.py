"""Attention whose bits depend on the sequence alone: however it is chunked, whatever it shares, whoever runs beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, generate, greedy, make_llm, random_prompts, tokens_of

from pallas_kernels import paged_attention
from prefix_jax.buckets import Bucket, Tiling, make_buckets
from prefix_jax.forest import Costs, Run, choose_runs
from prefix_jax.step import batch_merge, batch_tiles
from prefix_jax.tile_plan import TilePlan, tile_plan

PAGE, FIXED, LENGTH = 16, 128, 600
COSTS = Costs(8, wide=1.0, tile=0.0, partial=0.0, launch=0.0, min_sequences=2, step=FIXED // PAGE)
BUCKETS = make_buckets(8, 64, 2, Tiling(8, max_splits=5, costs=COSTS, fixed=FIXED))
DECODE, MIXED = (next(b for b in BUCKETS if (b.kind, b.num_tokens) == what) for what in (("decode", 8), ("mixed", 64)))


def plan_of(bucket: Bucket, chunks, runs=()) -> TilePlan:
    rows, starts, lengths = np.array(chunks, np.int64).T
    return tile_plan(
        rows, starts, lengths, num_tokens=bucket.num_tokens, shapes=bucket.shapes, runs=runs, page_size=PAGE
    )


def shared_table(num_rows: int, shared: int) -> np.ndarray:
    """Rows that share so many leading pages."""
    columns = -(-LENGTH // PAGE)
    table = 1 + np.arange(num_rows * columns, dtype=np.int32).reshape(num_rows, columns)
    table[:, :shared] = table[0, :shared]
    return table


def runs_of(table, chunks) -> list[Run]:
    _, starts, lengths = np.array(chunks).T
    return choose_runs(table, starts // PAGE, lengths, page_size=PAGE, costs=COSTS, max_tiles=40, max_partials=500)


@functools.cache
def slots() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((8 * 40 * PAGE, 2, 32)), jnp.float32) for _ in range(2))


@functools.cache
def attend(bucket: Bucket, implementation: str):
    return jax.jit(functools.partial(paged_attention, page_size=PAGE, implementation=implementation))


def attention(bucket: Bucket, chunks, table, runs, q_of, implementation: str) -> dict[tuple[int, int], bytes]:
    """The bits of each (row, position)."""
    places = [(row, p) for row, start, length in chunks for p in range(start, start + length)]
    plan = plan_of(bucket, chunks, runs)
    views = bucket.unpack(np.zeros(bucket.packed_len, np.int32))
    bucket.fill_tiles(plan, views)
    batch = {name: jnp.asarray(view) for name, view in views.items()}
    positions = np.zeros(bucket.num_tokens, np.int32)
    positions[: len(places)] = [p for _, p in places]
    q = np.zeros((bucket.num_tokens, 4, 32), np.float32)
    q[: len(places)] = [q_of[place] for place in places]
    out = attend(bucket, implementation)(
        jnp.asarray(q), *slots(), jnp.asarray(positions), jnp.asarray(table),
        batch_tiles(batch, bucket), batch_merge(batch, bucket),
    )  # fmt: skip
    return {place: np.asarray(out[i]).tobytes() for i, place in enumerate(places)}


@pytest.mark.parametrize("implementation", ["pallas_interpret", "xla"])
def test_bits_depend_on_the_sequence_alone(implementation):
    table = shared_table(8, shared=20)
    rng = np.random.default_rng(1)
    q_of = {(row, p): rng.standard_normal((4, 32)) for row in range(8) for p in range(LENGTH)}
    chunks = [(row, 500 + 7 * row, 1) for row in range(8)]
    runs = runs_of(table, chunks)
    assert [(run.first, run.last) for run in runs] == [(0, 16)], "whole multiples of the fixed cut"
    compare = functools.partial(attention, table=table, q_of=q_of, implementation=implementation)
    plain = compare(DECODE, chunks, runs=[])
    assert compare(DECODE, chunks, runs=runs) == plain, "what is shared makes no difference"
    alone = compare(DECODE, chunks[3:4], runs=[])
    assert alone.items() <= plain.items(), "nor do neighbours"
    (long,) = ([(3, 495, 64)],)
    whole = compare(MIXED, long, runs=[])
    assert whole[3, 521] == plain[3, 521], "nor the bucket, nor the chunk"
    parts = [compare(MIXED, [(3, 495, 30)], runs=[]), compare(MIXED, [(3, 525, 34), (0, 511, 9)], runs=[])]
    assert {place: bits for part in parts for place, bits in part.items() if place[0] == 3} == whole


def test_an_engine_runs_on_fixed_tiles():
    prompts = [[*random_prompts(5, 40)[0], *tail] for tail in random_prompts(6, 3, 9, 17)]
    want = tokens_of(generate(make_llm(**TINY), prompts, greedy(6)))
    llm = make_llm(**TINY, bitwise=True)
    assert all(len(bucket.shapes) == 1 and bucket.shapes[0].fixed for bucket in llm.engine.batcher.buckets)
    assert tokens_of(generate(llm, prompts, greedy(6))) == want
