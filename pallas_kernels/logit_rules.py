"""What a row asks of its logits before one is drawn: penalties, biases, bans. Rows that ask for nothing do not pay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import triton

BLOCK = 2048  # tokens of the vocabulary that a program looks at in one go
NUM_WARPS = 8
MAX_BIASES = 512  # of a row


class LogitRules(NamedTuple):
    """The rules of all rows, on the device. Bit t % 32 of a row's word t // 32 stands for token t.

    asks: 0 for a row that asks for nothing, whose other entries mean nothing. counts: of each token twice how often the
    row put it out, plus one if its prompt has it. banned: never drawn; banned_early: not before position `until`.
    bias: added to the `num_biases` first tokens of bias_token. prompt_len: a token from that position on is output.
    """

    asks: Array  # int32 [rows], and so the next three
    prompt_len: Array
    until: Array
    num_biases: Array
    penalties: Array  # float32 [rows, 3]: presence, frequency, repetition
    bias_token: Array  # int32 [rows, MAX_BIASES]
    bias: Array  # float32 [rows, MAX_BIASES]
    banned: Array  # uint32 [rows, words]
    banned_early: Array  # uint32 [rows, words]
    counts: Array  # int32 [rows, V]

    @classmethod
    def empty(cls, rows: int, vocab_size: int) -> "LogitRules":
        words = pl.cdiv(vocab_size, 32)
        integers = [jnp.zeros(rows, jnp.int32) for _ in range(4)]
        biases = [jnp.zeros((rows, MAX_BIASES), dtype) for dtype in (jnp.int32, jnp.float32)]
        bans = [jnp.zeros((rows, words), jnp.uint32) for _ in range(2)]
        return cls(*integers, jnp.zeros((rows, 3)), *biases, *bans, jnp.zeros((rows, vocab_size), jnp.int32))


def apply_rules(
    logits: Float[Array, "B V"],
    rules: LogitRules,
    row: Int[Array, " B"],
    last_token: Int[Array, " B"],
    position: Int[Array, " B"],
    *,
    implementation: str,
) -> tuple[Float[Array, "B V"], LogitRules]:
    """The logits that rows of `rules` make of theirs, and the rules with `last_token` counted where it is output.

    position: of the token to be drawn, one behind `last_token`. Each row that asks occurs once. In the order of vLLM:
    bans, biases, then repetition (Keskar et al., CTRL, 2019), frequency and presence penalty. With Pallas, what stands
    in the logits of rows that do not ask is undefined.
    """
    if implementation == "xla":
        asks = rules.asks[row] > 0

        def apply() -> tuple[Array, Array]:
            counted = jnp.where(asks & (position > rules.prompt_len[row]), 2, 0)
            counts = rules.counts.at[row, last_token].add(counted)
            token = jnp.arange(logits.shape[1])
            bans = jnp.where((position < rules.until[row])[:, None], rules.banned_early[row], 0) | rules.banned[row]
            banned = (bans[:, token // 32] >> (token % 32).astype(jnp.uint32)) & 1 > 0
            given = jnp.arange(MAX_BIASES) < rules.num_biases[row][:, None]
            bias = jnp.zeros_like(logits).at[jnp.arange(len(row))[:, None], rules.bias_token[row]]
            biased = logits + bias.add(jnp.where(given, rules.bias[row], 0))
            ruled = _penalize(jnp.where(banned, -jnp.inf, biased), counts[row], *rules.penalties[row].T[..., None])
            return jnp.where(asks[:, None], ruled, logits), counts

        ruled, counts = lax.cond(jnp.any(asks), apply, lambda: (logits, rules.counts))
    else:
        ruled, counts = triton.launch(
            _kernel,
            out_shape=[jax.typeof(a) for a in (logits, rules.counts)],
            grid=row.shape,
            aliases={len(jax.tree.leaves(rules)) + 3: 1},
            num_warps=NUM_WARPS,
            num_stages=1,
            interpret=implementation == "pallas_interpret",
            name="apply_rules",
        )(logits, row, last_token, position, rules)
    return ruled, rules._replace(counts=counts)


def _penalize(logits, counts, presence, frequency, repetition):
    seen, times = counts > 0, (counts >> 1).astype(jnp.float32)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    return logits - frequency * times - jnp.where(times > 0, presence, 0.0)


def _kernel(logits_ref, row_ref, last_token_ref, position_ref, rules: LogitRules, ruled_ref, counts_ref):
    """One program for a row; one that does not ask ends at once."""
    index = pl.program_id(0)
    row, last_token, position = row_ref[index], last_token_ref[index], position_ref[index]
    vocab = logits_ref.shape[1]
    counted = (position > rules.prompt_len[row]).astype(jnp.int32) * 2
    early = position < rules.until[row]
    presence, frequency, repetition = (rules.penalties[row, i] for i in range(3))
    num_biases = rules.num_biases[row]

    def body(i, carry):
        token = i * BLOCK + lax.iota(jnp.int32, BLOCK)
        real = token < vocab
        of_row, of_index = triton.spread(row, token), triton.spread(index, token)
        logits = triton.load(logits_ref.at[of_index], mask=real, other=0)
        is_last = token == last_token
        counts = triton.load(counts_ref.at[of_row], mask=real, other=0) + is_last.astype(jnp.int32) * counted
        triton.store(counts_ref.at[of_row], counts, mask=real & is_last)
        words = triton.spread(row, token // 32)
        bans = triton.load(rules.banned.at[words], mask=real, other=0)
        bans |= triton.load(rules.banned_early.at[words], mask=real & early, other=0)
        banned = (bans >> (token % 32).astype(jnp.uint32)) & 1 > 0
        logits = lax.fori_loop(
            0,
            num_biases,
            lambda j, x: x + jnp.where(token == rules.bias_token[row, j], rules.bias[row, j], 0.0),
            logits,
        )
        ruled = _penalize(jnp.where(banned, -jnp.inf, logits), counts, presence, frequency, repetition)
        triton.store(ruled_ref.at[of_index], ruled, mask=real)
        return carry

    lax.fori_loop(0, (rules.asks[row] > 0).astype(jnp.int32) * pl.cdiv(vocab, BLOCK), body, None)
