"""The one door to Pallas's Triton backend, which JAX has deprecated: another backend would replace this module and the
kernel bodies, not the tile lists."""

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

load = triton.load
store = triton.store


def spread(*index: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    """Indices of one shape, as `load` and `store` want them."""
    return tuple(jnp.broadcast_arrays(*index))


def dot(a: jax.Array, b: jax.Array, trans_b: bool = False) -> jax.Array:
    """Matrix product in float32. float32 operands are not rounded: the default on NVIDIA cards is TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return triton.dot(a, b, trans_b=trans_b, precision=precision)


def launch(kernel, *, out_shape, grid, aliases, num_warps, num_stages, interpret, name):
    """A function that runs the kernel over the grid. Without block specs: programs see whole arrays."""
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),  # selects Triton
        interpret=interpret,
        name=name,
    )
