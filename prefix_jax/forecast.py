"""What waiting sequences are going to read, page by page: a trie of their prompts, and whose turn it is when.

A published page is linked to its demand through its parent's, so that it costs one look-up. The demand of a sequence is
dropped when it starts, and put back when it is preempted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from math import inf

from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_trie import Node
from prefix_jax.request import Sequence


class Demand:
    """A page that waiting sequences will read."""

    __slots__ = ("children", "turns")

    def __init__(self) -> None:
        self.children: dict[bytes, Demand] = {}
        self.turns: list[int] = []  # of its readers, negated and ascending: the next one at the end

    @property
    def next_use(self) -> float:
        return -self.turns[-1] if self.turns else inf


class DemandTrie:
    """The pages of prompts, one root for each namespace."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.roots: dict[Hashable, Demand] = {}

    def path(self, sequence: Sequence, *, make: bool = False) -> list[Demand]:
        """The pages of its tokens that it can find in a cache, so all but that of the last token, as far as they are in
        the trie; with `make` they are put there."""
        size, tokens = self.page_size, sequence.tokens
        salt = sequence.request.cache_salt
        demand = self.roots.setdefault(salt, Demand()) if make else self.roots.get(salt)
        path: list[Demand] = []
        for start in range(0, (len(tokens) - 1) // size * size if demand is not None else 0, size):
            key = tokens[start : start + size].tobytes()
            child = demand.children.get(key)
            if child is None:
                if not make:
                    break
                child = demand.children[key] = Demand()
            path.append(child)
            demand = child
        return path

    def prune(self, sequence: Sequence, path: list[Demand]) -> None:
        """Forgets the pages of a path, from the first one without turns on."""
        above = self.roots[sequence.request.cache_salt]
        for i, demand in enumerate(path):
            if not demand.turns:
                del above.children[sequence.tokens[i * self.page_size : (i + 1) * self.page_size].tobytes()]
                break
            above = demand


class Forecast:
    """The turns of a batch that is known as a whole, in the order given or, if `depth_first`, in that of its trie: what
    shares most is neighbours, what the cache holds already comes first."""

    def __init__(self, cache: PrefixCache, batch: Iterable[Sequence], *, depth_first: bool):
        self.demands = DemandTrie(cache.page_size)
        batch = sorted(batch, key=lambda sequence: sequence.order)
        paths = {sequence: self.demands.path(sequence, make=True) for sequence in batch}
        self._link(cache)
        if depth_first:
            batch = self._depth_first(paths, cache)
        for turn, sequence in enumerate(batch):
            sequence.turn = turn
        for sequence in reversed(batch):
            for demand in paths[sequence]:
                demand.turns.append(-sequence.turn)
        cache.queue.rank_again()

    def drop(self, sequence: Sequence) -> None:
        """The sequence has started, and reads all of its demand that is published, or was aborted."""
        for demand in self.demands.path(sequence) if sequence.turn is not None else ():
            i = bisect_left(demand.turns, -sequence.turn)
            if i < len(demand.turns) and demand.turns[i] == -sequence.turn:
                del demand.turns[i]

    def put_back(self, sequence: Sequence) -> None:
        """The sequence has to start once more; it still reads its pages."""
        for demand in self.demands.path(sequence) if sequence.turn is not None else ():
            insort(demand.turns, -sequence.turn)

    def _link(self, cache: PrefixCache) -> None:
        for node in cache.trie:
            node.demand = None
        cache.trie.demands = self.demands.roots
        stack: list[tuple[Node, Demand | None]] = []
        for namespace, root in cache.trie.roots.items():
            root.demand = self.demands.roots.get(namespace)
            stack.append((root, root.demand))
        while stack:
            node, demand = stack.pop()
            for child in node.children if demand is not None else ():
                child.demand = demand.children.get(child.key)
                stack.append((child, child.demand))

    def _depth_first(self, paths: dict[Sequence, list[Demand]], cache: PrefixCache) -> list[Sequence]:
        cached = {id(node.demand) for node in cache.trie if node.demand is not None}
        ends: dict[int, list[Sequence]] = {}
        for sequence, path in paths.items():
            last = path[-1] if path else self.demands.roots[sequence.request.cache_salt]
            ends.setdefault(id(last), []).append(sequence)
        order: list[Sequence] = []
        stack = list(reversed(self.demands.roots.values()))
        while stack:
            demand = stack.pop()
            order += ends.get(id(demand), ())
            children = list(demand.children.values())
            children.sort(key=lambda child: id(child) not in cached)  # stable: else in the order of arrival
            stack += reversed(children)
        return order
