"""Checkpoints to a model on the device: safetensors folders, GGUF files, or random weights for a config.

One parameter at a time: its tensors are read, sent to the device as they lie in the file, and transposed, fused and
converted there. The host never holds more than the tensors of two parameters.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from prefix_jax.gguf_file import CheckpointError, GgufFile, read_gguf
from prefix_jax.models.llama import Llama, LlamaConfig

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
FILE_DTYPES = ("BF16", "F16", "F32", "F64")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"  # GGUF: one divisor per RoPE frequency, where the model scales them
REDUNDANT_SUFFIX = "rotary_emb.inv_freq"  # a buffer that follows from the config

ModelSource = str | Path | Mapping[str, Any] | LlamaConfig


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
    config: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    kind = "dummy"
    if isinstance(source, (str, Path)):
        kind, path = _locate(source, load_format)
        config = {} if kind == "gguf" else _hf_config(path)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        name = _Safetensors(path).read(EMBED).dtype.name if kind == "safetensors" else "bfloat16"
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
    kind, path = _locate(source, load_format) if isinstance(source, (str, Path)) else ("dummy", source)
    if kind == "dummy":
        raise ValueError('a config has no weights; pass load_format="dummy" for random ones')
    checkpoint = _Gguf(read_gguf(path), config) if kind == "gguf" else _Safetensors(path)
    _check_tensors(checkpoint, config)
    model = Llama(config, dtype=dtype)
    in_flight = None
    for parameter, names, convert in _parameters(model):
        tensors = [checkpoint.read(name, dtype) for name in names]
        jax.block_until_ready(in_flight)  # the next tensors were read meanwhile
        in_flight = convert(*tensors, dtype=dtype)
        parameter.set_value(in_flight)
    return jax.block_until_ready(model)


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
    return _read_json(path if path.is_file() else path / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


# Which tensors fill which parameter. A linear weight lies [out, in] in the file and [in, out] in the model.


@partial(jax.jit, static_argnames="dtype")
def _as_is(tensor, *, dtype):
    return tensor.astype(dtype)


@partial(jax.jit, static_argnames="dtype")
def _transposed(tensor, *, dtype):
    return tensor.astype(dtype).T


@partial(jax.jit, static_argnames=("dtype", "head_dim"))
def _fused_qkv(q, k, v, *, dtype, head_dim):
    width, num_kv_heads = q.shape[1], k.shape[0] // head_dim
    heads = [x.astype(dtype).reshape(num_kv_heads, -1, head_dim, width) for x in (q, k, v)]
    return jnp.concatenate(heads, axis=1).transpose(3, 0, 1, 2)  # [E, Hkv, G + 2, D]


@partial(jax.jit, static_argnames="dtype")
def _fused_gate_up(gate, up, *, dtype):
    return jnp.stack([gate.astype(dtype), up.astype(dtype)]).transpose(2, 0, 1)  # [E, 2, F]


def _parameters(model: Llama) -> Iterator[tuple[nnx.Param, tuple[str, ...], Any]]:
    """(parameter, names of its tensors, how they become it), in the order of a checkpoint."""
    yield model.embed, (EMBED,), _as_is
    for index, layer in enumerate(model.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        yield layer.input_norm, (f"model.layers.{index}.input_layernorm.weight",), _as_is
        qkv = tuple(f"{attention}.{name}_proj.weight" for name in "qkv")
        yield layer.qkv, qkv, partial(_fused_qkv, head_dim=model.config.head_dim)
        yield layer.o, (f"{attention}.o_proj.weight",), _transposed
        yield layer.post_norm, (f"model.layers.{index}.post_attention_layernorm.weight",), _as_is
        yield layer.gate_up, (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), _fused_gate_up
        yield layer.down, (f"{mlp}.down_proj.weight",), _transposed
    yield model.norm, ("model.norm.weight",), _as_is
    if not model.config.tie_word_embeddings:
        yield model.lm_head, (HEAD,), _transposed


def _tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this config must hold."""
    width, mlp = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (q_rows, width),
        "self_attn.k_proj": (kv_rows, width),
        "self_attn.v_proj": (kv_rows, width),
        "self_attn.o_proj": (width, q_rows),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, width), "model.norm.weight": (width,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, width)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _check_tensors(checkpoint: "_Safetensors | _Gguf", config: LlamaConfig) -> None:
    wanted, got = _tensor_shapes(config), checkpoint.shapes
    left_over = {name for name in got.keys() - wanted.keys() if not name.endswith(REDUNDANT_SUFFIX)}
    # A tied checkpoint may store its head once more; one that differs would be dropped silently.
    if HEAD in left_over and config.tie_word_embeddings and got[HEAD] == got.get(EMBED):
        same = np.array_equal(checkpoint.read(HEAD, np.float32), checkpoint.read(EMBED, np.float32))
        left_over -= {HEAD} if same else set()
    faults = [f"{name} is missing" for name in wanted if name not in got]
    faults += [f"{checkpoint.files[name]}: {name} is not used by this model" for name in sorted(left_over)]
    faults += [
        f"{checkpoint.files[name]}: {name} has shape {got[name]}, the config wants {shape}"
        for name, shape in wanted.items()
        if name in got and got[name] != shape
    ]
    if faults:
        raise CheckpointError("the checkpoint does not fit its config:\n  " + "\n  ".join(faults))


class _Safetensors:
    """Tensors of one or many safetensors files. CheckpointError names a file that is missing or cut short."""

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = _read_index(folder)
        for path in sorted(set(index.values())) or [_only_file(folder)]:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensor = file.get_slice(name)
                    self.files[name], self.shapes[name] = path, tuple(tensor.get_shape())
                    if tensor.get_dtype() not in FILE_DTYPES and not name.endswith(REDUNDANT_SUFFIX):
                        known = ", ".join(FILE_DTYPES)
                        raise CheckpointError(f"{path}: {name}: unknown dtype {tensor.get_dtype()}; known: {known}")
        if absent := [f"{name} in {path}" for name, path in index.items() if self.files.get(name) != path]:
            raise CheckpointError(f"the index names tensors their files lack: {', '.join(absent)}")

    def read(self, name: str, dtype: Any = None) -> np.ndarray:
        """As it lies in the file; the device converts it. Opened anew each time, so that no read pages stay mapped."""
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)


def _read_index(folder: Path) -> dict[str, Path]:
    """Tensor name to file, empty for a folder without an index."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    return {name: folder / file for path in indices[:1] for name, file in _read_json(path)["weight_map"].items()}


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        return folder / "model.safetensors"
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(f"want model.safetensors, or many files with an index, in {folder}; found: {names}")
    return files[0]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {"token_embd.weight": EMBED, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}


class _Gguf:
    """Tensors of a GGUF file under their Hugging Face names, with llama.cpp's order of RoPE rows undone."""

    def __init__(self, file: GgufFile, config: LlamaConfig):
        self._file = file
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._gguf_names = {_hf_name(name): name for name in file.tensors if name != ROPE_DIVISORS}
        self.files = dict.fromkeys(self._gguf_names, file.path)
        self.shapes = {name: file.tensors[gguf_name].shape for name, gguf_name in self._gguf_names.items()}

    def read(self, name: str, dtype: Any) -> np.ndarray:
        tensor = self._file.read(self._gguf_names[name], dtype)
        if (heads := self._heads.get(self._gguf_names[name].split(".")[-2])) is not None:
            neighbours = tensor.reshape(heads, -1, 2, tensor.shape[1])  # RoPE pairs lie together, not in halves
            tensor = neighbours.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def _hf_name(name: str) -> str:
    """The Hugging Face name, or the name itself where there is none (which then counts as left over)."""
    index, _, kind = name.removeprefix("blk.").removesuffix(".weight").partition(".")
    if name == f"blk.{index}.{kind}.weight" and kind in _GGUF_LAYER_NAMES:
        return f"model.layers.{index}.{_GGUF_LAYER_NAMES[kind]}.weight"
    return _GGUF_NAMES.get(name, name)


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
            "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
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
    return replace(config, rope_divisors=tuple(file.read(ROPE_DIVISORS, np.float32).tolist()))
