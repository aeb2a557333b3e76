"""Checkpoints to a model on the device: safetensors folders, GGUF files, Orbax folders, or random weights for a config.

One parameter at a time: its tensors are read, sent to the device as they lie in the file, and transposed, fused and
converted there; of several devices, each is sent its part. The host never holds more than the tensors of one parameter.
"""

import hashlib
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from prefix_jax.checkpoint import CheckpointError, read_gguf, read_json
from prefix_jax.models.llama import Llama, LlamaConfig
from prefix_jax.models.split import NCCL_ALONE
from prefix_jax.stored_tensors import (
    EMBED,
    HEAD,
    ORBAX,
    REDUNDANT_SUFFIX,
    Shape,
    StoredTensor,
    gguf_config,
    gguf_tensors,
    orbax_tensors,
    safetensors_in,
)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")

ModelSource = str | Path | Mapping[str, Any] | LlamaConfig


def read_config(source: ModelSource, load_format: str = "auto") -> LlamaConfig:
    """The model's sizes, from a folder, a config.json, a GGUF file, the contents of a config.json, or as given."""
    if isinstance(source, LlamaConfig):
        return source
    content = source if isinstance(source, Mapping) else hf_config(source, load_format)
    try:
        return LlamaConfig.from_hf(content)
    except (TypeError, AttributeError, KeyError, ZeroDivisionError) as error:  # of a value of another kind
        where = "the config" if isinstance(source, Mapping) else f"the config of {source}"
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def hf_config(path: str | Path, load_format: str = "auto") -> dict[str, Any]:
    """The contents of the model's config.json, or for a GGUF file what would stand there."""
    kind, path = _locate(path, load_format)
    return gguf_config(read_gguf(path)) if kind == "gguf" else read_json(path)


def checkpoint_dtype(source: ModelSource, load_format: str = "auto") -> jnp.dtype:
    """The dtype a checkpoint is meant to run in: as its config or its embedding says; bfloat16 for GGUF and none."""
    config, kind = source if isinstance(source, Mapping) else {}, "dummy"
    if isinstance(source, (str, Path)):
        kind, path = _locate(source, load_format)
        config = {} if kind == "gguf" else read_json(path)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        name = _STORED[kind](path.parent)[EMBED].dtype if kind in _STORED else "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{source}: unknown dtype {name!r}; known: float32, bfloat16, float16")
    return jnp.dtype(name)


def load_model(
    source: ModelSource,
    config: LlamaConfig,
    *,
    dtype: Any,
    load_format: str = "auto",
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    use_tqdm: bool = False,
) -> Llama:
    """The model with every parameter in `dtype`, on the default device or split among those of `mesh`; `seed` is for
    load_format "dummy" alone.

    CheckpointError names every tensor that is missing, left over, damaged or of the wrong shape, and its file.
    """
    if load_format == "dummy":
        return Llama(config, dtype=dtype, rngs=nnx.Rngs(seed), mesh=mesh)
    if not isinstance(source, (str, Path)):
        raise ValueError('a config has no weights; pass load_format="dummy" for random ones')
    model = Llama(config, dtype=dtype, mesh=mesh)
    devices = [None] if mesh is None else list(mesh.devices.flat)
    stored = open_tensors(source, model, load_format)
    parameters = list(_parameters(model, stored))
    sizes = [math.prod(parameter.get_value().shape) * jnp.dtype(dtype).itemsize for parameter, *_ in parameters]
    with tqdm(total=sum(sizes), desc="loading", unit="B", unit_scale=True, disable=not use_tqdm) as progress:
        for (parameter, names, convert), size in zip(parameters, sizes, strict=True):
            # Each is waited for: what is still to be copied to the device would pile up on the host.
            values = [stored[name].read() for name in names]
            parts = []
            for index, device in enumerate(devices):
                tensors = [part for pair in zip(names, values, strict=True) for part in model.split.part(*pair, index)]
                tensors = jax.device_put(tensors, device)
                parts.append(jax.block_until_ready(convert(*tensors, dtype=dtype)))
                for tensor in tensors:
                    tensor.delete()
            _let_go(values)
            if dtype == jnp.float16 and not all(jnp.isfinite(part).all() for part in parts):
                files = ", ".join({str(stored[name].file): None for name in names})
                raise CheckpointError(f"{files}: {', '.join(names)}: values that float16 cannot hold; use bfloat16")
            whole, value = parameter.get_value(), parts[0]
            if mesh is not None:
                value = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)
            parameter.set_value(value)
            progress.update(size)
    return model


def _let_go(values: list[np.ndarray]) -> None:
    """Empties the list, and waits a little until JAX has let go of the arrays: it does so in a thread of its own, and
    only while it is called."""
    held = [weakref.ref(value.base if isinstance(value.base, np.ndarray) else value) for value in values]
    values.clear()
    for _ in range(2000):
        if not any(ref() is not None for ref in held):
            return
        jax.device_put(0)
        time.sleep(0.0001)


def open_tensors(path: str | Path, model: Llama, load_format: str = "auto") -> dict[str, StoredTensor]:
    """The stored tensors of a checkpoint by their Hugging Face names, none of them read yet. CheckpointError unless
    they are the model's."""
    kind, path = _locate(path, load_format)
    if kind == "dummy":
        raise ValueError('a config has no weights; pass load_format="dummy" for random ones')
    if kind == "gguf":
        file, config = read_gguf(path), model.config
        wanted = [name for _, shapes, _ in _parameters(model) for name in shapes]
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        stored = gguf_tensors(file, file.metadata.get("general.architecture", "llama"), wanted, heads)
    else:
        stored = _STORED[kind](path.parent)
    _check_tensors(
        stored, {name: shape for _, shapes, _ in _parameters(model, stored) for name, shape in shapes.items()}
    )
    return stored


@partial(jax.jit, compiler_options=NCCL_ALONE)
def checksum(array: jax.Array) -> jax.Array:
    """32 bits of all its bits: no element can change, or two change places, unseen; equal on all devices."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(array, kind).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)  # in the flat array, which is never made: its parts may be on several devices
    for axis, size in enumerate(bits.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def fingerprint(params: Any, whole: Callable[[int, jax.Array], jax.Array] = lambda index, array: array) -> str:
    """Of the weights in a pytree, as they are computed with: sha256 of each array's shape, dtype and checksum, in
    order. One pass over the weights, on their device; equal in every process and on every device. whole: makes of the
    array at an index what it is on one device."""
    arrays, sums = jax.tree.leaves(params), []
    for index, array in enumerate(arrays):
        array = whole(index, array)
        sums.append((array.shape, array.dtype.name, checksum(array)))
    parts = [(shape, name, int(value)) for shape, name, value in jax.device_get(sums)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_STORED: dict[str, Callable[[Path], dict[str, StoredTensor]]] = {  # by what is in a model's folder
    "safetensors": safetensors_in,
    "orbax": lambda folder: orbax_tensors(folder / ORBAX),
}


def _locate(source: str | Path, load_format: str) -> tuple[str, Path]:
    """("gguf", the file), or "safetensors", "orbax" or, where there are no weights, "dummy", and the config.json."""
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
    found = "orbax" if (path / ORBAX).exists() else "safetensors"
    return (found if load_format == "auto" else load_format), path / "config.json"


@partial(jax.jit, static_argnames="dtype")
def _as_is(tensor, *, dtype):
    return tensor.astype(dtype)


@partial(jax.jit, static_argnames=("rows", "axis", "dtype"))
def _fused(*tensors, rows=(-1,), axis=0, dtype):
    """Linear weights [out, E], or biases [out], each with its rows as `rows` says, joined along `axis` to one parameter
    [E, ...], or [...]."""
    parts = [part.astype(dtype).reshape(*rows, *part.shape[1:]) for part in tensors]
    joined = jnp.concatenate(parts, axis)
    return jnp.moveaxis(joined, -1, 0) if tensors[0].ndim == 2 else joined


@partial(jax.jit, static_argnames="dtype")
def _unit_rows(tensor, *, dtype):
    """A head [V, E] whose rows get length one, as [E, V]."""
    wide = tensor.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, axis=1, keepdims=True))
    return (wide / jnp.maximum(length, 1e-12)).astype(dtype).T


def _parameters(
    model: Llama, stored: Collection[str] = ()
) -> Iterator[tuple[nnx.Param, dict[str, Shape], Callable[..., jax.Array]]]:
    """(parameter, shapes of its tensors by name, how they become it), in the order of a checkpoint. Where `stored` has
    queries, keys and values, or gate and up, in one tensor, that one."""
    config = model.config
    width, mlp_width = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    by_kv_head = partial(_fused, rows=(model.split.local.num_kv_heads, -1, config.head_dim), axis=1)
    by_block = partial(_fused, rows=(-1, 1, model.split.mlp_block), axis=1)

    def joined(parts, *packed):
        """The tensors of `parts`, or the first of `packed` that is stored, with their rows one after the other."""
        rows = sum(shape[0] for shape in parts.values())
        return next(({name: (rows, width)} for name in packed if name in stored), parts)

    yield model.embed, {EMBED: (config.vocab_size, width)}, _as_is
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        qkv = {f"{attention}.{kind}_proj.weight": (rows, width) for kind, rows in qkv_rows.items()}
        gate_up = {f"{mlp}.{kind}_proj.weight": (mlp_width, width) for kind in ("gate", "up")}
        yield layer.input_norm, {f"{prefix}.input_layernorm.weight": (width,)}, _as_is
        yield layer.qkv, joined(qkv, f"{attention}.qkv_proj.weight", f"{attention}.W_pack.weight"), by_kv_head
        if config.qkv_bias:
            yield layer.qkv_bias, {f"{attention}.{kind}_proj.bias": (qkv_rows[kind],) for kind in "qkv"}, by_kv_head
        if config.qk_norm:
            yield layer.q_norm, {f"{attention}.q_norm.weight": (config.head_dim,)}, _as_is
            yield layer.k_norm, {f"{attention}.k_norm.weight": (config.head_dim,)}, _as_is
        yield layer.o, {f"{attention}.o_proj.weight": (width, q_rows)}, _fused
        yield layer.mlp_norm, {f"{prefix}.{before_mlp}.weight": (width,)}, _as_is
        yield layer.gate_up, joined(gate_up, f"{mlp}.gate_up_proj.weight"), by_block
        yield layer.down, {f"{mlp}.down_proj.weight": (width, mlp_width)}, _fused
        if config.post_norms:
            yield layer.attention_post_norm, {f"{prefix}.post_attention_layernorm.weight": (width,)}, _as_is
            yield layer.mlp_post_norm, {f"{prefix}.post_feedforward_layernorm.weight": (width,)}, _as_is
    yield model.norm, {"model.norm.weight": (width,)}, _as_is
    if not config.tie_word_embeddings:
        yield model.lm_head, {HEAD: (config.vocab_size, width)}, _unit_rows if config.norm_head else _fused


def _digest(tensor: StoredTensor) -> tuple[Shape, str, str]:
    """Of what a tensor is; one is read at a time."""
    values = np.ascontiguousarray(tensor.read())
    return tensor.shape, values.dtype.name, hashlib.blake2b(values.reshape(-1).view(np.uint8)).hexdigest()


def _check_tensors(stored: Mapping[str, StoredTensor], wanted: Mapping[str, Shape]) -> None:
    left_over = {name for name in stored.keys() - wanted.keys() if not name.endswith(REDUNDANT_SUFFIX)}
    # A tied checkpoint may store its head once more; one that differs would be dropped silently.
    if HEAD in left_over and EMBED in stored and _digest(stored[HEAD]) == _digest(stored[EMBED]):
        left_over.remove(HEAD)
    files = ", ".join(dict.fromkeys(str(tensor.file.parent) for tensor in stored.values()))
    faults = [f"{name} is missing in {files}" for name in wanted if name not in stored]
    faults += [f"{stored[name].file}: {name} is not used by this model" for name in sorted(left_over)]
    faults += [
        f"{tensor.file}: {name} has shape {tensor.shape}, the config wants {wanted[name]}"
        for name, tensor in stored.items()
        if tensor.shape != wanted.get(name, tensor.shape)
    ]
    if faults:
        raise CheckpointError("the checkpoint does not fit its config:\n  " + "\n  ".join(faults))
