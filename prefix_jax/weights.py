"""Checkpoints to a model on the device: safetensors folders, GGUF files, or random weights for a config.

One parameter at a time: its tensors are read, sent to the device as they lie in the file, and transposed, fused and
converted there. The host never holds more than the tensors of one parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
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
FILE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"  # GGUF: one divisor per RoPE frequency, where the model scales them
REDUNDANT_SUFFIX = "rotary_emb.inv_freq"  # a buffer that follows from the config

ModelSource = str | Path | Mapping[str, Any] | LlamaConfig
Shapes = dict[str, tuple[int, ...]]


def read_config(source: ModelSource, load_format: str = "auto") -> LlamaConfig:
    """The model's sizes, from a folder, a config.json, a GGUF file, the contents of a config.json, or as given."""
    if isinstance(source, LlamaConfig):
        return source
    if isinstance(source, Mapping):
        return LlamaConfig.from_hf(source)
    kind, path = _locate(source, load_format)
    return _gguf_config(read_gguf(path)) if kind == "gguf" else LlamaConfig.from_hf(_hf_config(path))


def checkpoint_dtype(source: ModelSource, load_format: str = "auto") -> jnp.dtype:
    """The dtype a checkpoint is meant to run in: as its config or its embedding says; bfloat16 for GGUF and none."""
    config, kind = source if isinstance(source, Mapping) else {}, "dummy"
    if isinstance(source, (str, Path)):
        kind, path = _locate(source, load_format)
        config = {} if kind == "gguf" else _hf_config(path)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        name = _Safetensors(path).dtypes.get(EMBED) if kind == "safetensors" else "bfloat16"
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
    checkpoint = _Gguf(read_gguf(path), config, wanted) if kind == "gguf" else _Safetensors(path)
    _check_tensors(checkpoint, wanted)
    for parameter, shapes, convert in parameters:
        # Each is waited for: what is still to be copied to the device would pile up on the host.
        parameter.set_value(jax.block_until_ready(convert(*map(checkpoint.read, shapes), dtype=dtype)))
    return model


def _locate(source: str | Path, load_format: str) -> tuple[str, Path]:
    """("gguf", file), ("safetensors", folder), or ("dummy", folder or config.json)."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load_format {load_format!r}; known: {', '.join(LOAD_FORMATS)}")
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        kind = {".gguf": "gguf", ".json": "dummy"}.get(path.suffix)
        if kind is None or load_format not in ("auto", "dummy", kind):
            raise CheckpointError(f"{path} is no folder, GGUF file or config.json (load_format {load_format!r})")
        return kind, path
    gguf_files = sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (gguf_files and not (path / "config.json").exists()):
        if len(gguf_files) != 1:
            raise CheckpointError(f"want one GGUF file in {path}, got {len(gguf_files)}; pass the path of one")
        return "gguf", gguf_files[0]
    return ("dummy" if load_format == "dummy" else "safetensors"), path


def _hf_config(path: Path) -> dict[str, Any]:
    return read_json(path if path.is_file() else path / "config.json")


@partial(jax.jit, static_argnames="dtype")
def _as_is(tensor, *, dtype):
    return tensor.astype(dtype)


@partial(jax.jit, static_argnames=("rows", "axis", "dtype"))
def _fused(*tensors, rows=(-1,), axis=0, dtype):
    """Linear weights [out, E], each with its rows as `rows` says, joined along `axis` to one parameter [E, ...]."""
    parts = [tensor.astype(dtype).reshape(*rows, tensor.shape[-1]) for tensor in tensors]
    return jnp.moveaxis(jnp.concatenate(parts, axis), -1, 0)


def _parameters(model: Llama) -> Iterator[tuple[nnx.Param, Shapes, Callable[..., jax.Array]]]:
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


def _check_tensors(checkpoint: "_Safetensors | _Gguf", wanted: Shapes) -> None:
    got = checkpoint.shapes
    left_over = {name for name in got.keys() - wanted.keys() if not name.endswith(REDUNDANT_SUFFIX)}
    # A tied checkpoint may store its head once more; one that differs would be dropped silently.
    if HEAD in left_over and np.array_equal(checkpoint.read(HEAD), checkpoint.read(EMBED)):
        left_over.remove(HEAD)
    faults = [f"{name} is missing" for name in wanted if name not in got]
    faults += [f"{checkpoint.files[name]}: {name} is not used by this model" for name in sorted(left_over)]
    faults += [
        f"{checkpoint.files[name]}: {name} has shape {got[name]}, the config wants {shape}"
        for name, shape in wanted.items()
        if got.get(name, shape) != shape
    ]
    if faults:
        raise CheckpointError("the checkpoint does not fit its config:\n  " + "\n  ".join(faults))


class _Safetensors:
    """Tensors of one or many safetensors files. CheckpointError names a file that is missing or cut short."""

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        self.shapes: Shapes = {}
        self.dtypes: dict[str, str] = {}
        indices = sorted(folder.glob("*.safetensors.index.json"))[:1]
        index = {name: folder / file for path in indices for name, file in read_json(path)["weight_map"].items()}
        for path in sorted(set(index.values())) or [_only_file(folder)]:
            self._add(path)
        if absent := [f"{name} in {path}" for name, path in index.items() if self.files.get(name) != path]:
            raise CheckpointError(f"the index names tensors their files lack: {', '.join(absent)}")

    def _add(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        try:
            with safe_open(path, "numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
        for name, tensor in slices.items():
            if (dtype := tensor.get_dtype()) not in FILE_DTYPES and not name.endswith(REDUNDANT_SUFFIX):
                raise CheckpointError(f"{path}: {name}: unknown dtype {dtype}; known: {', '.join(FILE_DTYPES)}")
            self.files[name], self.shapes[name] = path, tuple(tensor.get_shape())
            self.dtypes[name] = FILE_DTYPES.get(dtype, dtype)

    def read(self, name: str) -> np.ndarray:
        """As it lies in the file; the device converts it. Opened anew each time, so that no read pages stay mapped."""
        with safe_open(self.files[name], "numpy") as file:
            return file.get_tensor(name)


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return folder / "model.safetensors"
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(f"want model.safetensors, or many files with an index, in {folder}; found: {names}")
    return files[0]


class _Gguf:
    """Tensors of a GGUF file under their Hugging Face names, with llama.cpp's order of RoPE rows undone."""

    def __init__(self, file: GgufFile, config: LlamaConfig, wanted: Iterable[str]):
        from gguf import MODEL_ARCH, get_tensor_name_map

        names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
        hf_names = {f"{names.get_name(name.removesuffix('.weight'))}.weight": name for name in wanted}
        # A tensor the model does not want keeps its own name, and counts as left over.
        self._stored = {hf_names.get(name, name): name for name in file.tensors if name != ROPE_DIVISORS}
        self._file = file
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self.files = dict.fromkeys(self._stored, file.path)
        self.shapes = {name: _gguf_shape(file, stored) for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """Dequantised to float32, but in the file's own dtype where that is one of numpy's."""
        tensor = _dequantised(self._file, self._stored[name])
        if (heads := self._heads.get(name.split(".")[-2])) is not None:
            neighbours = tensor.reshape(heads, -1, 2, tensor.shape[1])  # RoPE pairs lie together, not in halves
            tensor = neighbours.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def _gguf_shape(file: GgufFile, name: str) -> tuple[int, ...]:
    return tuple(reversed(file.tensors[name].shape.tolist()))


def _dequantised(file: GgufFile, name: str) -> np.ndarray:
    from gguf import dequantize

    tensor = file.tensors[name]
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise CheckpointError(f"{file.path}: {name}: {error}") from error


def _gguf_config(file: GgufFile) -> LlamaConfig:
    """Goes through the keys of a Hugging Face config, whose checks then hold for both."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: unknown GGUF architecture {architecture!r}; known: llama")

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"llama.{key}", default)

    for key, known in (("rope.scaling.type", (None, "none")), ("expert_count", (None, 0))):
        if value(key) not in known:
            raise CheckpointError(f"{file.path}: llama.{key} = {value(key)!r} is not supported; known: {known[1]!r}")
    config = LlamaConfig.from_hf(
        {
            "vocab_size": _gguf_shape(file, "token_embd.weight")[0] if "token_embd.weight" in file.tensors else None,
            "hidden_size": value("embedding_length"),
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": value("attention.head_count"),
            "num_key_value_heads": value("attention.head_count_kv"),
            "head_dim": value("attention.key_length"),
            "max_position_embeddings": value("context_length", 2048),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon", 1e-5),
            "rope_theta": value("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        }
    )
    if (turned := value("rope.dimension_count", config.head_dim)) != config.head_dim:
        raise CheckpointError(f"{file.path}: RoPE over {turned} of {config.head_dim} dimensions is not supported")
    if ROPE_DIVISORS not in file.tensors:
        return config
    return replace(config, rope_divisors=tuple(_dequantised(file, ROPE_DIVISORS).tolist()))
