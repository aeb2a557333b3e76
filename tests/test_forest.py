"""Runs of shared pages against all pairs of rows; plans with shared tiles against a count of each (token, position)."""

import dataclasses
import random

import numpy as np
import pytest
from fake_device import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_jax.buckets import Bucket, Tiling, make_buckets
from prefix_jax.forest import Costs, choose_runs, shared_runs
from prefix_jax.step_batch import Batcher
from prefix_jax.tile_plan import RANGE_STEP, TilePlan, tile_plan

EAGER = Costs(4, wide=1.1, tile=0.0, partial=0.0, launch=0.0, min_sequences=2)
TILINGS = [
    Tiling(4, costs=EAGER),
    Tiling(8, 64, 32, costs=dataclasses.replace(EAGER, wide_rows=8, wide=2.0, partial=9)),
]


def random_table(rng: np.random.Generator, num_rows: int, num_pages: int) -> np.ndarray:
    """Rows that copy a random head of an earlier row, then go on with pages of their own."""
    table = np.zeros((num_rows, num_pages), np.int32)
    fresh = iter(rng.permutation(num_rows * num_pages) + 1)
    for i in range(num_rows):
        kept = int(rng.integers(0, num_pages + 1)) if i and rng.random() < 0.8 else 0
        table[i, :kept] = table[rng.integers(0, max(i, 1)), :kept]
        table[i, kept:] = [next(fresh) for _ in range(num_pages - kept)]
    return table[rng.permutation(num_rows)]


def runs_of_pairs(table: np.ndarray, limits: np.ndarray) -> set[tuple[frozenset[int], int]]:
    """Every group of at least two rows that agree in so many leading columns, and in no more."""
    groups = {}
    for columns in range(1, table.shape[1] + 1):
        for i in np.flatnonzero(limits >= columns):
            same = [j for j in np.flatnonzero(limits >= columns) if (table[i, :columns] == table[j, :columns]).all()]
            if len(same) > 1:
                groups[frozenset(same)] = columns  # ever longer
    return set(groups.items())


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_runs_are_all_that_any_two_rows_share(seed, num_rows, num_pages):
    rng = np.random.default_rng(seed)
    table = random_table(rng, num_rows, num_pages)
    limits = rng.integers(0, num_pages + 1, num_rows)
    order, runs = shared_runs(table, limits)
    found = {(frozenset(order[begin:end].tolist()), columns) for begin, end, columns, _ in runs}
    assert found == runs_of_pairs(table, limits)
    assert len(found) == len(runs)
    for i, (begin, end, columns, children) in enumerate(runs):
        inside = [j for j, (b, e, c, _) in enumerate(runs) if begin <= b and e <= end and c > columns]
        outermost = [j for j in inside if not any(runs[k][0] <= runs[j][0] and runs[j][1] <= runs[k][1] and
                                                  runs[k][2] < runs[j][2] for k in inside)]  # fmt: skip
        assert sorted(children) == outermost
        assert all(j < i for j in children)


@st.composite
def settings_of_plans(draw):
    page_size = draw(st.sampled_from([1, 16, 128]))
    max_num_seqs = draw(st.integers(2, 16))
    budget = draw(st.integers(max_num_seqs, 90))
    num_pages = draw(st.integers(1, 40)) * (64 // min(page_size, 64))
    lengths, left = [], draw(st.integers(2, budget))
    sizes = [1] if draw(st.booleans()) else [1, 1, 2, 3, 7, 30]
    while left and len(lengths) < max_num_seqs:
        lengths.append(min(left, num_pages * page_size, draw(st.sampled_from(sizes))))
        left -= lengths[-1]
    return page_size, max_num_seqs, budget, num_pages, lengths, draw(st.integers(0, 1)), draw(st.integers(0, 2**32))


def shared_plan(page_size, max_num_seqs, budget, num_pages, lengths, tiling, seed):
    """A bucket, its costs, the chunks of a plan for it, and the page table of its rows."""
    rng, lengths, tiling = np.random.default_rng(seed), np.array(lengths), TILINGS[tiling]
    table = random_table(rng, len(lengths), num_pages)
    starts = rng.integers(0, num_pages * page_size - lengths + 1)
    rows = rng.permutation(max_num_seqs)[: len(lengths)]
    kind = "mixed" if lengths.sum() > len(lengths) else "shared"
    buckets = make_buckets(max_num_seqs, budget, 1, tiling)
    bucket = next(b for b in buckets if b.kind == kind and b.num_tokens >= lengths.sum())
    full_table = np.zeros((max_num_seqs, num_pages), np.int32)
    full_table[rows] = table
    return bucket, tiling.costs, rows, starts, lengths, full_table, page_size


def plan_of(bucket: Bucket, costs: Costs, rows, starts, lengths, table, page_size) -> tuple[TilePlan, list]:
    runs = choose_runs(
        table[rows], starts // page_size, lengths, page_size=page_size, costs=costs,
        max_tiles=bucket.shapes[-1].shared_tiles, max_partials=bucket.shapes[-1].shared_partials,
    )  # fmt: skip
    plan = tile_plan(
        rows, starts, lengths, num_tokens=bucket.num_tokens, shapes=bucket.shapes,
        runs=runs, page_size=page_size,
    )  # fmt: skip
    return plan, runs


@given(settings_of_plans())
@settings(max_examples=400, deadline=None)
def test_every_token_reads_each_of_its_positions_once_through_pages_of_its_own(drawn):
    made = shared_plan(*drawn)
    bucket, _, rows, starts, lengths, table, page_size = made
    plan, runs = plan_of(*made)
    row_of = np.repeat(rows, lengths)
    position = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    reads = np.zeros((len(position), table.shape[1] * page_size), int)
    ranges: list[list[tuple[int, ...]]] = [[] for _ in position]  # of each token: start, end, list, partial
    for number, (tiles, shape) in enumerate(zip(plan.lists, bucket.shapes, strict=True)):
        fields = (tiles.token, tiles.row, tiles.start, tiles.end, tiles.partial)
        for tokens, row, start, end, partials in zip(*fields, strict=True):
            for t, p in zip(tokens, partials, strict=True):
                if t == bucket.num_tokens:
                    assert p == shape.partials
                    continue
                reads[t, start:end] += 1
                columns = np.arange(start, end) // page_size
                assert (table[row, columns] == table[row_of[t], columns]).all()
                ranges[t].append((int(start), int(end), number, int(p) if p < shape.partials else -1))
    for t, p in enumerate(position):
        assert (reads[t, : p + 1] == 1).all()
        assert not reads[t, starts[np.searchsorted(np.cumsum(lengths), t, "right")] + lengths.max() :].any()
    merged = {}
    for i, t in enumerate(plan.merge.token.tolist()):
        counts = zip(plan.merge.first[:, i].tolist(), plan.merge.count[:, i].tolist(), strict=True)
        merged[t] = {(number, p) for number, (first, n) in enumerate(counts) for p in range(first, first + n)}
    for t, parts in enumerate(ranges):
        parts.sort()
        assert all(start % RANGE_STEP == 0 or start % page_size == 0 for start, *_ in parts)
        if len(parts) == 1:
            assert parts[0][3] == -1 and t not in merged
        else:
            assert {part[2:] for part in parts} == merged[t]
            for number in (0, 1):
                in_list = [p for _, _, n, p in parts if n == number]
                assert in_list == sorted(in_list), "in the order of positions"
    used = [part[2:] for parts in ranges for part in parts if part[3] >= 0]
    assert len(used) == len(set(used))
    if bucket.kind == "shared":
        assert all(part[3] >= 0 for parts in ranges for part in parts if part[2] == 1), "of cut tokens alone"
    for outer, inner in ((a, b) for i, a in enumerate(runs) for b in runs[i + 1 :]):
        both = set(outer.members) & set(inner.members)
        assert not both or (both == set(inner.members) and inner.first >= outer.last)


@given(settings_of_plans())
@settings(max_examples=100, deadline=None)
def test_with_nothing_shared_the_plan_is_the_plain_one(drawn):
    bucket, costs, rows, starts, lengths, table, page_size = shared_plan(*drawn)
    own = np.arange(table.size, dtype=np.int32).reshape(table.shape)
    plan, runs = plan_of(bucket, costs, rows, starts, lengths, own, page_size)
    plain = tile_plan(
        rows,
        starts,
        lengths,
        num_tokens=bucket.num_tokens,
        shapes=bucket.shapes,
    )
    assert not runs
    for ours, theirs in zip([*plan.lists, plan.merge], [*plain.lists, plain.merge], strict=True):
        for field in dataclasses.fields(ours):
            np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))


H200 = Costs(32, wide=2.6, tile=200.0, partial=11.0, launch=10_000.0)
ROOM = {"page_size": 16, "max_tiles": 200, "max_partials": 5000}


def tree(branches: list[int], columns: list[int], own: int) -> np.ndarray:
    """Rows under a tree: at each level so many branches, each with so many columns of its own."""
    num_rows, parts, page = int(np.prod(branches)), [], 1
    for level, width in enumerate([*columns, own]):
        groups = int(np.prod(branches[: level + 1])) if level < len(columns) else num_rows
        ids = page + np.arange(groups * width).reshape(groups, width)
        parts.append(np.repeat(ids, num_rows // groups, axis=0))
        page += groups * width
    return np.concatenate(parts, axis=1).astype(np.int32)


def chosen(table: np.ndarray, costs: Costs = H200, own: int = 1, **room):
    limits = np.full(len(table), table.shape[1] - own)
    return choose_runs(table, limits, np.ones(len(table), int), costs=costs, **ROOM | room)


def test_levels_nest():
    """512 -> 4 x 1024 -> 32 x 256 -> 256 rows, in positions."""
    runs = chosen(tree([1, 4, 8, 8], [32, 64, 16], own=4), own=4)
    assert [(len(run.members), run.first, run.last) for run in runs if len(run.members) > 8] == [(64, 0, 96)] * 4
    assert [(run.first, run.last) for run in runs if len(run.members) == 8] == [(96, 112)] * 32
    wider = chosen(
        tree([1, 4, 8, 8], [32, 64, 16], own=4), dataclasses.replace(H200, wide_rows=128, partial=2.8), own=4
    )
    assert [(len(run.members), run.first, run.last) for run in wider if len(run.members) > 64] == [(256, 0, 32)], (
        "worth a level where the tiles below it would not be full"
    )


def test_a_short_root_is_left_to_the_runs_below_it():
    runs = chosen(tree([1, 4, 16], [1, 64], own=4), own=4)
    assert [(len(run.members), run.first, run.last) for run in runs] == [(16, 0, 65)] * 4


@pytest.mark.parametrize(
    ("num_rows", "columns", "worth"), [(2, 4096, False), (3, 64, True), (3, 8, False), (64, 1, False), (64, 2, True)]
)
def test_what_is_worth_a_tile(num_rows, columns, worth):
    """Two rows read alone are cheaper than a wide tile; few columns do not pay for a partial result of each row."""
    assert bool(chosen(tree([1, num_rows], [columns], own=1))) == worth


def test_what_does_not_fit_goes_to_the_runs_that_gain_less_last():
    table = tree([2, 30], [64], own=2)
    table[30:, 16:64] = np.arange(30 * 48, dtype=np.int32).reshape(30, 48) + 100_000  # share 16 columns only
    assert [(len(run.members), run.last) for run in chosen(table, own=2)] == [(30, 16), (30, 64)]
    assert [(len(run.members), run.last) for run in chosen(table, own=2, max_tiles=1)] == [(30, 64)]
    assert [(len(run.members), run.last) for run in chosen(table, own=2, max_partials=59)] == [(30, 64)]
    assert chosen(table, own=2, max_partials=29) == []


def test_chunks_that_fill_their_own_tiles_share_nothing():
    """128 tokens are four full tiles; of four tiles of 104 a quarter is empty, which pays for 104 partial results only
    where much is shared; eight tokens alone leave most of a tile empty."""
    lengths = np.array([1, 1, 1, 1, 128, 104, 8])
    for columns, members in ((37, [0, 1, 2, 3, 6]), (512, [0, 1, 2, 3, 5, 6])):
        table = tree([1, 7], [columns], own=9)
        (run,) = choose_runs(table, np.full(7, columns), lengths, costs=H200, **ROOM)
        assert run.members.tolist() == members


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_kept_runs_are_what_a_fresh_look_finds(seed):
    """Sequences that share prefixes come, decode, end, are preempted and replaced in their rows; what was kept from the
    step before is never another's."""
    rng = random.Random(seed)
    engine = FakeEngine(rng.choice([24, 60]), budget=24, num_seqs=5, max_len=40)
    costs = Costs(4, wide=0.4, tile=0.0, partial=0.0, launch=0.0, min_sequences=2)
    engine.batcher = Batcher(make_buckets(5, 24, 1, Tiling(4, costs=costs)), 5, 10, page_size=4, costs=costs)
    engine.device.batcher = engine.batcher
    build, seen = engine.batcher.build, []

    def watch(plan):
        batch = build(plan)
        table = np.zeros((len(plan.chunks), 10), np.int32)
        for i, chunk in enumerate(plan.chunks):
            pages = chunk.sequence.table.pages
            table[i, : len(pages)] = pages
        runs = engine.batcher.runs if batch.bucket.kind != "decode" and len(plan.chunks) > 1 else []
        for run in runs:
            assert (table[run.members, : run.last] == table[run.members[0], : run.last]).all()
            assert all(run.last * 4 <= plan.chunks[i].start for i in run.members)
        if plan.num_tokens == len(plan.chunks) > 1:
            room = engine.batcher.bucket_of(len(table), len(table), shares=True).shapes[-1]
            fresh = choose_runs(
                table, np.array([chunk.start // 4 for chunk in plan.chunks]), np.ones(len(table), int), page_size=4,
                costs=costs, max_tiles=room.shared_tiles, max_partials=room.shared_partials,
            )  # fmt: skip
            assert [(r.members.tolist(), r.first, r.last) for r in runs] == [
                (r.members.tolist(), r.first, r.last) for r in fresh
            ]
            seen.append(len(runs))
        return batch

    engine.batcher.build = watch
    stems = [[rng.randrange(5) for _ in range(16)] for _ in range(2)]
    for _ in range(12):
        prompt = rng.choice(stems)[: rng.choice([4, 8, 12, 16])] + [
            rng.randrange(5) for _ in range(rng.randrange(1, 4))
        ]
        engine.add(prompt, max_tokens=rng.randrange(1, 16))
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.run(400)
    assert any(seen)
