"""The device half: what is compiled and when, what is donated, what the device knows of pages, what lowers where."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    SMALL,
    WIDE,
    cached_of,
    check_greedy,
    compiling_once,
    generate,
    greedy,
    make_llm,
    random_prompts,
    tiny_folder,
)
from test_kernel_lowering import an_h200
from tiny_models import tiny_config

from prefix_jax import LLM, tiling
from prefix_jax.engine import default_max_num_seqs
from prefix_jax.forest import Costs
from prefix_jax.kv_store import copy_pages, make_kv_store
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.runner import CHANGE_GROUP, COPY_GROUPS, Runner


@pytest.fixture
def unstarted(monkeypatch):
    """Makes an LLM whose buckets are not compiled."""
    monkeypatch.setattr(Runner, "_warm_up", lambda self, use_tqdm: None)
    return lambda folder, **options: LLM(folder, use_tqdm=False, **options)


# At the start ---------------------------------------------------------------------------------------------------------


def test_every_bucket_is_compiled_at_the_start_with_a_bar_to_watch(capsys):
    with compiling_once():
        llm = LLM(tiny_folder(), use_tqdm=True, **SMALL)
    names = ["decode_1", "decode_8", "mixed_16", "mixed_64"]
    assert sorted(llm.engine.runner.steps) == names == sorted(bucket.name for bucket in llm.engine.batcher.buckets)
    assert llm.stats["num_buckets"] == 4 and llm.stats["warmup_seconds"] > 0
    shown = capsys.readouterr().err
    assert "compiling" in shown and "4/4" in shown
    for slots in jax.tree.leaves(llm.engine.runner.store):
        assert not np.asarray(slots[llm.engine.config.page_size :]).any(), "warming up writes to the scratch page alone"
    assert not np.asarray(llm.engine.runner.page_table)[:-1].any()


def test_a_start_without_a_bar_is_silent(capsys):
    with compiling_once():
        LLM(tiny_folder(), use_tqdm=False, **SMALL)
    assert capsys.readouterr() == ("", "")


def test_the_pool_is_what_was_asked_for_or_what_all_rows_can_use(unstarted):
    """A small model grabs everything, or an explicit limit is not kept: tpu-inference#3408, vllm#54383 (C40)."""
    options = {"max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 8}
    assert unstarted(tiny_folder(), num_pages=5, **options).stats["num_pages"] == 5
    llm = unstarted(tiny_folder(), **options)
    assert llm.stats["num_pages"] == 21, "3 rows of 7 pages"
    for keys, values in llm.engine.runner.store:
        assert keys.shape == values.shape == (22 * 16, 2, 16)


# Through the steps ----------------------------------------------------------------------------------------------------


def test_the_store_is_never_copied():
    """Every step writes in place: the same memory before and after, and the arrays of before are gone."""
    llm = make_llm()
    runner, seen = llm.engine.runner, []
    (stem,) = random_prompts(0, 90)
    dispatch = runner.dispatch

    def watch(batch):
        before = [*jax.tree.leaves(runner.store), runner.page_table]
        jax.block_until_ready(before)
        places = [array.unsafe_buffer_pointer() for array in before]
        tokens = dispatch(batch)
        after = [*jax.tree.leaves(runner.store), runner.page_table]
        jax.block_until_ready(after)
        assert all(array.is_deleted() for array in before)
        assert [array.unsafe_buffer_pointer() for array in after] == places
        seen.append((batch.bucket.name, len(batch.copies)))
        return tokens

    runner.dispatch = watch
    try:
        generate(llm, [stem, *random_prompts(1, 3, 70)])
        generate(llm, [stem[:37] + tail for tail in random_prompts(2, *range(1, 9))])
        generate(llm, random_prompts(2, 10))
    finally:
        del runner.dispatch
    names, copies = zip(*seen, strict=True)
    assert {"decode_8", "mixed_16", "mixed_64"} <= set(names) and max(copies) > 0


def test_the_device_knows_the_pages_of_every_running_row():
    """After each step, whatever changed: growth, hits, pages taken over, rows that changed hands."""
    llm = make_llm()
    engine = llm.engine
    dispatch, early = engine.runner.dispatch, []

    def watch(batch):
        tokens = dispatch(batch)
        known = np.asarray(engine.runner.page_table)
        for sequence in engine.scheduler.running:
            if sequence.planned_step == engine.cache.step:
                assert known[sequence.row, : len(sequence.table.pages)].tolist() == sequence.table.pages
        early.append(batch.early_changes.shape[1])
        return tokens

    engine.runner.dispatch = watch
    try:
        (stem,) = random_prompts(3, 240)
        generate(llm, [stem])
        again = generate(llm, [stem], greedy(2))  # 15 pages at once, for a step of one token
        generate(llm, random_prompts(4, *range(1, 40, 3)))
        generate(llm, [stem[: 10 * i] for i in range(1, 24)])
    finally:
        del engine.runner.dispatch
    assert cached_of(again) == [239]
    assert 0 < max(early) <= CHANGE_GROUP


@pytest.mark.parametrize("sizes", [COPY_GROUPS, COPY_GROUPS[:1]], ids=["one large launch", "many launches"])
def test_more_pages_are_copied_in_a_step_than_a_small_launch_takes(sizes, monkeypatch):
    llm = make_llm(**WIDE)
    compiled = llm.engine.runner._copy_pages
    assert tuple(compiled) == COPY_GROUPS
    monkeypatch.setattr(llm.engine.runner, "_copy_pages", {size: compiled[size] for size in sizes})
    (stem,) = random_prompts(5, 64)
    generate(llm, [stem], greedy(1))
    count = 2 * COPY_GROUPS[0] + 3
    copies, dispatch = [], llm.engine.runner.dispatch
    llm.engine.runner.dispatch = lambda batch: (copies.append(len(batch.copies)), dispatch(batch))[1]
    try:
        outputs = generate(llm, [[*stem[:40], 4 + i] for i in range(count)], greedy(4))
    finally:
        del llm.engine.runner.dispatch
    assert 2 * COPY_GROUPS[0] < max(copies) < COPY_GROUPS[1]
    assert all(cached >= 40 - (stem[40] == 4 + i) for i, cached in enumerate(cached_of(outputs)))
    check_greedy(outputs)


def test_reset_forgets_every_page(monkeypatch):
    llm = make_llm()
    generate(llm, random_prompts(6, 50))
    old = llm.engine.runner.store
    assert any(np.asarray(slots).any() for slots in jax.tree.leaves(old))
    runner = llm.engine.runner

    def make_with_room_for_one(*args):
        assert runner.store is None, "the device has no room for two stores"
        return make_kv_store(*args)

    monkeypatch.setattr("prefix_jax.kv_store.make_kv_store", make_with_room_for_one)
    runner.reset()
    assert not any(np.asarray(slots).any() for slots in jax.tree.leaves(llm.engine.runner.store))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), old) == jax.tree.map(
        lambda x: (x.shape, x.dtype), llm.engine.runner.store
    )
    llm.reset_prefix_cache()


# Without the device ---------------------------------------------------------------------------------------------------


def num_aliased(text: str) -> int:
    return text.count("tf.aliasing_output") + text.count("jax.buffer_donor")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_the_step_with_xla_attention_lowers_everywhere(platform, unstarted):
    llm = unstarted(
        tiny_folder(), num_pages=8, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, attention="xla"
    )
    for bucket in llm.engine.batcher.buckets:
        text = llm.engine.runner.lower(bucket, 8, (platform,)).as_text()
        assert num_aliased(text) == 5 + 10, "keys and values of two layers, the page table, and all rules are donated"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [{"group": 2, "head_dim": 64}, {"group": 4, "head_dim": 128}], ids=str)
def test_the_step_with_the_kernel_lowers_for_cuda(model, dtype, unstarted):
    llm = unstarted(
        tiny_folder(**model), dtype=dtype, num_pages=8, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        attention="pallas",
    )  # fmt: skip
    buckets = llm.engine.batcher.buckets
    chosen = [min(buckets, key=lambda b: b.num_tokens), max(buckets, key=lambda b: (b.kind == "mixed", b.num_tokens))]
    assert [bucket.kind for bucket in chosen] == ["decode", "mixed"] and chosen[0].merges
    for bucket in chosen:
        with an_h200():
            text = llm.engine.runner.lower(bucket, 8, ("cuda",)).as_text()
        assert num_aliased(text) >= 5 + 10
        calls = [line for line in text.splitlines() if "triton_kernel_call" in line or "__gpu$xla.gpu.triton" in line]
        names = ("draw", "lowest_kept", "merge")
        assert all(any(name in line for line in calls) for name in names)
        assert len(calls) > len(names)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_copying_pages_copies_pages_and_not_the_store(num_kv_heads):
    """Nor to another layout, where the heads are one."""
    store = make_kv_store(LlamaConfig.from_hf(tiny_config(num_key_value_heads=num_kv_heads)), 500, 4, jnp.float32)
    index = jax.ShapeDtypeStruct((16,), jnp.int32)
    jitted = jax.jit(functools.partial(copy_pages, page_size=4), donate_argnums=0)
    memory = jitted.lower(store, index, index).compile().memory_analysis()
    assert memory.temp_size_in_bytes < store[0][0].nbytes, "the read is not fused into the write"
    assert memory.alias_size_in_bytes == sum(slots.nbytes for layer in store for slots in layer)
    targets, sources = jnp.array([3, 7] + [0] * 14), jnp.array([9, 3] + [0] * 14)
    filled = jax.tree.map(lambda slots: jnp.arange(slots.size, dtype=slots.dtype).reshape(slots.shape), store)
    before = np.asarray(filled[1][0]).reshape(501, 4, -1)
    after = np.asarray(jitted(filled, sources, targets)[1][0]).reshape(501, 4, -1)
    np.testing.assert_array_equal(after[[3, 7]], before[[9, 3]], "every source is read before any target is written")
    np.testing.assert_array_equal(np.delete(after, [3, 7], 0), np.delete(before, [3, 7], 0))


def test_buckets_of_a_gpu_give_the_same_answers(monkeypatch):
    """Many prompts in a step, a few, one, and none; decoding that ends row by row; hits of full pages, and of heads."""
    monkeypatch.setattr(tiling, "is_compiled", lambda implementation: True)
    monkeypatch.setattr(tiling, "_shared_costs", lambda config, dtype, rows: Costs(rows, 2.6, 0.0, 0.0, 0.0))
    sizes = {"max_num_seqs": 40, "max_num_batched_tokens": 160, "max_model_len": 256, "num_pages": 256}
    llm = make_llm(attention="xla", page_size=4, forest=True, **sizes)
    names, build = set(), llm.engine.batcher.build
    llm.engine.batcher.build = lambda plan: names.add((batch := build(plan)).bucket.name) or batch
    try:
        (stem,) = random_prompts(6, 150)
        outputs = generate(llm, random_prompts(7, *range(1, 40)), [greedy(1 + i) for i in range(39)])
        outputs += generate(llm, [stem], greedy(2))
        again = generate(llm, [[*stem, 5 + i] for i in range(20)], greedy(3))
        several = generate(llm, [[*stem, 5, 6], [*stem, 7, 8, 9]], greedy(2))
    finally:
        del llm.engine.batcher.build
    assert (cached_of(again), cached_of(several)) == ([148] * 20, [151, 151])
    check_greedy([*outputs, *again, *several])
    decode, mixed = (
        {"decode_1", "decode_8", "decode_16", "decode_32"},
        {"mixed_16", "mixed_64", "mixed_128", "mixed_160"},
    )
    assert decode | mixed | {"shared_40"} <= names, names


@pytest.mark.parametrize(("on_gpu", "stats", "number"), [
    (True, {"bytes_limit": 104 * 2**30}, 1024), (True, {"bytes_limit": 60 * 10**9}, 1024),
    (True, {"bytes_limit": 30 * 10**9}, 256), (True, None, 256), (False, None, 32),
])  # fmt: skip
def test_as_many_sequences_as_the_memory_suggests(on_gpu, stats, number, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert default_max_num_seqs(on_gpu) == number
