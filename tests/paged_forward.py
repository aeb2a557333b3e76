"""The model over pages without an engine: any chunks of any rows in one step, and shared ranges read once."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import paged_attention
from pallas_kernels.cases import lay_out
from prefix_jax.kv_store import make_kv_store
from prefix_jax.models.llama import Llama

PAGE_SIZE = 8
TILE_ROWS = 16


class PagedModel:
    """Logits of chunks of sequences that stand in rows of a page table."""

    def __init__(self, model: Llama, page_table: np.ndarray, implementation: str = "xla"):
        self.graph, self.params = nnx.split(model)
        self.page_table = jnp.asarray(page_table, jnp.int32)
        self.store = make_kv_store(model.config, int(page_table.max()), PAGE_SIZE, model.dtype)
        self.implementation = implementation
        self.run = jax.jit(self._run)

    def __call__(self, *chunks: tuple[int, int, list[int]], shared: int = 0) -> list[np.ndarray]:
        """float32 [len(ids), V] of each chunk (row, start, ids). shared: positions that all rows have in common, read
        by wide tiles of tokens of several rows."""
        row = np.concatenate([[row] * len(ids) for row, _, ids in chunks])
        position = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids in chunks])
        tokens = np.concatenate([ids for *_, ids in chunks])
        pieces, first = [], 0
        for at, start, ids in chunks:
            for i in range(0, len(ids), TILE_ROWS):
                members = np.arange(i, min(i + TILE_ROWS, len(ids)))
                pieces.append((first + members, at, shared, start + int(members[-1]) + 1))
            first += len(ids)
        if shared:
            pieces.append((np.arange(first), 0, 0, shared))
        tile_lists, merge = lay_out(pieces, first, max(TILE_ROWS, first if shared else 0))
        arrays = [jnp.asarray(a, jnp.int32) for a in (tokens, position, row)]
        logits, self.store = self.run(self.params, self.store, *arrays, tile_lists, merge)
        return np.split(np.asarray(logits), np.cumsum([len(ids) for *_, ids in chunks])[:-1])

    def _run(self, params, store, tokens, positions, row, tile_lists, merge):
        slots = self.page_table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

        def attend(q, k_slots, v_slots, **scoring):
            return paged_attention(
                q, k_slots, v_slots, positions, self.page_table, tile_lists, merge,
                page_size=PAGE_SIZE, implementation=self.implementation, **scoring,
            )  # fmt: skip

        model = nnx.merge(self.graph, params)
        hidden, store = model(tokens, positions, slots, store, attend, self.implementation)
        return model.logits(hidden), store
