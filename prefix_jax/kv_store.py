"""The K and V pages on the device: for each layer one array of keys and one of values, donated through every step.

Slot = page * page_size + offset. Page 0 is scratch: padding writes there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from prefix_jax.models.llama import KVStore, LlamaConfig

MAX_ARRAY_BYTES = 4 * 2**30  # beyond, a kernel's offsets need 64 bits; 2 GiB for elements of one byte


def page_bytes(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    """Bytes of one page in all layers, K and V."""
    return 2 * config.num_layers * _array_page_bytes(config, page_size, dtype)


def max_pages(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    """How many pages one layer's array may hold, scratch included."""
    limit = MAX_ARRAY_BYTES if jnp.dtype(dtype).itemsize > 1 else MAX_ARRAY_BYTES // 2
    return limit // _array_page_bytes(config, page_size, dtype)


def make_kv_store(config: LlamaConfig, num_pages: int, page_size: int, dtype: Any) -> KVStore:
    """Zeroed slots of pages 0 (scratch) to `num_pages`, `[num_slots, Hkv, D]` each."""
    shape = ((num_pages + 1) * page_size, config.num_kv_heads, config.head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def copy_pages(store: KVStore, sources: Int[Array, " n"], targets: Int[Array, " n"], *, page_size: int) -> KVStore:
    """Copies whole pages, reading all sources before any target is written. Padding copies page 0 onto itself."""

    def copy(slots: Array) -> Array:
        pages = slots.reshape(-1, page_size, *slots.shape[1:])
        # Without the barrier XLA fuses the read into the write, and copies the whole array to make that right.
        read = jax.lax.optimization_barrier(pages[sources])
        return pages.at[targets].set(read).reshape(slots.shape)

    return jax.tree.map(copy, store)


def _array_page_bytes(config: LlamaConfig, page_size: int, dtype: Any) -> int:
    return page_size * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
