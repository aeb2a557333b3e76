"""The K and V pages on the device: for each layer one array of keys and one of values, donated through every step.

Slot = page * page_size + offset. Page 0 is scratch: padding writes there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Shaped

from pallas_kernels import Scales, Tiles, paged_attention
from pallas_kernels.qkv import LARGEST
from prefix_jax.models.llama import KVStore, Llama, LlamaConfig
from prefix_jax.models.split import EVERYWHERE, KV, NCCL_ALONE, on_each

MAX_ARRAY_BYTES = 4 * 2**30  # beyond, a kernel's offsets need 64 bits; 2 GiB for elements of one byte


def page_bytes(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    """Bytes of one page in all layers, K and V."""
    return 2 * config.num_layers * _array_page_bytes(config, page_size, dtype)


def max_pages(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    """How many pages one layer's array may hold, scratch included."""
    limit = MAX_ARRAY_BYTES if jnp.dtype(dtype).itemsize > 1 else MAX_ARRAY_BYTES // 2
    return limit // _array_page_bytes(config, page_size, dtype)


def make_kv_store(
    config: LlamaConfig, num_pages: int, page_size: int, dtype: Any, sharding: jax.sharding.Sharding | None = None
) -> KVStore:
    """Zeroed slots of pages 0 (scratch) to `num_pages`, `[num_slots, Hkv, D]` each, on the default device or as
    `sharding` says."""
    shape = ((num_pages + 1) * page_size, config.num_kv_heads, config.head_dim)
    new = functools.partial(jnp.zeros, shape, dtype, device=sharding)
    return tuple((new(), new()) for _ in range(config.num_layers))


def measure_scales(model: Llama, tokens: Sequence[int]) -> tuple[Scales, ...]:
    """For each layer and KV head what makes K and V fit into float8_e4m3fn with room to spare: twice their largest
    values over these tokens, which see all before them."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)

    def attend(q: Array, k_slots: Array, v_slots: Array, **scoring: Any) -> Array:
        tiles = Tiles(positions[:, None], jnp.zeros_like(positions), jnp.zeros_like(positions), positions + 1)
        table = jnp.arange(len(tokens), dtype=jnp.int32)[None]
        options = {"page_size": 1, "implementation": "xla", **scoring}
        return paged_attention(q, k_slots, v_slots, positions, table, [tiles], **options)

    def run(params: list[Array], tokens: Array) -> KVStore:
        store = make_kv_store(model.split.local, len(tokens) - 1, 1, model.dtype)
        state = jax.tree.unflatten(tree, params)
        return nnx.merge(graph, state)(tokens, positions, positions, store, attend)[1]

    graph, state = nnx.split(model)
    params, tree = jax.tree.flatten(state)
    specs = None if model.mesh is None else [array.sharding.spec for array in params]
    run = jax.jit(on_each(run, model.mesh, (specs, EVERYWHERE), KV), compiler_options=NCCL_ALONE)
    largest = jax.tree.map(
        lambda slots: jnp.maximum(2 * jnp.abs(slots.astype(jnp.float32)).max(axis=(0, 2)) / LARGEST, 1e-8),
        run(params, np.array(tokens, np.int32)),
    )
    return tuple(Scales(k, v) for k, v in largest)


def copy_pages(store: KVStore, sources: Int[Array, " n"], targets: Int[Array, " n"], *, page_size: int) -> KVStore:
    """Copies whole pages, reading all sources before any target is written. Padding copies page 0 onto itself."""

    # Slot by slot: reshaped to pages, a store of one KV head gets another layout, and is copied whole to change it.
    sources, targets = (
        (pages[:, None] * page_size + jnp.arange(page_size)).reshape(-1) for pages in (sources, targets)
    )

    def copy(slots: Array) -> Array:
        # Without the barrier XLA fuses the read into the write, and copies the whole array to make that right.
        return slots.at[targets].set(jax.lax.optimization_barrier(slots[sources]))

    return jax.tree.map(copy, store)


def read_slots(store: KVStore, slots: Int[Array, " n"]) -> Shaped[Array, "n L 2 Hkv D"]:
    """K and V of single positions, those of all layers together."""
    return jnp.stack([jnp.stack([k[slots], v[slots]], axis=1) for k, v in store], axis=1)


def write_slots(store: KVStore, slots: Int[Array, " n"], values: Shaped[Array, "n L 2 Hkv D"]) -> KVStore:
    """What `read_slots` read, into any slots; for padding, into those of page 0."""
    return tuple(
        (k.at[slots].set(values[:, layer, 0]), v.at[slots].set(values[:, layer, 1]))
        for layer, (k, v) in enumerate(store)
    )


def read_pages(store: KVStore, slots: Int[Array, "pages S"]) -> list[Shaped[Array, "S L 2 Hkv D"]]:
    """K and V of whole pages, each an array of its own that can go and come alone."""
    return jnp.split(read_slots(store, slots.reshape(-1)), len(slots))


def write_pages(store: KVStore, slots: Int[Array, "pages S"], pages: list[Shaped[Array, "S L 2 Hkv D"]]) -> KVStore:
    return write_slots(store, slots.reshape(-1), jnp.concatenate(pages))


def _array_page_bytes(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    return page_size * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
