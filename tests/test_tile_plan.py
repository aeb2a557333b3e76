"""The tile plan against a count of every (token, position) pair, in capacities that hold every legal plan."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_jax.buckets import MAX_EXECUTABLES, Bucket, Tiling, make_buckets
from prefix_jax.forest import Costs, Run
from prefix_jax.step_batch import Batcher
from prefix_jax.tile_plan import RANGE_STEP, TilePlan, TileShape, run_pieces, tile_plan

TILINGS = [Tiling(4), Tiling(32), Tiling(8, 64, 32), Tiling(16, 528, 264), Tiling(1, 16, 16, max_splits=4)]


@st.composite
def plans(draw):
    """Settings of the buckets, whether they are a GPU's, and the chunks (row, start, length) of a legal plan."""
    max_num_seqs = draw(st.integers(1, 12))
    budget = draw(st.integers(max_num_seqs, 90))
    settings = max_num_seqs, budget, draw(st.sampled_from([1, 2])), draw(st.sampled_from(TILINGS))
    for_gpu = draw(st.booleans())
    chunks, left = [], draw(st.integers(1, budget))
    for row in draw(st.permutations(range(max_num_seqs))):
        if left:
            length = min(left, draw(st.sampled_from([1, 1, 2, 3, 5, 17, 33, 64])))
            chunks.append((row, draw(st.sampled_from([0, 1, 63, 64, 200, 255, 256, 700, 3000])), length))
            left -= length
    return settings, for_gpu, chunks


def drawn_bucket(settings, for_gpu, chunks) -> Bucket:
    return bucket_for(make_buckets(*settings, for_gpu=for_gpu), chunks)


def bucket_for(buckets: list[Bucket], chunks) -> Bucket:
    num_tokens = sum(length for _, _, length in chunks)
    num_prompts = sum(length > 1 for _, _, length in chunks)
    return Batcher(buckets, 1024, 4).bucket_of(len(chunks), num_tokens, num_prompts)


def plan_of(bucket: Bucket, chunks) -> TilePlan:
    rows, starts, lengths = np.array(chunks, np.int64).reshape(-1, 3).T
    return tile_plan(rows, starts, lengths, num_tokens=bucket.num_tokens, shapes=bucket.shapes)


def tiles_of_tokens(plan: TilePlan, num_tokens: int, shapes) -> list[list[tuple[int, ...]]]:
    """For each token what reads it: (start, end, row, partial, list), in position order; partial -1: none."""
    found = [[] for _ in range(num_tokens)]
    for number, (tiles, shape) in enumerate(zip(plan.lists, shapes, strict=True)):
        for n, r in zip(*np.nonzero(tiles.token < num_tokens), strict=True):
            partial = tiles.partial[n, r] if tiles.partial[n, r] < shape.partials else -1
            what = tiles.start[n], tiles.end[n], tiles.row[n], partial, number
            found[tiles.token[n, r]].append(tuple(int(value) for value in what))
    return [sorted(reads) for reads in found]


@given(plans())
@settings(max_examples=300, deadline=None)
def test_every_position_is_read_once_by_every_token_that_may_see_it(drawn):
    bucket, chunks = drawn_bucket(*drawn), drawn[-1]
    plan = plan_of(bucket, chunks)
    reads = tiles_of_tokens(plan, bucket.num_tokens, bucket.shapes)
    token = 0
    for row, start, length in chunks:
        for position in range(start, start + length):
            assert {read[2] for read in reads[token]} == {row}
            assert reads[token][0][0] == 0
            assert reads[token][-1][1] > position
            assert all(a[1] == b[0] for a, b in zip(reads[token], reads[token][1:], strict=False)), "no gap, no overlap"
            assert all(begin < end for begin, end, *_ in reads[token])
            assert all(begin % RANGE_STEP == 0 for begin, *_ in reads[token])
            assert reads[token][-1][1] <= start + length, "nothing behind the chunk, which nobody may have written"
            token += 1
    assert not any(reads[token:]), "padding is read by nobody"


@given(plans())
@settings(max_examples=300, deadline=None)
def test_partial_results_of_a_token_follow_one_another_and_are_its_own(drawn):
    bucket, chunks = drawn_bucket(*drawn), drawn[-1]
    plan = plan_of(bucket, chunks)
    reads = tiles_of_tokens(plan, bucket.num_tokens, bucket.shapes)
    merged = {}
    for i, token in enumerate(plan.merge.token.tolist()):
        ranges = zip(plan.merge.first[:, i].tolist(), plan.merge.count[:, i].tolist(), strict=True)
        merged[token] = [(n, p) for n, (first, count) in enumerate(ranges) for p in range(first, first + count)]
    cut = {token: [(read[4], read[3]) for read in tiles] for token, tiles in enumerate(reads) if len(tiles) > 1}
    assert merged == cut, "exactly the cut tokens are merged, in position order"
    assert len(merged) == len(plan.merge.token), "each once"
    ids = [partial for partials in merged.values() for partial in partials]
    assert len(set(ids)) == len(ids)
    assert all(0 <= partial < bucket.shapes[number].partials for number, partial in ids)
    assert all(tiles[0][3] == -1 for tiles in reads if len(tiles) == 1), "written to the token itself"


@given(plans())
@settings(max_examples=200, deadline=None)
def test_padding_tiles_are_empty(drawn):
    bucket, chunks = drawn_bucket(*drawn), drawn[-1]
    for tiles, shape in zip(plan_of(bucket, chunks).lists, bucket.shapes, strict=True):
        assert tiles.token.shape == tiles.partial.shape == (shape.tiles, shape.rows)
        padding = (tiles.token == bucket.num_tokens).all(axis=1)
        assert (tiles.token >= 0).all()
        assert (tiles.token <= bucket.num_tokens).all()
        for values in (tiles.row, tiles.start, tiles.end):
            assert values.shape == (shape.tiles,)
            assert (values[padding] == 0).all()
        assert (tiles.partial[tiles.token == bucket.num_tokens] == shape.partials).all()


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_how_a_range_is_cut_depends_on_the_bucket_and_the_range_alone(drawn, rng):
    bucket, chunks = drawn_bucket(*drawn), drawn[-1]
    chunk = rng.choice(chunks)
    alone = tiles_of_tokens(plan_of(bucket, [chunk]), bucket.num_tokens, bucket.shapes)[: chunk[2]]
    before = sum(length for _, _, length in chunks[: chunks.index(chunk)])
    among = tiles_of_tokens(plan_of(bucket, chunks), bucket.num_tokens, bucket.shapes)[before : before + chunk[2]]
    assert [[read[:3] for read in token] for token in alone] == [[read[:3] for read in token] for token in among]


@pytest.mark.parametrize("end", [1, 255, 256, 511, 512, 513, 1281, 4096, 8193, 100_000])
@pytest.mark.parametrize("splits", [1, 2, 5, 32])
def test_cut_ranges_are_long_enough_to_be_worth_it(end, splits):
    shape = TileShape(splits, 1, splits, partials=splits)
    plan = tile_plan(np.array([0]), np.array([end - 1]), np.array([1]), num_tokens=1, shapes=(shape,))
    reads = tiles_of_tokens(plan, 1, (shape,))[0]
    assert len(reads) <= splits
    assert all(stop - start >= shape.min_range for start, stop, *_ in reads[:-1])
    assert len(reads) > 1 or splits == 1 or end < 2 * shape.min_range


@pytest.mark.parametrize(
    ("prefix", "own", "sizes"),
    [
        (2048, 40, [512] * 4),  # in 40 positions nothing is gained
        (4096, 512, [1152, 896] * 2),  # every second one ends 256 positions earlier: half of 512
        (4096, 2048, [1536, 512] * 2),
        (4096, 4096, [2048] * 2),  # there would be no room for pieces that are 2048 positions shorter
        (4097 * 16, 512, [16512, 16256, 16512, 16272]),  # cut at whole steps of the kernel
        (2048, 4096, [1024] * 2),
        (512, 600, [256] * 2),  # none is below 256 positions
    ],
)
def test_shared_ranges_leave_room_to_own_ones_as_long_as_these_take(prefix, own, sizes):
    """Two rows in one tile, cut into four pieces, of which every second is shorter, or into two that are alike."""
    shapes = (
        TileShape(2, 1, partials=2),
        TileShape(8, 32, partials=99, shared_tiles=8, shared_partials=99, fill=4, spare=2, own_time=0.5),
    )
    run = Run(np.arange(2), 0, prefix // 16, gain=1.0)
    starts = np.full(2, prefix + own // 2 - 1)
    plan = tile_plan(np.arange(2), starts, np.ones(2, int), num_tokens=2, shapes=shapes, runs=[run], page_size=16)
    edges = np.cumsum([0, *sizes]).tolist()
    for token, reads in enumerate(tiles_of_tokens(plan, 2, shapes)):
        assert [read[:3] for read in reads] == [
            *((*piece, 0) for piece in itertools.pairwise(edges)), (prefix, prefix + own // 2, token),
        ]  # fmt: skip
        assert len({(read[3], read[4]) for read in reads}) == len(reads), "each has a partial result of its own"


@pytest.mark.parametrize("page_size", [8, 64, 256, 320, 384, 512, 1024])
def test_no_shared_range_is_empty_however_large_the_pages(page_size):
    """The partial result of a tile that reads nothing is merged, and nobody wrote it."""
    rng = np.random.default_rng(page_size)
    num_uneven = 0
    for _ in range(200):
        num_pages, own = rng.integers(2, max(60, 8000 // page_size)), rng.integers(1, 9000)
        fill, own_time = rng.integers(2, 33), rng.choice([0.07, 0.3])
        limits = {"shared_tiles": 64, "shared_partials": 999, "fill": int(fill), "own_time": float(own_time)}
        shapes = (TileShape(2, 1, partials=2), TileShape(64, 32, partials=999, **limits))
        run = Run(np.arange(2), 0, int(num_pages), gain=1.0)
        starts = np.full(2, num_pages * page_size + own - 1)
        num_uneven += run_pieces([run], starts, np.ones(2, int), shapes[1], page_size)[1].any()
        plan = tile_plan(
            np.arange(2), starts, np.ones(2, int), num_tokens=2, shapes=shapes, runs=[run], page_size=page_size
        )
        for reads in tiles_of_tokens(plan, 2, shapes):
            assert all(start < end for start, end, *_ in reads)
            assert reads[0][0] == 0 and reads[-1][1] == num_pages * page_size + own
            assert all(before[1] == after[0] for before, after in itertools.pairwise(reads))
        assert plan.merge.count[1].max(initial=0) == np.count_nonzero(plan.lists[1].end)
    assert num_uneven


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (1, 7), (3, 3), (8, 64), (5, 100)])
def test_the_fullest_plans_fit(tiling, max_num_seqs, budget):
    """All chunks of one token, all of two, one chunk of everything, and tiles that are each one token too long."""
    buckets = make_buckets(max_num_seqs, budget, 1, tiling)
    far = 10_000
    shapes = [[1] * max_num_seqs, [budget], [2] * min(max_num_seqs, budget // 2)]
    wide = [tiling.wide_rows + 1] * min(max_num_seqs, budget // (tiling.wide_rows + 1))
    shapes += [wide, [*wide, budget - sum(wide)]] if wide and len(wide) < max_num_seqs else [wide]
    for lengths in shapes:
        chunks = [(row, far, length) for row, length in enumerate(lengths) if length]
        if chunks:
            bucket = bucket_for(buckets, chunks)
            reads = tiles_of_tokens(plan_of(bucket, chunks), bucket.num_tokens, bucket.shapes)
            assert sum(map(bool, reads)) == sum(lengths)


def test_the_bucket_is_the_smallest_that_takes_the_plan():
    buckets = make_buckets(32, 512, 2, Tiling(64), step=8, smallest=16)
    assert [bucket.name for bucket in buckets] == [
        "decode_1", "decode_8", "decode_32", "mixed_16", "mixed_128", "mixed_512",
    ]  # fmt: skip
    assert Batcher(buckets, 32, 4).bucket_of(num_chunks=9, num_tokens=9).name == "decode_32"
    assert Batcher(buckets, 32, 4).bucket_of(num_chunks=9, num_tokens=17).name == "mixed_128"


def test_the_number_of_buckets_grows_with_the_logarithm():
    """C36: far too many shapes are compiled and start-up takes minutes (vllm#14510)."""
    tiling = Tiling(32, 528, 264, costs=Costs(32, 2.6, 200.0, 11.0, 1e4))
    for max_num_seqs, counts in ((256, [9, 3, 12]), (1024, [10, 5, 9]), (8, [2, 0, 9])):
        buckets = make_buckets(max_num_seqs, 8192, 8, tiling, for_gpu=True)
        assert [sum(bucket.kind == kind for bucket in buckets) for kind in ("decode", "shared", "mixed")] == counts
        assert len(buckets) <= MAX_EXECUTABLES
        assert len({bucket.name for bucket in buckets}) == len(buckets)
        assert max(bucket.packed_len for bucket in buckets) * 4 < 4 * 2**20, "one transfer of a few MB at most"
        if max_num_seqs > 8:  # a full engine and a prompt; and one that empties
            assert {f"mixed_{max_num_seqs * 3 // 2}", f"decode_{max_num_seqs * 3 // 4}"} < {b.name for b in buckets}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 32, 48, 256, 1024])
@pytest.mark.parametrize("budget", [1, 2, 16, 17, 24, 31, 32, 33, 48, 64, 320, 8192])
def test_a_gpu_has_a_bucket_for_every_number_of_tokens(max_num_seqs, budget):
    tiling = Tiling(32, 528, 264, costs=Costs(32, 2.6, 200.0, 11.0, 1e4))
    buckets = make_buckets(max_num_seqs, budget, 8, tiling, for_gpu=True)
    assert len({bucket.name for bucket in buckets}) == len(buckets)
    batcher = Batcher(buckets, max_num_seqs, 4)
    for num_tokens in range(2, budget + 1):
        assert batcher.bucket_of(num_chunks=1, num_tokens=num_tokens).num_tokens >= num_tokens
    for num_chunks in range(1, min(max_num_seqs, budget) + 1):
        assert batcher.bucket_of(num_chunks=num_chunks, num_tokens=num_chunks).num_samples >= num_chunks
        if 2 * num_chunks <= budget:
            bucket = batcher.bucket_of(num_chunks, 2 * num_chunks, num_prompts=num_chunks)
            assert bucket.num_prompts >= num_chunks


def test_a_small_step_of_one_prompt_has_few_empty_tiles():
    tiling = Tiling(32, 528, 132, 264, costs=Costs(32, 2.6, 200.0, 11.0, 1e4))
    batcher = Batcher(make_buckets(1024, 8192, 8, tiling, for_gpu=True), 1024, 4)
    one, two = (batcher.bucket_of(num_chunks=n, num_tokens=16, num_prompts=n) for n in (1, 2))
    assert (one.name, two.name) == ("mixed_16", "mixed_128"), "there is none between with so many sequences"
    assert one.shapes[1].tiles == 16 + 17, "of the prompt's own range, and of shared ones"
