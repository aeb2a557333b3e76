"""The order of the waiting queue, by name. A policy takes the waiting sequences and yields them in the order to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prefix_jax.request import Sequence

Policy = Callable[[list[Sequence]], Iterable[Sequence]]


def fifo(waiting: list[Sequence]) -> Iterable[Sequence]:
    """First come, first served; a preempted sequence keeps its place."""
    return sorted(waiting, key=lambda sequence: sequence.order)


POLICIES: dict[str, Policy] = {"fifo": fifo}
