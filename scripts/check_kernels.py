"""Compares the Pallas kernels with the reference on every named case, on the device at hand, and each with a second run of
itself, bit for bit. Exits with 1 if any differs."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_implementation, paged_attention
from pallas_kernels.cases import CASES, Case, build
from pallas_kernels.reference import reference

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}


def check(case: Case, dtype: str, implementation: str, seed: int) -> str | None:
    """What is wrong, if anything."""
    a = build(case, jnp.dtype(dtype), seed)
    want = reference(a.q, a.k_slots, a.v_slots, a.positions, a.row, a.page_table, page_size=case.page_size)
    attend = jax.jit(functools.partial(paged_attention, page_size=case.page_size, implementation=implementation))
    arguments = (a.q, a.k_slots, a.v_slots, a.positions, a.page_table, a.tile_lists, a.merge)
    out, again = np.asarray(attend(*arguments)), np.asarray(attend(*arguments))
    if not np.array_equal(out, again, equal_nan=True):
        return "two runs differ"
    out, want = out[~a.idle].astype(np.float32), np.asarray(want)[~a.idle].astype(np.float32)
    error = np.abs(out - want).max()
    return None if error <= TOLERANCE[dtype] else f"largest error {error:.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default=default_implementation())
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    faults = 0
    for case in CASES:
        for dtype in TOLERANCE:
            fault = check(case, dtype, args.implementation, args.seed)
            faults += fault is not None
            print(f"{case.name:24} {dtype:10} {fault or 'ok'}", flush=True)
    print(f"{2 * len(CASES) - faults} passed, {faults} failed")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
