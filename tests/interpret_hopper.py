"""Runs the kernel for Hopper in Mosaic's interpreter and compares it with the reference; a process of its own, because
the interpreter wants a thread for each warpgroup (NPROC). Arguments: names of cases. Prints the largest errors."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

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


if __name__ == "__main__":
    for case in HOPPER_CASES:
        if case.name in sys.argv[1:]:
            print(case.name, largest_error(case), flush=True)
