"""Compares the Pallas kernels with the reference on every named case, on the device at hand, and with a second run of
themselves, bit for bit. Exits with 1 if any differs."""

import argparse
import functools
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_implementation, paged_attention
from pallas_kernels.cases import CASES, HOPPER_CASES, Case, build
from pallas_kernels.reference import reference
from pallas_kernels.sampling import draw, lowest_kept

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


def check(case: Case, dtype: str, implementation: str, seed: int) -> str | None:
    """What is wrong, if anything."""
    a = build(case, jnp.dtype(dtype), seed)
    want = reference(a.q, a.k_slots, a.v_slots, a.positions, a.row, a.page_table, page_size=case.page_size, **a.options)
    attend = jax.jit(
        functools.partial(paged_attention, page_size=case.page_size, implementation=implementation, **a.options)
    )
    out, again = np.asarray(attend(*a.arguments)), np.asarray(attend(*a.arguments))
    if not np.array_equal(out, again, equal_nan=True):
        return "two runs differ"
    kept = np.zeros_like(a.q) if case.beside else np.asarray(a.q)
    if not np.array_equal(out[a.idle], kept[a.idle]):
        return "a token in no tile was written"
    out, want = out[~a.idle].astype(np.float32), np.asarray(want)[~a.idle].astype(np.float32)
    error = np.abs(out - want).max()
    return None if error <= TOLERANCE[dtype] else f"largest error {error:.2e}"


def check_sampling(implementation: str, seed: int) -> str | None:
    """Rows that ask for different things, over a vocabulary of Llama-3's size: the kernels against plain XLA."""
    rng = np.random.default_rng(seed)
    num_rows = 64
    logits = jnp.asarray(rng.normal(0, 4, (num_rows, 128_256)), jnp.float32)
    temperature = jnp.asarray(rng.choice([0, 0.5, 1, 2], num_rows), jnp.float32)
    top_k = jnp.asarray(rng.choice([0, 1, 50, 1000], num_rows), jnp.int32)
    top_p = jnp.asarray(rng.choice([1, 0.99, 0.5, 1e-6], num_rows), jnp.float32)
    key = jnp.asarray(rng.integers(0, 2**32, (num_rows, 2)), jnp.uint32)

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(logits, temperature, top_k, top_p, key, implementation):
        lowest = lowest_kept(logits, temperature, top_k, top_p, implementation=implementation)
        return lowest, draw(logits, lowest, temperature, key, implementation=implementation)

    rows = logits, temperature, top_k, top_p, key
    (lowest, tokens), (want_lowest, want_tokens) = run(*rows, implementation), run(*rows, "xla")
    # The mass of a set is summed in another order: a threshold may fall on the next token of 128,256.
    far = ~((lowest == want_lowest) | (jnp.abs(lowest - want_lowest) < 1e-2))
    wrong = int((far | (tokens != want_tokens)).sum())
    return f"{wrong} of {num_rows} rows differ" if wrong else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default=default_implementation())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=TOLERANCE)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    cases = [(case, dtype) for case in CASES for dtype in args.dtypes]
    cases += [(case, dtype) for case in HOPPER_CASES for dtype in args.dtypes if dtype != "float32"]
    faults = 0
    with ThreadPoolExecutor(args.threads) as pool:
        results = pool.map(lambda c: check(*c, args.implementation, args.seed), cases)
        for (case, dtype), fault in zip(cases, results, strict=True):
            faults += fault is not None
            print(f"{case.name:24} {dtype:10} {fault or 'ok'}", flush=True)
    fault = check_sampling(args.implementation, args.seed)
    faults += fault is not None
    print(f"{'sampling':24} {'float32':10} {fault or 'ok'}")
    print(f"{len(cases) + 1 - faults} passed, {faults} failed")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
