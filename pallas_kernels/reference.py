"""What paged attention means: softmax over every visible position of the token's row, in float32."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tiles import Scales


def reference(
    q: Float[Array, "T Hq D"],
    k_slots: Float[Array, "num_slots Hkv D"],
    v_slots: Float[Array, "num_slots Hkv D"],
    positions: Int[Array, "T"],
    rows: Int[Array, "T"],
    page_table: Int[Array, "B P"],
    *,
    page_size: int,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    alibi_slopes: Float[Array, " Hq"] | None = None,
    scales: Scales | None = None,
) -> Float[Array, "T Hq D"]:
    """Attention of each token t to the positions 0 … positions[t] of row rows[t], or to the last `window` of these;
    float32, whatever comes in.

    Memory grows with T x P x page_size: for tests only.
    """
    _, num_heads, head_dim = q.shape
    group = num_heads // k_slots.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    slots = (page_table[:, :, None] * page_size + jnp.arange(page_size)).reshape(page_table.shape[0], -1)
    away = positions[:, None] - jnp.arange(slots.shape[1])  # [T, positions]
    visible = (away >= 0) & (away < (window or slots.shape[1]))
    k = k_slots[slots[rows]].astype(jnp.float32)  # [T, positions, Hkv, D]
    v = v_slots[slots[rows]].astype(jnp.float32)
    if scales is not None:
        k, v = k * scales.k[:, None], v * scales.v[:, None]
    v = jnp.where(visible[:, :, None, None], v, 0.0)  # what is not visible may be NaN, and 0 * NaN is NaN
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)  # query head h reads KV head h // group
    scores = jnp.einsum("thd,tjhd->thj", q.astype(jnp.float32), k, precision=jax.lax.Precision.HIGHEST) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores -= alibi_slopes[:, None] * away[:, None, :].astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("thj,tjhd->thd", weights, v, precision=jax.lax.Precision.HIGHEST)
