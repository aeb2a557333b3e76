"""Files that several modules read or write, JSON, GGUF and Orbax, and what is raised when one is damaged. No jax."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint with something missing, damaged, left over or of the wrong shape; the message names it."""


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key, and tensors by name: `gguf.ReaderTensor`, whose quantised data lie in the mapped file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. CheckpointError when it is missing, no JSON or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is missing or no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {content!r:.80}")
    return content


def eos_ids_of(config: Mapping[str, Any]) -> list[int]:
    """Those that a config.json or generation_config.json states, where there may be one, several or none."""
    stated = config.get("eos_token_id")
    return [token_id for token_id in (stated if isinstance(stated, list | tuple) else [stated]) if token_id is not None]


def read_gguf(path: Path) -> GgufFile:
    """CheckpointError when the file is damaged; of a file that is cut short it names the first tensor it lacks."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _read_gguf(path, (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=1)  # config, weights and tokenizer come from one file, and it takes seconds
def _read_gguf(path: Path, state: tuple[int, ...]) -> GgufFile:
    """state: what tells the file from another that takes its place."""
    # Imported where it is used: a machine without the package still serves Hugging Face folders.
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _build_tensors(self, start_offs, fields):
            for field in fields:  # each by itself first, since the library's error does not name the tensor
                try:
                    super()._build_tensors(start_offs, [field])
                except ValueError as error:
                    raise ValueError(f"{field.name}: {error}") from error
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged, cut short or no GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} has the byte order of another machine")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def orbax_checkpointer(document: str, arrays: str) -> Any:
    """An orbax.checkpoint.Checkpointer, to be closed, of folders with two items of these names: a JSON document, and a
    pytree of arrays, which are not compressed: zstd is slower than most disks."""
    # Imported where it is used: it takes a second.
    import orbax.checkpoint as ocp

    handlers = {
        document: ocp.JsonCheckpointHandler(),
        arrays: ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
    }
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers))


def open_array(path: Path) -> Any:
    """A tensorstore.TensorStore of an array that `orbax_checkpointer` wrote, its file mapped. To read with it is to do
    without Orbax's list of all arrays, which each call reads anew, and without a second copy of what is read. Raises
    whatever TensorStore does."""
    import tensorstore

    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "context": {"file_io_mode": {"mode": "memmap"}},
        "fill_missing_data_reads": False,
    }
    return tensorstore.open(spec, open=True, read=True).result()
