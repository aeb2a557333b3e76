"""Partial results of cut tokens -> one, by log-sum-exp in float32, in the order of positions."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import triton
from pallas_kernels.tiles import Merge, Partials

STEP = 4  # partials that a program merges at a time
FEW = 256  # tokens
MAX_PROGRAMS = 2048  # of one group of heads: as many as the device holds; a program of padding costs, too


def merge_xla(x: Float[Array, "T Hq D"], partials: Sequence[Partials | None], merge: Merge) -> Float[Array, "T Hq D"]:
    """x with the merged results of the cut tokens in place. partials: of each list, None where it cuts none."""

    def body(i, carry, part, first, count):
        peak, total, acc = carry
        at = jnp.minimum(first + i, part.lse.shape[0] - 1)
        there = (i < count)[:, None]
        lse = jnp.where(there, part.lse[at], -jnp.inf)
        value = jnp.where((lse > -jnp.inf)[..., None], part.value[at], 0)
        new_peak = jnp.maximum(peak, lse)
        shift = jnp.where(new_peak > -jnp.inf, new_peak, 0)  # -inf - -inf is NaN
        fade, weight = jnp.exp2(peak - shift), jnp.exp2(lse - shift)
        return new_peak, total * fade + weight, acc * fade[..., None] + value * weight[..., None]

    blank = jnp.zeros((merge.token.shape[0], x.shape[1]), jnp.float32)
    carry = (blank - jnp.inf, blank, jnp.zeros(blank.shape + x.shape[2:], jnp.float32))
    for part, first, count in zip(partials, merge.first, merge.count, strict=True):
        if part is not None:
            of_list = functools.partial(body, part=part, first=first, count=count)
            carry = lax.fori_loop(0, count.max(initial=0), of_list, carry)
    _, total, acc = carry
    value = acc / jnp.where(total > 0, total, 1)[..., None]
    token = jnp.where(merge.count.sum(axis=0) > 0, merge.token, x.shape[0])
    return x.at[token].set(value.astype(x.dtype), mode="drop")


def merge_pallas(
    x: Float[Array, "T Hq D"], partials: Sequence[Partials | None], merge: Merge, *, interpret: bool = False
) -> Float[Array, "T Hq D"]:
    """The same as a kernel; the result takes the place of x, in the same memory."""
    num_cut = len(merge.token)
    # Few tokens: short programs that wait for little. Many: every program costs, and most may find nothing to do.
    heads, num_warps = (2, 1) if num_cut <= FEW else (min(32, pl.next_power_of_2(x.shape[1])), 8)
    plan = jnp.concatenate([merge.token, merge.first.reshape(-1), merge.count.reshape(-1)])  # one copy, not three
    return triton.launch(
        functools.partial(_kernel, num_cut=num_cut, heads=heads),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(min(num_cut, MAX_PROGRAMS), pl.cdiv(x.shape[1], heads)),
        aliases={0: 0},
        num_warps=num_warps,
        num_stages=1,
        interpret=interpret,
        name="merge",
    )(x, [part and (part.value, part.lse) for part in partials], plan)


def _kernel(
    x_ref,  # [T, Hq, D], only its memory
    partials,  # of each list, if it cuts any, [C, Hq, D] and [C, Hq]
    plan_ref,  # the arrays of Merge, one behind the other: M tokens, then L x M firsts and as many counts
    out_ref,  # [T, Hq, D]
    *,
    num_cut: int,
    heads: int,
):
    """One program for a cut token, or several, and so many of their heads."""
    first, stride = pl.program_id(0), pl.num_programs(0)
    head = pl.program_id(1) * heads + lax.iota(jnp.int32, heads)
    merge = functools.partial(_merge, x_ref, partials, plan_ref, out_ref, head, num_cut=num_cut)
    if num_cut <= MAX_PROGRAMS:
        return merge(first)
    # Padding comes last: it ends the program's tokens.
    own = first + stride * lax.iota(jnp.int32, pl.next_power_of_2(pl.cdiv(num_cut, MAX_PROGRAMS)))
    num_tokens = x_ref.shape[0]
    token = triton.load(plan_ref.at[own], mask=own < num_cut, other=num_tokens)
    num_own = (token < num_tokens).astype(jnp.int32).sum()
    lax.fori_loop(0, num_own, lambda k, _: merge(first + k * stride), None)


def _merge(x_ref, partials, plan_ref, out_ref, head, i, *, num_cut: int) -> None:
    """These heads of the i-th of the cut tokens."""
    num_tokens, num_heads, head_dim = x_ref.shape
    lanes = pl.next_power_of_2(head_dim)
    lane = lax.iota(jnp.int32, lanes)

    def load(j, value_ref, lse_ref, first, count):
        step = j * STEP + lax.iota(jnp.int32, STEP)
        at, columns = triton.spread((first + step)[:, None], head[None, :])
        there = (step < count)[:, None] & (head < num_heads)[None, :]
        lse = triton.load(lse_ref.at[at, columns], mask=there, other=-jnp.inf)
        mask = there[:, :, None] & (lane < head_dim)[None, None, :]
        cube = triton.spread(at[:, :, None], columns[:, :, None], lane[None, None, :])
        return lse, triton.load(value_ref.at[cube], mask=mask, other=0.0)

    def fold(carry, lse, value):
        peak, total, acc = carry
        new_peak = jnp.maximum(peak, lse.max(axis=0))
        shift = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)  # -inf - -inf is NaN
        fade, weight = jnp.exp2(peak - shift), jnp.exp2(lse - shift[None, :])
        acc = acc * fade[:, None] + (value * weight[:, :, None]).sum(axis=0)
        return new_peak, total * fade + weight.sum(axis=0), acc

    blank = jnp.zeros(head.shape, jnp.float32)
    carry = blank - jnp.inf, blank, jnp.zeros((*head.shape, lanes), jnp.float32)
    lists = [
        (*refs, *(plan_ref[(1 + k) * num_cut + i] for k in (number, len(partials) + number)))
        for number, refs in enumerate(partials)
        if refs is not None
    ]
    token = plan_ref[i]
    seen = sum(count for *_, count in lists)
    # What nearly always is all of them is asked for at once, before anything is folded.
    for of_list, begun in [(of_list, load(0, *of_list)) for of_list in lists]:
        steps = pl.cdiv(of_list[-1], STEP)
        carry = fold(carry, *begun)
        carry = lax.fori_loop(1, steps, lambda j, carry, of_list=of_list: fold(carry, *load(j, *of_list)), carry)
    _, total, acc = carry
    value = acc / jnp.where(total > 0, total, 1.0)[:, None]
    token = jnp.where(seen > 0, token, num_tokens)
    mask = (head < num_heads)[:, None] & (lane < head_dim)[None, :] & (token < num_tokens)
    at = triton.spread(token, head[:, None], lane[None, :])
    triton.store(out_ref.at[at], value.astype(out_ref.dtype), mask=mask)
