"""The seam: what the device is told is what the plan says, and nothing that an earlier plan said."""

import random
from array import array

import numpy as np
import pytest
from fake_device import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_jax.buckets import Tiling, make_buckets
from prefix_jax.forest import Costs
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.request import Request, SamplingParams, Sequence
from prefix_jax.scheduler import Chunk, StepPlan
from prefix_jax.step_batch import Batcher


class Layout:
    """Sequences with private pages, laid out by one batcher."""

    def __init__(self, num_seqs=4, budget=32, page_size=4, max_pages=16, tiling=Tiling(4)):  # noqa: B008
        self.cache = PrefixCache(200, page_size)
        self.batcher = Batcher(make_buckets(num_seqs, budget, 1, tiling), num_seqs, max_pages)

    def sequence(self, tokens, row, seed=0, **sampling) -> Sequence:
        sequence = Sequence(Request("", tuple(tokens), SamplingParams(**sampling), 1000), 0, seed)
        sequence.table, sequence.row = self.cache.open(array("i", tokens), publishes=False), row
        assert self.cache.grow(sequence.table, len(tokens) + 1)
        return sequence

    def build(self, *chunks: Chunk, copies=()):
        batch = self.batcher.build(StepPlan(list(chunks), list(copies), sum(chunk.length for chunk in chunks)))
        return batch, {name: view.copy() for name, view in batch.bucket.unpack(batch.packed).items()}


def chunk(sequence, start, length, samples=True, from_device=False) -> Chunk:
    return Chunk(sequence, sequence.row, start, length, samples, from_device)


def test_tokens_positions_and_rows_of_mixed_chunks():
    layout = Layout()
    a, b = layout.sequence(range(10, 20), 2), layout.sequence(range(50, 53), 0)
    c = layout.sequence([7, 8], 3)
    batch, views = layout.build(chunk(a, 4, 6), chunk(b, 2, 1), chunk(c, 2, 1, from_device=True))
    assert batch.bucket.name == "mixed_16"
    pad = 16 - 8
    assert views["token"].tolist() == [14, 15, 16, 17, 18, 19, 52, 0] + [0] * pad
    assert views["source"].tolist() == [4] * 7 + [3] + [4] * pad, "the last token sampled in row 3"
    assert views["position"].tolist() == [4, 5, 6, 7, 8, 9, 2, 2] + [0] * pad
    assert views["row"].tolist() == [2] * 6 + [0, 3] + [4] * pad
    assert views["sample_row"].tolist() == [2, 0, 3, 4]
    assert views["sample_token"].tolist()[:3] == [5, 6, 7]
    assert views["sample_position"].tolist()[:3] == [10, 3, 3], "of the token that is sampled"


def test_a_chunk_that_does_not_reach_the_end_samples_nothing():
    layout = Layout()
    a, b = layout.sequence(range(10), 1), layout.sequence(range(3), 2)
    _, views = layout.build(chunk(a, 0, 5, samples=False), chunk(b, 0, 3))
    assert views["sample_row"].tolist() == [2, 4, 4, 4]
    assert views["sample_token"].tolist()[0] == 7


def test_padding_goes_to_the_scratch_row_and_the_scratch_page():
    """C33: negative padding indices wrap, so that padding writes into the last page (jax#29434)."""
    layout = Layout(num_seqs=5, budget=64)
    for count in range(1, 6):
        sequences = [layout.sequence([1, 2, 3], row) for row in range(count)]
        for length in (1, 3):
            batch, views = layout.build(*(chunk(sequence, 3 - length, length) for sequence in sequences))
            real = count * length
            assert (batch.packed[: 4 * batch.bucket.num_tokens] >= 0).all()
            assert (views["row"][real:] == 5).all()
            assert (views["position"][real:] == 0).all()
            assert (views["source"] == 5).all()
            assert (views["sample_row"][count:] == 5).all()
            assert ((views["change_index"] < 5 * 16) == (views["change_page"] > 0)).all()
            assert (views["change_index"][views["change_page"] == 0] == 5 * 16).all()
            assert all((views[f"{kind}.token"] >= 0).all() for kind in ("narrow",))


def test_an_empty_plan_is_a_step_of_padding():
    layout = Layout(tiling=Tiling(4, 32, 32))
    for bucket in layout.batcher.buckets:
        batch = layout.batcher.build(StepPlan(), bucket)
        views = bucket.unpack(batch.packed)
        assert (views["row"] == 4).all()
        assert (views["sample_row"] == 4).all()
        assert (views["narrow.token"] == bucket.num_tokens).all()
        assert (views["narrow.end"] == 0).all()


@pytest.mark.parametrize("tiling", [Tiling(4), Tiling(4, 32, 32)])
def test_every_field_of_the_packed_array_is_its_own(tiling):
    for bucket in make_buckets(7, 40, 2, tiling):
        packed = np.full(bucket.packed_len, -1, np.int32)
        for number, view in enumerate(bucket.unpack(packed).values()):
            assert (view == -1).all(), "no two fields overlap"
            view[...] = number
        assert (packed >= 0).all(), "no gap"
        assert [view.shape for view in bucket.unpack(packed).values()] == list(bucket.fields.values())
        assert [set(view.ravel()) for view in bucket.unpack(packed).values()] == [
            {n} for n in range(len(bucket.fields))
        ]


def sampling_of(views, k=0):
    temperature, top_p = (float(views[name][k : k + 1].view(np.float32)[0]) for name in ("temperature", "top_p"))
    return temperature, int(views["top_k"][k]), top_p, views["seed"][k].view(np.uint32).tolist()


def test_a_row_used_again_keeps_nothing_of_its_last_owner():
    """C45: a later request inherits the settings of the row it gets (vllm#43894)."""
    layout = Layout()
    first = layout.sequence([1, 2], 0, seed=(5 << 32) + 6, temperature=0.5, top_k=9, top_p=0.25)
    _, views = layout.build(chunk(first, 0, 2))
    assert sampling_of(views) == (0.5, 9, 0.25, [5, 6])
    plain = layout.sequence([1, 2], 0, seed=2**64 - 1)
    _, views = layout.build(chunk(plain, 0, 2))
    assert sampling_of(views) == (1.0, 0, 1.0, [2**32 - 1, 2**32 - 1])
    _, views = layout.build(chunk(layout.sequence([1, 2], 1, top_k=-1, temperature=0), 0, 2))
    assert sampling_of(views) == (0.0, 0, 1.0, [0, 0])


def test_two_hundred_steps_of_churn_mix_no_settings():
    """C45: rows are taken, left and moved to at random; each sample is drawn with its own request's settings."""
    rng, layout = random.Random(1), Layout(num_seqs=3)
    rows: list[Sequence | None] = [None] * 3
    for _ in range(200):
        for row in range(3):
            if rows[row] is None or rng.random() < 0.4:
                moved = rng.choice(rows)
                if moved is not None and rng.random() < 0.3:  # preempted, and resumed in another row
                    rows = [None if sequence is moved else sequence for sequence in rows]
                    moved.row, rows[row] = row, moved
                    continue
                if rows[row] is not None:
                    layout.cache.close(rows[row].table)
                k, seed = rng.randint(-1, 5), rng.getrandbits(64)
                rows[row] = layout.sequence([1, 2], row, seed=seed, temperature=rng.randint(0, 3), top_k=k, top_p=0.5)
        chosen = [sequence for sequence in rows if sequence is not None]
        rng.shuffle(chosen)
        _, views = layout.build(*(chunk(sequence, 1, 1) for sequence in chosen))
        for k, sequence in enumerate(chosen):
            sampling = sequence.request.sampling
            seed = [sequence.seed >> 32, sequence.seed % 2**32]
            assert views["sample_row"][k] == sequence.row
            assert sampling_of(views, k) == (sampling.temperature, max(0, sampling.top_k), 0.5, seed)


def test_table_changes_that_do_not_fit_come_before_the_step():
    layout = Layout(num_seqs=2, budget=32, max_pages=40)
    sequence = layout.sequence(range(100), 1)
    batch, views = layout.build(chunk(sequence, 99, 1))
    assert batch.bucket.num_tokens == 1
    assert batch.early_changes.shape == (2, 25)
    table = np.zeros((3, 40), np.int32)
    table.reshape(-1)[batch.early_changes[0]] = batch.early_changes[1]
    table.reshape(-1)[views["change_index"]] = views["change_page"]
    assert table[1, : len(sequence.table.pages)].tolist() == sequence.table.pages
    assert not table[0].any()
    batch, views = layout.build(chunk(sequence, 100, 1, from_device=True))
    assert batch.early_changes.shape == (2, 0)
    assert views["change_index"].tolist() == [2 * 40], "said once"


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([3, 16, 200]))
@settings(max_examples=25, deadline=None)
def test_the_device_always_knows_the_pages_of_what_it_computes(seed, page_size, budget):
    """FakeEngine compares the device's table with every planned sequence's after every step; rows, pages and overflow
    of changes (prompts found in the trie whole: one token to compute, many table entries) at random."""
    rng = random.Random(seed)
    engine = FakeEngine(60 // page_size, page_size, budget=budget, num_seqs=3, max_len=50)
    stem = [rng.randrange(3) for _ in range(45)]
    overflowed = []
    build = engine.batcher.build

    def watch(plan):
        batch = build(plan)
        overflowed.append(batch.early_changes.shape[1])
        return batch

    engine.batcher.build = watch
    for _ in range(12):
        engine.add([*stem[: rng.randint(1, 45)], rng.randrange(3)], rng.randint(1, 4))
    engine.run(2000)
    engine.check_outputs()
    if page_size == 1 and budget == 3:
        assert any(overflowed)


def sharing_layout():
    """Four sequences that decode over three shared pages of four positions; any run is taken for worth a tile."""
    costs = Costs(4, wide=0.5, tile=0.0, partial=0.0, launch=0.0, min_sequences=2)
    layout = Layout(num_seqs=5, tiling=Tiling(4, costs=costs))
    layout.batcher = Batcher(layout.batcher.buckets, 5, 16, page_size=4, costs=costs)
    sequences = [layout.sequence(range(14 + row), row) for row in range(4)]
    for sequence in sequences[1:]:
        sequence.table.pages[:3] = sequences[0].table.pages[:3]
    return layout, sequences


def readers_of_shared_tiles(batch, views) -> list[int]:
    if batch.bucket.kind != "shared":
        return []
    tokens = views["wide.token"][views["wide.end"] > views["wide.start"]].ravel().tolist()
    return sorted(token for token in tokens if token < batch.bucket.num_tokens)


def test_a_row_that_changes_hands_leaves_the_runs_of_the_row():
    """The new sequence's only token is the last of its prompt: the step looks like the one before."""
    layout, sequences = sharing_layout()
    step = lambda: layout.build(*(chunk(s, 13 + s.row, 1) for s in sequences))  # noqa: E731
    assert readers_of_shared_tiles(*step()) == [0, 1, 2, 3]
    assert readers_of_shared_tiles(*step()) == [0, 1, 2, 3]
    sequences[3] = layout.sequence(range(100, 117), 3)
    batch, views = step()
    assert readers_of_shared_tiles(batch, views) == [0, 1, 2]
    assert views["narrow.start"][:4].tolist() == [12, 12, 12, 0]


def test_a_row_joins_a_run_when_it_comes_to_see_its_pages_whole():
    layout, sequences = sharing_layout()
    late = layout.sequence(range(13), 4)
    late.table.pages[:3] = sequences[0].table.pages[:3]
    for position in (2, 3, 4, 5):  # from 4 on its first page lies behind it
        chunks = [chunk(s, 13 + s.row, 1) for s in sequences]
        batch, views = layout.build(*chunks, chunk(late, position, 1))
        assert readers_of_shared_tiles(batch, views).count(4) == (position >= 4)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_step_laid_out_from_the_last_one_is_laid_out_right(seed, shares):
    """Sequences come, decode for a while, end, are preempted and replaced in their rows, whatever they share."""
    rng = random.Random(seed)
    engine = FakeEngine(rng.choice([24, 60]), budget=24, num_seqs=5, max_len=40)
    costs = Costs(4, wide=0.4, tile=0.0, partial=0.0, launch=0.0, min_sequences=2) if shares else None
    tiling = Tiling(4, costs=costs, shared_programs=4, spare_programs=2, own_time=0.5)
    engine.batcher = Batcher(make_buckets(5, 24, 1, tiling), 5, 10, page_size=4, costs=costs)
    engine.device.batcher = engine.batcher
    again, kinds = engine.batcher._lay_out_again, []

    def compare(plan, decoded):
        views = again(plan, decoded)
        numbers = [(chunk.row, chunk.start, chunk.length, chunk.write_from) for chunk in plan.chunks]
        fresh = engine.batcher._lay_out(plan, decoded.bucket, *np.array(numbers, np.int64).T, decoded.runs)
        for name in decoded.bucket.fields:
            if not name.startswith("change_"):
                np.testing.assert_array_equal(views[name], fresh[name], name)
        kinds.append(decoded.bucket.kind)
        return views

    engine.batcher._lay_out_again = compare
    stem = [rng.randrange(5) for _ in range(16)]
    for _ in range(12):
        prompt = stem[: rng.choice([0, 8, 16])] + [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        engine.add(prompt, max_tokens=rng.randrange(4, 16))
        for _ in range(rng.randrange(8)):
            engine.step()
    engine.run(400)
    engine.check_outputs()
    assert "decode" in kinds if not shares else kinds


def test_runs_are_looked_for_once_also_when_pages_come_back():
    """Pages of an earlier batch go to other rows of the next: what their last owners left in the table is nobody's."""
    costs = Costs(4, wide=0.4, tile=0.0, partial=0.0, launch=0.0, min_sequences=2)
    engine = FakeEngine(60, budget=32, num_seqs=6, max_len=80)
    engine.batcher = Batcher(make_buckets(6, 32, 1, Tiling(4, costs=costs)), 6, 20, page_size=4, costs=costs)
    engine.device.batcher = engine.batcher
    find, counts = engine.batcher.find_runs, []
    engine.batcher.find_runs = lambda *args: counts.append(len(args[0])) or find(*args)
    looked = []
    for batch in range(4):
        counts.clear()
        for i in range(6):
            engine.add([batch] * 9 + [i] * (1 + i), max_tokens=30)
        engine.run(200)
        looked.append(counts.count(6))
        engine.cache.clear()
    assert looked == looked[:1] * 4 and looked[0] < 10, looked
    engine.check_outputs()
