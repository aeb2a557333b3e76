"""Log-probabilities of a token and of the likeliest ones, row by row. Rows that do not ask do not pay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton

MAX_LOGPROBS = 20  # likeliest tokens of a row
BLOCK = 4096  # tokens of the vocabulary that a program looks at in one go
NUM_WARPS = 8


class Logprobs(NamedTuple):
    """Of the softmax of each row: of one token, how many are likelier, plus one, and the likeliest, the likeliest
    first and of equals the lower id. What a row did not ask for is undefined."""

    logprob: Array  # float32 [B]
    rank: Array  # int32 [B]
    top_tokens: Array  # int32 [B, top]
    top_logprobs: Array  # float32 [B, top]


def logprobs(
    logits: Float[Array, "B V"], token: Int[Array, " B"], num_top: Int[Array, " B"], *, implementation: str
) -> Logprobs:
    """Of `token`, and of the `num_top` likeliest, at most MAX_LOGPROBS; -1: the row asks for nothing."""
    num_rows, vocab = logits.shape
    top = min(MAX_LOGPROBS, vocab)
    shapes = [(num_rows,), (num_rows,), (num_rows, top), (num_rows, top)]
    kinds = [jnp.float32, jnp.int32, jnp.int32, jnp.float32]
    if implementation == "xla":

        def find() -> Logprobs:
            total = jax.nn.logsumexp(logits, axis=1)
            own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
            best, tokens = lax.top_k(logits, top)
            rank = 1 + (logits > own[:, None]).sum(axis=1, dtype=jnp.int32)
            return Logprobs(own - total, rank, tokens, best - total[:, None])

        nothing = Logprobs(*(jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, kinds, strict=True)))
        return lax.cond(jnp.any(num_top >= 0), find, lambda: nothing)
    found = triton.launch(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, kinds, strict=True)],
        grid=(num_rows,),
        aliases={},
        num_warps=NUM_WARPS,
        num_stages=2,
        interpret=implementation == "pallas_interpret",
        name="logprobs",
    )(logits, token, num_top)
    return Logprobs(*found)


def _kernel(logits_ref, token_ref, num_top_ref, logprob_ref, rank_ref, top_tokens_ref, top_logprobs_ref):
    """One program for a row; one that does not ask ends at once."""
    row = pl.program_id(0)
    vocab, num_top = logits_ref.shape[1], num_top_ref[row]
    num_blocks = (num_top >= 0).astype(jnp.int32) * pl.cdiv(vocab, BLOCK)

    def fold(combine, start):
        """Over the row's blocks: combine(carry, token ids, logits)."""

        def body(i, carry):
            token = i * BLOCK + lax.iota(jnp.int32, BLOCK)
            at = triton.spread(row, token)
            return combine(carry, token, triton.load(logits_ref.at[at], mask=token < vocab, other=-jnp.inf))

        return lax.fori_loop(0, num_blocks, body, start)

    lowest = jnp.float32(-jnp.inf)
    own = fold(
        lambda own, token, x: jnp.maximum(own, jnp.where(token == token_ref[row], x, lowest).max(axis=0)), lowest
    )
    peak = fold(lambda peak, _, x: jnp.maximum(peak, x.max(axis=0)), lowest)
    mass = fold(lambda mass, _, x: mass + jnp.exp(x - peak).sum(axis=0), jnp.float32(0))
    total = peak + jnp.log(mass)
    logprob_ref[row] = own - total
    rank_ref[row] = fold(lambda rank, _, x: rank + (x > own).astype(jnp.int32).sum(axis=0), jnp.int32(1))

    def next_best(i, last):
        """The best behind the last, in the order of falling logits and rising ids."""
        last_logit, last_token = last

        def better(best, token, x):
            x = jnp.where((x < last_logit) | ((x == last_logit) & (token > last_token)), x, lowest)
            x_best = x.max(axis=0)
            token_best = jnp.where((x == x_best) & (x_best > lowest), token, vocab).min(axis=0)
            is_better = x_best > best[0]
            return jnp.where(is_better, x_best, best[0]), jnp.where(is_better, token_best, best[1])

        logit, token = fold(better, (lowest, jnp.int32(0)))
        top_tokens_ref[row, i] = token
        top_logprobs_ref[row, i] = logit - total
        return logit, token

    lax.fori_loop(0, jnp.minimum(num_top, top_tokens_ref.shape[1]), next_best, (jnp.float32(jnp.inf), jnp.int32(-1)))
