"""Which kernel with which sizes runs the tiles of a kind: a table of measurements, and safe defaults beyond it."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import hopper_attention as hopper
from pallas_kernels.hopper_attention import HopperConfig
from pallas_kernels.tile_attention import Config, default_config

TABLE = Path(__file__).with_name("tuned.json")
Kind = Literal["narrow", "own", "wide", "shared"]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """rows: query tokens of a tile (R, which others call block_q over the group). programs: how many of a tile and a KV
    head fill the device; with fewer, ranges are to be cut. own_time: how many positions of such a tile take the time
    of one that narrow tiles read beside them, for each KV head. spare: how many programs fewer where that is long."""

    rows: int
    config: Config | HopperConfig
    programs: int
    spare: int = 0
    own_time: float = 0.0


# One program a multiprocessor. Before JAX 0.12 XLA leaves this kernel out of the CUDA graph: too dear where a step is
# short, as those of shared tiles are.
ON_HOPPER = {"wide": Tuning(0, HopperConfig(), 132)}
if jax.__version_info__ >= (0, 12):
    ON_HOPPER["shared"] = Tuning(0, HopperConfig(), 128, spare=64, own_time=0.009)


def tuning_for(
    kind: Kind,
    group: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    *,
    implementation: str,
    page_size: int = 16,
) -> Tuning:
    """For tiles of one token ("narrow"), such behind a range that others read for them ("own"), or many ("wide"), or
    many that run beside the narrow ones ("shared").

    group: query heads of a KV head. What the table does not have for the default device gets what was found to spill no
    registers.
    """
    dtype = jnp.dtype(dtype)
    rows = wide_rows(implementation, group, dtype) if kind in ("wide", "shared") else 1
    if (
        implementation == "pallas_hopper"
        and kind in ON_HOPPER
        and hopper.refusal(rows, group, head_dim, dtype, page_size) is None
    ):
        return dataclasses.replace(ON_HOPPER[kind], rows=rows)
    row = table().get(device_kind(), {}).get(f"{kind}, G = {group}, D = {head_dim}, {dtype.name}")
    if row is not None:
        return Tuning(row["rows"], Config(row["block_kv"], row["num_warps"], row["num_stages"]), row["programs"])
    config = default_config(rows, group, head_dim, dtype)
    return Tuning(rows, config, programs=264 if rows > 1 else 528)


def wide_rows(implementation: str, group: int, dtype: jax.typing.DTypeLike) -> int:
    """R of wide tiles, those of prompts: 128 matrix rows of bfloat16 fill the matrix units of a GPU."""
    if implementation == "xla":
        return 64
    matrix_rows = 32 if jnp.dtype(dtype).itemsize == 4 else 128  # float32 products run on scalar units, from registers
    return max(1, matrix_rows // (1 << (group - 1).bit_length()))


def device_kind() -> str:
    return jax.devices()[0].device_kind


@functools.cache
def table() -> dict[str, dict[str, dict[str, int]]]:
    """By kind of device; `scripts/tune_kernels.py` writes it."""
    return json.loads(TABLE.read_text(encoding="utf-8"))
