"""Tile attention as a Pallas kernel for NVIDIA GPUs: one kernel for decode, prefill and shared prefixes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.scoring import MASKED, Scoring
from pallas_kernels.tiles import Partials, Scales, Tiles


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of one launch: positions in a step of the loop, warps of a program, stages of its load pipeline."""

    block_kv: int
    num_warps: int
    num_stages: int


def default_config(rows: int, group: int, head_dim: int, dtype: jax.typing.DTypeLike) -> Config:
    """What was fastest on an H200 for tiles of `rows` tokens; where nothing was measured, what spills no registers."""
    wide = matrix_rows(rows, group) > 16
    if jnp.dtype(dtype).itemsize == 4:
        return Config(block_kv=32, num_warps=8 if wide and head_dim > 64 else 4, num_stages=2)
    if wide:
        return Config(block_kv=64, num_warps=8 if head_dim > 128 else 4, num_stages=3 if head_dim <= 128 else 2)
    return Config(block_kv=64, num_warps=4, num_stages=3)


def matrix_rows(rows: int, group: int) -> int:
    """M: query tokens times query heads of a KV head, as the matrix units want it."""
    return max(16, pl.next_power_of_2(rows * group))


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
    config: Config,
    scales: Scales | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hq D"] | None, Partials | None]:
    """Runs the tiles of one list: x with the results of whole tokens in place, and the partials of cut ones.

    x may be q itself; it is None for a list with `only_cut`. Memory of no partial is uninitialised.
    """
    num_kv_heads = k_slots.shape[1]
    kernel = functools.partial(_kernel, tiles=tiles, page_size=page_size, block_kv=config.block_kv)
    out_shape = [] if x is None else [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if tiles.partial is not None:
        shape = (tiles.num_partials, *q.shape[1:])
        out_shape += [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape[:-1])]
    base = None if x is None or x is q else x  # what the results are put into, if that is not q
    # In one array: each would be a copy out of the batch, of a microsecond or two.
    fields = (tiles.row, tiles.start, tiles.end, tiles.token, tiles.partial)
    plan = jnp.concatenate([field.reshape(-1) for field in fields if field is not None])
    outputs = triton.launch(
        kernel,
        out_shape=out_shape,
        grid=(num_kv_heads, tiles.token.shape[0]),  # heads of one tile together: their K and V lie side by side
        aliases={} if x is None else {0 if x is q else 1: 0},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name=f"tile_attention_{tiles.token.shape[1]}",
    )(q, base, plan, positions, page_table, k_slots, v_slots, scoring, scales)
    x, *partials = outputs if x is not None else (None, *outputs)
    return x, Partials(*partials) if partials else None


def _kernel(
    q_ref,  # [T, Hq, D]
    base_ref,  # None, or the memory of the results
    plan_ref,  # the arrays of Tiles, one behind the other: N rows, starts, ends, N x R tokens and, if any, partials
    positions_ref,  # [T]
    page_table_ref,  # [B, P]
    k_ref,  # [num_slots, Hkv, D]
    v_ref,
    scoring,
    scale_refs,  # None, or of K and of V [Hkv]
    *out_refs,  # [T, Hq, D] but for lists of cut tokens alone; where tokens are cut [C, Hq, D] and [C, Hq]
    tiles: Tiles,
    page_size: int,
    block_kv: int,
):
    """One program for a (tile, KV head): M = R * G query rows, kept; the range, walked once in steps of block_kv.
    The last tile runs first: there the longest belong.

    Matrix row i is query token i // G under query head i % G of the KV head.
    """
    del base_ref
    num_partials = tiles.num_partials
    num_tiles, rows = tiles.token.shape
    kv_head, n = pl.program_id(0), num_tiles - 1 - pl.program_id(1)
    num_tokens, num_heads, head_dim = q_ref.shape
    group = num_heads // k_ref.shape[1]
    table_row, start, end = (plan_ref[i * num_tiles + n] for i in range(3))

    index = lax.iota(jnp.int32, matrix_rows(rows, group))
    member = (3 * num_tiles + n * rows) + jnp.minimum(index // group, rows - 1)
    token = plan_ref[member]
    real = (index < rows * group) & (token < num_tokens) & (start < end)
    position = triton.load(positions_ref.at[token], mask=real, other=-1)
    head = kv_head * group + index % group
    lane = lax.iota(jnp.int32, max(16, pl.next_power_of_2(head_dim)))
    q = _load_rows(q_ref, (token, head), lane, real)
    first = scoring.first_seen(jnp.where(real, position, end), start)  # padding does not count
    slope = None
    if scoring.alibi_slopes is not None:
        slope = triton.load(scoring.alibi_slopes.at[head], mask=real, other=0.0)[:, None]

    unit, k_scale, v_scale = scoring.unit, None, None
    if scale_refs is not None:
        k_scale, v_scale = (ref[kv_head] for ref in scale_refs)
        if scoring.is_product:  # where the unit comes in, the scale costs nothing
            unit, k_scale = unit * k_scale, None

    def body(i, carry):
        acc, peak, total = carry
        kv_position = first + i * block_kv + lax.iota(jnp.int32, block_kv)
        owned = jnp.minimum(kv_position, end - 1)  # past the end may be anybody's page, or NaN
        page = page_table_ref[table_row, owned // page_size]
        slot = page * page_size + owned % page_size
        k = _load_rows(k_ref, (slot, kv_head), lane).astype(q.dtype)
        v = _load_rows(v_ref, (slot, kv_head), lane).astype(q.dtype)  # asked for before k is waited for
        products = triton.dot(q, k, trans_b=True)
        products = products if k_scale is None else products * k_scale
        scores = scoring.scores(products, kv_position[None, :] - position[:, None], slope)
        scores = jnp.where(scoring.sees(kv_position[None, :], position[:, None], end), scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        fade = jnp.exp2((peak - new_peak) * unit)
        weights = jnp.exp2(scores * unit - (new_peak * unit)[:, None])
        acc = acc * fade[:, None] + triton.dot(weights.astype(v.dtype), v)
        return acc, new_peak, total * fade + weights.sum(axis=1)

    blank = jnp.zeros(index.shape, jnp.float32)
    carry = jnp.zeros(index.shape + lane.shape, jnp.float32), blank + MASKED, blank
    acc, peak, total = lax.fori_loop(0, pl.cdiv(end - first, block_kv), body, carry)

    seen = peak > MASKED / 2  # until a row sees a position its weights are exp2(0) of masked scores
    total = jnp.where(seen, total, 1)
    value = jnp.where(seen[:, None], acc / total[:, None], 0)
    value = value if v_scale is None else value * v_scale

    @pl.when(start < end)
    def _():
        token = plan_ref[member]  # once more: kept through the loop, these would spill registers
        real = (index < rows * group) & (token < num_tokens)
        if tiles.partial is not None:
            partial = plan_ref[num_tiles * rows + member]
            cut = real & (partial < num_partials)
            real &= partial >= num_partials
            partial = jnp.where(cut, partial, num_partials)
            _store_rows(out_refs[-2], (partial, head), lane, value, cut)
            lse = jnp.where(seen, peak * unit + jnp.log2(total), -jnp.inf)
            triton.store(out_refs[-1].at[partial, head], lse, mask=cut)
        if not tiles.only_cut:
            _store_rows(out_refs[0], (jnp.where(real, token, num_tokens), head), lane, value, real)


def _load_rows(ref, at, lane, mask=None):
    """ref[*at, :] padded with zeros to the lanes; rows outside of the mask are zeros and are not read."""
    if mask is None and lane.size == ref.shape[-1]:
        return ref[*at, :]
    at, mask = _spread(ref, at, lane, mask)
    return triton.load(ref.at[at], mask=mask, other=0)


def _store_rows(ref, at, lane, value, mask):
    at, mask = _spread(ref, at, lane, mask)
    triton.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def _spread(ref, at, lane, mask):
    """Indices and mask of every element of the rows ref[*at, :]; the second index may be a scalar."""
    first, second = at
    inside = (lane < ref.shape[-1])[None, :]
    inside = inside if mask is None else mask[:, None] & inside
    *at, inside = triton.spread(first[:, None], second[:, None] if jnp.ndim(second) else second, lane[None, :], inside)
    return tuple(at), inside
