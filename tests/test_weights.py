"""Checkpoints: every tensor used and every parameter filled, or an error that names the file and the tensor."""

import dataclasses
import json
import shutil
import weakref
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from convert_checkpoint import convert, main
from flax import nnx
from host_memory import peak_of_loading
from oracle import OracleLlama
from plain_forward import plain_logits
from safetensors.numpy import load_file, save_file
from test_goldens import write_family
from tiny_models import (
    SPECIAL_TOKENS,
    tiny_baichuan,
    tiny_config,
    tiny_tokenizer,
    tiny_weights,
    write_checkpoint,
    write_tiny_model,
)

from prefix_jax import LLM, SamplingParams, weights
from prefix_jax.checkpoint import CheckpointError
from prefix_jax.models.llama import Llama, LlamaConfig, rope_frequencies
from prefix_jax.stored_tensors import gguf_config, safetensors_in, write_safetensors
from prefix_jax.tokenizer import Tokenizer
from prefix_jax.weights import checkpoint_dtype, load_model, read_config

IDS = np.random.default_rng(1).integers(4, 272, 20).tolist()
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(path, dtype=jnp.float32) -> Llama:
    return load_model(path, read_config(path), dtype=dtype)


def leaves_equal(one: Llama, other: Llama) -> bool:
    pairs = zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_with_and_without_their_tensor(tmp_path, tied, has_head, num_shards):
    """A tied config with a head in the file, and an untied one without: vllm#6758, vllm#53019, sglang#1508 (C68)."""
    config = tiny_config(tied=tied, num_layers=1)
    weights = tiny_weights(config)
    if has_head:
        weights[HEAD] = weights[EMBED].copy() if tied else weights[HEAD]
    else:
        weights.pop(HEAD, None)
    folder = write_checkpoint(tmp_path, config, weights, num_shards)
    if not tied and not has_head:
        with pytest.raises(CheckpointError, match=f"{HEAD} is missing"):
            load(folder)
        return
    want = OracleLlama(config, weights, np.float32).logits(IDS)
    np.testing.assert_allclose(plain_logits(load(folder), IDS), want, atol=1e-3, rtol=0)


def test_a_tied_checkpoint_whose_head_differs_is_refused(tmp_path):
    """C68 (sglang#2009): dropping a head that was trained apart would be a silent wrong answer."""
    config = tiny_config(tied=True, num_layers=1)
    weights = tiny_weights(config)
    folder = write_checkpoint(tmp_path, config, weights | {HEAD: weights[EMBED] + 1})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {HEAD} is not used"):
        load(folder)


def test_every_tensor_must_be_used_and_every_parameter_filled(tmp_path):
    config = tiny_config(num_layers=1)
    weights = tiny_weights(config)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # redundant: allowed
    load(write_checkpoint(tmp_path, config, weights))
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    weights["model.norm.weight"] = np.ones(33, np.float32)
    del weights["model.layers.0.mlp.up_proj.weight"]
    write_checkpoint(tmp_path, config, weights)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight is missing" in message
    assert "model.layers.0.self_attn.q_proj.bias is not used by this model" in message
    assert "model.norm.weight has shape (33,), the config wants (32,)" in message
    assert "inv_freq" not in message
    assert message.count("model.safetensors") == 2


def test_a_config_with_more_layers_than_the_file_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path, num_layers=1)
    (folder / "config.json").write_text(json.dumps(tiny_config(num_layers=2)))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.input_layernorm\.weight is missing"):
        load(folder)


SHARD = "model-00002-of-00003.safetensors"


def test_a_missing_shard_is_named(tmp_path):
    """A partial download must not load as random weights: sglang#32279, mlx-vlm#1827 (C69)."""
    folder = write_tiny_model(tmp_path, num_shards=3)
    load(folder)
    (folder / SHARD).rename(folder / "renamed.safetensors")
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_shard_is_named(tmp_path, keep):
    """C69: sglang#32279, mlx-vlm#1827."""
    folder = write_tiny_model(tmp_path, num_shards=3)
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=f"{SHARD} is missing, damaged or cut short"):
        load(folder)


def test_an_index_that_points_at_the_wrong_file_is_named(tmp_path):
    """C69: sglang#32279."""
    folder = write_tiny_model(tmp_path, num_shards=3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][EMBED] = SHARD if index["weight_map"][EMBED] != SHARD else SHARD.replace("2-", "1-")
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"names {EMBED} in {index['weight_map'][EMBED]}, which lacks it"):
        load(folder)


def test_folders_without_a_checkpoint_say_what_is_missing(tmp_path):
    """C69: an empty folder, shards without their index, an index beside a single file."""
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_config(tmp_path / "nowhere")
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load(folder)
    single = write_tiny_model(tmp_path / "single")
    names = dict.fromkeys(load_file(single / "model.safetensors"), "model-00001-of-00001.safetensors")
    (single / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors is missing"):
        load(single)
    with pytest.raises(ValueError, match="unknown load_format 'npz'; known: auto, safetensors, gguf, orbax, dummy"):
        read_config(folder, "npz")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_stored_dtypes_are_converted_once(tmp_path, stored, wanted):
    """bf16 run as fp16, dtype ignored: G.O.D#1231, vllm#7561 (C76)."""
    config = tiny_config(num_layers=1)
    weights = {name: tensor.astype(stored) for name, tensor in tiny_weights(config).items()}
    model = load(write_checkpoint(tmp_path, config, weights), wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(model.embed[...], weights[EMBED].astype(wanted))
    down = weights["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(model.layers[0].down[...], down.T.astype(wanted))


def test_auto_dtype_is_the_checkpoints(tmp_path):
    """C76: G.O.D#1231, vllm#7561."""
    config = tiny_config(num_layers=1)
    weights = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tiny_weights(config).items()}
    for changes, want in (({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32")):
        stated = {key: value for key, value in config.items() if key != "torch_dtype"} | changes
        assert checkpoint_dtype(write_checkpoint(tmp_path, stated, weights)) == want
        assert checkpoint_dtype(stated) == want
    del config["torch_dtype"]
    assert checkpoint_dtype(write_checkpoint(tmp_path, config, weights)) == "bfloat16"
    with pytest.raises(ValueError, match="unknown dtype 'float8_e4m3fn'; known: float32, bfloat16, float16"):
        checkpoint_dtype(config | {"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize("stored", [ml_dtypes.float8_e4m3fn, np.int8])
def test_tensors_that_need_a_scale_are_refused(tmp_path, stored):
    """fp8 without its scale is noise at normal speed: vllm#48231 (C76)."""
    config = tiny_config(num_layers=1)
    weights = tiny_weights(config)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(stored)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: unknown dtype .*; known: BF16, F16, F32, F64"):
        load(write_checkpoint(tmp_path, config, weights))


def test_dummy_weights_need_only_a_config(tmp_path):
    values = tiny_config(num_layers=2)
    (tmp_path / "config.json").write_text(json.dumps(values))
    models = []
    for source in (values, LlamaConfig.from_hf(values), tmp_path, tmp_path / "config.json"):
        config = read_config(source, "dummy")
        models.append(load_model(source, config, dtype=jnp.bfloat16, load_format="dummy", seed=3))
        assert leaves_equal(models[0], models[-1])
        assert models[-1].embed[...].dtype == jnp.bfloat16
    assert np.std(np.asarray(models[0].embed[...], np.float32)) == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(models[0].layers[0].qkv[...], models[0].layers[1].qkv[...])
    for source in (values, tmp_path / "config.json"):
        with pytest.raises(ValueError, match='load_format="dummy"'):
            load_model(source, config, dtype=jnp.bfloat16)


LLAMA3_DIVISORS = np.linspace(1, 8, 16).astype(np.float32)


def quantized(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The package cannot make blocks of the K kinds: random ones, whose float16 scales are small."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(weight, kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(weight.size).integers(0, 256, (weight.size // values, size), np.uint8)
    scales = {"Q4_K": slice(0, 4), "Q6_K": slice(size - 2, size)}[kind.name]
    count = (scales.stop - scales.start) // 2
    blocks[:, scales] = np.full((len(blocks), count), 2e-4, np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


def write_gguf(
    path: Path, config: dict, weights: dict, *, quantization=None, divisors=None, architecture="llama", tokens=None
):
    """The checkpoint as llama.cpp's converter writes it; tokens: "gpt2" for the tiny tokenizer, "llama" for some of
    SentencePiece's."""
    writer = gguf.GGUFWriter(path, architecture)
    if tokens == "llama":
        pieces = ["▁", "a", "t", "at", "▁c", "▁cat", "c", "ca"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
        writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    elif tokens:
        model = json.loads(tiny_tokenizer().to_str())["model"]
        texts = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(texts)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_token_types([control if text in SPECIAL_TOKENS else normal for text in texts])
        writer.add_eos_token_id(0)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, weight in weights.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # halves to neighbours
            weight = (
                weight.reshape(-1, 2, config["head_dim"] // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            )
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantization is None or weight.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(weight))
        else:
            writer.add_tensor(stored, quantized(weight, quantization), raw_dtype=quantization)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_same_model_as_its_folder(tmp_path, tied):
    """The RoPE rows are permuted back exactly once: transformers#25199, gpt-fast#190 (C73)."""
    config = tiny_config(tied=tied, group=3, head_dim=32)
    weights = tiny_weights(config)
    folder = write_checkpoint(tmp_path / "hf", config, weights)
    path = write_gguf(tmp_path / "model.gguf", config, weights)
    assert leaves_equal(load(folder), load(path))
    assert leaves_equal(load(folder), load(tmp_path))  # the folder that holds it
    assert checkpoint_dtype(path) == "bfloat16"
    want = OracleLlama(config, weights).logits(IDS)
    np.testing.assert_allclose(OracleLlama.from_gguf(path).logits(IDS), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_gguf_files_of_other_architectures(tmp_path, name):
    """Biases and norms of queries and keys; no rows in another order: transformers#25199 (C73)."""
    folder = write_family(tmp_path / "hf", name)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 10000.0, "head_dim": config.get("head_dim", 16)}
    path = write_gguf(tmp_path / "m.gguf", config, load_file(folder / "model.safetensors"), architecture=name)
    assert leaves_equal(load(folder), load(path))


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "Q4_K", "Q6_K"])
def test_quantised_gguf_tensors_are_dequantised(tmp_path, kind, monkeypatch):
    """A few rows at a time."""
    monkeypatch.setattr("prefix_jax.stored_tensors.DEQUANTIZED_AT_ONCE", 4096)
    config = tiny_config(
        num_layers=1, **({"hidden_size": 256, "head_dim": 64} if kind.endswith("_K") else {"hidden_size": 64})
    )
    quantization = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), quantization=quantization)
    want = OracleLlama.from_gguf(path, np.float32).logits(IDS)
    np.testing.assert_allclose(plain_logits(load(path), IDS), want, atol=1e-3, rtol=0)


def test_rope_divisors_of_a_gguf_file_are_applied(tmp_path):
    """Scaling stored as rope_freqs.weight is a scaling too: mlx-vlm#1710 (C66)."""
    config = tiny_config(head_dim=32, num_layers=1)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), divisors=LLAMA3_DIVISORS)
    plain = rope_frequencies(LlamaConfig.from_hf(config))
    np.testing.assert_allclose(rope_frequencies(read_config(path)), plain / LLAMA3_DIVISORS, rtol=1e-6)
    load(path)


def test_bad_gguf_files_are_refused_by_name(tmp_path):
    """C69 for GGUF: another architecture, a cut file, a file of something else."""
    config = tiny_config(num_layers=1)
    path = write_gguf(tmp_path / "other.gguf", config, {}, architecture="gemma2")
    with pytest.raises(
        CheckpointError, match=r"general\.architecture = 'gemma2' is not supported; known: llama, qwen2"
    ):
        read_config(path)
    with pytest.raises(CheckpointError, match=r"want one GGUF file in .*, got 0"):
        read_config(tmp_path / "..", "gguf")
    path = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config))
    content = path.read_bytes()
    for keep, message in (
        (len(content) // 2, r"cut short.*: blk\.0\.attn_output\.weight: "),
        (100, "damaged, cut short or no GGUF"),
        (3, "no GGUF file"),
        (0, "no GGUF file"),
    ):
        path = tmp_path / f"{keep}.gguf"
        path.write_bytes(content[:keep])
        with pytest.raises(CheckpointError, match=f"{keep}.gguf is .*{message}"):
            load(path)


def test_the_host_never_holds_more_than_the_tensors_of_one_parameter(tmp_path, monkeypatch):
    """Whatever the format: no tensor that was read outlives the parameter that it became."""
    config = tiny_config(num_layers=3, hidden_size=256)
    folder = write_checkpoint(tmp_path / "hf", config, tiny_weights(config), num_shards=2)
    convert(folder, tmp_path / "orbax", "orbax")
    path = write_gguf(
        tmp_path / "model.gguf", config, tiny_weights(config), quantization=gguf.GGMLQuantizationType.Q8_0
    )
    largest = max(config["vocab_size"], 2 * config["intermediate_size"]) * config["hidden_size"] * 4
    opened, held = weights.open_tensors, []

    def read(tensor):
        values = tensor.read()
        held.append((weakref.ref(values.base if isinstance(values.base, np.ndarray) else values), values.nbytes))
        size = sum(size for ref, size in held if ref() is not None)
        alive.append(size)
        return values

    def watched(*args):
        return {name: dataclasses.replace(t, read=partial(read, t)) for name, t in opened(*args).items()}

    monkeypatch.setattr(weights, "open_tensors", watched)
    for source in (folder, tmp_path / "orbax", path):
        alive = []
        load(source, jnp.bfloat16)
        assert largest * 0.9 < max(alive) <= largest, source


@pytest.mark.parametrize("kind", ["safetensors", "orbax", "gguf"])
def test_the_host_holds_little_more_than_the_largest_tensors(kind, tmp_path):
    """Those of one parameter, as they are read, quantised ones as float32."""
    for name, sizes in (("warm", {}), ("big", {"hidden_size": 1024, "vocab_size": 32000, "head_dim": 64, "group": 4})):
        config = tiny_config(num_layers=2, **sizes)
        if kind == "gguf":
            write_gguf(
                tmp_path / f"{name}.gguf", config, tiny_weights(config), quantization=gguf.GGMLQuantizationType.Q8_0
            )
        else:
            write_checkpoint(tmp_path / name, config, tiny_weights(config), num_shards=2)
        if kind == "orbax":
            convert(tmp_path / name, tmp_path / f"{name}.orbax", "orbax")
    warm, big = (tmp_path / f"{name}{'' if kind == 'safetensors' else '.' + kind}" for name in ("warm", "big"))
    largest = 32000 * 1024 * 4
    assert 0.9 * largest < peak_of_loading(warm, big) < 1.3 * largest


def test_a_bf16_checkpoint_written_by_others_loads(tmp_path):
    """Only the tensors count: metadata and order of the file do not."""
    config = tiny_config(num_layers=1)
    weights = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in reversed(tiny_weights(config).items())}
    folder = write_checkpoint(tmp_path, config, weights)
    first = load(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert leaves_equal(first, load(folder))


def test_loading_shows_a_bar_to_watch(tmp_path, capsys):
    folder = write_tiny_model(tmp_path)
    load(folder)
    assert capsys.readouterr().err == ""
    load_model(folder, read_config(folder), dtype=jnp.float32, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "loading" in shown and "100%" in shown


def test_values_that_float16_cannot_hold_are_named(tmp_path):
    """A bfloat16 checkpoint run in float16 gives NaN and one token for ever: vllm#7561, G.O.D#1231 (C76)."""
    config = tiny_config(num_layers=1)
    weights = tiny_weights(config)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    folder = write_checkpoint(tmp_path, config, weights)
    load(folder, jnp.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: .*mlp\.up_proj\.weight: values that float16 cannot"
    ):
        load(folder, jnp.float16)


def test_a_head_of_unit_rows_is_made_once(tmp_path):
    """Baichuan 2: what is stored stays as it is, what is computed with has rows of length one."""
    folder = tiny_baichuan(tmp_path)
    head = np.asarray(load(folder).lm_head[...])
    np.testing.assert_allclose(np.linalg.norm(head, axis=0), 1, rtol=1e-6)
    stored = load_file(folder / "model.safetensors")[HEAD]
    np.testing.assert_allclose(head.T, stored / np.linalg.norm(stored, axis=1, keepdims=True), rtol=1e-5)


# From one format to another -------------------------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    kinds = [{name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in x.items()} for x in (one, other)]
    return kinds[0] == kinds[1]


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_checkpoint_goes_to_orbax_and_back_bit_for_bit(tmp_path, stored):
    """NaN and infinities too, shards or not, config and tokenizer with it; Orbax gives the same model (C73, C77)."""
    config = tiny_config()
    weights = {name: tensor.astype(stored) for name, tensor in tiny_weights(config).items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.array([np.nan, -np.inf, -0.0, 1e-8], stored)
    folder = write_checkpoint(tmp_path / "hf", config, weights, num_shards=3)
    convert(folder, tmp_path / "orbax", "orbax")
    convert(tmp_path / "orbax", tmp_path / "back", "safetensors")
    assert same_bits(tensors_in(tmp_path / "back"), weights)
    assert leaves_equal(load(folder), load(tmp_path / "orbax"))
    beside = {path.name: path.read_bytes() for path in folder.glob("*.json") if "index" not in path.name}
    for made in ("orbax", "back"):
        assert {path.name: path.read_bytes() for path in (tmp_path / made).glob("*.json")} == beside
    assert checkpoint_dtype(tmp_path / "orbax") == "float32", "as config.json says"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])
def test_families_go_to_orbax_and_back(tmp_path, name):
    folder = write_family(tmp_path / "hf", name)
    convert(folder, tmp_path / "orbax", "orbax")
    assert leaves_equal(load(folder), load(tmp_path / "orbax"))
    convert(tmp_path / "orbax", tmp_path / "back", "safetensors")
    assert same_bits(tensors_in(tmp_path / "back"), tensors_in(folder))


def test_a_large_checkpoint_becomes_several_files(tmp_path):
    config = tiny_config()
    folder = write_checkpoint(tmp_path, config, tiny_weights(config))
    stored, target = safetensors_in(folder), tmp_path / "shards"
    target.mkdir()
    write_safetensors(target, stored, max_bytes=40_000)
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 3
    assert {name: tensor.shape for name, tensor in safetensors_in(target).items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    assert same_bits(tensors_in(target), tiny_weights(config))


@pytest.mark.parametrize("tokens", ["gpt2", "llama"])
def test_a_gguf_file_becomes_a_folder_of_the_same_model(tmp_path, tokens):
    """Tensors, RoPE divisors, sizes and tokenizer; where nothing is quantised every bit stays: C66, C73."""
    config = tiny_config(head_dim=32)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config), divisors=LLAMA3_DIVISORS, tokens=tokens)
    for kind in ("orbax", "safetensors"):
        assert main([str(path), str(tmp_path / kind), "--to", kind]) == 0
        assert leaves_equal(load(path), load(tmp_path / kind))
        assert checkpoint_dtype(tmp_path / kind) == checkpoint_dtype(path)
        want = dataclasses.replace(read_config(path), eos_ids=(0,))
        assert dataclasses.replace(read_config(tmp_path / kind), eos_ids=(0,)) == want
        one, other = Tokenizer.load(path), Tokenizer.load(tmp_path / kind)
        text = "the cat and 3 é 🙂<|end|>"
        assert (one.encode(text), one.bos_id, one.eos_ids) == (other.encode(text), other.bos_id, other.eos_ids)
    assert same_bits(tensors_in(tmp_path / "safetensors"), tiny_weights(config))


@pytest.mark.slow
def test_smollm2_says_the_same_from_its_gguf_file_and_converted(tmp_path, default_model):
    """From GGUF to Orbax to safetensors: weights, tokenizer and chat template."""
    llm = LLM(default_model, dtype="float32", num_pages=16, max_model_len=96, max_num_seqs=1,
              max_num_batched_tokens=64, use_tqdm=False)  # fmt: skip
    chat = [{"role": "user", "content": "How much is 12 and 30? Où est l'été?"}]
    params = SamplingParams(temperature=0, max_tokens=12)

    def says():
        (output,) = llm.generate([Tokenizer.load(source).encode_chat(chat)], params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        return output.prompt_token_ids, output.outputs[0].token_ids, llm.engine.runner.fingerprint

    source = default_model
    want = says()
    assert len(set(want[1])) > 5
    for kind in ("orbax", "safetensors"):
        convert(source, tmp_path / kind, kind)
        source = tmp_path / kind
        llm.load_weights(source)
        llm.reset_prefix_cache()
        assert says() == want


def orbax_of(tmp_path: Path) -> Path:
    folder = tmp_path / "orbax"
    convert(write_tiny_model(tmp_path / "hf", num_layers=1), folder, "orbax")
    return folder


def test_a_damaged_tensor_of_an_orbax_folder_is_named(tmp_path):
    """C69: a bit that changed, values that are missing, a tensor of another shape, a list that is missing."""
    folder, name = orbax_of(tmp_path), "model.layers.0.mlp.up_proj.weight"
    load(folder)
    (data,) = [path for path in (folder / "orbax" / "model" / name).iterdir() if path.name == "0.0"]
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=rf"orbax: {name} is damaged: its checksum is another"):
        load(folder)
    data.write_bytes(bytes(content[:-4]))
    with pytest.raises(CheckpointError, match=rf"orbax: {name} is missing or damaged"):
        load(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"orbax: {name} is "):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 301}))
    with pytest.raises(CheckpointError, match=rf"{EMBED}: {EMBED} has shape \(300, 32\), the config wants \(301, 32\)"):
        load(folder)
    shutil.rmtree(folder / "orbax" / "tensors")
    with pytest.raises(CheckpointError, match="orbax is missing, damaged or cut short"):
        load(folder)


def test_a_conversion_that_cannot_be_is_refused_before_anything_is_written(tmp_path, capsys):
    folder = write_tiny_model(tmp_path / "hf", num_layers=1)
    assert main([str(folder), str(folder)]) == 1
    assert "exists; name a folder that does not" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(tiny_config(num_layers=2)))
    assert main([str(folder), str(tmp_path / "new")]) == 1
    assert "model.layers.1.input_layernorm.weight is missing in" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_gguf_file_that_takes_anothers_place_is_read_anew(tmp_path):
    """C10: the same path, other weights."""
    config = tiny_config()
    path, other = (
        write_gguf(tmp_path / f"{seed}.gguf", config, tiny_weights(config, seed), tokens="gpt2") for seed in (0, 7)
    )
    first = load(path)
    shutil.copy(other, tmp_path / "download")
    (tmp_path / "download").replace(path)
    assert leaves_equal(load(path), load(other)) and not leaves_equal(load(path), first)


def test_a_checkpoint_is_not_converted_into_itself(tmp_path):
    folder = write_tiny_model(tmp_path / "hf", num_layers=1)
    with pytest.raises(ValueError, match=r"orbax lies inside .*hf"):
        convert(folder, folder / "orbax", "orbax")
    assert leaves_equal(load(folder), load(folder)) and not (folder / "orbax").exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_config(), tiny_weights(tiny_config()))  # without a tokenizer
    with pytest.raises(ValueError, match="tokenizer"):
        convert(path, tmp_path / "made", "safetensors")
    assert [left.name for left in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    """C69."""
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_attention_heads": "4"}, "the config of .* cannot be read: TypeError"),
        ({"hidden_act": ["silu"]}, "the config of .* cannot be read: TypeError"),
        ({"rope_scaling": "linear"}, "the config of .* cannot be read: .*Error"),
        ({"rope_scaling": {"factor": 8.0}}, r"RoPE has the factor 8\.0, but no type"),
    ],
)
def test_values_of_another_kind_in_a_config_are_refused(tmp_path, changes, error):
    """C66: a factor without a type would scale nothing, silently."""
    folder = write_tiny_model(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=error):
        read_config(folder)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json must hold a JSON object, got \[\]"):
        read_config(folder)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_scaled_gguf_without_a_type_is_refused(tmp_path, key):
    path = write_gguf(tmp_path / "model.gguf", tiny_config(), tiny_weights(tiny_config()))
    file = weights.read_gguf(path)
    scaled = dataclasses.replace(file, metadata={**file.metadata, f"llama.{key}": 4.0})
    with pytest.raises(CheckpointError, match=rf"llama\.{key} = 4\.0 is not supported"):
        gguf_config(scaled)


def test_a_tied_head_that_is_stored_once_more_has_to_be_the_same(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_weights(config)
    folder = write_checkpoint(tmp_path / "same", config, tensors | {HEAD: tensors[EMBED]})
    assert load(folder)
    folder = write_checkpoint(tmp_path / "other", config, tensors | {HEAD: tensors[EMBED] + 1})
    with pytest.raises(CheckpointError, match=rf"{HEAD} is not used by this model"):
        load(folder)
