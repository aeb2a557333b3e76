"""The order of the waiting queue, by name. A policy takes the waiting sequences and yields them in the order to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Protocol, runtime_checkable

from prefix_jax.forecast import Demand, DemandTrie
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_trie import Node
from prefix_jax.request import Sequence


class View:
    """What a policy may look at, and must not change."""

    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.num_free_rows = 0  # sequences that may start now
        self.num_started = 0  # so far
        self.longest_queue = 0  # sequences that have waited at once, since none did
        self._matches: dict[Sequence, tuple[Node, int]] = {}

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages for the taking: free ones, and those that nobody reads, also where a waiting sequence would."""
        return len(self.cache.pool) + self.cache.num_idle

    def cached_len(self, sequence: Sequence) -> int:
        """Positions of a waiting sequence in full pages of the cache. Looks on from where it looked last."""
        node, num_pages = self._matches.get(sequence, (None, 0))
        if node is None or node.parent is None:  # evicted since
            node, num_pages = self.cache.trie.roots.get(sequence.request.cache_salt), 0
        if node is None:
            return 0
        node, num_pages = self.cache.follow(node, sequence.tokens, num_pages)
        self._matches[sequence] = node, num_pages
        return num_pages * self.page_size

    def num_read_pages(self, sequence: Sequence) -> int:
        """Of the pages that it would find in the cache, those that others read or pinned: they take no room."""
        num_pages = self.cached_len(sequence) // self.page_size
        node = self._matches[sequence][0] if num_pages else None
        while num_pages and node.is_idle:
            node, num_pages = node.parent, num_pages - 1
        return num_pages

    def queued(self, sequence: Sequence, num_waiting: int) -> None:
        """For the scheduler: it comes behind `num_waiting` others. Notes by which start it is due: as many later than
        its turn as ever waited at once."""
        self.longest_queue = max(self.longest_queue, num_waiting + 1)
        sequence.due = self.num_started + num_waiting + 1 + self.longest_queue

    def left(self, sequence: Sequence, num_waiting: int, *, started: bool) -> None:
        """For the scheduler: it does not wait any more, `num_waiting` others do."""
        self.num_started += started
        if not num_waiting:
            self.longest_queue = 0
        self._matches.pop(sequence, None)


@runtime_checkable
class Policy(Protocol):
    """Any callable of this form. It may leave sequences out, which then go on waiting; while nothing runs, the oldest
    of those left out is tried too. The first that does not fit ends the admission for this step: what comes later
    must not take its pages."""

    def __call__(self, waiting: list[Sequence], view: View) -> Iterable[Sequence]: ...


def fifo(waiting: list[Sequence], view: View) -> Iterable[Sequence]:
    """First come, first served; a preempted sequence keeps its place."""
    return sorted(waiting, key=lambda sequence: sequence.order)


def priority(waiting: list[Sequence], view: View) -> Iterable[Sequence]:
    """The highest `Request.priority` first, in order of arrival among equals. The low ones may wait for ever."""
    return sorted(waiting, key=lambda sequence: (-sequence.request.priority, sequence.order))


def dfs(waiting: list[Sequence], view: View) -> Iterable[Sequence]:
    """The order of the forecast, which is that of the trie of a whole batch; then those that were in no batch."""
    return sorted(waiting, key=lambda s: (inf if s.turn is None else s.turn, s.order))


def lpm(waiting: list[Sequence], view: View) -> Iterable[Sequence]:
    """The longest cached prefix first, within the bound of `by_due`."""
    return by_due(waiting, view, sorted(waiting, key=lambda s: (-view.cached_len(s), s.order)))


def by_due(waiting: list[Sequence], view: View, wanted: Iterable[Sequence]) -> Iterator[Sequence]:
    """The order wanted, for as many starts as leave each sequence one by `due`; then first come, first served. So
    each starts after at most as many others as under `fifo`, and as many more as had waited at once when it came:
    the longest wait, in starts, at most doubles."""
    in_order = fifo(waiting, view)
    slack = min((s.due - i for i, s in enumerate(in_order)), default=0) - view.num_started - 1
    chosen = set()
    for sequence, _ in zip(wanted, range(slack), strict=False):
        chosen.add(sequence)
        yield sequence
    yield from (sequence for sequence in in_order if sequence not in chosen)


class Greedy:
    """Groups the waiting by the longest prefix that each shares with another, a shared page counted once. First the
    groups that find most in the cache, so that one begun is finished; then those that are going to hold most pages.
    Packed into the pages that are free, within the bound of `by_due`."""

    def __init__(self, page_size: int):
        self.demands = DemandTrie(page_size)
        self.paths: dict[Sequence, list[Demand]] = {}

    def __call__(self, waiting: list[Sequence], view: View) -> Iterable[Sequence]:
        self._follow(waiting)
        return by_due(waiting, view, self.packed(self.groups(waiting, view), view))

    def _follow(self, waiting: list[Sequence]) -> None:
        present = set(waiting)
        for sequence in [sequence for sequence in self.paths if sequence not in present]:
            path = self.paths.pop(sequence)
            for demand in path:
                demand.turns.pop()
            self.demands.prune(sequence, path)
        for sequence in waiting:
            if sequence not in self.paths:
                self.paths[sequence] = self.demands.path(sequence, make=True)
                for demand in self.paths[sequence]:
                    demand.turns.append(0)  # only their number counts here

    def groups(self, waiting: list[Sequence], view: View) -> list[list[Sequence]]:
        groups: dict[int, list[Sequence]] = {}
        pages: dict[int, int] = {}
        for sequence in fifo(waiting, view):
            path = self.paths[sequence]
            shared = _first(len(path), lambda i, path=path: len(path[i].turns) < 2)
            key = id(path[shared - 1]) if shared else id(sequence)
            groups.setdefault(key, []).append(sequence)
            pages[key] = pages.get(key, shared) + num_pages(sequence, view) - shared
        held = {key: view.cached_len(group[0]) for key, group in groups.items()}
        return [groups[key] for key in sorted(groups, key=lambda key: (-held[key], -pages[key]))]

    def packed(self, groups: list[list[Sequence]], view: View) -> Iterator[Sequence]:
        """Those that fit beside the ones before them; a page that is read or was taken for one of those is there."""
        room, taken = view.num_free_pages, set()
        for sequence in (sequence for group in groups for sequence in group):
            path = self.paths[sequence]
            there = _first(len(path), lambda i, path=path: id(path[i]) not in taken)
            needed = num_pages(sequence, view) - max(there, view.num_read_pages(sequence))
            if needed <= room:
                room -= needed
                taken.update(map(id, path[there:]))
                yield sequence


def _first(end: int, holds: Callable[[int], bool]) -> int:
    """The first index that it holds for, if it does for all from there on; `end` if for none."""
    low = 0
    while low < end:
        middle = (low + end) // 2
        low, end = (low, middle) if holds(middle) else (middle + 1, end)
    return low


def num_pages(sequence: Sequence, view: View) -> int:
    """Pages that a waiting sequence starts with."""
    return -(-sequence.length // view.page_size)


POLICIES = ("fifo", "greedy", "lpm", "dfs", "priority")


def make_policy(name: str, page_size: int) -> Policy:
    """KeyError for an unknown name."""
    return {"fifo": fifo, "greedy": Greedy(page_size), "lpm": lpm, "dfs": dfs, "priority": priority}[name]
