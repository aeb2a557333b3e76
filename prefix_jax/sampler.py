"""Logits -> tokens, on the device, each row by its own parameters and its own random key.

A row's key derives from (seed, position) alone, so its neighbours never change its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.logit_rules import LogitRules, apply_rules
from pallas_kernels.logprobs import Logprobs, logprobs
from pallas_kernels.sampling import Ruled, draw, lowest_kept, threefry

GREEDY_BELOW = 1e-5  # a temperature this small is greedy: dividing by it only overflows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """What each logits row is for, and its parameters.

    row: whose rules apply, the scratch row's none. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
    last_token, position: the token before the new one, and the position of the new one. num_logprobs: how many of the
    likeliest tokens to report; -1: none, and not its own. target: report this token's log-probability instead of the
    drawn one's; -1: the drawn one's.
    """

    row: Int[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]
    last_token: Int[Array, " B"]
    position: Int[Array, " B"]
    num_logprobs: Int[Array, " B"]
    target: Int[Array, " B"]


@dataclass(frozen=True)
class LogitsContext:
    """What a logits processor may look at: int32 scalars, and for each token of the vocabulary how often the output has
    it (int32 [V]) and whether the prompt does (bool [V])."""

    position: Int[Array, ""]
    last_token: Int[Array, ""]
    output_counts: Int[Array, " V"]
    in_prompt: Bool[Array, " V"]


LogitsProcessor = Callable[[Float[Array, " V"], LogitsContext], Float[Array, " V"]]


def sample(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    rules: LogitRules,
    processors: Sequence[LogitsProcessor] = (),
    *,
    implementation: str,
) -> tuple[Int[Array, " B"], Logprobs, LogitRules]:
    """One token for each row, what was asked about the logits as the model gave them, and the rules with the last
    tokens counted.

    A row's rules and then its processors change its logits. It draws from the set that top_k and min_p, then top_p
    leave; tokens that tie with its last are in it.
    """
    ruled, rules = apply_rules(logits, rules, rows.row, rows.last_token, rows.position, implementation=implementation)
    asks = rules.asks[rows.row]
    ruled = Ruled(logits, ruled, asks)
    for bit, process in enumerate(processors, start=1):  # bit 0: there are rules
        run = partial(_process, process, (asks >> bit) & 1 > 0, ruled.ruled, rows, rules)
        # A branch spares a CPU the work; a GPU would have to wait for the host to take it.
        has_any = jnp.any((asks >> bit) & 1 > 0)
        ruled = ruled._replace(
            ruled=jax.lax.cond(has_any, run, lambda x=ruled.ruled: x) if implementation == "xla" else run()
        )
    temperature = jnp.where(rows.temperature >= GREEDY_BELOW, rows.temperature, 0)
    is_random = temperature > 0
    top_k = jnp.where(is_random & (rows.top_k < logits.shape[1]), rows.top_k, 0)
    top_p, min_p = jnp.where(is_random, rows.top_p, 1), jnp.where(is_random, rows.min_p, 0)
    lowest = lowest_kept(ruled, temperature, top_k, top_p, min_p, implementation=implementation)
    zeros = jnp.zeros_like(rows.position, jnp.uint32)
    key = threefry(rows.seed[:, 0], rows.seed[:, 1], zeros, rows.position.astype(jnp.uint32))
    token = draw(ruled, lowest, temperature, jnp.stack(key, axis=1), implementation=implementation)
    about = jnp.where(rows.target >= 0, rows.target, token)
    return token, logprobs(logits, about, rows.num_logprobs, implementation=implementation), rules


def _process(
    process: LogitsProcessor,
    asks: Bool[Array, " B"],
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    rules: LogitRules,
) -> Float[Array, "B V"]:
    """The logits of rows that ask, processed."""
    counts = rules.counts[rows.row]
    contexts = rows.position, rows.last_token, counts >> 1, counts & 1 > 0
    processed = jax.vmap(lambda row, *context: process(row, LogitsContext(*context)))(logits, *contexts)
    kinds = [(a.shape[1:], a.dtype) for a in jax.tree.leaves(processed)]
    if kinds != [(logits.shape[1:], logits.dtype)]:
        got = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds) or "nothing"
        raise ValueError(
            f"the logits processor {process!r} must return {logits.dtype}{list(logits.shape[1:])}, got {got}"
        )
    return jnp.where(asks[:, None], processed, logits)
