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
from pallas_kernels.gated_product import gated_product, product_on_hopper
from pallas_kernels.logit_rules import LogitRules
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.qkv import rotate_and_write
from pallas_kernels.reference import reference
from prefix_jax.sampler import SamplingRows, sample

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


def check(case: Case, dtype: str, implementation: str, seed: int) -> str | None:
    """What is wrong, if anything."""
    a = build(case, jnp.dtype(dtype), seed)
    want = reference(a.q, a.k_slots, a.v_slots, a.positions, a.row, a.page_table, page_size=case.page_size, **a.options)
    attend = jax.jit(
        functools.partial(paged_attention, page_size=case.page_size, implementation=implementation, **a.options)
    )
    out, again = np.asarray(attend(*a.arguments)), np.asarray(attend(*a.arguments))
    if not np.array_equal(out[~a.idle], again[~a.idle], equal_nan=True):
        return "two runs differ"
    if not case.beside and not np.array_equal(out[a.idle], np.asarray(a.q)[a.idle]):
        return "a token in no tile was written"
    out, want = out[~a.idle].astype(np.float32), np.asarray(want)[~a.idle].astype(np.float32)
    error = np.abs(out - want).max()
    return None if error <= TOLERANCE[dtype] else f"largest error {error:.2e}"


def check_sampling(implementation: str, seed: int, vocab: int = 128_256, num_rows: int = 64) -> str | None:
    """Rows with random rules and parameters over random logits: what is drawn, counted and reported, by the kernels and
    by plain XLA."""
    rng = np.random.default_rng(seed)
    of_rows = lambda values, dtype: jnp.asarray(rng.choice(values, num_rows), dtype)  # noqa: E731
    logits = jnp.asarray(rng.normal(0, 4, (num_rows, vocab)), jnp.float32)
    rows = SamplingRows(
        row=jnp.arange(num_rows),
        temperature=of_rows([0, 0.5, 1, 2], jnp.float32),
        top_k=of_rows([0, 0, 1, 50, 1000], jnp.int32),
        top_p=of_rows([1, 0.99, 0.5, 1e-6], jnp.float32),
        min_p=of_rows([0, 0, 0.02], jnp.float32),
        seed=jnp.asarray(rng.integers(0, 2**32, (num_rows, 2)), jnp.uint32),
        last_token=jnp.asarray(rng.integers(0, vocab, num_rows), jnp.int32),
        position=of_rows(range(8, 64), jnp.int32),
        num_logprobs=of_rows([-1, 0, 5], jnp.int32),
        target=jnp.full(num_rows, -1),
    )
    empty = LogitRules.empty(num_rows, vocab)
    bits = lambda: jnp.asarray(rng.integers(0, 2**32, (3, *empty.banned.shape)), jnp.uint32)  # noqa: E731
    rules = empty._replace(
        asks=of_rows([0, 1], jnp.int32),
        prompt_len=of_rows([4, 32], jnp.int32),
        until=of_rows([0, 32], jnp.int32),
        num_biases=of_rows([0, 3], jnp.int32),
        penalties=jnp.asarray(rng.uniform(0.5, 1.5, (num_rows, 3)), jnp.float32),
        bias_token=empty.bias_token.at[:, :3].set(jnp.asarray(rng.integers(0, vocab, (num_rows, 3)))),
        bias=empty.bias + 2,
        banned=jnp.bitwise_and.reduce(bits(), axis=0),
        banned_early=jnp.bitwise_and.reduce(bits(), axis=0),
        counts=jnp.asarray(rng.choice([0, 0, 0, 1, 2, 5], (num_rows, vocab)), jnp.int32),
    )
    run = jax.jit(sample, static_argnames="implementation")
    (got, again), want = (
        (run(logits, rows, rules, implementation=implementation) for _ in range(2)),
        run(logits, rows, rules, implementation="xla"),
    )
    return differences(_asked(got, rows), _asked(again, rows), _asked(want, rows), 1e-4)


def _asked(sampled, rows: SamplingRows) -> list[np.ndarray]:
    """Of a step's samples what is defined: tokens, counts, and the log-probabilities of rows that ask."""
    token, found, rules = sampled
    num = np.asarray(rows.num_logprobs)
    asks, top = num >= 0, np.arange(found.top_tokens.shape[1]) < num[:, None]
    masks = asks, asks, top, top
    return [
        np.asarray(token),
        np.asarray(rules.counts),
        *(np.asarray(a)[mask] for a, mask in zip(found, masks, strict=True)),
    ]


def check_norm(implementation: str, seed: int, dtype: str = "bfloat16") -> str | None:
    """The residual sum and its norm, 300 tokens of Llama-3-8B's width."""
    rng = np.random.default_rng(seed)
    x, delta, weight = (jnp.asarray(rng.normal(0, 2, shape), dtype) for shape in ((300, 4096), (300, 4096), (4096,)))
    run = jax.jit(functools.partial(add_rms_norm, eps=1e-5), static_argnames="implementation")
    got, again, want = (run(x, delta, weight, implementation=name) for name in (implementation, implementation, "xla"))
    return differences(got, again, want, TOLERANCE[dtype])


def check_rotation(implementation: str, seed: int, dtype: str = "bfloat16") -> str | None:
    """RoPE and the writing of K and V with a bias and norms before it, some tokens written nowhere."""
    rng = np.random.default_rng(seed)
    heads, group, width, num_tokens, num_slots = 8, 4, 128, 300, 1000
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    angle = rng.uniform(-np.pi, np.pi, (num_tokens, width // 2))
    slots = rng.permutation(num_slots)[:num_tokens]
    slots[::7] = np.iinfo(np.int32).max
    arrays = (
        normal(num_tokens, heads, group + 2, width),
        *(jnp.asarray(of(angle), jnp.float32) for of in (np.cos, np.sin)),
        jnp.asarray(slots, jnp.int32),
        *(normal(num_slots, heads, width) for _ in range(2)),
    )
    options = {"bias": normal(heads, group + 2, width), "q_norm": normal(width), "k_norm": normal(width), "eps": 1e-5}
    run = jax.jit(functools.partial(rotate_and_write, **options), static_argnames="implementation")
    got, again, want = (run(*arrays, implementation=name) for name in (implementation, implementation, "xla"))
    return differences(got, again, want, 2 * TOLERANCE[dtype])


def check_product(seed: int, num_tokens: int, dtype: str = "bfloat16") -> str | None:
    """Gate, up and SiLU in one product on Hopper, in more and in fewer tiles than there are multiprocessors.
    num_tokens: for which there is room, 28 more than there are."""
    rng = np.random.default_rng(seed)
    x, weight = (jnp.asarray(rng.normal(0, 1, shape), dtype) for shape in ((num_tokens, 512), (512, 512, 2, 16)))
    real = num_tokens - 28
    want = gated_product(x.astype(jnp.float32), weight.astype(jnp.float32))[:real]
    got, again = (product_on_hopper(x, weight, "silu", jnp.array([real]))[:real] for _ in range(2))
    return differences([got], [again], [want], TOLERANCE[dtype])


def differences(got, again, want, tolerance: float) -> str | None:
    """What is wrong with some arrays, if anything."""
    for one, second, right in zip(got, again, want, strict=True):
        one, second, right = (np.asarray(array) for array in (one, second, right))
        if not np.array_equal(one, second):
            return "two runs differ"
        if np.issubdtype(one.dtype, np.integer):
            if not np.array_equal(one, right):
                return f"{(one != right).sum()} of {one.size} integers differ"
        else:
            one, right = one.astype(np.float32), right.astype(np.float32)
            error = np.abs(one - right) / np.maximum(1, np.abs(right))
            if error.max(initial=0) > tolerance:
                return f"largest error {error.max():.2e}"
    return None


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
    implementation = args.implementation.replace("_hopper", "")
    others = {
        "sampling": functools.partial(check_sampling, implementation),
        "sum and norm": functools.partial(check_norm, implementation),
        "rotation and K, V": functools.partial(check_rotation, implementation),
    }
    if args.implementation == "pallas_hopper":
        others |= {f"gated product, {n}": functools.partial(check_product, num_tokens=n) for n in (128, 384, 1024)}
    for name, check_other in others.items():
        fault = check_other(seed=args.seed)
        faults += fault is not None
        print(f"{name:24} {'':10} {fault or 'ok'}", flush=True)
    print(f"{len(cases) + len(others) - faults} passed, {faults} failed")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
