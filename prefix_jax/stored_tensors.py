"""Tensors where they lie, by their Hugging Face names: safetensors, one file or many, GGUF files, Orbax folders.

They are listed first, with shapes and dtypes, and then read one at a time, each piece by piece into memory of its own:
little else is held meanwhile. No jax: what is to become of a tensor is the reader's business.
"""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from prefix_jax.checkpoint import CheckpointError, GgufFile, open_array, orbax_checkpointer, read_json

Shape = tuple[int, ...]

FILE_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPE_DIVISORS = "rope_freqs.weight"  # GGUF: one divisor per RoPE frequency, where the model scales them
REDUNDANT_SUFFIX = "rotary_emb.inv_freq"  # a buffer that follows from the config
SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
ORBAX = "orbax"  # in a model's folder: its weights as an Orbax checkpoint
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
READ_AT_ONCE = 2**22  # bytes of Orbax's files
DEQUANTIZED_AT_ONCE = 2**18  # values: what the gguf package needs meanwhile is several times that


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `read` gives its values as they are there, quantised ones as float32; CheckpointError names
    tensor and file when they are damaged."""

    file: Path
    shape: Shape
    dtype: str
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _to_fill(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a multiple of 64 bytes: on a CPU JAX takes such an array as it is, and copies any other."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)


# Safetensors ----------------------------------------------------------------------------------------------------------


def safetensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of one or many files. CheckpointError names a file that is missing or cut short."""
    index_file = folder / INDEX
    index = read_json(index_file).get("weight_map") if index_file.exists() else {}
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{index_file}: weight_map must give each tensor's file, got {index!r:.80}")
    stored: dict[str, StoredTensor] = {}
    for path in [folder / name for name in sorted(set(index.values())) or [SAFETENSORS]]:
        stored |= _safetensors_file(path)
    for name, file_name in index.items():
        if name not in stored or stored[name].file.name != file_name:
            raise CheckpointError(f"{index_file} names {name} in {file_name}, which lacks it")
    return stored


def _safetensors_file(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, "numpy"):  # the library checks header, offsets and length
            pass
        with path.open("rb") as file:
            header_len = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_len))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, damaged or cut short: {error}") from error
    stored = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if (dtype := entry["dtype"]) in FILE_DTYPES:
            kind, shape = np.dtype(FILE_DTYPES[dtype]), tuple(entry["shape"])
            start = 8 + header_len + entry["data_offsets"][0]
            stored[name] = StoredTensor(path, shape, kind.name, partial(_read_span, path, name, start, kind, shape))
        elif not name.endswith(REDUNDANT_SUFFIX):
            raise CheckpointError(f"{path}: {name}: unknown dtype {dtype}; known: {', '.join(FILE_DTYPES)}")
    return stored


def _read_span(path: Path, name: str, start: int, dtype: np.dtype, shape: Shape) -> np.ndarray:
    """By plain reading: pages of a mapped file would count as memory beside the tensor itself."""
    values = _to_fill(shape, dtype)
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(values.reshape(-1).view(np.uint8)) != values.nbytes:
            raise CheckpointError(f"{path}: {name} is cut short")
    return values


def write_safetensors(
    folder: Path, tensors: Mapping[str, StoredTensor], *, max_bytes: int = 4 * 2**30, use_tqdm: bool = False
) -> None:
    """One file, or several of up to `max_bytes` (or one tensor) each, and their index. Host memory holds one file."""
    files, size = [[]], 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    paths = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    paths = paths if len(files) > 1 else [SAFETENSORS]
    values = _read_all(tensors, use_tqdm)
    for path, names in zip(paths, files, strict=True):
        save_file(dict(itertools.islice(values, len(names))), folder / path, metadata={"format": "pt"})
    next(values, None)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: path for path, names in zip(paths, files, strict=True) for name in names}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


# GGUF -----------------------------------------------------------------------------------------------------------------


def gguf_tensors(
    file: GgufFile, architecture: str, wanted: Iterable[str], heads: Mapping[str, int]
) -> dict[str, StoredTensor]:
    """Those whose Hugging Face name is among `wanted` under it, and under llama.cpp's the others.

    heads: of "q_proj" and "k_proj", whose rows llama.cpp stores in another order for the architecture "llama".
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    num_layers = file.metadata[f"{architecture}.block_count"]
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], num_layers)
    hf_names = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in wanted}
    stored = {}
    for stored_name, tensor in file.tensors.items():
        if stored_name == ROPE_DIVISORS:
            continue
        name = hf_names.get(stored_name, stored_name)
        num_heads = heads.get(name.split(".")[-2]) if architecture == "llama" and "." in name else None
        shape = tuple(tensor.shape[::-1].tolist())
        read = partial(_read_gguf_tensor, file.path, tensor, shape, num_heads)
        stored[name] = StoredTensor(file.path, shape, _gguf_dtype(tensor).name, read)
    return stored


def _gguf_dtype(tensor: Any) -> np.dtype:
    return np.dtype({"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(tensor.tensor_type.name, np.float32))


def _read_gguf_tensor(path: Path, tensor: Any, shape: Shape, num_heads: int | None) -> np.ndarray:
    if tensor.tensor_type.name in ("F32", "F16", "BF16"):
        values = _read_span(path, tensor.name, int(tensor.data_offset), _gguf_dtype(tensor), shape)
    else:
        values = _dequantized(path, tensor, shape)
    if num_heads is None:
        return values
    neighbours = values.reshape(num_heads, -1, 2, *shape[1:])  # RoPE pairs lie together, not in halves
    halves = _to_fill(shape, values.dtype)
    halves.reshape(num_heads, 2, -1, *shape[1:])[:] = neighbours.swapaxes(1, 2)
    return halves


def _dequantized(path: Path, tensor: Any, shape: Shape) -> np.ndarray:
    from gguf import dequantize

    values = _to_fill(shape, np.dtype(np.float32))
    rows = values.reshape(-1, shape[-1])
    row_bytes = tensor.n_bytes // len(rows)
    step = max(1, DEQUANTIZED_AT_ONCE // shape[-1])
    with path.open("rb") as file:
        file.seek(int(tensor.data_offset))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            blocks = np.fromfile(file, np.uint8, len(piece) * row_bytes).reshape(len(piece), row_bytes)
            try:
                piece[:] = dequantize(blocks, tensor.tensor_type)
            except NotImplementedError as error:
                raise CheckpointError(f"{path}: {tensor.name}: {error}") from error
    return values


_GGUF_CONFIG = {  # key of config.json: key of a GGUF file, after the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """What stands in the config.json of the same model, whose checks then hold for both."""
    metadata, tensors = file.metadata, file.tensors
    if (architecture := metadata.get("general.architecture", "llama")) not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise CheckpointError(f"{file.path}: general.architecture = {architecture!r} is not supported; known: {known}")
    unscaled = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scale_linear": 1.0}
    for key, known in (unscaled | {"expert_count": 0}).items():
        if (got := metadata.get(f"{architecture}.{key}", known)) != known:
            raise CheckpointError(f"{file.path}: {architecture}.{key} = {got!r} is not supported; known: {known!r}")
    values = {key: metadata.get(f"{architecture}.{gguf_key}") for key, gguf_key in _GGUF_CONFIG.items()}
    has_window = architecture == "llama" and values["sliding_window"]
    values["architectures"] = ["MistralForCausalLM" if has_window else GGUF_ARCHITECTURES[architecture]]
    values["vocab_size"] = int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None
    values["tie_word_embeddings"] = "output.weight" not in tensors
    bos, *ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot"))
    values |= {"bos_token_id": bos, "eos_token_id": [token_id for token_id in ends if token_id is not None]}
    values = {key: value for key, value in values.items() if value is not None}
    if ROPE_DIVISORS in tensors:  # those of all lengths: in a config.json this is how to say it
        divisors = tensors[ROPE_DIVISORS].data.tolist()
        rope = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        values["rope_scaling"] = rope | {"original_max_position_embeddings": values.get("max_position_embeddings")}
    turned = metadata.get(f"{architecture}.rope.dimension_count")
    head_dim = values.get("head_dim") or values.get("hidden_size", 0) // max(values.get("num_attention_heads", 1), 1)
    if turned not in (None, head_dim):
        raise CheckpointError(f"{file.path}: RoPE over {turned} of {head_dim} dimensions is not supported")
    return values


# Orbax ----------------------------------------------------------------------------------------------------------------


def orbax_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of what `write_orbax` wrote. CheckpointError when the list of them is missing or damaged."""
    import orbax.checkpoint as ocp

    folder = folder.absolute()
    try:
        with orbax_checkpointer("tensors", "model") as checkpointer:
            args = ocp.args.Composite(tensors=ocp.args.JsonRestore())
            entries = checkpointer.restore(folder, args).tensors
        return {
            name: StoredTensor(
                folder / "model" / name, tuple(entry["shape"]), entry["dtype"], partial(_restore, folder, name, entry)
            )
            for name, entry in entries.items()
        }
    except Exception as error:  # Orbax and TensorStore raise whatever comes
        raise CheckpointError(f"{folder} is missing, damaged or cut short: {error}") from error


def write_orbax(folder: Path, tensors: Mapping[str, StoredTensor], *, use_tqdm: bool = False) -> None:
    """One Orbax checkpoint: `model`, the tensors by name, and `tensors`, their shapes, dtypes and checksums. It is
    whole or it is not there. Host memory holds all tensors meanwhile."""
    import orbax.checkpoint as ocp

    values = dict(_read_all(tensors, use_tqdm))
    entries = {
        name: {"shape": list(value.shape), "dtype": value.dtype.name, "crc32": _crc32(value)}
        for name, value in values.items()
    }
    args = ocp.args.Composite(model=ocp.args.PyTreeSave(values), tensors=ocp.args.JsonSave(entries))
    with orbax_checkpointer("tensors", "model") as checkpointer:
        checkpointer.save(folder.absolute(), args)


def _read_all(tensors: Mapping[str, StoredTensor], use_tqdm: bool) -> Iterator[tuple[str, np.ndarray]]:
    total = sum(tensor.nbytes for tensor in tensors.values())
    with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=not use_tqdm) as progress:
        for name, tensor in tensors.items():
            yield name, tensor.read()
            progress.update(tensor.nbytes)


def _restore(folder: Path, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    """Of a mapped file only the pages of one piece are held."""
    import tensorstore

    try:
        stored = open_array(folder / "model" / name)
        values = _to_fill(stored.shape, stored.dtype.numpy_dtype)
        step = max(1, READ_AT_ONCE * len(values) // max(1, values.nbytes))
        for start in range(0, len(values), step):
            piece = values[start : start + step]
            tensorstore.array(piece).write(stored[start : start + len(piece)]).result()
    except Exception as error:
        raise CheckpointError(f"{folder}: {name} is missing or damaged: {error}") from error
    if list(values.shape) != entry["shape"] or values.dtype.name != entry["dtype"]:
        raise CheckpointError(f"{folder}: {name} is {values.dtype.name} {values.shape}, its list says {entry}")
    if _crc32(values) != entry["crc32"]:
        raise CheckpointError(f"{folder}: {name} is damaged: its checksum is another")
    return values


def _crc32(value: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
