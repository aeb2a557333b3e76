"""Logits -> tokens without a sort: thresholds found bit by bit, Gumbel noise, argmax. Rows that do not ask do not pay.

A row's noise is Threefry of (its key, the token id): it depends on no neighbour and on no padding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import triton

BLOCK = 4096  # tokens of the vocabulary that a program looks at in one go
HALF = BLOCK // 2  # two tokens so far apart in a block share the two words of one Threefry
FEW = 1024  # the same where each has several sums, kept in registers
NUM_WARPS = 8
BITS = 4  # of a threshold that a kernel finds in one pass over the vocabulary


class Ruled(NamedTuple):
    """float32 [B, V] logits with rows replaced: those with `asks` over 0 stand in `ruled`, the others in `plain`, with
    XLA in both."""

    plain: Array
    ruled: Array
    asks: Array  # int32 [B]

    def load(self, row: Any, token: Any) -> Any:
        """In a kernel, where the three are Refs: one row's logits, -inf behind the vocabulary."""
        at, real, asks = triton.spread(row, token), token < self.plain.shape[1], self.asks[row] > 0
        plain = triton.load(self.plain.at[at], mask=real & ~asks, other=-jnp.inf)
        return jnp.maximum(plain, triton.load(self.ruled.at[at], mask=real & asks, other=-jnp.inf))


def lowest_kept(
    logits: Ruled,
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    *,
    implementation: str,
) -> Float[Array, " B"]:
    """The smallest logit of each row that sampling may choose: of the k largest that are at least min_p times as likely
    as the best, then of the smallest set of these with a mass of at least p at this temperature; ties stay. top_k 0,
    top_p 1 and min_p 0 are off; -inf where all are."""
    if implementation == "xla":
        asks = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
        find = jax.vmap(lambda row, *options: _lowest_kept(_whole(row), *options, bits=1))
        nothing = jnp.full(top_p.shape, -jnp.inf)
        return lax.cond(asks, find, lambda *_: nothing, logits.ruled, temperature, top_k, top_p, min_p)
    return triton.launch(
        _lowest_kept_kernel,
        out_shape=jax.ShapeDtypeStruct(top_p.shape, jnp.float32),
        grid=top_p.shape,
        aliases={},
        num_warps=NUM_WARPS,
        num_stages=2,
        interpret=implementation == "pallas_interpret",
        name="lowest_kept",
    )(logits, temperature, top_k, top_p, min_p)


def draw(
    logits: Ruled,
    lowest: Float[Array, " B"],
    temperature: Float[Array, " B"],
    key: UInt32[Array, "B 2"],
    *,
    implementation: str,
) -> Int[Array, " B"]:
    """One token of each row: the argmax of logits / temperature + Gumbel noise among logits of at least `lowest`;
    temperature 0 is the argmax alone."""
    num_rows, vocab = logits.plain.shape
    if implementation == "xla":
        token = jnp.arange(vocab)
        noise = jax.vmap(lambda key: gumbel(key[0], key[1], token))
        score = lambda x, key, *options: _scores(x, noise(key), *(option[:, None] for option in options))  # noqa: E731
        is_random = jnp.any(temperature > 0)
        noisy = lax.cond(is_random, score, lambda x, *_: x, logits.ruled, key, lowest, temperature)
        return jnp.argmax(noisy, axis=1).astype(jnp.int32)
    num_blocks = pl.cdiv(vocab, BLOCK)
    best, token = triton.launch(
        _draw_kernel,
        out_shape=[jax.ShapeDtypeStruct((num_rows, num_blocks), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(num_rows, num_blocks),
        aliases={},
        num_warps=NUM_WARPS,
        num_stages=1,
        interpret=implementation == "pallas_interpret",
        name="draw",
    )(logits, lowest, temperature, key)
    return jnp.take_along_axis(token, jnp.argmax(best, axis=1, keepdims=True), axis=1)[:, 0]


def _scores(logits, noise, lowest, temperature):
    """What the chosen token has the most of. Greedy rows stay as they are."""
    noisy = logits / jnp.where(temperature > 0, temperature, 1) + noise
    return jnp.where(temperature > 0, jnp.where(logits >= lowest, noisy, -jnp.inf), logits)


def gumbel(key_0: UInt32[Array, ""], key_1: UInt32[Array, ""], token: Int[Array, " n"]) -> Float[Array, " n"]:
    """The noise of each token of the vocabulary."""
    words = _random_words(key_0, key_1, token // BLOCK * HALF + token % HALF)
    return _gumbel(jnp.where(token % BLOCK < HALF, *words))


def _random_words(key_0, key_1, counter):
    return threefry(key_0, key_1, counter.astype(jnp.uint32), jnp.zeros(counter.shape, jnp.uint32))


def _gumbel(word):
    """-log(-log(u)), u uniform in (0, 1) from 23 random bits of each word."""
    uniform = ((word >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def threefry(key_0: Any, key_1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32, 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011)."""
    keys = key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << jnp.uint32(turn)) | (x1 >> jnp.uint32(32 - turn))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def _draw_kernel(logits: Ruled, lowest_ref, temperature_ref, key_ref, best_ref, token_ref):
    """One program for a (row, BLOCK tokens): the best score and whose it is."""
    row, block = pl.program_id(0), pl.program_id(1)
    lane, temperature = lax.iota(jnp.int32, HALF), temperature_ref[row]
    tokens = [block * BLOCK + half * HALF + lane for half in range(2)]
    values = [logits.load(row, token) for token in tokens]

    def noisy() -> list[Any]:
        words = _random_words(key_ref[row, 0], key_ref[row, 1], block * HALF + lane)
        return [_scores(x, _gumbel(word), lowest_ref[row], temperature) for x, word in zip(values, words, strict=True)]

    scores = lax.cond(temperature > 0, noisy, lambda: values)
    best = jnp.maximum(*scores).max(axis=0)
    best_ref[row, block] = best
    last = logits.plain.shape[1] - 1
    first = [jnp.where(x == best, token, last) for x, token in zip(scores, tokens, strict=True)]
    token_ref[row, block] = jnp.minimum(*first).min(axis=0)


def _lowest_kept_kernel(logits: Ruled, temperature_ref, top_k_ref, top_p_ref, min_p_ref, lowest_ref):
    """One program for a row; one that asks for nothing ends at once."""
    row = pl.program_id(0)
    top_k, top_p, min_p = top_k_ref[row], top_p_ref[row], min_p_ref[row]
    asks = (top_k > 0) | (top_p < 1) | (min_p > 0)
    num_blocks = asks.astype(jnp.int32) * pl.cdiv(logits.plain.shape[1], FEW)

    def reduce(how, number, value):
        """A lane's part is kept to itself until the end: to sum over all lanes takes longer than what is summed."""
        combine, start = (jnp.add, 0.0) if how is jnp.sum else (jnp.maximum, -jnp.inf)

        def body(i, parts):
            values = value(logits.load(row, i * FEW + lax.iota(jnp.int32, FEW)))
            return tuple(combine(*pair) for pair in zip(parts, values, strict=True))

        parts = lax.fori_loop(0, num_blocks, body, (jnp.full(FEW, start, jnp.float32),) * number)
        return tuple(how(part, axis=0) for part in parts)

    lowest_ref[row] = _lowest_kept(reduce, temperature_ref[row], top_k, top_p, min_p, bits=BITS)


def _whole(row):
    """The reductions of a row that is all at hand."""
    return lambda how, number, value: tuple(how(part, axis=0) for part in value(row))


def _lowest_kept(reduce, temperature, top_k, top_p, min_p, *, bits):
    """For one row, whose logits are seen through `reduce(sum or max, number of values, values of a block)` alone;
    `bits` of a threshold are found in one pass over them."""
    (peak,) = reduce(jnp.max, 1, lambda x: (x,))
    temperature = jnp.where(temperature > 0, temperature, 1)

    def find(asks, weight, target_of):
        """The largest t, in the order of the floats' bits, such that the weights of {x >= t} sum to the target, which
        is made of the sum of all of them. 0, below every float, for a row that does not ask."""

        def set_bits(i, state):
            found, target = state
            shift = (32 - bits * (i + 1)).astype(jnp.uint32)
            candidates = [found | (jnp.uint32(digit) << shift) for digit in range(2**bits)]

            def reached(x):
                ordered, weights = _ordered(x), weight(x)
                return tuple(jnp.where(ordered >= candidate, weights, 0.0) for candidate in candidates)

            total, *totals = reduce(jnp.sum, len(candidates), reached)
            target = jnp.where(i == 0, target_of(total), target)
            digit = sum((total >= target).astype(jnp.uint32) for total in totals)
            return found | (digit << shift), target

        return lax.fori_loop(0, asks.astype(jnp.int32) * (32 // bits), set_bits, (jnp.uint32(0), jnp.float32(0)))[0]

    kept = find(top_k > 0, jnp.ones_like, lambda total: top_k.astype(jnp.float32))
    likely = peak + jnp.log(jnp.maximum(min_p, 1e-38)) * temperature
    likely = jnp.minimum(_ordered(likely), _ordered(peak))  # 0.0 is behind a peak of -0.0
    kept = jnp.maximum(kept, jnp.where(min_p > 0, likely, 0))
    mass = lambda x: jnp.where(_ordered(x) >= kept, jnp.exp((x - peak) / temperature), 0.0)  # noqa: E731
    return _unordered(jnp.maximum(kept, find(top_p < 1, mass, lambda total: jnp.maximum(top_p, 1e-20) * total)))


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= jnp.uint32(1 << 31), ~bits, bits | jnp.uint32(1 << 31))


def _unordered(bits: UInt32[Array, ""]) -> Float[Array, ""]:
    """The float of such an integer; -inf for 0, which is below every float."""
    x = lax.bitcast_convert_type(jnp.where(bits >= jnp.uint32(1 << 31), bits ^ jnp.uint32(1 << 31), ~bits), jnp.float32)
    return jnp.where(bits == 0, -jnp.inf, x)
