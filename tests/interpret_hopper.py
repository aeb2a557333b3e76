"""Runs the kernels for Hopper in Mosaic's interpreter and compares them with references; a process of its own, because
the interpreter wants a thread for each warpgroup (NPROC). Arguments: names of cases of attention, or "gated_product"
and how many tokens there is room for and are. Prints the largest errors."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels.gated_product as gated_product
from pallas_kernels import HopperConfig, paged_attention
from pallas_kernels.cases import HOPPER_CASES, build
from pallas_kernels.reference import reference

jax.lax.empty = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)  # nobody's memory


def largest_error(case) -> float:
    a = build(case, jnp.bfloat16)
    want = reference(a.q, a.k_slots, a.v_slots, a.positions, a.row, a.page_table, page_size=case.page_size)

    @jax.jit
    def attend(*arguments):
        configs = [HopperConfig() if tiles.token.shape[1] > 1 else None for tiles in a.tile_lists]
        return paged_attention(*arguments, page_size=case.page_size, implementation="pallas_interpret", configs=configs)

    out = np.asarray(attend(*a.arguments), np.float32)
    kept = np.full_like(out, np.nan) if case.beside else np.asarray(a.q, np.float32)
    assert np.array_equal(out[a.idle], kept[a.idle], equal_nan=True), "a token in no tile was written"
    return float(np.abs(out - np.asarray(want))[~a.idle].max())


def largest_error_of_product(capacity: int, num_tokens: int, activation: str) -> float:
    """Of a row, over its norm; of the tiles some programs take several and others none."""
    gated_product.NUM_MULTIPROCESSORS = 4
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(0, 1, shape), jnp.bfloat16) for shape in ((capacity, 128), (128, 40, 2, 16)))
    out = gated_product.product_on_hopper(x, weight, activation, jnp.array([num_tokens]), interpret=True)[:num_tokens]
    gate, up = (np.asarray(weight[:, :, i].reshape(128, -1), np.float32) for i in range(2))
    x = np.asarray(x, np.float32)[:num_tokens]
    activate = jax.nn.silu if activation == "silu" else jax.nn.gelu
    want = np.asarray(activate(x @ gate)) * (x @ up)
    error = np.linalg.norm(np.asarray(out, np.float32) - want, axis=1)
    return float((error / np.linalg.norm(want, axis=1)).max())


if __name__ == "__main__":
    names = sys.argv[1:]
    if names[0] == "gated_product":
        for activation in ("silu", "gelu_tanh"):
            print(activation, largest_error_of_product(*map(int, names[1:]), activation), flush=True)
    for case in HOPPER_CASES:
        if case.name in names:
            print(case.name, largest_error(case), flush=True)
