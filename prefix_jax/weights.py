"""Checkpoints to a model on the device: safetensors folders, GGUF files, or random weights for a config.

One parameter at a time: its tensors are read, sent to the device as they lie in the file, and transposed, fused and
converted there. The host never holds more than the tensors of one parameter.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from prefix_jax.checkpoint import CheckpointError, GgufFile, read_gguf, read_json
from prefix_jax.models.llama import Llama, LlamaConfig

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
FILE_DTYPES = ("BF16", "F16", "F32", "F64")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"  # GGUF: one divisor per RoPE frequency, where the model scales them
REDUNDANT_SUFFIX = "rotary_emb.inv_freq"  # a buffer that follows from the config

ModelSource = str | Path | Mapping[str, Any] | LlamaConfig
Shape = tuple[int, ...]


def read_config(source: ModelSource, load_format: str = "auto") -> LlamaConfig:
    """The model's sizes, from a folder, a config.json, a GGUF file, the contents of a config.json, or as given."""
    if isinstance(source, LlamaConfig):
        return source
    if isinstance(source, Mapping):
        return LlamaConfig.from_hf(source)
    kind, path = _locate(source, load_format)
    return _gguf_config(read_gguf(path)) if kind == "gguf" else LlamaConfig.from_hf(read_json(path))


def checkpoint_dtype(source: ModelSource, load_format: str = "auto") -> jnp.dtype:
    """The dtype a checkpoint is meant to run in: as its config or its embedding says; bfloat16 for GGUF and none."""
    config, kind = source if isinstance(source, Mapping) else {}, "dummy"
    if isinstance(source, (str, Path)):
        kind, path = _locate(source, load_format)
        config = {} if kind == "gguf" else read_json(path)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        name = _safetensors(path.parent)[EMBED].read().dtype.name if kind == "safetensors" else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{source}: unknown dtype {name!r}; known: float32, bfloat16, float16")
    return jnp.dtype(name)


def load_model(
    source: ModelSource, config: LlamaConfig, *, dtype: Any, load_format: str = "auto", seed: int = 0
) -> Llama:
    """The model with every parameter on the default device in `dtype`; `seed` is for load_format "dummy" alone.

    CheckpointError names every tensor that is missing, left over, damaged or of the wrong shape.
    """
    if load_format == "dummy":
        return Llama(config, dtype=dtype, rngs=nnx.Rngs(seed))
    kind, path = _locate(source, load_format) if isinstance(source, (str, Path)) else ("dummy", None)
    if kind == "dummy":
        raise ValueError('a config has no weights; pass load_format="dummy" for random ones')
    model = Llama(config, dtype=dtype)
    parameters = list(_parameters(model))
    wanted = {name: shape for _, shapes, _ in parameters for name, shape in shapes.items()}
    stored = _gguf_tensors(read_gguf(path), config, wanted) if kind == "gguf" else _safetensors(path.parent)
    _check_tensors(stored, wanted)
    for parameter, names, convert in parameters:
        # Each is waited for: what is still to be copied to the device would pile up on the host.
        tensors = [stored[name].read() for name in names]
        parameter.set_value(jax.block_until_ready(convert(*tensors, dtype=dtype)))
    return model


@jax.jit
def checksum(array: jax.Array) -> jax.Array:
    """32 bits of all its bits: no element can change, or two change places, unseen; equal on all devices."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, kind).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def fingerprint(params: Any) -> str:
    """Of the weights in a pytree, as they are computed with: sha256 of each array's shape, dtype and checksum, in
    order. One pass over the weights, on their device; equal in every process and on every device."""
    arrays = jax.tree.leaves(params)
    sums = jax.device_get([checksum(array) for array in arrays])
    parts = [(array.shape, array.dtype.name, int(value)) for array, value in zip(arrays, sums, strict=True)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _locate(source: str | Path, load_format: str) -> tuple[str, Path]:
    """("gguf", the file), or "safetensors" or, where there are no weights, "dummy", and the config.json."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load_format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    gguf_files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (gguf_files and not (path / "config.json").exists()):
        if len(gguf_files) != 1:
            raise CheckpointError(f"want one GGUF file in {path}, got {len(gguf_files)}; pass the path of one")
        return "gguf", gguf_files[0]
    if path.is_file():
        return "dummy", path
    return ("dummy" if load_format == "dummy" else "safetensors"), path / "config.json"


@partial(jax.jit, static_argnames="dtype")
def _as_is(tensor, *, dtype):
    return tensor.astype(dtype)


@partial(jax.jit, static_argnames=("rows", "axis", "dtype"))
def _fused(*tensors, rows=(-1,), axis=0, dtype):
    """Linear weights [out, E], each with its rows as `rows` says, joined along `axis` to one parameter [E, ...]."""
    parts = [tensor.astype(dtype).reshape(*rows, tensor.shape[-1]) for tensor in tensors]
    return jnp.moveaxis(jnp.concatenate(parts, axis), -1, 0)


def _parameters(model: Llama) -> Iterator[tuple[nnx.Param, dict[str, Shape], Callable[..., jax.Array]]]:
    """(parameter, shapes of its tensors by name, how they become it), in the order of a checkpoint."""
    config = model.config
    width, mlp_width = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    by_kv_head = partial(_fused, rows=(config.num_kv_heads, -1, config.head_dim), axis=1)

    yield model.embed, {EMBED: (config.vocab_size, width)}, _as_is
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        qkv = {f"{attention}.{kind}_proj.weight": (rows, width) for kind, rows in qkv_rows.items()}
        gate_up = {f"{mlp}.{kind}_proj.weight": (mlp_width, width) for kind in ("gate", "up")}
        yield layer.input_norm, {f"{prefix}.input_layernorm.weight": (width,)}, _as_is
        yield layer.qkv, qkv, by_kv_head
        yield layer.o, {f"{attention}.o_proj.weight": (width, q_rows)}, _fused
        yield layer.post_norm, {f"{prefix}.post_attention_layernorm.weight": (width,)}, _as_is
        yield layer.gate_up, gate_up, partial(_fused, rows=(1, -1))
        yield layer.down, {f"{mlp}.down_proj.weight": (width, mlp_width)}, _fused
    yield model.norm, {"model.norm.weight": (width,)}, _as_is
    if not config.tie_word_embeddings:
        yield model.lm_head, {HEAD: (config.vocab_size, width)}, _fused


@dataclass(frozen=True)
class StoredTensor:
    """A tensor where it lies. `read` gives its values as they are there; the device converts them."""

    file: Path
    shape: Shape
    read: Callable[[], np.ndarray]


def _check_tensors(stored: Mapping[str, StoredTensor], wanted: Mapping[str, Shape]) -> None:
    left_over = {name for name in stored.keys() - wanted.keys() if not name.endswith(REDUNDANT_SUFFIX)}
    # A tied checkpoint may store its head once more; one that differs would be dropped silently.
    if HEAD in left_over and EMBED in stored and np.array_equal(stored[HEAD].read(), stored[EMBED].read()):
        left_over.remove(HEAD)
    faults = [f"{name} is missing" for name in wanted if name not in stored]
    faults += [f"{stored[name].file}: {name} is not used by this model" for name in sorted(left_over)]
    faults += [
        f"{tensor.file}: {name} has shape {tensor.shape}, the config wants {wanted[name]}"
        for name, tensor in stored.items()
        if tensor.shape != wanted.get(name, tensor.shape)
    ]
    if faults:
        raise CheckpointError("the checkpoint does not fit its config:\n  " + "\n  ".join(faults))


def _safetensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of one or many files. CheckpointError names a file that is missing or cut short."""

    def read(path: Path, name: str) -> np.ndarray:
        with safe_open(path, "numpy") as file:  # opened anew each time, so that no read pages stay mapped
            return file.get_tensor(name)

    index_file = folder / "model.safetensors.index.json"
    index = read_json(index_file)["weight_map"] if index_file.exists() else {}
    stored: dict[str, StoredTensor] = {}
    for path in [folder / name for name in sorted(set(index.values())) or ["model.safetensors"]]:
        try:
            with safe_open(path, "numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is missing, damaged or cut short: {error}") from error
        for name, tensor in slices.items():
            if (dtype := tensor.get_dtype()) not in FILE_DTYPES and not name.endswith(REDUNDANT_SUFFIX):
                raise CheckpointError(f"{path}: {name}: unknown dtype {dtype}; known: {', '.join(FILE_DTYPES)}")
            stored[name] = StoredTensor(path, tuple(tensor.get_shape()), partial(read, path, name))
    for name, file_name in index.items():
        if name not in stored or stored[name].file.name != file_name:
            raise CheckpointError(f"{index_file} names {name} in {file_name}, which lacks it")
    return stored


def _gguf_tensors(file: GgufFile, config: LlamaConfig, wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Tensors under their Hugging Face names, with llama.cpp's order of RoPE rows undone; float32 once read."""
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str, tensor: Any) -> np.ndarray:
        try:
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            raise CheckpointError(f"{file.path}: {tensor.name}: {error}") from error
        if (num_heads := heads.get(name.split(".")[-2])) is None:
            return weight
        neighbours = weight.reshape(num_heads, -1, 2, weight.shape[1])  # RoPE pairs lie together, not in halves
        return neighbours.swapaxes(1, 2).reshape(weight.shape)

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    hf_names = {names.get_name(name, try_suffixes=(".weight",)): name for name in wanted}
    tensors = {hf_names.get(name, name): tensor for name, tensor in file.tensors.items() if name != ROPE_DIVISORS}
    return {
        name: StoredTensor(file.path, tuple(tensor.shape[::-1].tolist()), partial(read, name, tensor))
        for name, tensor in tensors.items()
    }


_GGUF_CONFIG = {  # key of config.json: key of a GGUF file, after "llama."
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def _gguf_config(file: GgufFile) -> LlamaConfig:
    """Goes through the keys of a Hugging Face config, whose checks then hold for both."""
    metadata, tensors = file.metadata, file.tensors
    supported = {"general.architecture": "llama", "llama.rope.scaling.type": "none", "llama.expert_count": 0}
    for key, known in supported.items():
        if (got := metadata.get(key, known)) != known:
            raise CheckpointError(f"{file.path}: {key} = {got!r} is not supported; known: {known!r}")
    values = {key: metadata.get(f"llama.{gguf_key}") for key, gguf_key in _GGUF_CONFIG.items()}
    values["vocab_size"] = int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None
    values["tie_word_embeddings"] = "output.weight" not in tensors
    values |= {f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    config = LlamaConfig.from_hf(values)
    if (turned := metadata.get("llama.rope.dimension_count", config.head_dim)) != config.head_dim:
        raise CheckpointError(f"{file.path}: RoPE over {turned} of {config.head_dim} dimensions is not supported")
    if ROPE_DIVISORS not in tensors:
        return config
    return replace(config, rope_divisors=tuple(tensors[ROPE_DIVISORS].data.tolist()))
