"""Logits -> tokens, on the device, each row by its own parameters and its own random key.

A row's key derives from (seed, sample index, position) alone, so its neighbours never change its sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.sampling import draw, lowest_kept, threefry

GREEDY_BELOW = 1e-5  # a temperature this small is greedy: dividing by it only overflows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Each row's parameters. temperature 0 is greedy, top_k 0 is off, top_p 1 is off. position: of the new token."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]
    position: Int[Array, " B"]


def sample(logits: Float[Array, "B V"], rows: SamplingRows, *, implementation: str) -> Int[Array, " B"]:
    """One token for each row, from the set that top_k and then top_p leave. Tokens that tie with its last are in it."""
    temperature = jnp.where(rows.temperature >= GREEDY_BELOW, rows.temperature, 0)
    is_random = temperature > 0
    top_k = jnp.where(is_random & (rows.top_k < logits.shape[1]), rows.top_k, 0)
    top_p = jnp.where(is_random, rows.top_p, 1)
    lowest = lowest_kept(logits, temperature, top_k, top_p, implementation=implementation)
    sample_index = jnp.zeros_like(rows.position, jnp.uint32)  # of the n samples of a request
    key = threefry(rows.seed[:, 0], rows.seed[:, 1], sample_index, rows.position.astype(jnp.uint32))
    return draw(logits, lowest, temperature, jnp.stack(key, axis=1), implementation=implementation)
