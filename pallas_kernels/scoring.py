"""From products of queries and keys to the weights of a softmax: scale, soft cap, ALiBi, and who sees whom."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite: the difference of two masked maxima must not be NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scoring:
    """score = softcap * tanh(q·k * scale / softcap) + slope of the head * (j - i), for key j and query i.

    scale: positive. softcap: None for no cap (Gemma 2). window: a query sees itself and the window - 1 positions before
    it; None for all (Mistral). alibi_slopes: one a query head (Press et al., Train Short, Test Long, 2021).
    """

    scale: float = dataclasses.field(metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    alibi_slopes: Any = None  # float32 [Hq], in a kernel the Ref of it

    @property
    def is_product(self) -> bool:
        """Whether a score is a product of query and key, times a constant."""
        return not self.softcap and self.alibi_slopes is None

    @property
    def unit(self) -> float:
        """What a score is a multiple of, as a power of two: applied after the maximum, where it costs nothing."""
        return self.scale * LOG2_E if self.is_product else 1.0

    def scores(self, products: Array, distance: Array, slope: Array | None) -> Array:
        """float32 scores in multiples of `unit`. distance: j - i; distance and slope as they broadcast."""
        if self.is_product:
            return products
        scores = products * self.scale
        if self.softcap:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if slope is not None:
            scores = scores + slope * distance.astype(jnp.float32)
        return scores * LOG2_E

    def first_seen(self, positions: Int[Array, "*batch rows"], start: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """Where a range that begins at `start` begins for queries at these positions: none sees what is before."""
        return start if self.window is None else jnp.maximum(start, positions.min(axis=-1) - self.window + 1)

    def sees(self, kv_position: Int[Array, "..."], position: Int[Array, "..."], end: Any) -> Bool[Array, "..."]:
        """Whether a query at `position` sees a key, of those before `end`."""
        visible = kv_position < jnp.minimum(position + 1, end)
        if self.window is not None:
            visible &= kv_position > position - self.window
        return visible


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " Hq"]:
    """float32 slopes: for a power of two 2 ** (-8 i / num_heads), i from 1 on; else those of the power below, and of
    the one above every other, as many as are wanted."""
    below = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * i / below for i in range(1, below + 1)]
    exponents += [4 * i / below for i in range(1, 2 * below + 1, 2)][: num_heads - below]
    return np.exp2(-np.array(exponents)).astype(np.float32)
