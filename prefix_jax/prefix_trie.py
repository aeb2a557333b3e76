"""Published pages, found by the tokens that lead to them. One node is one full page, so no edge is ever split.

A node's identity is its page's tokens themselves (their int32 bytes), under its parent, under a namespace's root. It
knows nothing of free pages or of who may be evicted: the prefix cache does.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefix_jax.forecast import Demand

TOKEN_BYTES = array("i").itemsize


class Node:
    """One published page. Children are kept in the order of their keys, so that the neighbours of a key that is missing
    are the ones that share most with it."""

    __slots__ = (
        "key", "page", "parent", "keys", "children", "readers", "pins", "last_use", "step",
        "depth", "uses", "priority", "expires", "demand", "ticket", "digest", "kept", "root",
    )  # fmt: skip

    def __init__(self, key: bytes, page: int, parent: Node | None, step: int):
        self.key = key
        self.page = page
        self.parent = parent  # None: a root, or evicted
        self.root: Root | None = parent and parent.root
        self.depth = 0 if parent is None else parent.depth + 1
        self.keys: list[bytes] = []
        self.children: list[Node] = []
        self.readers = 0  # open page tables that include this node
        self.pins = 0  # declared prefixes that include this node
        self.last_use = 0
        self.step = step  # the step that fills the page; it may be copied from in later ones
        self.uses = 0  # page tables that included this node, so far
        self.priority = 0  # the highest of a sequence that used it
        self.expires = 0.0  # on the clock of the eviction queue
        self.demand: Demand | None = (
            None if parent is None or parent.demand is None else parent.demand.children.get(key)
        )
        self.ticket = 0  # of its latest entry in the eviction queue
        self.digest = hash((parent.digest if parent else 0, key))  # of the path; for statistics, identity is the tokens
        self.kept: object | None = None  # its place among the pages in host memory, if it was looked up

    @property
    def is_idle(self) -> bool:
        return self.readers == 0 and self.pins == 0

    def child(self, key: bytes) -> Node | None:
        """The child whose page holds exactly these tokens."""
        return next(iter(self.path([key])), None)

    def path(self, keys: Iterable[bytes]) -> list[Node]:
        """The pages below this one that these keys lead to, as far as there are."""
        node, path = self, []
        for key in keys:
            i = bisect_left(node.keys, key)
            if i == len(node.keys) or node.keys[i] != key:
                break
            node = node.children[i]
            path.append(node)
        return path

    def add(self, key: bytes, page: int, step: int) -> Node:
        """Hangs a new page below this one; the caller has checked that the key is not there."""
        node = Node(key, page, self, step)
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.children.insert(i, node)
        self.root.num_pages += 1
        return node

    def remove(self) -> None:
        """Takes this leaf out of the trie."""
        assert self.parent is not None and not self.children
        i = bisect_left(self.parent.keys, self.key)
        del self.parent.keys[i], self.parent.children[i]
        self.root.num_pages -= 1
        self.parent = None

    def longest_head(self, key: bytes, step: int) -> tuple[Node | None, int]:
        """The child, filled before `step`, that shares the longest head with `key` (which may be shorter than a page),
        and the length of that head in tokens. Sharing falls with the distance in key order, so each side is asked
        once."""
        best, best_len = None, 0
        i = bisect_left(self.keys, key)
        for side in (range(i, len(self.keys)), range(i - 1, -1, -1)):
            for j in side:
                if self.children[j].step < step:
                    shared = common_len(self.keys[j], key)
                    if shared > best_len:
                        best, best_len = self.children[j], shared
                    break
        return best, best_len

    def subtree(self) -> Iterator[Node]:
        """This node's descendants, itself not included."""
        stack = list(self.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


class Root(Node):
    """Where a namespace begins; no page. Its readers are all open page tables of the namespace."""

    __slots__ = ("namespace", "num_pages", "leaves")

    def __init__(self, namespace: Hashable):
        super().__init__(b"", 0, None, 0)
        self.namespace = namespace
        self.root = self
        self.num_pages = 0  # of its nodes
        self.leaves: list[tuple] = []  # a heap of the eviction queue's entries for them, where there is a quota
        self.digest = hash(namespace)


class PrefixTrie:
    """One root for each namespace that is in use."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, Root] = {}
        self.demands: Mapping[Hashable, Demand] = {}  # the roots of a forecast

    def root(self, namespace: Hashable) -> Root:
        if namespace not in self.roots:
            self.roots[namespace] = Root(namespace)
            self.roots[namespace].demand = self.demands.get(namespace)
        return self.roots[namespace]

    def drop_unused(self, root: Root) -> None:
        """Forgets a namespace without pages and readers: callers may invent one for each of their users."""
        if not root.readers and not root.children:
            del self.roots[root.namespace]

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from root.subtree()


def common_len(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys share."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end // TOKEN_BYTES
    low, high = 0, end // TOKEN_BYTES  # a[:low] equal, a[:high] not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
