"""Families of models: what their configs ask for, and that they are computed so, through pages and the engine."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import cached_of, check_greedy, generate, greedy, home, make_llm, random_prompts
from flax import nnx
from oracle import OracleLlama
from paged_forward import PAGE_SIZE, PagedModel
from test_goldens import FAMILIES, write_family
from tiny_models import tiny_baichuan, tiny_config, write_tiny_model

from pallas_kernels import tuning_for
from pallas_kernels.hopper_attention import HopperConfig
from prefix_jax.models.llama import Llama, LlamaConfig, rope_frequencies, rope_phases
from prefix_jax.tiling import make_batcher, tile_configs
from prefix_jax.weights import load_model, read_config

IDS = np.random.default_rng(0).integers(4, 272, 150).tolist()
HEAD = 88  # positions that two sequences share, whole pages
TOLERANCE = 1e-4
BAICHUAN = {
    "baichuan2_13b": {"num_heads": 10},
    "baichuan2_13b_power_of_two": {"num_heads": 4},
    "baichuan_13b": {"second": False},
    "baichuan2_7b": {"alibi": False},
    "baichuan_7b": {"alibi": False, "second": False},
}


def folder_of(name: str) -> Path:
    folder = home() / name
    if not folder.exists():
        tiny_baichuan(folder, **BAICHUAN[name]) if name in BAICHUAN else write_family(folder, name)
    return folder


def load(folder: Path, length: int | None = None) -> Llama:
    return load_model(folder, read_config(folder).for_length(length), dtype=jnp.float32)


# How they are computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *BAICHUAN])
def test_every_way_through_the_pages_gives_the_logits_of_the_oracle(name):
    """In chunks, token by token, behind a prefix that another computed, and with that prefix read once for both:
    C74 (sglang#16868, vllm#1009: a bias relative to the chunk), C66, C72, C73, C75."""
    oracle, model = OracleLlama.from_folder(folder_of(name)), load(folder_of(name), len(IDS))
    other = [*IDS[:HEAD], *IDS[:-HEAD:-1]]  # the same head, another tail
    want, want_other = oracle.logits(IDS, len(IDS)), oracle.logits(other, len(IDS))
    num_pages = -(-len(IDS) // PAGE_SIZE)
    page_table = np.random.default_rng(1).permutation(2 * num_pages).reshape(2, -1) + 1
    page_table[1, : HEAD // PAGE_SIZE] = page_table[0, : HEAD // PAGE_SIZE]
    paged = PagedModel(model, page_table)

    def close(got, want):
        np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)

    for start in range(0, 150, 50):
        close(paged((0, start, IDS[start : start + 50]))[0], want[start : start + 50])
    for at in range(100, 103):  # once more, as if they had just been sampled
        close(paged((0, at, IDS[at : at + 1]))[0], want[at : at + 1])
    close(paged((1, HEAD, other[HEAD : HEAD + 50]))[0], want_other[HEAD : HEAD + 50])
    both = paged((0, 120, IDS[120:121]), (1, 138, other[138:142]), shared=HEAD)
    close(both[0], want[120:121])
    close(both[1], want_other[138:142])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3", "qwen2_window", "baichuan2_13b"])
def test_the_pallas_kernels_agree(name):
    model, page_table = load(folder_of(name)), np.arange(1, 6)[None]
    want, got = (PagedModel(model, page_table, how)((0, 0, IDS[:40]))[0] for how in ("xla", "pallas_interpret"))
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "baichuan2_13b", "gemma2"])
def test_windows_and_alibi_live_with_prefix_hits_and_shared_tiles(name, monkeypatch):
    """Tokens are the oracle's, cold and warm, alone and with the head that all share read once for them: C74, C82."""
    folder = folder_of(name)
    sizes = {"num_pages": 128, "max_model_len": 192, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    llm = make_llm(folder, **sizes, forest=True)
    batcher = llm.engine.batcher  # any run of shared pages is worth a tile
    batcher.costs = dataclasses.replace(batcher.costs, wide=1.5, tile=0.0, partial=0.0, launch=0.0)
    (head,) = random_prompts(7, 100)
    prompts = [head + tail for tail in random_prompts(8, *range(3, 19))]
    kinds, dispatch = [], llm.engine.runner.dispatch
    monkeypatch.setattr(llm.engine.runner, "dispatch", lambda batch: kinds.append(batch.bucket.kind) or dispatch(batch))
    cold = generate(llm, prompts, greedy(12))
    warm = generate(llm, prompts, greedy(12))
    assert kinds.count("shared") > 10, "the head is read once for all"
    check_greedy(cold + warm, folder)
    assert cached_of(cold)[0] == 0 and min(cached_of(cold)[1:]) >= 96
    assert cached_of(warm) == [min(len(prompt) - 1, (len(prompt) + 11) // 16 * 16) for prompt in prompts]


def test_layers_of_one_kind_share_a_trace():
    """Gemma 3: two local layers and a global one are two traces, and each says what it wants of attention."""
    model, calls = load(folder_of("gemma3")), []
    slots = jnp.zeros((4, 2, 32))

    def attend(q, k_slots, v_slots, **scoring):
        calls.append(scoring)
        return q

    places = jnp.arange(4)
    nnx.jit(lambda model, store: model(places, places, places, store, attend))(model, ((slots, slots),) * 3)
    assert calls == [{"scale": 20**-0.5, "window": 24}, {"scale": 20**-0.5}]


# What their configs ask for -------------------------------------------------------------------------------------------


def plain(**changes) -> dict:
    """The keys that all configs have."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {key: tiny_config()[key] for key in keys} | changes


def config_of(architecture: str, **changes) -> LlamaConfig:
    return LlamaConfig.from_hf(plain(architectures=[architecture], **changes))


def test_a_window_that_is_switched_off_is_none():
    """sliding_window stands in the config of a Qwen2 that does not use it: vllm#3377 (C75)."""
    switches = {"use_sliding_window": (True, False, None), "sliding_window": (32, None), "max_window_layers": (0, 1, 2)}
    for values in itertools.product(*((*choices, "missing") for choices in switches.values())):
        keys = {key: value for key, value in zip(switches, values, strict=True) if value != "missing"}
        config = config_of("Qwen2ForCausalLM", **keys)
        size, first = keys.get("sliding_window", 4096), keys.get("max_window_layers", 28)
        if keys.get("use_sliding_window") and size and first < 2:
            assert (config.window, config.local_layers) == (size, (first == 0, True)), keys
        else:
            assert config.window is None and config.has_plain_scores, keys


def test_a_window_that_is_switched_off_cuts_nothing(tmp_path):
    """100 tokens beyond a window of 32: vllm#3377 (C75)."""
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    folder = write_tiny_model(tmp_path / "on", **changes)
    off = write_tiny_model(tmp_path / "off", **changes | {"sliding_window": None})
    logits = [PagedModel(load(f), np.arange(1, 14)[None])((0, 0, IDS[:100]))[0] for f in (folder, off)]
    np.testing.assert_allclose(logits[0][:32], logits[1][:32], atol=5e-4)
    assert np.abs(logits[0][60:] - logits[1][60:]).max() > 1
    for got, path in zip(logits, (folder, off), strict=True):
        np.testing.assert_allclose(got, OracleLlama.from_folder(path).logits(IDS[:100]), atol=5e-4)


def test_a_window_that_no_sequence_outgrows_is_none():
    config = config_of("MistralForCausalLM", num_key_value_heads=2)
    assert (config.window, config.local_layers, config.has_plain_scores) == (4096, (True, True), False)
    assert config.for_length(4096).has_plain_scores and config.for_length(4096).local_layers == ()
    assert config.for_length(4097) == config
    gemma = config_of("Gemma3ForCausalLM", num_hidden_layers=6, num_key_value_heads=2).for_length(1000)
    assert gemma.window is None and gemma.is_local(0) and not gemma.is_local(5), "local layers keep their RoPE"


def test_configs_as_their_models_ship_them():
    """From memory of the published files: the keys on which a switch hangs."""
    mistral = config_of("MistralForCausalLM", sliding_window=None, rope_theta=1e6, num_key_value_heads=2)
    assert mistral.has_plain_scores and mistral.rope_theta == 1e6
    qwen2 = config_of("Qwen2ForCausalLM", use_sliding_window=False, sliding_window=131072, max_window_layers=70)
    assert qwen2.qkv_bias and qwen2.has_plain_scores
    qwen3 = config_of("Qwen3ForCausalLM", num_key_value_heads=2)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 128, False)
    gemma2 = config_of("Gemma2ForCausalLM", num_key_value_heads=2, query_pre_attn_scalar=144, num_hidden_layers=3)
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.attention_scale) == (50.0, 30.0, 1 / 12)
    assert gemma2.local_layers == (True, False, True) and gemma2.tie_word_embeddings and gemma2.head_dim == 256
    keys = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    gemma3 = config_of("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window_pattern=6, **keys)
    assert gemma3.local_layers == (True,) * 5 + (False, True) and gemma3.max_position == 131072
    assert rope_frequencies(gemma3)[0] == 1 / 8 and rope_frequencies(gemma3, local=True)[0] == 1
    assert (gemma3.attention_softcap, gemma3.logit_softcap) == (None, None)
    sizes = {"hidden_size": 5120, "num_attention_heads": 40, "model_max_length": 4096}
    baichuan = config_of("BaichuanForCausalLM", **sizes | {"vocab_size": 125696})
    assert baichuan.alibi and baichuan.norm_head and (baichuan.max_position, baichuan.num_kv_heads) == (4096, 40)
    small = config_of("BaiChuanForCausalLM", max_position_embeddings=4096)
    assert not small.alibi and not small.norm_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types must be sliding_attention or full"),
        ({"layer_types": ["sliding_attention"]}, "in 2 layers"),
        ({"hidden_activation": "relu"}, "hidden_act = 'relu' is not supported; known: silu, gelu_pytorch_tanh"),
        ({"sliding_window": 0}, "window must be a positive integer, got 0"),
        ({"attn_logit_softcapping": -1.0}, r"attention_softcap must be a positive number, got -1\.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ],
)
def test_a_family_refuses_what_it_does_not_compute(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("Gemma2ForCausalLM", **changes)


# RoPE that depends on the length --------------------------------------------------------------------------------------


def dynamic(factor: float = 4.0) -> LlamaConfig:
    rope = {"rope_type": "dynamic", "factor": factor}
    return config_of("LlamaForCausalLM", max_position_embeddings=2048, rope_scaling=rope)


def test_dynamic_rope_is_unscaled_up_to_the_original_length():
    """An enlarged base hurts short prompts: vllm#3488, vllm#5093 (C67)."""
    unscaled = rope_frequencies(config_of("LlamaForCausalLM", max_position_embeddings=2048))
    for length in (None, 100, 2048):
        config = dynamic().for_length(length)
        np.testing.assert_array_equal(rope_frequencies(config), unscaled)
        assert config.max_position == (length or 2048)
    np.testing.assert_array_equal(rope_frequencies(Llama(dynamic()).config), unscaled)


def test_dynamic_rope_is_fixed_for_the_longest_sequence():
    """C67: a base that moved with the length would spoil cached keys."""
    config = dynamic().for_length(6000)
    assert config.rope_theta == pytest.approx(10000.0 * (4 * 6000 / 2048 - 3) ** (8 / 6)), "head_dim 8"
    assert config.max_position == 6000 and config == config.for_length(6000)
    assert dynamic().for_length(100_000).max_position == 4 * 2048, "and no further"


def test_the_engine_settles_rope_from_its_max_model_len():
    """C67: the same prompt, by engines for shorter and for longer sequences; both as the oracle has it."""
    folder = folder_of("llama_dynamic")  # originally 64 positions
    prompts = random_prompts(3, 40, 57)
    thetas = []
    for length in (64, 200):
        llm = make_llm(folder, num_pages=32, max_model_len=length, max_num_seqs=2, max_num_batched_tokens=16)
        assert llm.engine.max_model_len == length == llm.engine.runner.config.max_position
        thetas.append(llm.engine.runner.config.rope_theta)
        oracle = OracleLlama.from_folder(folder)
        for output in generate(llm, prompts, greedy(5)):
            ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            logits = oracle.logits(ids[:-1], length)[len(output.prompt_token_ids) - 1 :]
            chosen = logits[np.arange(5), output.outputs[0].token_ids]
            assert (logits.max(axis=-1) - chosen).max() < 1e-3
    assert thetas[0] == 10000.0 < thetas[1]


def test_longrope_takes_its_factors_by_the_longest_sequence():
    """C66 for longrope: short factors up to the original length, long ones beyond, cos and sin scaled in both."""
    short, long = [1.0] * 7 + [1.5], [2.0] * 8
    rope = {"type": "su", "short_factor": short, "long_factor": long}
    keys = {"max_position_embeddings": 1024, "original_max_position_embeddings": 64, "rope_scaling": rope}
    config = config_of("Phi3ForCausalLM", hidden_size=64, **keys)
    assert config.for_length(64).rope_divisors == tuple(short)
    assert config.for_length(65).rope_divisors == config.for_length(None).rope_divisors == tuple(long)
    assert config.rope_amplitude == pytest.approx(np.sqrt(1 + np.log(16) / np.log(64)))
    cos, _ = rope_phases(config.for_length(64), jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(cos, config.rope_amplitude)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rope_reaches_as_far_as_it_was_made_for(kind):
    """C66: positions beyond the original length may be used."""
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 2048}
    assert config_of("LlamaForCausalLM", max_position_embeddings=2048, rope_scaling=rope).max_position == 8192


@pytest.mark.parametrize("name", ["llama_linear", "llama_yarn", "llama_dynamic", "phi3_longrope", "gemma3"])
def test_rope_tables_are_exact_at_large_positions(name):
    """C66: the error of a scaling that is not applied is nil at position 0 and grows (mlx-vlm#1710)."""
    folder = folder_of(name)
    config, oracle = read_config(folder).for_length(20001), OracleLlama.from_folder(folder)
    positions = np.array([0, 1000, 8000, 20000])
    for layer in range(config.num_layers):
        got = rope_phases(config, jnp.asarray(positions), config.is_local(layer))
        for table, want in zip(got, oracle.rope_tables(positions, layer, config.max_position), strict=True):
            np.testing.assert_allclose(table, want, atol=3e-3)


# What runs them -------------------------------------------------------------------------------------------------------


def test_the_kernel_for_hopper_gets_plain_scores_alone():
    base = config_of("MistralForCausalLM", hidden_size=512, head_dim=128, num_key_value_heads=1)
    options = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 8192}
    kinds = {}
    for config in (base, base.for_length(4096), dataclasses.replace(base, window=None, local_layers=(), alibi=True)):
        batcher = make_batcher(config, jnp.bfloat16, "pallas_hopper", **options)
        (bucket, *_) = [bucket for bucket in batcher.buckets if bucket.kind == "mixed"]
        chosen = tile_configs(bucket, config, jnp.bfloat16, "pallas_hopper", 16)
        kinds[config.window, config.alibi] = any(isinstance(sizes, HopperConfig) for sizes in chosen)
    assert kinds == {(4096, False): False, (None, False): True, (None, True): False}
    hopper = tuning_for("wide", 4, 128, jnp.bfloat16, implementation="pallas_hopper")
    assert isinstance(hopper.config, HopperConfig)


@pytest.mark.parametrize("name", ["gemma2", "baichuan2_13b"])
def test_scales_of_half_the_bytes_are_measured_with_the_scores_of_the_model(name):
    llm = make_llm(folder_of(name), kv_dtype="float8_e4m3fn")
    (prompt,) = random_prompts(5, 60)
    scales = llm.engine.runner.scales
    assert len(scales) == llm.model_config.num_layers
    cold, warm = generate(llm, [prompt]), generate(llm, [prompt])
    assert warm[0].num_cached_tokens == 59
    assert cold[0].outputs[0].token_ids == warm[0].outputs[0].token_ids


@pytest.mark.parametrize(("name", "start"), [("gemma3", 0.0), ("qwen2", 1.0)])
def test_random_weights_are_made_from_a_config_alone(name, start):
    """Norms multiply by one, whether that is in their weights or added to them."""
    config = LlamaConfig.from_hf(json.loads((folder_of(name) / "config.json").read_text()))
    model = load_model(config, config, dtype=jnp.bfloat16, load_format="dummy")
    assert {float(norm[...][0]) for norm in (model.norm, model.layers[0].mlp_norm)} == {start}
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
