"""Tile attention in plain XLA, for every backend: groups of tiles, one block of positions at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.scoring import MASKED, Scoring
from pallas_kernels.tiles import Partials, Scales, Tiles

BLOCK_KV = 128
GROUP_QUERIES = 8  # tiles of one token that share a block step: more fall out of a laptop's second-level cache


def tile_attention(
    q: Float[Array, "T Hq D"],
    x: Float[Array, "T Hq D"] | None,
    tiles: Tiles,
    positions: Int[Array, "T"],
    page_table: Int[Array, "B P"],
    k_slots: Float[Array, "num_slots Hkv D"],
    v_slots: Float[Array, "num_slots Hkv D"],
    *,
    page_size: int,
    scoring: Scoring,
    scales: Scales | None = None,
) -> tuple[Float[Array, "T Hq D"] | None, Partials | None]:
    """Runs the tiles of one list: x with the results of whole tokens in place, and the partials of cut ones. x is None
    for a list with `only_cut`.

    Temporaries are bounded by a group of tiles times BLOCK_KV positions. Tiles after the last with work cost nothing.
    """
    num_tiles, rows = tiles.token.shape
    size = max(1, min(num_tiles, GROUP_QUERIES // rows))
    padded = jax.tree.map(lambda a: _pad_to_multiple(a, size), tiles)
    used = jnp.max(jnp.where(tiles.end > tiles.start, jnp.arange(1, num_tiles + 1), 0), initial=0)

    def run_group(i, carry):
        x, partials = carry
        part = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, i * size, size), padded)
        value, lse = _attend_group(q, part, positions, page_table, k_slots, v_slots, page_size, scoring, scales)
        return _write(x, partials, part, value, lse)

    partials = None
    if tiles.partial is not None:
        shape = (tiles.num_partials, *q.shape[1:])
        partials = Partials(jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32))
    return lax.fori_loop(0, (used + size - 1) // size, run_group, (x, partials))


def _pad_to_multiple(a: Array, size: int) -> Array:
    return jnp.pad(a, [(0, -a.shape[0] % size)] + [(0, 0)] * (a.ndim - 1))  # range [0, 0): an empty tile


def _attend_group(queries, tiles, positions, page_table, k_slots, v_slots, page_size, scoring, scales):
    """Results [N, R, Hq, D] and log2 of the softmax sums [N, R, Hq] of a group of N tiles, in float32."""
    size, rows = tiles.token.shape
    _, num_kv_heads, head_dim = k_slots.shape
    group = queries.shape[1] // num_kv_heads
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    token = jnp.minimum(tiles.token, queries.shape[0] - 1)
    q = queries[token].reshape(size, rows, num_kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(size, num_kv_heads, rows * group, head_dim)
    q_position = jnp.repeat(positions[token], group, axis=1)[:, None, :, None]  # [N, 1, R*G, 1]
    slope = None
    if scoring.alibi_slopes is not None:
        slope = jnp.tile(scoring.alibi_slopes.reshape(num_kv_heads, group), rows)[:, :, None]  # [Hkv, R*G, 1]

    pages_per_block = -(-BLOCK_KV // page_size)
    end = tiles.end[:, None]
    first = scoring.first_seen(jnp.where(tiles.token < queries.shape[0], positions[token], end), tiles.start)
    first_page = first // page_size
    last_page = jnp.maximum(tiles.end - 1, 0) // page_size
    num_pages = jnp.where(tiles.end > first, last_page + 1 - first_page, 0)
    page_row = page_table[tiles.row]  # [N, P]

    def body(i, carry):
        peak, total, acc = carry
        page = first_page[:, None] + i * pages_per_block + jnp.arange(pages_per_block)
        kv_position = (page[:, :, None] * page_size + jnp.arange(page_size)).reshape(size, -1)
        owned = (tiles.start[:, None] <= kv_position) & (kv_position < tiles.end[:, None])
        page_id = jnp.take_along_axis(page_row, jnp.minimum(page, last_page[:, None]), axis=1)
        k = _gather_pages(k_slots, page_id, page_size, q.dtype, scales and scales.k)
        v = _gather_pages(v_slots, page_id, page_size, q.dtype, scales and scales.v)
        v = jnp.where(owned[:, None, :, None], v, 0)
        keys = kv_position[:, None, None, :]
        visible = owned[:, None, None, :] & scoring.sees(keys, q_position, tiles.end[:, None, None, None])
        scores = jnp.einsum("nhmd,nhjd->nhmj", q, k, precision=precision, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scoring.scores(scores, keys - q_position, slope), MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        fade = jnp.exp2((peak - new_peak) * scoring.unit)
        weights = jnp.where(visible, jnp.exp2((scores - new_peak[..., None]) * scoring.unit), 0)
        total = total * fade + weights.sum(axis=-1)
        mean = jnp.einsum(
            "nhmj,nhjd->nhmd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return new_peak, total, acc * fade[..., None] + mean

    zero = jnp.zeros(q.shape[:3], jnp.float32)
    start = (zero + MASKED, zero, jnp.zeros(q.shape, jnp.float32))
    peak, total, acc = lax.fori_loop(0, -(-num_pages.max() // pages_per_block), body, start)
    value = acc / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, peak * scoring.unit + jnp.log2(total), -jnp.inf)
    value = value.reshape(size, num_kv_heads, rows, group, head_dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(size, num_kv_heads, rows, group).transpose(0, 2, 1, 3)
    return value.reshape(size, rows, -1, head_dim), lse.reshape(size, rows, -1)


def _gather_pages(
    slots: Array, page_id: Int[Array, "N P"], page_size: int, dtype: jax.typing.DTypeLike, scale: Array | None
) -> Float[Array, "N Hkv J D"]:
    """K or V of some pages of each tile. Whole pages: one long copy each is three times faster than one per slot."""
    size, num_pages = page_id.shape
    pages = slots.reshape(-1, page_size, *slots.shape[1:])
    taken = pages.at[page_id].get(mode="promise_in_bounds")  # [N, P, S, Hkv, D]
    taken = taken.reshape(size, num_pages * page_size, *slots.shape[1:]).transpose(0, 2, 1, 3).astype(dtype)
    return taken if scale is None else taken * scale.astype(dtype)[:, None, None]


def _write(x, partials, tiles, value, lse):
    """Results of whole tokens into x, of cut tokens into partials; indices past the end are dropped."""
    whole = (tiles.start < tiles.end)[:, None] & jnp.ones(tiles.token.shape, bool)
    if tiles.partial is not None:
        at = jnp.where(whole, tiles.partial, tiles.num_partials)
        partials = Partials(
            value=partials.value.at[at].set(value, mode="drop"),
            lse=partials.lse.at[at].set(lse, mode="drop"),
        )
        whole &= tiles.partial >= tiles.num_partials
    if x is not None:
        x = x.at[jnp.where(whole, tiles.token, x.shape[0])].set(value.astype(x.dtype), mode="drop")
    return x, partials
