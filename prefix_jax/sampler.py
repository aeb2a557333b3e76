"""Logits -> tokens, on the device, each row by its own parameters and its own random key.

No sort: the top-k and top-p sets are {x >= threshold}, and the threshold is found bit by bit in the float's own order.
Tokens that tie with the last one of a set are in the set. A row's key derives from (seed, sample index, position) alone,
so its neighbours never change its sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

GREEDY_BELOW = 1e-5  # a temperature this small is greedy: dividing by it only overflows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Each row's parameters. temperature 0 is greedy, top_k 0 is off, top_p 1 is off. position: of the token sampled."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]
    position: Int[Array, " B"]


def sample(logits: Float[Array, "B V"], rows: SamplingRows) -> Int[Array, " B"]:
    """One token for each row. Rows that ask for nothing random cost an argmax and no more."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = rows.temperature >= GREEDY_BELOW
    drawn = lax.cond(jnp.any(is_random), lambda: _draw(logits, rows), lambda: greedy)
    return jnp.where(is_random, drawn, greedy)


def _draw(logits: Float[Array, "B V"], rows: SamplingRows) -> Int[Array, " B"]:
    temperature = jnp.maximum(rows.temperature, GREEDY_BELOW)[:, None]
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    asks = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    scaled = lax.cond(asks, lambda: truncate(scaled, rows.top_k, rows.top_p), lambda: scaled)
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, rows.position, logits.shape[-1])
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def truncate(logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    """-inf for what is outside the k largest, and then outside the smallest set with a mass of at least p of the rest."""
    ordered = _ordered_bits(logits)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1]).astype(jnp.float32)
    in_k = ordered >= _threshold(ordered, jnp.ones_like(logits), k)[:, None]
    mass = jnp.where(in_k, jnp.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    target = jnp.maximum(top_p, 1e-20) * mass.sum(axis=-1)
    in_p = (ordered >= _threshold(ordered, mass, target)[:, None]) | (top_p >= 1)[:, None]
    return jnp.where(in_k & in_p, logits, -jnp.inf)


def _threshold(ordered: UInt32[Array, "B V"], weight: Float[Array, "B V"], target: Float[Array, " B"]) -> UInt32[Array, " B"]:
    """The largest t such that the weights of {x >= t} sum to at least the target; 0 if none does."""

    def set_bit(i: Int[Array, ""], found: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        candidate = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.where(ordered >= candidate[:, None], weight, 0.0).sum(axis=-1) >= target
        return jnp.where(reached, candidate, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(ordered.shape[0], jnp.uint32))


def _ordered_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _gumbel(seed: UInt32[Array, "2"], position: Int[Array, ""], size: int) -> Float[Array, " V"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    sample_index = 0  # of the n samples of a request
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, sample_index), position), (size,), jnp.float32)
