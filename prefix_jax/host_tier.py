"""The second tier: pages that the prefix cache evicted, in host memory, found again by the tokens that lead to them.

Bookkeeping alone, without jax; what a page's values are, and how they move, only the runner knows. A plan evicts
(`departures`, to be read off the device before anything is written) and brings back (`arrivals`, to be written before
the step). What came back stays here as well, so that evicting it once more costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from prefix_jax.prefix_trie import Node, Root

log = logging.getLogger(__name__)


class Entry:
    """One page by its tokens under its parent's, or a step on the way to one."""

    __slots__ = ("key", "parent", "children", "values", "settled")

    def __init__(self, key: Hashable, parent: Entry | None):
        self.key = key  # a root's is its namespace
        self.parent = parent  # None: a root, or dropped
        self.children: dict[bytes, Entry] = {}
        self.values: Any = None  # None: not (yet) here
        self.settled = False  # a step that ran after the values were read has ended well


class HostTier:
    """At most `max_pages` pages, the one used least recently dropped first. `to_device` starts the transfer of a list
    of values; at most `max_staged` of them lie ready there for whom `prefetch` named last."""

    def __init__(self, max_pages: int, to_device: Callable[[list], list], max_staged: int = 0):
        self.max_pages = max_pages
        self.max_staged = max_staged
        self.to_device = to_device
        self.roots: dict[Hashable, Entry] = {}
        self.entries: dict[Entry, None] = {}  # with values, or about to be read; the least recently used first
        self.staged: dict[Entry, Any] = {}  # values on the device already
        self.departures: dict[int, Entry] = {}  # by the page to read
        self.arrivals: dict[int, Any] = {}  # by the page to write
        self.unsettled: list[tuple[Entry, Any]] = []

    def __len__(self) -> int:
        return len(self.entries)

    # What the prefix cache asks for -----------------------------------------------------------------------------------

    def spill(self, node: Node, step: int) -> None:
        """Keeps what an evicted node's page holds, if an earlier step has filled it."""
        self.arrivals.pop(node.page, None)
        if node.step == step:
            return  # nothing is in the page yet
        entry = self._entry(node, create=True)
        if entry in self.entries:
            self._touch([entry])
            return
        if len(self.entries) == self.max_pages:
            self._drop(next(iter(self.entries)), keep=entry)
        self.entries[entry] = None
        self.departures[node.page] = entry

    def fetch(self, node: Node, keys: Iterable[bytes]) -> list[tuple[bytes, Any]]:
        """The pages that continue `node` along `keys`, as far as they are here: (key, values on their way to the
        device). None of them if the device does not take them."""
        found = list(self._walk(node, keys))
        if not found:
            return []
        self._touch(found)
        try:
            missing = [entry for entry in found if entry not in self.staged]
            values = dict(zip(missing, self.to_device([entry.values for entry in missing]), strict=True))
        except (RuntimeError, MemoryError) as error:
            log.warning("%d pages stay in host memory, to be computed again: %s", len(found), error)
            return []
        return [(entry.key, values[entry] if entry in values else self.staged.pop(entry)) for entry in found]

    def prefetch(self, node: Node, keys: Iterable[bytes]) -> None:
        """Starts the transfer of what `fetch` would return; what was staged for others goes."""
        wanted = [entry for entry, _ in zip(self._walk(node, keys), range(self.max_staged), strict=False)]
        self.staged = {entry: self.staged[entry] for entry in wanted if entry in self.staged}
        missing = [entry for entry in wanted if entry not in self.staged]
        try:
            self.staged |= zip(missing, self.to_device([entry.values for entry in missing]), strict=True)
        except (RuntimeError, MemoryError) as error:
            log.warning("no room on the device to prefetch %d pages: %s", len(missing), error)

    # What the engine asks for -----------------------------------------------------------------------------------------

    def take_departures(self) -> dict[int, Entry]:
        """Pages to read now, before the next step is started; `keep` or `lose` them."""
        departures, self.departures = self.departures, {}
        return departures

    def take_arrivals(self) -> dict[int, Any]:
        """Values to write into pages, before the next step is started."""
        arrivals, self.arrivals = self.arrivals, {}
        return arrivals

    def keep(self, entries: Iterable[Entry], values: Iterable[Any]) -> None:
        for entry, value in zip(entries, values, strict=True):
            if entry in self.entries:  # else dropped in the same plan
                entry.values = value
                self.unsettled.append((entry, value))

    def take_unsettled(self) -> list[tuple[Entry, Any]]:
        """What was kept lately, to be settled once the step that is started next has ended well."""
        unsettled, self.unsettled = self.unsettled, []
        return unsettled

    def lose(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry in self.entries:
                self._drop(entry)

    def settle(self, unsettled: Iterable[tuple[Entry, Any]], to_host: Callable[[Any], Any]) -> None:
        for entry, value in unsettled:
            if entry.values is value:  # else dropped since
                entry.values, entry.settled = to_host(value), True

    def recover(self) -> None:
        """After a failed step: forgets what is not known to be whole, and what was to be moved."""
        self._stop_moving()
        self.lose([entry for entry in self.entries if not entry.settled])

    def clear(self) -> None:
        """Forgets everything."""
        for entry in self._all():
            entry.parent = entry.values = None  # nodes may still point here
        self.roots, self.entries = {}, {}
        self._stop_moving()

    def check(self) -> None:
        """Recounts every invariant; AssertionError where one fails."""
        reachable = list(self._all())
        assert len(self.entries) <= self.max_pages, "over budget"
        assert len(self.staged) <= self.max_staged
        assert set(self.entries) <= set(reachable), "a page that nobody can find"
        assert all(entry in self.entries or entry.children for entry in reachable), "a way that leads nowhere"
        assert all(entry in self.entries for entry in self.staged)
        pending = set(self.departures.values())
        for entry in reachable:
            assert all(child.parent is entry and child.key == key for key, child in entry.children.items())
            assert entry.values is None or entry in self.entries, "dropped pages hold no memory"
            assert entry.values is not None or entry not in self.entries or entry in pending, "nobody reads this page"

    # ------------------------------------------------------------------------------------------------------------------

    def _entry(self, node: Node, *, create: bool) -> Entry | None:
        """A node's place, which may hold no values; from the nearest node above that knows its own."""
        path = []
        while not isinstance(node, Root) and (node.kept is None or node.kept.parent is None):
            path.append(node)
            node = node.parent
        if isinstance(node, Root):
            entry = self.roots.get(node.namespace)
            if entry is None and create:
                entry = self.roots[node.namespace] = Entry(node.namespace, None)
        else:
            entry = node.kept
        while path and entry is not None:
            node = path.pop()
            child = entry.children.get(node.key)
            if child is None and create:
                child = entry.children[node.key] = Entry(node.key, entry)
            node.kept = entry = child
        return entry

    def _walk(self, node: Node, keys: Iterable[bytes]) -> Iterator[Entry]:
        entry = self._entry(node, create=False) if self.entries else None
        for key in keys if entry is not None else ():
            entry = entry.children.get(key)
            if entry is None or entry.values is None:
                return
            yield entry

    def _touch(self, path: list[Entry]) -> None:
        """A parent is used no earlier than its child."""
        for entry in reversed(path):
            del self.entries[entry]
            self.entries[entry] = None

    def _drop(self, entry: Entry, keep: Entry | None = None) -> None:
        """Forgets a page, and the way to it but for what leads elsewhere or is `keep`."""
        del self.entries[entry]
        self.staged.pop(entry, None)
        entry.values, entry.settled = None, False
        while entry is not keep and entry not in self.entries and not entry.children:
            parent, entry.parent = entry.parent, None
            if parent is None:
                del self.roots[entry.key]
                return
            del parent.children[entry.key]
            entry = parent

    def _stop_moving(self) -> None:
        self.departures, self.arrivals, self.staged, self.unsettled = {}, {}, {}, []

    def _all(self) -> Iterator[Entry]:
        """All entries but the roots, which lead somewhere or are gone."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())
