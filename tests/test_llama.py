"""The model: every shape against the numpy oracle, its RoPE, its config, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import OracleLlama
from plain_forward import empty_store, plain_attend, plain_logits
from tiny_models import tiny_config, write_tiny_model

from prefix_jax.models.llama import Llama, LlamaConfig, rope_frequencies, rope_phases
from prefix_jax.weights import load_model, read_config

IDS = np.random.default_rng(0).integers(4, 272, 40).tolist()
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}  # fmt: skip


def load(folder) -> Llama:
    return load_model(folder, read_config(folder), dtype=jnp.float32)


def check_against_oracle(folder, ids=IDS, atol=5e-4) -> None:
    """The random models' heads are 20 times as big as usual, and so is what rounding does to their logits."""
    got, want = plain_logits(load(folder), ids), OracleLlama.from_folder(folder).logits(ids)
    np.testing.assert_allclose(got, want, atol=atol, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (3, 64), (4, 96), (1, 128), (4, 8)])
def test_logits_are_those_of_the_oracle(tmp_path, group, head_dim, tied):
    check_against_oracle(write_tiny_model(tmp_path, group=group, head_dim=head_dim, tied=tied))


@pytest.mark.parametrize("head_dim", [32, 24])
def test_a_stated_head_size_wins(tmp_path, head_dim):
    """head_dim derived although the config states another: TensorRT-LLM#5912, candle#2358 (C72)."""
    folder = write_tiny_model(tmp_path, hidden_size=64, group=2, num_kv_heads=2, head_dim=head_dim)
    assert read_config(folder).head_dim == head_dim
    check_against_oracle(folder)


def test_a_head_size_that_is_null_or_missing_is_derived(tmp_path):
    """C72: TensorRT-LLM#5912, candle#2358."""
    config = tiny_config(hidden_size=64, group=2, num_kv_heads=2)
    assert LlamaConfig.from_hf(config | {"head_dim": None}).head_dim == 16
    del config["head_dim"]
    assert LlamaConfig.from_hf(config).head_dim == 16


def test_a_real_checkpoint_gives_the_logits_of_the_oracle_beyond_position_8(shared_data):
    """Half-split weights run with interleaved RoPE look plausible when short: transformers#25199 (C73)."""
    check_against_oracle(shared_data / "models" / "stories260K-hf", [1, *range(3, 120)], atol=1e-4)


def test_one_step_continues_what_another_wrote(tmp_path):
    """K and V go to the slots they are given, and a slot one past the end goes nowhere."""
    model = load(write_tiny_model(tmp_path))
    places = jnp.arange(8)
    tokens = jnp.asarray(IDS[:8], jnp.int32)
    whole, _ = model(tokens, places, places, empty_store(model, 8), plain_attend)
    _, store = model(tokens, places, jnp.where(places < 5, places, 8), empty_store(model, 8), plain_attend)
    k_slots, _ = store[-1]
    assert not np.asarray(k_slots[5:]).any()
    assert np.asarray(k_slots[:5]).any(axis=(1, 2)).all()
    places = jnp.where(places < 5, 8, places)
    hidden, store = model(tokens, jnp.arange(8), places, store, plain_attend)
    np.testing.assert_allclose(hidden[-1], whole[-1], atol=1e-5)


def test_the_layer_is_traced_once_for_all_layers(tmp_path):
    model = load(write_tiny_model(tmp_path, num_layers=5))
    calls = []

    def attend(q, k_slots, v_slots):
        calls.append(q.shape)
        return plain_attend(q, k_slots, v_slots)

    tokens = jnp.arange(4)
    nnx.jit(lambda model, store: model(tokens, tokens, tokens, store, attend))(model, empty_store(model, 4))
    assert calls == [(4, 4, 16)]


def test_rope_phases_are_exact_at_large_positions():
    """Positions multiplied in bfloat16 drift past 256: sglang-jax#1472, candle#3520 (C39)."""
    config = LlamaConfig.from_hf(tiny_config(head_dim=64))
    positions = np.array([0, 255, 257, 4095, 4096, 16000])
    cos, sin = rope_phases(config, jnp.asarray(positions))
    phases = np.outer(positions, 10000.0 ** (-np.arange(0, 64, 2) / 64))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(phases), atol=2e-3)
    np.testing.assert_allclose(sin, np.sin(phases), atol=2e-3)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_is_applied(tmp_path, place, key):
    """A declared scaling that is parsed but not built shows only at long positions: mlx-vlm#1710 (C66)."""
    rope = {key if name == "rope_type" else name: value for name, value in LLAMA3_ROPE.items()}
    folder = write_tiny_model(tmp_path, **{place: rope})
    config, oracle = read_config(folder), OracleLlama.from_folder(folder)
    positions = np.array([0, 1000, 8000, 20000])
    cos, sin = rope_phases(config, jnp.asarray(positions))
    want_cos, want_sin = oracle.rope_tables(positions)
    np.testing.assert_allclose(cos, want_cos, atol=3e-3)
    np.testing.assert_allclose(sin, want_sin, atol=3e-3)
    plain = rope_frequencies(LlamaConfig.from_hf(tiny_config()))
    assert np.abs(rope_frequencies(config) / plain).min() == pytest.approx(1 / 8)
    check_against_oracle(folder)


@pytest.mark.parametrize("kind", ["ntk", "mystery"])
def test_another_rope_type_is_refused_by_name(kind):
    """C66: an unknown scaling must not become a plain RoPE (mlx-vlm#1710)."""
    for place, key in (("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")):
        with pytest.raises(ValueError, match=f"unknown RoPE type '{kind}'; known: default, linear, llama3, yarn, dyn"):
            LlamaConfig.from_hf(tiny_config(**{place: {key: kind, "factor": 8.0}}))


def test_rope_parameters_by_layer_type_are_refused():
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="by layer type"):
        LlamaConfig.from_hf(tiny_config(rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"architectures = \['MixtralForCausalLM'\] is not supported"),
        ({"architectures": ["LlamaModel", "LlamaForCausalLM"]}, "is not supported; known: LlamaForCausalLM, Mistral"),
        ({"model_type": "falcon", "architectures": None}, "model_type = 'falcon' is not supported; known: llama, mist"),
        ({"model_type": "gemma2"}, "model_type = 'gemma2' is not supported; known: llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; known: silu, gelu_pytorch_tanh"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"sliding_window": 32}, "sliding_window = 32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vocab_size": None}, "config lacks vocab_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 0.5}}, "low < high"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE type linear lacks factor"),
        ({"rope_scaling": {"type": "yarn", "factor": -4.0}}, r"RoPE type yarn wants a positive factor, got -4\.0"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "RoPE type su lacks long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            r"wants 8 positive numbers as short_factor, got \[1\.0\]",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, "partial_rotary_factor = 0.75"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size 30 over 4 heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 query heads do not divide among 2 KV heads"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf({**tiny_config(), **changes})


def test_a_config_reads_old_and_new_keys_alike():
    old = LlamaConfig.from_hf(tiny_config(rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, eos_token_id=[7, 9]))
    new_rope = LLAMA3_ROPE | {"rope_theta": 500000.0}
    new = LlamaConfig.from_hf(tiny_config(rope_theta=None, rope_parameters=new_rope, eos_token_id=[7, 9]))
    assert old == new
    assert (old.rope_theta, old.eos_ids) == (500000.0, (7, 9))
    assert LlamaConfig.from_hf(tiny_config(num_key_value_heads=None)).group_size == 1


def test_bfloat16_stays_bfloat16_until_the_logits(tmp_path):
    folder = write_tiny_model(tmp_path)
    model = load_model(folder, read_config(folder), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    logits = plain_logits(model, IDS)
    assert logits.dtype == np.float32
    want = OracleLlama.from_folder(folder).logits(IDS)
    assert np.corrcoef(logits.ravel(), want.ravel())[0, 1] > 0.999
