"""Which unread leaf goes next: a heap of candidates, cleaned lazily, under a policy that ranks nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from prefix_jax.prefix_trie import Node

Rank = int | float
Policy = Callable[[Node], Rank]
"""The node with the smallest rank is evicted first. A rank may only change while the node is read or pinned."""


def lru(node: Node) -> Rank:
    return node.last_use


POLICIES: dict[str, Policy] = {"lru": lru}


class EvictionQueue:
    """Unread, unpinned leaves in the policy's order. `push` a node whenever it becomes one; stale entries are
    skipped."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.heap: list[tuple[Rank, int, Node]] = []
        self.ticket = count()
        self.limit = 64

    def push(self, node: Node) -> None:
        heapq.heappush(self.heap, (self.policy(node), next(self.ticket), node))
        if len(self.heap) > self.limit:
            self._drop_stale()

    def pop(self) -> Node | None:
        """The next leaf to evict, or None. The caller must evict it."""
        while self.heap:
            rank, _, node = heapq.heappop(self.heap)
            if self._is_current(rank, node):
                return node
        return None

    def _is_current(self, rank: Rank, node: Node) -> bool:
        return node.parent is not None and node.is_idle and not node.children and rank == self.policy(node)

    def _drop_stale(self) -> None:
        """Keeps the heap within a constant factor of the leaves in it, also under endless touching of few nodes."""
        current = {id(entry[2]): entry for entry in self.heap if self._is_current(entry[0], entry[2])}
        self.heap = list(current.values())
        heapq.heapify(self.heap)
        self.limit = max(64, 2 * len(self.heap))
