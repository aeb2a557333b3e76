"""Which unread leaf goes next: a heap of candidates, cleaned lazily, under a policy that ranks nodes.

Expired pages go first; then pages of lower priority; among equals the policy decides. Only leaves are candidates, so no
policy can part a page from the pages that it was computed behind.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from itertools import count
from math import inf, log2

from prefix_jax.prefix_trie import Node, Root

Rank = int | float | tuple
Policy = Callable[[Node], Rank]
"""The node with the smallest rank is evicted first. It is ranked when it becomes an unread leaf: what changes its rank
later, unread, is not seen until the next `EvictionQueue.rank_again`."""

HALF_LIFE = 200  # closed page tables, after which a page that nobody used is half as likely to be used again


def lru(node: Node) -> Rank:
    return node.last_use


def lfu(node: Node) -> Rank:
    """The page that the fewest sequences used; among equals the least recently used."""
    return node.uses, node.last_use


def fifo(node: Node) -> Rank:
    """The page that was published first."""
    return node.step


def belady(node: Node) -> Rank:
    """The page whose next use is furthest in the future; first of all those that nobody in the forecast will use, by
    `lru`. A page is never needed later than one behind it, so the order is leaf-first by itself."""
    return (-node.demand.next_use if node.demand is not None else -inf), node.last_use


class RecomputeTime:
    """Seconds to compute positions [start, end): `linear` for each, and `attention` for each earlier one it attends to.
    Both are fitted to the steps observed, by least squares. Where these do not tell the two apart, both keep their
    proportion, at first that of an 8B model."""

    def __init__(self) -> None:
        self.linear, self.attention = 1.0, 1 / 32768
        self.tt = self.tp = self.pp = self.ts = self.ps = 0.0

    @property
    def is_measured(self) -> bool:
        return self.ts > 0

    def __call__(self, start: int, end: int) -> float:
        return (end - start) * (self.linear + self.attention * (start + end) / 2)

    def observe(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A step computed `num_tokens` positions, which attended to `num_pairs` positions in all."""
        self.tt += num_tokens * num_tokens
        self.tp += num_tokens * num_pairs
        self.pp += num_pairs * num_pairs
        self.ts += num_tokens * seconds
        self.ps += num_pairs * seconds
        determinant = self.tt * self.pp - self.tp * self.tp
        if determinant > 1e-6 * self.tt * self.pp:  # else the steps were all alike
            linear = (self.ts * self.pp - self.ps * self.tp) / determinant
            attention = (self.ps * self.tt - self.ts * self.tp) / determinant
            if linear > 0 and attention >= 0:
                self.linear, self.attention = linear, attention
                return
        ratio = self.attention / self.linear
        if (scale := (self.ts + ratio * self.ps) / (self.tt + 2 * ratio * self.tp + ratio**2 * self.pp)) > 0:
            self.linear, self.attention = scale, ratio * scale


class Cost:
    """The page with the least to lose: seconds to recompute it x chance of its reuse. The chance is taken to be its
    uses so far, halved for every `HALF_LIFE` page tables closed since the last. All pages fade alike, so the logarithm
    of the product, up to a term common to all, is a rank that stays. Seconds are counted in those of a first page:
    their scale is common to all, and is not known before the first steps."""

    def __init__(self, page_size: int, seconds: Callable[[int, int], float]):
        self.page_size = page_size
        self.seconds = seconds

    def __call__(self, node: Node) -> Rank:
        end = node.depth * self.page_size
        seconds = self.seconds(end - self.page_size, end) / self.seconds(0, self.page_size)
        return log2(seconds * node.uses) + node.last_use / HALF_LIFE


POLICIES = ("lru", "lfu", "fifo", "cost", "belady")


def make_policy(name: str, page_size: int, seconds: Callable[[int, int], float]) -> Policy:
    """KeyError for an unknown name. `seconds` (of positions from, to) is for `cost`."""
    return {"lru": lru, "lfu": lfu, "fifo": fifo, "cost": Cost(page_size, seconds), "belady": belady}[name]


class EvictionQueue:
    """Unread, unpinned leaves in the policy's order. `push` a node whenever it becomes one; stale entries are
    skipped. With `by_root`, those of a namespace that is in `over` go before all others."""

    def __init__(
        self,
        policy: Policy,
        now: Callable[[], float] = time.monotonic,
        turn: Callable[[Node], int] = lambda node: 0,
        by_root: bool = False,
    ):
        self.policy = policy
        self.now = now
        self.turn = turn  # comes before everything else; where it has grown since, the node waits once more
        self.by_root = by_root
        self.over: dict[Root, None] = {}
        self.heap: list[tuple[int, int, Rank, int, Node]] = []
        self.expiring: list[tuple[float, int, Node]] = []
        self.ticket = count(1)
        self.limit = 64

    def push(self, node: Node) -> None:
        node.ticket = next(self.ticket)
        entry = self._entry(node)
        heapq.heappush(self.heap, entry)
        if self.by_root:
            leaves = node.root.leaves
            heapq.heappush(leaves, entry[1:])
            if len(leaves) > 64 + 2 * node.root.num_pages:
                leaves[:] = self._current(leaves)
                heapq.heapify(leaves)
        if node.expires < inf:
            heapq.heappush(self.expiring, (node.expires, node.ticket, node))
        if len(self.heap) > self.limit:
            self._drop_stale()

    def pop(self) -> Node | None:
        """The next leaf to evict, or None. The caller must evict it."""
        while self.expiring and self.expiring[0][0] <= self.now():
            _, ticket, node = heapq.heappop(self.expiring)
            if self._is_current(ticket, node):
                return node
        for root in self.over:
            while root.leaves:
                *_, ticket, node = heapq.heappop(root.leaves)
                if self._is_current(ticket, node):
                    return node
        while self.heap:
            turn, *_, ticket, node = heapq.heappop(self.heap)
            if self._is_current(ticket, node):
                if self.turn(node) <= turn:
                    return node
                heapq.heappush(self.heap, self._entry(node))
        return None

    def rank_again(self) -> None:
        """After ranks of unread leaves have changed."""
        leaves = list(self.candidates())
        self.heap = [self._entry(node) for node in leaves]
        heapq.heapify(self.heap)
        if self.by_root:
            for node in leaves:
                node.root.leaves = []
            for entry in sorted(self.heap):  # sorted, so each of them is a heap
                entry[-1].root.leaves.append(entry[1:])

    def candidates(self) -> Iterator[Node]:
        """The leaves that are queued, in no order."""
        return (entry[-1] for entry in self._current(self.heap))

    def _entry(self, node: Node) -> tuple[int, int, Rank, int, Node]:
        return self.turn(node), node.priority, self.policy(node), node.ticket, node

    def _current(self, heap: list[tuple]) -> list[tuple]:
        return [entry for entry in heap if self._is_current(entry[-2], entry[-1])]

    def _is_current(self, ticket: int, node: Node) -> bool:
        return ticket == node.ticket and node.parent is not None and node.is_idle and not node.children

    def _drop_stale(self) -> None:
        """Keeps the heaps within a constant factor of the leaves in them, also under endless touching of few nodes."""
        self.heap = self._current(self.heap)
        self.expiring = self._current(self.expiring)
        heapq.heapify(self.heap)
        heapq.heapify(self.expiring)
        self.limit = max(64, 2 * len(self.heap))
