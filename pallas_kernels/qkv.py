"""Between the query-key-value product and attention: split, rotate queries and keys, write keys and values."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.norm import rms_norm
from pallas_kernels.tiles import Scales

Slots = Float[Array, "num_slots Hkv D"]
LARGEST = 448.0  # of float8_e4m3fn


def rotate_and_write(
    qkv: Float[Array, "T Hkv rows D"],
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    slots: Int[Array, " T"],
    k_slots: Slots,
    v_slots: Slots,
    scales: Scales | None = None,
    *,
    bias: Float[Array, "Hkv rows D"] | None = None,
    q_norm: Float[Array, " D"] | None = None,
    k_norm: Float[Array, " D"] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    implementation: str = "xla",
) -> tuple[Float[Array, "T Hq D"], Slots, Slots]:
    """Returns the rotated queries, and the slots with this step's keys, rotated, and values in place.

    Each KV head has its G query heads, its key, its value. RoPE (Su et al., 2021) turns the pairs (i, i + D/2), the
    order of Hugging Face checkpoints, in float32; without cos and sin nothing is turned. Before that comes `bias`, and
    then an RMS norm of each query with the weights `q_norm` and of each key with `k_norm`, to which `offset` is added.
    A slot past the end is written nowhere. With scales, slots hold K and V divided by them, in float8_e4m3fn. With
    Pallas the slots are written in the same memory.
    """
    num_tokens, num_kv_heads, rows, head_dim = qkv.shape
    q_shape = (num_tokens, num_kv_heads * (rows - 2), head_dim)
    norms = None if q_norm is None else (q_norm, k_norm)
    if implementation == "xla":
        if bias is not None:
            qkv = qkv + bias
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1]
        if norms is not None:
            q, k = (
                rms_norm(*(a.astype(jnp.float32) for a in pair), eps, offset)
                for pair in zip((q, k), norms, strict=True)
            )
        if cos is not None:
            q, k = (_turn_pairs(x, cos[:, None, None], sin[:, None, None]) for x in (q, k))
        k = k[:, :, 0]
        if scales is not None:
            k, v = _fit(k, scales.k[:, None]), _fit(v, scales.v[:, None])
        k_slots = k_slots.at[slots].set(k.astype(k_slots.dtype), mode="drop")
        v_slots = v_slots.at[slots].set(v.astype(v_slots.dtype), mode="drop")
        return q.reshape(q_shape).astype(qkv.dtype), k_slots, v_slots
    return triton.launch(
        functools.partial(_kernel, eps=eps, offset=offset),
        out_shape=[jax.ShapeDtypeStruct(q_shape, qkv.dtype), *(jax.typeof(a) for a in (k_slots, v_slots))],
        grid=(num_tokens, num_kv_heads),
        aliases={2: 1, 3: 2},
        num_warps=1,
        num_stages=1,
        interpret=implementation == "pallas_interpret",
        name="rotate_and_write",
    )(qkv, slots, k_slots, v_slots, None if cos is None else (cos, sin), bias, norms, scales)


def _kernel(
    qkv_ref, slots_ref, k_in_ref, v_in_ref, phase_refs, bias_ref, norm_refs, scale_refs, q_ref, k_ref, v_ref, *,
    eps: float, offset: float,
):  # fmt: skip
    """One program for a (token, KV head). Heads are in halves, whose lanes are the pairs."""
    del k_in_ref, v_in_ref  # the memory of k_ref and v_ref
    token, kv_head = pl.program_id(0), pl.program_id(1)
    num_tokens, _, num_rows, head_dim = qkv_ref.shape
    group, half = num_rows - 2, head_dim // 2
    pair = lax.iota(jnp.int32, pl.next_power_of_2(half))
    real = pair < half
    slot = slots_ref[token]
    lanes = (pair, pair + half)
    phases = None
    if phase_refs is not None:
        phases = [triton.load(ref.at[triton.spread(token, pair)], mask=real, other=0) for ref in phase_refs]

    def load(row, mask):
        """A query, key or value, with its bias."""
        halves = [
            triton.load(qkv_ref.at[triton.spread(token, kv_head, row, lane)], mask=mask, other=0) for lane in lanes
        ]
        if bias_ref is None:
            return halves
        return [
            half + triton.load(bias_ref.at[triton.spread(kv_head, row, lane)], mask=mask, other=0)
            for half, lane in zip(halves, lanes, strict=True)
        ]

    def normed(halves, number):
        """A query or key, normed where there is a norm, in float32."""
        if norm_refs is None:
            return halves
        first, second = (half.astype(jnp.float32) for half in halves)
        square = (first * first + second * second).sum(axis=-1, keepdims=True)
        scale = lax.rsqrt(square / head_dim + eps)
        weights = [triton.load(norm_refs[number].at[lane], mask=real, other=0).astype(jnp.float32) for lane in lanes]
        return [half * scale * (weight + offset) for half, weight in zip((first, second), weights, strict=True)]

    def turned(halves):
        return halves if phases is None else _turn(*halves, *phases)

    row = lax.iota(jnp.int32, pl.next_power_of_2(group))[:, None]
    mask = (row < group) & real
    to = jnp.where(row < group, token, num_tokens)
    for value, lane in zip(turned(normed(load(row, mask), 0)), lanes, strict=True):
        at = triton.spread(to, kv_head * group + row, lane)
        triton.store(q_ref.at[at], value.astype(q_ref.dtype), mask=mask)

    k, v = turned(normed(load(group, real), 1)), load(group + 1, real)
    written = real & (slot >= 0) & (slot < k_ref.shape[0])
    for number, (ref, halves) in enumerate(((k_ref, k), (v_ref, v))):
        for value, lane in zip(halves, lanes, strict=True):
            value = value if scale_refs is None else _fit(value, scale_refs[number][kv_head])
            triton.store(ref.at[triton.spread(slot, kv_head, lane)], value.astype(ref.dtype), mask=written)


def _fit(value, scale):
    """Within what float8_e4m3fn can hold: beyond there is only NaN."""
    return jnp.clip(value.astype(jnp.float32) / scale, -LARGEST, LARGEST)


def _turn_pairs(x, cos, sin):
    return jnp.concatenate(_turn(*jnp.split(x, 2, axis=-1), cos, sin), axis=-1)


def _turn(first, second, cos, sin):
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return first * cos - second * sin, second * cos + first * sin
