"""A model on several devices says what it says on one: eight of the host's threads stand for them."""

import contextlib
import dataclasses
import random
import re
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_checkpoint import convert
from engines import (
    TINY,
    branches,
    cached_of,
    check_alone,
    check_greedy,
    compiling_once,
    family,
    forget,
    generate,
    greedy,
    make_llm,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from flax import nnx
from host_memory import peak_of_loading
from jax.sharding import Mesh
from test_goldens import write_family
from tiny_models import tiny_baichuan, tiny_config, tiny_weights, write_checkpoint, write_tiny_model

from pallas_kernels import Tiles, paged_attention
from prefix_jax import LLM, SamplingParams, tiling, weights
from prefix_jax.kv_store import make_kv_store, page_bytes
from prefix_jax.models import llama
from prefix_jax.models.llama import Llama, LlamaConfig
from prefix_jax.models.split import AXIS, EVERYWHERE, Split, on_each
from prefix_jax.runner import PAGE, Runner
from prefix_jax.weights import load_model, read_config

HERE = Path(__file__).parent
NUMS = (2, 4, 8)
EIGHT_HEADS = {"group": 4, "num_kv_heads": 2}


def mesh_of(num: int, first: int = 0) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + num]), (AXIS,))


OPTIONS = {"page_size": 4, "num_pages": 64, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def parallel(num: int, **options) -> LLM:
    """All with the same executables for as many devices."""
    return make_llm(tiny_folder(**EIGHT_HEADS), **{**OPTIONS, "tensor_parallel_size": num, **options})


@contextlib.contextmanager
def fewer_pages(llm: LLM, num_pages: int):
    pool = llm.engine.cache.pool
    pool.free[:] = [page for page in pool.free if page <= num_pages]
    pool.num_pages = num_pages
    yield
    llm.engine.start_over()


# The engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", NUMS)
def test_the_tokens_and_the_hits_are_those_of_one_device(num):
    """Chunks, hits exact to the token, copies of pages' heads; alone and together. KV heads are fewer than the devices,
    or as many: transformers#48307, sglang#20967 (C71)."""
    folder, one, llm = tiny_folder(**EIGHT_HEADS), parallel(1), parallel(num)
    assert check_alone(llm, family(0), folder=folder) == check_alone(one, family(0), folder=folder)
    results = []
    for engine in (one, llm):
        forget(engine)
        outputs = generate(engine, [*family(1), *random_prompts(2, 3, 70, 17)], greedy(12))
        results.append((tokens_of(outputs), cached_of(outputs), engine.stats["cached_tokens"]))
    assert results[0] == results[1]
    assert llm.engine.runner.fingerprint == one.engine.runner.fingerprint


@pytest.mark.parametrize("num", [2, 8])
def test_pages_that_are_evicted_and_sequences_that_are_preempted(num):
    prompts, results = branches(random.Random(5), 5, 16, 0.3), []
    for llm in (parallel(1), parallel(num)):
        with fewer_pages(llm, 16):
            outputs = generate(llm, prompts, greedy(16))
            counts = [llm.stats[name] for name in ("preemptions", "evicted_pages")]
        assert min(counts) > 0
        results.append((tokens_of(outputs), cached_of(outputs), counts))
    assert results[0] == results[1]
    check_greedy(outputs, tiny_folder(**EIGHT_HEADS))


@pytest.mark.parametrize("attention", ["xla", pytest.param("pallas_interpret", marks=pytest.mark.slow)])
def test_shared_pages_read_once(attention, monkeypatch):
    """Shared tiles run on each device's heads; so do all kernels."""
    (stem,) = random_prompts(7, 40)
    prompts, results = [stem + tail for tail in random_prompts(8, *range(1, 9))], []
    options = {"max_num_seqs": 8}
    costs, cheap = tiling._shared_costs, {"wide": 0.6, "tile": 0.0, "partial": 0.0, "launch": 0.0, "min_sequences": 2}
    monkeypatch.setattr(tiling, "_shared_costs", lambda *args: dataclasses.replace(costs(*args), **cheap))
    for num in (1, 2):
        llm = parallel(num, **options, forest=True, attention=attention)
        kinds, dispatch = [], llm.engine.runner.dispatch

        def watch(batch, kinds=kinds, dispatch=dispatch):
            kinds.append(batch.bucket.kind)
            return dispatch(batch)

        monkeypatch.setattr(llm.engine.runner, "dispatch", watch)
        outputs = generate(llm, prompts, greedy(6))
        assert kinds.count("shared") > 3
        results.append((tokens_of(outputs), cached_of(outputs), kinds))
    assert results[0] == results[1]


@pytest.mark.parametrize("num", [2, 8])
def test_samples_rules_and_logprobs(num):
    """Each device draws the same tokens from the same logits."""
    prompts = family(3)
    params = [
        greedy(8, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=8),
        SamplingParams(temperature=1.5, top_p=0.8, top_k=50, seed=2, max_tokens=8, logprobs=1),
        SamplingParams(temperature=0.7, min_p=0.05, seed=3, max_tokens=8, presence_penalty=1.0),
        greedy(8, repetition_penalty=1.3, frequency_penalty=0.5),
        greedy(8, logit_bias={7: 30.0, 299: 20.0}, bad_words=[], min_tokens=4),
        greedy(8, allowed_token_ids=[5, 150, 299]),
        SamplingParams(temperature=1.0, seed=4, max_tokens=8),
    ]
    results = []
    for engine in (parallel(1), parallel(num)):
        outputs = generate(engine, prompts, params)
        results.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        entries = [*outputs[0].prompt_logprobs[1:], *outputs[0].outputs[0].logprobs]
        results.append([sorted((token, found.logprob) for token, found in entry.items()) for entry in entries])
    assert results[0] == results[2]
    np.testing.assert_allclose(*([pair for entry in found for pair in entry] for found in results[1::2]), atol=1e-4)


@pytest.mark.parametrize(
    ("saves", "loads", "kv_dtype"),
    [(1, 2, None), (8, 1, None), (2, 8, None), (1, 8, "float8_e4m3fn"), (8, 1, "float8_e4m3fn")],
)
def test_prefixes_saved_on_one_mesh_are_found_on_another(saves, loads, kv_dtype, tmp_path):
    (text,) = random_prompts(4, 50)
    one, other = (parallel(num, kv_dtype=kv_dtype) for num in (saves, loads))
    saved = one.prefixes.add(text, name="text").warm()
    want = generate(one, [[*text, 9]], greedy(6))
    one.prefixes.save(tmp_path)
    (loaded,) = other.prefixes.load(tmp_path)
    assert loaded.tokens == saved.tokens
    got = generate(other, [[*text, 9]], greedy(6))
    assert tokens_of(got) == tokens_of(want) and cached_of(got) == [48]
    if kv_dtype is None:
        check_greedy(got, tiny_folder(**EIGHT_HEADS))


@pytest.mark.parametrize(("num", "memory"), [(2, "unpinned"), (8, "unpinned"), (8, "pinned")])
def test_pages_come_back_from_host_memory(num, memory, monkeypatch):
    one, llm = parallel(1, host_memory_gib=0.001), parallel(num, host_memory_gib=0.001)
    runner = llm.engine.runner
    if memory == "pinned":
        monkeypatch.setitem(runner.__dict__, "host_memory", runner._placed(PAGE, memory_kind="pinned_host"))
    prompts, results = random_prompts(1, 40, 40, 40), []
    for engine in (one, llm):
        with fewer_pages(engine, 16):
            outputs = [generate(engine, [prompt], greedy(4))[0] for prompt in prompts * 2]
            assert cached_of(outputs) == [0, 0, 0, 36, 36, 36] and engine.stats["host_hit_pages"] > 15
        results.append(tokens_of(outputs))
    assert results[0][:3] == results[0][3:] and results[0] == results[1]
    page = page_bytes(llm.model_config, 4, np.float32) * max(2, num) // 2
    assert llm.engine.tier.max_pages == int(0.001 * 2**30 // page), "KV heads of several devices count for each"


def test_half_the_bytes():
    results, scales = [], []
    for llm in (parallel(1, kv_dtype="float8_e4m3fn"), parallel(8, kv_dtype="float8_e4m3fn")):
        results += [tokens_of(generate(llm, family(0), greedy(6))) for _ in range(2)]
        assert llm.engine.runner.store[0][0].dtype == jnp.float8_e4m3fn
        scales.append(np.array(jax.tree.leaves(llm.engine.runner.whole_scales())))
    assert results[0] == results[1] == results[2] == results[3]
    np.testing.assert_allclose(*scales, rtol=1e-5)


def test_nothing_is_copied_and_nothing_compiled_while_it_runs(monkeypatch):
    llm = parallel(4)
    runner, dispatch, buckets = llm.engine.runner, llm.engine.runner.dispatch, set()

    def places(arrays):
        jax.block_until_ready(arrays)
        return [shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards]

    def watch(batch):
        before = [*jax.tree.leaves(runner.store), runner.page_table]
        known = places(before)
        tokens = dispatch(batch)
        assert places([*jax.tree.leaves(runner.store), runner.page_table]) == known
        assert all(array.is_deleted() for array in before)
        buckets.add(batch.bucket.name)
        return tokens

    monkeypatch.setattr(runner, "dispatch", watch)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **options: pytest.fail("compiled"))
    generate(llm, family(0))
    generate(llm, family(4))
    assert {"decode_4", "mixed_16"} <= buckets


def test_pages_move_within_each_device():
    """Copies, and pages to host memory and back, exchange nothing."""
    runner = parallel(8).engine.runner
    slots = runner._slots_of(np.array([3], np.int32))
    pages = runner._read_pages(runner.store, slots)
    moves = [
        *runner._copy_pages.values(),
        runner._read_pages.lower(runner.store, slots).compile(),
        runner._write_pages.lower(runner.store, slots, pages).compile(),
    ]
    for move in moves:
        assert not re.search(r"all-(reduce|gather|to-all)|collective|reduce-scatter", move.as_text())


def test_no_position_is_read_where_devices_hold_the_same_head():
    runner = parallel(8).engine.runner
    shape = (0, runner.config.num_layers, 2, runner.config.num_kv_heads, runner.config.head_dim)
    assert runner.read_slots(np.zeros(0, np.int32)).shape == shape


def test_a_failed_step_and_other_weights(tmp_path):
    """The store is made anew in its shards; weights are read into theirs."""
    llm = parallel(2)
    want = tokens_of(generate(llm, family(0)))
    runner, dispatch = llm.engine.runner, llm.engine.runner.dispatch

    def fail(batch):
        runner.dispatch = dispatch
        raise RuntimeError("a device is lost")

    runner.dispatch = fail
    assert tokens_of(generate(llm, family(0))) == want
    config = tiny_config(**EIGHT_HEADS)
    other = write_checkpoint(tmp_path, config, tiny_weights(config, seed=5))
    try:
        llm.load_weights(other)
        check_greedy(generate(llm, family(0)), other)
    finally:
        llm.load_weights(tiny_folder(**EIGHT_HEADS))
    assert tokens_of(generate(llm, family(0))) == want


def test_engines_side_by_side():
    """Data parallelism: each engine on devices of its own."""
    folder, devices = tiny_folder(**EIGHT_HEADS), jax.devices()
    groups = [devices[3:4], devices[4:6]]
    with compiling_once():
        engines = [
            LLM(folder, use_tqdm=False, devices=group, tensor_parallel_size=len(group), **TINY) for group in groups
        ]
    for llm, group in zip(engines, groups, strict=True):
        check_greedy(generate(llm, family(2)), folder)
        runner = llm.engine.runner
        state = (runner.params, runner.store, runner.page_table, runner.last_tokens, runner.rules)
        assert {device for array in jax.tree.leaves(state) for device in array.devices()} == set(group)


def test_what_another_thread_does_for_an_engine_is_done_on_its_device():
    """What waits between two steps is done by whoever steps, whose default device may be another."""
    with compiling_once():
        llm = LLM(tiny_folder(**EIGHT_HEADS), use_tqdm=False, devices=jax.devices()[3:4], **TINY)
    found = []
    with llm.engine.lock:
        waits = threading.Thread(target=lambda: found.append(llm._call(lambda: jnp.zeros(1).devices())))
        waits.start()
        while llm.engine.commands.queue.empty():
            pass
        llm.engine.commands.run()
    waits.join()
    assert found == [{jax.devices()[3]}]


# The arrays -----------------------------------------------------------------------------------------------------------


def test_each_device_has_its_part_and_no_more():
    """Weights or K and V are built whole and then split: tt-xla#5764 (C41). The bytes are those predicted (C71)."""
    llm = parallel(8)
    runner, split = llm.engine.runner, llm.engine.runner.split
    page = page_bytes(split.local, llm.engine.config.page_size, np.float32)
    assert page == page_bytes(llm.model_config, llm.engine.config.page_size, np.float32) // 2
    for device in jax.devices():
        held = [
            s.data.nbytes for a in jax.tree.leaves(runner.store) for s in a.addressable_shards if s.device == device
        ]
        assert sum(held) == page * (runner.num_pages + 1)
    model = Llama(split.local, dtype=jnp.float32)
    want = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model))]
    for index in range(8):
        assert [array.addressable_shards[index].data.shape for array in runner.params] == want


def test_the_device_with_least_room_decides(monkeypatch):
    """What one device has left is for its own heads' part of a page."""
    monkeypatch.setattr(Runner, "_warm_up", lambda self, use_tqdm: None)
    page = page_bytes(parallel(4).engine.runner.split.local, 4, np.float32)
    stats = [{"bytes_limit": 2**30, "bytes_in_use": 2**30 - 2**24 - page * left} for left in (300, 100, 200, 500)]
    monkeypatch.setattr("prefix_jax.runner._memory_stats", lambda mesh: stats[: mesh.size])
    with compiling_once():
        options = {**OPTIONS, "num_pages": None, "memory_fraction": 1.0}
        llm = LLM(tiny_folder(**EIGHT_HEADS), use_tqdm=False, tensor_parallel_size=4, **options)
    runner = llm.engine.runner
    temporary = runner.compile(llm.engine.batcher.buckets[-1], 1).memory_analysis().temp_size_in_bytes
    free = (2**24 + 100 * page - temporary) // page
    assert free * 3 / 4 < runner.num_pages <= free


def test_no_device_is_sent_more_of_a_parameter_than_its_part(monkeypatch):
    """C41: tt-xla#5764."""
    folder = write_tiny_model(tiny_folder().parent / "parts", **EIGHT_HEADS, vocab_size=304)
    sent, put = [], jax.device_put

    def watch(values, device=None, **options):
        sent.extend(value.nbytes for value in jax.tree.leaves(values) if isinstance(value, np.ndarray))
        return put(values, device, **options)

    monkeypatch.setattr(jax, "device_put", watch)
    load_model(folder, read_config(folder), dtype=jnp.float32, mesh=mesh_of(8))
    assert 0 < max(sent) <= 4 * max(304 * 32, 64 * 32, 32 * 128) // 8


def test_random_weights_are_drawn_in_their_parts():
    """C41: no device draws what is another's."""
    model = Llama(read_config(tiny_config(**EIGHT_HEADS, vocab_size=304)), mesh=mesh_of(8))
    for parameter in (model.embed, model.layers[0].gate_up):
        like = parameter.get_value()
        options = (parameter.whole, jnp.float32, None, model.split, parameter.kind, parameter.axis)
        lowered = llama._initial_parts.lower(jax.random.key(0), *options, like.shape, like.sharding)
        memory, part = lowered.compile().memory_analysis(), like.size * 4 // 8
        assert memory.output_size_in_bytes == part and memory.temp_size_in_bytes < 4 * part


@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_checkpoints_go_into_the_shards_of_any_mesh(num, kind, tmp_path):
    """What a checkpoint was saved from says nothing of where it goes: orbax#648, flax#5110, orbax#2408 (C77)."""
    config = tiny_config(group=3, num_kv_heads=3, vocab_size=301, hidden_size=40)
    tensors = {name: value.astype(jnp.bfloat16) for name, value in tiny_weights(config).items()}
    folder = write_checkpoint(tmp_path / "hf", config, tensors, num_shards=2)
    if kind == "orbax":
        convert(folder, tmp_path / "orbax", "orbax")
        folder = tmp_path / "orbax"
    config = read_config(folder)
    one = load_model(folder, config, dtype=jnp.float32)
    model = load_model(folder, config, dtype=jnp.float32, mesh=mesh_of(num, first=8 - num))
    named = [jax.tree.leaves(nnx.state(m), is_leaf=lambda x: isinstance(x, nnx.Param)) for m in (one, model)]
    for alone, parts in zip(*named, strict=True):
        value, layout = parts.get_value(), (parts.kind, parts.axis, parts.whole)
        assert value.dtype == jnp.float32 and len(value.devices()) == num
        assert value.is_fully_replicated == (parts.kind is None)
        whole = one.split.gather(alone.get_value(), *layout)
        assert whole.shape == parts.whole
        np.testing.assert_array_equal(model.split.gather(value, *layout), whole)
        if parts.kind is not None:
            again = model.split.spread(whole, parts.kind, parts.axis, value.shape)
            np.testing.assert_array_equal(again, value), "zeros in all other places"
    layout = [(p.kind, p.axis, p.whole) for p in named[1]]
    prints = [
        weights.fingerprint(
            [p.get_value() for p in leaves], lambda index, array, m=m: m.split.gather(array, *layout[index])
        )
        for m, leaves in zip((one, model), named, strict=True)
    ]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("num", NUMS)
def test_random_weights_are_those_of_one_device(num):
    config = LlamaConfig.from_hf(tiny_config(group=3, num_kv_heads=3, vocab_size=301))
    one, model = (
        load_model(config, config, dtype=jnp.bfloat16, load_format="dummy", seed=3, mesh=mesh)
        for mesh in (None, mesh_of(num))
    )
    named = [jax.tree.leaves(nnx.state(m), is_leaf=lambda x: isinstance(x, nnx.Param)) for m in (one, model)]
    for whole, parts in zip(*named, strict=True):
        values = (
            m.split.gather(p.get_value(), parts.kind, parts.axis, parts.whole)
            for m, p in ((one, whole), (model, parts))
        )
        np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_the_host_holds_little_more_than_the_largest_tensors(kind, tmp_path):
    """C41, C77. The largest parameter is gate and up, in float32; of the next, devices have columns."""
    sizes = {"hidden_size": 1024, "vocab_size": 1000, "head_dim": 64, "group": 4, "intermediate_size": 16384}
    for name, config in (("warm", tiny_config(num_layers=1, group=4)), ("big", tiny_config(num_layers=2, **sizes))):
        write_checkpoint(tmp_path / "hf" / name, config, tiny_weights(config), num_shards=2)
        if kind == "orbax":
            convert(tmp_path / "hf" / name, tmp_path / "orbax" / name, "orbax")
    largest = 2 * 16384 * 1024 * 4
    assert 0.9 * largest < peak_of_loading(tmp_path / kind / "warm", tmp_path / kind / "big", 8) < 1.3 * largest


# The model ------------------------------------------------------------------------------------------------------------


def logits_of(model: Llama, ids) -> np.ndarray:
    """float32 [len(ids), V], every token of one sequence in one step."""
    graph, state = nnx.split(model)
    params, tree = jax.tree.flatten(state)
    places = jnp.arange(len(ids), dtype=jnp.int32)
    tiles = Tiles(places[:, None], jnp.zeros_like(places), jnp.zeros_like(places), places + 1)
    options = {"page_size": 1, "implementation": "xla"}
    attend = partial(paged_attention, positions=places, page_table=places[None], tile_lists=[tiles], **options)

    def forward(params):
        model = nnx.merge(graph, jax.tree.unflatten(tree, params))
        store = make_kv_store(model.split.local, len(ids) - 1, 1, model.dtype)
        return model.logits(model(jnp.asarray(ids), places, places, store, attend)[0])

    specs = [array.sharding.spec for array in params] if model.mesh else None
    return np.asarray(jax.jit(on_each(forward, model.mesh, (specs,), EVERYWHERE))(params))


FAMILIES = ["qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mistral"]
HEADS = [(1, 8), (2, 5), (3, 3), (3, 1), (5, 2), (6, 4), (8, 1)]  # KV heads, query heads of each
IDS = np.random.default_rng(1).integers(4, 300, 40).tolist()


def check_logits(folder: Path, nums) -> None:
    config = read_config(folder)
    want = logits_of(load_model(folder, config, dtype=jnp.float32), IDS)
    for num in nums:
        got = logits_of(load_model(folder, config, dtype=jnp.float32, mesh=mesh_of(num)), IDS)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_same_logits(name, tmp_path):
    """Biases and norms of queries and keys, packed tensors, tied heads, norms behind: transformers#48307 (C71), and a
    tied head on several devices (C68)."""
    check_logits(write_family(tmp_path, name), (2, 4))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_number_of_heads_gives_the_same_logits(heads, tmp_path):
    """A head is split across devices, or replicas have the wrong one: tpu-inference#1429, sglang#20967 (C71). Whatever
    does not divide, the vocabulary and the columns too, is filled up: mirage#751, vllm#340 (C70)."""
    num_kv_heads, group = heads
    sizes = {"num_layers": 1, "vocab_size": 301, "intermediate_size": 37}
    folder = write_tiny_model(tmp_path, num_kv_heads=num_kv_heads, group=group, **sizes)
    check_logits(folder, [num for num in NUMS if num <= num_kv_heads * group])


@pytest.mark.parametrize("num_heads", [8, 10])
def test_alibi_and_heads_of_unit_rows(num_heads, tmp_path):
    """Every head keeps its slope: sglang#16868, vllm#1009 (C74)."""
    check_logits(tiny_baichuan(tmp_path, num_heads=num_heads), NUMS)


def test_padding_is_never_drawn(tmp_path):
    """Zero rows give the logit 0, which beats logits that are all negative: mirage#751, pegainfer#676 (C70)."""
    config = tiny_config(group=4, vocab_size=299, num_layers=1)
    tensors = tiny_weights(config)
    head = tensors["lm_head.weight"]
    tensors["model.norm.weight"][:] = 0
    tensors["model.norm.weight"][0] = 1
    head[:, 0] = -np.abs(head[:, 0]) - 0.1  # all logits have one sign
    folder = write_checkpoint(tmp_path, config, tensors)
    with compiling_once():
        options = {**TINY, "max_num_seqs": 16, "max_num_batched_tokens": 16}
        llm = LLM(folder, use_tqdm=False, tensor_parallel_size=8, **options)
    assert llm.engine.runner.split.padded.vocab_size == 304
    params = SamplingParams(temperature=5.0, max_tokens=100, n=16, seed=0, ignore_eos=True)
    (output,) = generate(llm, [[5, 6]], params)
    drawn = np.array([answer.token_ids for answer in output.outputs])
    assert drawn.size == 1600 and drawn.max() < 299 and len(np.unique(drawn)) > 100
    scores = llm.score([[5, 6]], [[token] for token in range(299)], use_tqdm=False)
    assert np.exp([score.logprob for score in scores]).sum() == pytest.approx(1, abs=1e-4)


# Where heads go -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_has_one_place_beside_its_key(heads, num):
    num_kv_heads, group = heads
    if num > num_kv_heads * group:
        pytest.skip("refused")
    config = LlamaConfig.from_hf(tiny_config(num_kv_heads=num_kv_heads, group=group))
    split = Split(config, num)
    kv, q, qkv = (split.places[kind][1] for kind in ("kv", "q", "qkv"))
    assert sorted(q[q >= 0]) == list(range(config.num_heads)), "each query head once"
    of = np.repeat(kv, len(q) // len(kv))
    assert (of[q >= 0] == q[q >= 0] // group).all(), "beside the KV head that it reads"
    assert set(kv[kv >= 0]) == set(range(num_kv_heads))
    copies = np.unique(kv[kv >= 0], return_counts=True)[1]
    assert len(set(copies)) == 1, "in equal groups"
    rows = qkv.reshape(len(kv), -1)
    assert (rows[kv >= 0, -2:] == kv[kv >= 0, None] * (group + 2) + [group, group + 1]).all()
    assert split.local.num_kv_heads * num == split.padded.num_kv_heads == len(kv)
    if num == 1:
        assert split.local == split.padded == config


# What is refused, and the scripts -------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    folder, devices = tiny_folder(**EIGHT_HEADS), jax.devices()
    cases = [
        ({"tensor_parallel_size": 9}, "tensor_parallel_size is 9, but JAX has 8 devices"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a positive integer, got 0"),
        ({"tensor_parallel_size": 2, "devices": devices[:3]}, "devices must be 2 different ones"),
        ({"tensor_parallel_size": 2, "devices": devices[:1] * 2}, "devices must be 2 different ones"),
        ({"devices": [None]}, "devices must be a list of jax.Device, got .None."),
        ({"devices": [0]}, "devices must be a list of jax.Device, got .0."),
        ({"devices": [devices[:1]]}, "devices must be a list of jax.Device"),
        ({"devices": devices[0]}, "devices must be a list of jax.Device"),
        ({"devices": devices[:1], "device": "gpu"}, "no device 'gpu'"),
    ]
    for options, error in cases:
        with pytest.raises(ValueError, match=error):
            LLM(folder, use_tqdm=False, **options)
    with pytest.raises(ValueError, match=r"a model of 4 query heads, 64 .* 300 .* cannot be split among 8 devices"):
        LLM(tiny_folder(), use_tqdm=False, tensor_parallel_size=8, **TINY)
