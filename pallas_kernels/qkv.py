"""Between the query-key-value product and attention: split, rotate queries and keys, write keys and values."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton
from pallas_kernels.tiles import Scales

Slots = Float[Array, "num_slots Hkv D"]
LARGEST = 448.0  # of float8_e4m3fn


def rotate_and_write(
    qkv: Float[Array, "T Hkv rows D"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    k_slots: Slots,
    v_slots: Slots,
    scales: Scales | None = None,
    *,
    implementation: str = "xla",
) -> tuple[Float[Array, "T Hq D"], Slots, Slots]:
    """Returns the rotated queries, and the slots with this step's keys, rotated, and values in place.

    Each KV head has its G query heads, its key, its value. RoPE (Su et al., 2021) turns the pairs (i, i + D/2), the
    order of Hugging Face checkpoints, in float32. A slot past the end is written nowhere. With scales, slots hold K and
    V divided by them, in float8_e4m3fn. With Pallas the slots are written in the same memory.
    """
    num_tokens, num_kv_heads, rows, head_dim = qkv.shape
    q_shape = (num_tokens, num_kv_heads * (rows - 2), head_dim)
    if implementation == "xla":
        halves = jnp.split(qkv[:, :, :-1], 2, axis=-1)
        turned = jnp.concatenate(_turn(*halves, cos[:, None, None], sin[:, None, None]), axis=-1)
        k, v = turned[:, :, -1], qkv[:, :, -1]
        if scales is not None:
            k, v = _fit(k, scales.k[:, None]), _fit(v, scales.v[:, None])
        k_slots = k_slots.at[slots].set(k.astype(k_slots.dtype), mode="drop")
        v_slots = v_slots.at[slots].set(v.astype(v_slots.dtype), mode="drop")
        return turned[:, :, :-1].reshape(q_shape).astype(qkv.dtype), k_slots, v_slots
    return triton.launch(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(q_shape, qkv.dtype), *(jax.typeof(a) for a in (k_slots, v_slots))],
        grid=(num_tokens, num_kv_heads),
        aliases={4: 1, 5: 2},
        num_warps=1,
        num_stages=1,
        interpret=implementation == "pallas_interpret",
        name="rotate_and_write",
    )(qkv, cos, sin, slots, k_slots, v_slots, scales)


def _kernel(qkv_ref, cos_ref, sin_ref, slots_ref, k_in_ref, v_in_ref, scale_refs, q_ref, k_ref, v_ref):
    """One program for a (token, KV head)."""
    del k_in_ref, v_in_ref  # the memory of k_ref and v_ref
    token, kv_head = pl.program_id(0), pl.program_id(1)
    num_tokens, _, num_rows, head_dim = qkv_ref.shape
    group, half = num_rows - 2, head_dim // 2
    pair = lax.iota(jnp.int32, pl.next_power_of_2(half))
    real = pair < half
    cos, sin = (triton.load(ref.at[triton.spread(token, pair)], mask=real, other=0) for ref in (cos_ref, sin_ref))
    slot = slots_ref[token]

    lanes = (pair, pair + half)

    def load_halves(row, mask):
        return [triton.load(qkv_ref.at[triton.spread(token, kv_head, row, lane)], mask=mask, other=0) for lane in lanes]

    row = lax.iota(jnp.int32, pl.next_power_of_2(group))[:, None]
    mask = (row < group) & real
    to = jnp.where(row < group, token, num_tokens)
    for turned, lane in zip(_turn(*load_halves(row, mask), cos, sin), lanes, strict=True):
        at = triton.spread(to, kv_head * group + row, lane)
        triton.store(q_ref.at[at], turned.astype(q_ref.dtype), mask=mask)

    k, v = load_halves(group, real), load_halves(group + 1, real)
    written = real & (slot >= 0) & (slot < k_ref.shape[0])
    for number, (ref, halves) in enumerate(((k_ref, _turn(*k, cos, sin)), (v_ref, v))):
        for value, lane in zip(halves, lanes, strict=True):
            value = value if scale_refs is None else _fit(value, scale_refs[number][kv_head])
            triton.store(ref.at[triton.spread(slot, kv_head, lane)], value.astype(ref.dtype), mask=written)


def _fit(value, scale):
    """Within what float8_e4m3fn can hold: beyond there is only NaN."""
    return jnp.clip(value.astype(jnp.float32) / scale, -LARGEST, LARGEST)


def _turn(first, second, cos, sin):
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return first * cos - second * sin, second * cos + first * sin
