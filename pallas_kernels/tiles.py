"""The work list of the attention operation, shared by its implementations."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """N tiles of up to R query tokens, each tile against one range of positions of one row of the page table.

    KV position j is visible to query token t of a tile if `start <= j < end` and `j <= positions[t]`.

    token: row of q of each query token. T (one past the end) is padding.
    row: row of the page table to read through.
    start, end: the range of positions `[start, end)`. `[0, 0)` is an empty tile: nothing is read, nothing written.
    partial: where, among this list's partial results, that of a cut token goes; `num_partials` says that the token is
        not cut, so that its result goes straight to the token. None: no token of this list is cut.
    num_partials: C, the list's room for partial results.
    only_cut: every token of this list is cut: it may run beside the next list, whose results it does not touch.
    """

    token: Int[Array, "N R"]
    row: Int[Array, "N"]
    start: Int[Array, "N"]
    end: Int[Array, "N"]
    partial: Int[Array, "N R"] | None = None
    num_partials: int = dataclasses.field(default=0, metadata={"static": True})
    only_cut: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Merge:
    """Tokens whose range was cut, and where their partial results lie: in each list consecutive, in position order.

    token: row of q. T is padding, which comes last.
    first, count: the token's partials in each of the L lists are `[first, first + count)`. No count at all is padding.
    """

    token: Int[Array, "M"]
    first: Int[Array, "L M"]
    count: Int[Array, "L M"]


class Scales(NamedTuple):
    """float32 [Hkv] each: what K and V of each KV head are to be multiplied by, where slots hold float8_e4m3fn."""

    k: Array
    v: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partials:
    """Results of tiles that saw only a part of their tokens' range; memory of no partial holds anything, NaN included.

    value: softmax-weighted mean of V over the tile's range.
    lse: log2 of the sum of exp2 of the scores; -inf where the token sees no position of the range.
    """

    value: Float[Array, "C Hq D"]
    lse: Float[Array, "C Hq"]
