"""Buckets and tiles that suit a model and the implementation of its attention: where measurements become plans."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import Tuning, is_compiled, tuning_for
from prefix_jax.buckets import Bucket, Tiling, make_buckets
from prefix_jax.forest import Costs
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.step_batch import Batcher

FIXED_CUT = 512  # positions between cuts where attention is to be bitwise reproducible, or a multiple of it
TILE_KINDS = {"decode": ("narrow",), "shared": ("own", "shared"), "mixed": ("narrow", "wide")}  # by kind of bucket


def make_batcher(
    config: LlamaConfig,
    dtype: Any,
    attention: str,
    *,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    forest: bool | None = None,
    bitwise: bool = False,
) -> Batcher:
    """Buckets and tiles that suit the model and the implementation of attention; bitwise: such that a row's bits depend
    on its sequence alone."""
    on_gpu = is_compiled(attention)
    narrow, wide, shared = (_tuning(kind, config, dtype, attention, page_size) for kind in ("narrow", "wide", "shared"))
    programs = narrow.programs, wide.programs, shared.programs, shared.spare, shared.own_time
    programs = programs if attention.startswith("pallas") else ()
    costs = _shared_costs(config, dtype, wide.rows) if forest or (forest is None and on_gpu) else None
    tiling = Tiling(wide.rows, *programs, costs=costs)
    if bitwise:
        whole_pages = math.lcm(FIXED_CUT, page_size)
        fixed = -(-max_model_len // (16 * whole_pages)) * whole_pages
        if costs is not None:
            costs = Costs(wide.rows, wide=1.0, tile=0.0, partial=0.0, launch=0.0, step=fixed // page_size)
        tiling = Tiling(wide.rows, max_splits=-(-max_model_len // fixed), costs=costs, fixed=fixed)
    # A CPU compiles slowly and minds padding less between buckets.
    sizes = {"step": 2, "for_gpu": True} if on_gpu else {"step": 8}
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens, config.num_kv_heads, tiling, **sizes)
    return Batcher(buckets, max_num_seqs, -(-max_model_len // page_size), page_size, costs)


def tile_configs(bucket: Bucket, config: LlamaConfig, dtype: Any, attention: str, page_size: int) -> list[Any]:
    """The sizes of the kernel that runs each of the bucket's tile lists."""
    kinds = ("shared",) if bucket.shapes[0].rows > 1 else TILE_KINDS[bucket.kind]
    return [_tuning(kind, config, dtype, attention, page_size).config for kind in kinds]


def _tuning(kind: str, config: LlamaConfig, dtype: Any, attention: str, page_size: int) -> Tuning:
    if attention == "pallas_hopper" and not config.has_plain_scores:
        attention = "pallas"  # the kernel for Hopper knows no others
    return tuning_for(kind, config.group_size, config.head_dim, dtype, implementation=attention, page_size=page_size)


def _shared_costs(config: LlamaConfig, dtype: Any, wide_rows: int) -> Costs:
    """Measured on an H200 with 4 KiB of K and V a position. A narrow tile takes 0.58 ns of the whole device for one,
    from the second-level cache if others read it too; a wide one, bound by its products, 1.5 ns and 0.12 µs besides its
    positions. A partial result is 2 G times as large as a position, and three launches a layer instead of one take 6 µs
    more."""
    position_bytes = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return Costs(wide_rows, 2.6, tile=200.0, partial=2.8 * config.group_size, launch=42e6 / position_bytes)
