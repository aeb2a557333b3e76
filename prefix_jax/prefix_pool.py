"""Declared prefixes: the upper levels of the trie that somebody marked to be kept, pinned within a budget of pages."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from prefix_jax.prefix_cache import PageTable, PrefixCache
from prefix_jax.prefix_trie import Node


@dataclass(eq=False)
class Prefix:
    """A declared prefix. Only its full pages are pinned, as they get published; a shorter tail is copied or
    recomputed."""

    tokens: bytes
    num_tokens: int
    namespace: Hashable
    nodes: list[Node] = field(default_factory=list)  # pinned, from the root down
    hits: int = 0


class PrefixPool:
    """Finds declared prefixes by their tokens and keeps at most `max_pinned` pages pinned for all of them. Over budget
    the least recently used declaration lapses: a prefix is never a reason to fail. There are at most `max_pinned`
    declarations too (and always room for one), so that callers who never repeat one do not fill the memory."""

    def __init__(self, cache: PrefixCache, max_pinned: int):
        self.cache = cache
        self.max_pinned = max_pinned
        self.prefixes: dict[tuple[Hashable, bytes], Prefix] = {}  # the least recently used first

    def declare(self, tokens: array, namespace: Hashable = None) -> Prefix:
        """The prefix of these tokens, made now or found again."""
        key = (namespace, tokens.tobytes())
        prefix = self.prefixes.pop(key, None)
        if prefix is None:
            prefix = Prefix(key[1], len(tokens), namespace)
        else:
            prefix.hits += 1
        self.prefixes[key] = prefix
        if len(self.prefixes) > max(1, self.max_pinned):
            self._lapse(next(iter(self.prefixes.values())))
        return prefix

    def pin_published(self, prefix: Prefix, table: PageTable) -> None:
        """Pins the pages of the prefix that an open table of it has published or found."""
        full = min(prefix.num_tokens // self.cache.page_size, len(table.nodes))
        if len(prefix.nodes) >= full and (not prefix.nodes or prefix.nodes[-1].parent is not None):
            return  # nothing new, nothing evicted
        if self.prefixes.get((prefix.namespace, prefix.tokens)) is not prefix:
            return  # deleted or lapsed meanwhile
        self._drop_evicted(prefix)
        for node in table.nodes[len(prefix.nodes) : full]:
            if not node.pins and not self._make_room(prefix):
                return
            self.cache.pin(node)
            prefix.nodes.append(node)

    def delete(self, tokens: array, namespace: Hashable = None) -> bool:
        """Forgets a declaration; its pages become ordinary ones, evictable once unread. False if there was none."""
        prefix = self.prefixes.get((namespace, tokens.tobytes()))
        if prefix is not None:
            self._lapse(prefix)
        return prefix is not None

    def clear(self) -> None:
        """Forgets all declarations."""
        for prefix in list(self.prefixes.values()):
            self._lapse(prefix)

    def _make_room(self, keep: Prefix) -> bool:
        while self.cache.num_pinned >= self.max_pinned:
            oldest = next((prefix for prefix in self.prefixes.values() if prefix is not keep and prefix.nodes), None)
            if oldest is None:
                return False
            self._lapse(oldest)
        return True

    def _lapse(self, prefix: Prefix) -> None:
        del self.prefixes[prefix.namespace, prefix.tokens]
        self._drop_evicted(prefix)
        while prefix.nodes:
            self.cache.unpin(prefix.nodes.pop())

    def _drop_evicted(self, prefix: Prefix) -> None:
        while prefix.nodes and prefix.nodes[-1].parent is None:
            prefix.nodes.pop()
