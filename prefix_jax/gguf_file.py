"""GGUF files: metadata and tensors, read one at a time.

The quantisations come from the `gguf` package; its reader is not used, because it makes a numpy array of every string
of the vocabulary: seconds where this takes a tenth of one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PIECE_BYTES = 1 << 20  # of float32 dequantised at once: stays in a CPU's cache


class CheckpointError(ValueError):
    """A checkpoint with something missing, damaged, left over or of the wrong shape; the message names it."""


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in numpy's order (rows first)."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata by key and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str, dtype: Any) -> np.ndarray:
        """The tensor dequantised, `dtype` [shape]; by pieces, so that float32 exists of a few rows only."""
        tensor = self.tensors[name]
        out = np.empty(tensor.shape, dtype)
        rows = out.reshape(-1, tensor.shape[-1])
        row_bytes = tensor.num_bytes // len(rows)
        step = max(1, _PIECE_BYTES // (4 * rows.shape[1]))
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, len(rows), step):
                piece = rows[start : start + step]
                raw = np.frombuffer(file.read(len(piece) * row_bytes), np.uint8)
                try:  # as one long row: the package goes by groups of rows, in Python
                    piece[...] = dequantize(raw[None], tensor.quantization).reshape(piece.shape)
                except (NotImplementedError, ValueError) as error:
                    kind = tensor.quantization.name
                    raise CheckpointError(f"{self.path}: {name}: cannot dequantise {kind}: {error}") from error
        return out


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table. CheckpointError when the file is no GGUF of version 2 or 3, or is cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointError(f"{path} is not a little-endian GGUF file of version 2 or 3")
        try:
            num_tensors, num_fields = _numbers(file, "QQ")
            metadata = {_string(file): _value(file, *_numbers(file, "I")) for _ in range(num_fields)}
            table = [_tensor_entry(file) for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path} is damaged or cut short in its header: {error}") from error
        alignment = metadata.get("general.alignment", 32)
        data_start = -(-file.tell() // alignment) * alignment
    return GgufFile(path, metadata, dict(_located(path, table, data_start, size)))


def _located(path: Path, table: list[tuple], data_start: int, size: int) -> Iterator[tuple[str, GgufTensor]]:
    for name, shape, code, offset in table:
        try:
            quantization = GGMLQuantizationType(code)
        except ValueError as error:
            raise CheckpointError(f"{path}: {name}: unknown quantisation {code}") from error
        elements, num_bytes = GGML_QUANT_SIZES[quantization]
        tensor = GgufTensor(shape, quantization, data_start + offset, int(np.prod(shape)) // elements * num_bytes)
        if tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(f"{path} is cut short: {name} ends at {tensor.offset + tensor.num_bytes} of {size}")
        yield name, tensor


def _numbers(file: BinaryIO, layout: str) -> tuple:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "Q")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _numbers(file, _FORMATS[kind])[0]
    element, length = _numbers(file, "IQ")
    if element in (_STRING, _ARRAY):
        return [_value(file, element) for _ in range(length)]
    return list(_numbers(file, f"{length}{_FORMATS[element]}"))


def _tensor_entry(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(file)
    (num_dims,) = _numbers(file, "I")
    *dims, code, offset = _numbers(file, f"{num_dims}QIQ")
    return name, tuple(reversed(dims)), code, offset
