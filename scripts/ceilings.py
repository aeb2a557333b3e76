"""The limits that benchmarks divide by, measured in the same process."""

import statistics
import time

import jax
import jax.numpy as jnp


def seconds_per_call(call, calls: int) -> float:
    """Of `calls` calls queued one behind the other, so that the device never waits for the host."""
    jax.block_until_ready(call())
    started = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


def measure_ceilings(size: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> dict[str, float]:
    """Bytes per second of a copy, read and write counted; operations per second of a square matrix product in `dtype`.
    `size` is the side of the matrices; the copy is of `size`**2 * 32 bytes, in float32: bfloat16 copies more slowly."""
    x = jnp.ones((8, size, size), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copied = [2 * x.nbytes / seconds_per_call(lambda: copy(x), 20) for _ in range(5)]
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    product = jax.jit(jnp.matmul)
    multiplied = [2 * size**3 / seconds_per_call(lambda: product(a, b), 10) for _ in range(5)]
    return {"copy_bytes_per_s": statistics.median(copied), "product_flop_per_s": statistics.median(multiplied)}


def device_ceilings(size: int | None = None) -> dict[str, float]:
    """Those of the default device in the dtype that suits it; size: as above, None for what suits it too."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return measure_ceilings(size or (1024 if on_cpu else 8192), jnp.float32 if on_cpu else jnp.bfloat16)
