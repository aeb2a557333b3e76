"""The residual sum and the RMS norm that reads it, in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import triton


def add_rms_norm(
    x: Float[Array, "T E"],
    delta: Float[Array, "T E"],
    weight: Float[Array, " E"],
    eps: float,
    *,
    offset: float = 0.0,
    implementation: str = "xla",
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """x + delta, and its RMS norm (Zhang and Sennrich, 2019), whose mean is taken in float32. Both in x's dtype.

    offset: what is added to the weights, as in Gemma, which multiplies in float32; Llama does in x's dtype.
    With Pallas the sum takes the place of x, in the same memory, where x has no other reader.
    """
    if implementation == "xla":
        total = x + delta
        return total, rms_norm(total, weight, eps, offset)
    return triton.launch(
        functools.partial(_kernel, eps=eps, offset=offset),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        grid=x.shape[:1],
        aliases={0: 0},
        num_warps=16 if x.shape[1] > 2048 and x.shape[0] <= 64 else 8,  # few tokens wait, many move bytes
        num_stages=1,
        interpret=implementation == "pallas_interpret",
        name="add_rms_norm",
    )(x, delta, weight)


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float, offset: float = 0.0
) -> Float[Array, "*batch D"]:
    """The norm alone, in plain XLA."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return _weighted(wide * scale, weight, offset, x.dtype)


def _weighted(normed, weight, offset, dtype):
    return (normed * (weight.astype(jnp.float32) + offset)).astype(dtype) if offset else normed.astype(dtype) * weight


def _kernel(x_ref, delta_ref, weight_ref, sum_ref, normed_ref, *, eps: float, offset: float):
    """One program for a token."""
    width = x_ref.shape[1]
    column = lax.iota(jnp.int32, pl.next_power_of_2(width))
    mask = column < width
    at = triton.spread(pl.program_id(0), column)
    weight = triton.load(weight_ref.at[column], mask=mask, other=0)  # before the sum, so as not to wait twice
    total = triton.load(x_ref.at[at], mask=mask, other=0) + triton.load(delta_ref.at[at], mask=mask, other=0)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt((wide * wide).sum(axis=0) / width + eps)
    normed = _weighted(wide * scale, weight, offset, total.dtype)
    triton.store(sum_ref.at[at], total, mask=mask)
    triton.store(normed_ref.at[at], normed, mask=mask)
