"""Which tokens live in which pages: the owner of the page pool and the prefix trie.

Every page is in exactly one state: free (in the pool), private (in one page table, may be written) or published (one
trie node, full, its bytes never change until it is evicted). A page table is a run of published pages, then private
ones. A node's parent has at least as many readers and pins as the node itself, so an idle node has only idle
descendants, and evicting leaves first reaches all of them.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from prefix_jax import eviction
from prefix_jax.host_tier import HostTier
from prefix_jax.page_pool import PagePool
from prefix_jax.prefix_trie import TOKEN_BYTES, Node, PrefixTrie, Root

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HitEnd:
    """Where a prompt's hit ended, and why.

    reason: "whole prompt", all but its last token was found; "one token", there was nothing to find; "off", the request
    or the engine reads nothing; "diverged", the cache goes on with another token there; "same step", what it shares is
    being computed in the very step that it began in; "no room", for a copy of the page that it shares in part;
    "scored", from there on the request wants the prompt's log-probabilities; "evicted", the next page was there once;
    "other weights", it was there before the weights changed; "other salt", it is there for another; "new", none of
    these.
    token, cached_token: at `position`, the prompt's and, where it diverged, the cache's; as text too, with a tokenizer.
    """

    reason: str
    position: int
    token: int | None = None
    cached_token: int | None = None
    text: str | None = None
    cached_text: str | None = None

    def __str__(self) -> str:
        if self.reason != "diverged":
            return f"{self.reason}, at position {self.position}"
        own, cached = self.text or self.token, self.cached_text or self.cached_token
        return f"diverged at position {self.position}: {own!r} here, {cached!r} in the cache"


class PageHistory:
    """Digests of the pages that were published, the latest `limit`: what a cache without end would still have. It
    serves statistics alone, so a collision is harmless."""

    def __init__(self, limit: int):
        self.limit = limit
        self.digests: OrderedDict[int, None] = OrderedDict()

    def add(self, digest: int) -> None:
        self.digests[digest] = None
        self.digests.move_to_end(digest)
        if len(self.digests) > self.limit:
            self.digests.popitem(last=False)

    def __contains__(self, digest: int) -> bool:
        return digest in self.digests


class PageTable:
    """One sequence's hold on pages, in position order."""

    __slots__ = ("pages", "root", "nodes", "cached_len", "copy", "changed", "publishes", "priority", "ttl", "step")

    def __init__(self, root: Root, nodes: list[Node], publishes: bool, *, priority: int = 0, ttl: float | None = None):
        self.root = root
        self.nodes = nodes  # the published pages, pages[:len(nodes)]
        self.pages = [node.page for node in nodes]
        self.cached_len = 0  # positions found in the trie when the table was opened
        self.copy: tuple[int, int] | None = None  # page to copy from and to, before the next step
        self.changed = list(range(len(nodes)))  # columns that the device does not know yet
        self.publishes = publishes
        self.priority = priority
        self.ttl = ttl  # seconds that its pages are worth keeping; None: any number
        self.step = -1  # whose plan opened it

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.root


class PrefixCache:
    """Opens, grows, publishes and closes page tables over `num_pages` pages of `page_size` positions."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        policy: str = "lru",
        recompute: eviction.RecomputeTime | None = None,
        tier: HostTier | None = None,
        salt_quota: int | None = None,
        salt_floor: int = 0,
    ):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.trie = PrefixTrie()
        self.tier = tier  # where evicted pages go and come back from
        self.salt_quota = salt_quota  # a salt's pages beyond so many go first
        self.salt_floor = salt_floor  # its last ones go last
        rank = eviction.make_policy(policy, page_size, recompute or eviction.RecomputeTime())
        self.queue = eviction.EvictionQueue(rank, turn=self._turn, by_root=salt_quota is not None)
        self.tables: set[PageTable] = set()
        self.step = 0  # of the plan being made
        self.clock = 0
        self.num_idle = 0  # published pages that nobody reads and nobody pinned
        self.num_pinned = 0
        self.num_evicted = 0
        self.num_pinned_evicted = 0
        self.history = PageHistory(max(2 * num_pages, 65_536))
        self.former: PageHistory | None = None  # of the weights before these
        self.num_returned = 0  # pages that came back from host memory

    # A sequence's hold on pages ------------------------------------------------------------------------------------

    def open(
        self,
        tokens: array,
        namespace: Hashable = None,
        *,
        reads: bool = True,
        publishes: bool = True,
        priority: int = 0,
        ttl: float | None = None,
    ) -> PageTable:
        """A page table for `tokens`, filled as far as the trie knows them, all but the last (its logits are needed).

        Where the match ends inside a page, the page's matching head is to be copied into a fresh page (`table.copy`).
        Once closed, its pages are evicted after those of lower `priority`, but `ttl` seconds later before all others.
        """
        root = self.trie.root(namespace)
        nodes = self._match(root, tokens, (len(tokens) - 1) // self.page_size) if reads else []
        table = self._hold_path(PageTable(root, nodes, publishes, priority=priority, ttl=ttl))
        if reads and publishes and self.tier:
            self._bring_back(table, tokens)
        if reads:
            self._copy_head(table, tokens)
        return table

    def fork(self, source: PageTable, length: int) -> PageTable:
        """A page table that begins with the first `length` positions of another, which earlier steps wrote: its
        published pages, and a copy (`table.copy`) of the page in which they end. As far as these reach: a private page
        has one owner."""
        nodes = source.nodes[: length // self.page_size]
        table = PageTable(source.root, nodes, source.publishes, priority=source.priority, ttl=source.ttl)
        self._hold_path(table)
        column = len(nodes)
        if column == length // self.page_size and column * self.page_size < length and self.grow(table, length):
            table.copy = (source.pages[column], table.pages[column])
            table.cached_len = length
        return table

    def insert(self, tokens: array, namespace: Hashable = None) -> PageTable:
        """A page table for the full pages of `tokens`, or as many leading ones as there is room for without preemption:
        published ones, then private ones, which the caller writes before it publishes them and closes the table."""
        root = self.trie.root(namespace)
        nodes = self._match(root, tokens, len(tokens) // self.page_size)
        table = self._hold_path(PageTable(root, nodes, publishes=True))
        pages = min(len(tokens) // self.page_size, len(table.nodes) + len(self.pool) + self.num_idle)
        self.grow(table, pages * self.page_size)
        return table

    def prefetch(self, tokens: array, namespace: Hashable = None) -> None:
        """Starts to bring back from host memory what `open` is going to ask for."""
        root = self.trie.roots.get(namespace) or Root(namespace)
        nodes = self._match(root, tokens, (len(tokens) - 1) // self.page_size)
        self.tier.prefetch(nodes[-1] if nodes else root, self._keys_behind(nodes, tokens))

    def grow(self, table: PageTable, length: int, *, force: bool = False) -> bool:
        """Extends the table to hold `length` positions, evicting what nobody reads. False, and nothing changed, if
        there are not enough pages. `force` takes unread pinned pages too, the oldest first."""
        missing = -(-length // self.page_size) - len(table.pages)
        if missing <= 0:
            return True
        if missing > len(self.pool) + self.num_idle + (self._num_unread_pinned() if force else 0):
            return False
        pinned_before = self.num_pinned_evicted
        while len(self.pool) < missing:
            self._evict(self.queue.pop() or self._oldest_pinned_leaf())
        if lost := self.num_pinned_evicted - pinned_before:
            log.warning(
                "evicted %d pages of declared prefixes: a sequence alone needs more than the rest of the pool", lost
            )
        first = len(table.pages)
        table.pages += self.pool.take(missing)
        table.changed += range(first, len(table.pages))
        return True

    def adopt(self, table: PageTable, tokens: array, computed_len: int) -> int:
        """Takes over pages that others published since, from `computed_len` on if that is a page edge, in place of this
        table's own unwritten ones. Returns the new computed length."""
        size = self.page_size
        if computed_len != len(table.nodes) * size:
            return computed_len
        while computed_len + size < len(tokens):
            node = table.last.child(self._key(tokens, len(table.nodes)))
            if node is None:
                break
            self._take_over(table, node)
            computed_len += size
        return computed_len

    def publish(self, table: PageTable, tokens: array, end: int, *, written: bool) -> int:
        """Puts the table's full pages before position `end` into the trie; returns how many. Where the trie already has
        a page of the same content, that page is taken and the own one freed, but only if the step that writes it has
        been dispatched (`written`): a published page is never written again."""
        if not table.publishes:
            return 0
        published = 0
        for column in range(len(table.nodes), min(end // self.page_size, len(table.pages))):
            key = self._key(tokens, column)
            node = table.last.child(key)
            if node is None:
                self._add(table, key, table.pages[column])
                published += 1
            elif written:
                self._take_over(table, node)
            else:
                break
        return published

    def close(self, table: PageTable) -> None:
        """Ends the hold: private pages go back to the pool, published ones stay findable."""
        self.clock += 1
        self.pool.give(table.pages[len(table.nodes) :])
        expires = inf if table.ttl is None else self.queue.now() + table.ttl
        for node in reversed(table.nodes):
            node.last_use = self.clock
            if node.priority < table.priority:
                node.priority = table.priority
            if node.expires < expires:
                node.expires = expires
            node.readers -= 1
            self._release(node)
        table.root.readers -= 1
        self.trie.drop_unused(table.root)
        self.tables.remove(table)

    def clear(self) -> None:
        """Forgets every page that nobody reads, pinned ones too, all in host memory, and what there was."""
        self.history, self.former = PageHistory(self.history.limit), None
        while node := self.queue.pop() or self._oldest_pinned_leaf():
            self._evict(node, spills=False)
        if self.tier is not None:
            self.tier.clear()

    def change_weights(self) -> None:
        """What there was is from now on what other weights had."""
        self.former, self.history = self.history, PageHistory(self.history.limit)

    def remember(self, before: PrefixCache) -> None:
        """Goes on counting where the cache before this one stopped, whose pages are lost."""
        self.history, self.former = before.history, before.former
        self.num_evicted, self.num_pinned_evicted = before.num_evicted, before.num_pinned_evicted
        self.num_returned = before.num_returned

    def forget(self, nodes: list[Node]) -> None:
        """Takes pages in which nothing good stands out of the trie, as far as nobody reads them; a path, in order."""
        for node in reversed(nodes):
            if node.is_idle and not node.children:
                self._evict(node, spills=False)

    # What there is ---------------------------------------------------------------------------------------------------

    def find(self, tokens: array, namespace: Hashable = None) -> list[Node]:
        """The published full pages of these tokens, in order."""
        root = self.trie.roots.get(namespace)
        return self._match(root, tokens, len(tokens) // self.page_size) if root else []

    def expected_len(self, table: PageTable, tokens: array) -> int:
        """Positions of full pages that a cache without end would have found for a prompt, or as many as were found; its
        table has just been opened."""
        digest, found = table.last.digest, len(table.nodes)
        for key in self._keys_behind(table.nodes, tokens):
            digest = hash((digest, key))  # as the node of this page has it
            if digest not in self.history:
                break
            found += 1
        return max(found * self.page_size, table.cached_len)

    def explain(self, table: PageTable, tokens: array) -> HitEnd:
        """Why the hit of a table that has just been opened ended where it did."""
        position, column = table.cached_len, len(table.nodes)
        if position >= len(tokens) - 1:
            return HitEnd("whole prompt" if len(tokens) > 1 else "one token", position)
        last, token = table.last, tokens[position]
        head = tokens[column * self.page_size : min((column + 1) * self.page_size, len(tokens) - 1)].tobytes()
        near, shared = last.longest_head(head, self.step)
        if last.longest_head(head, self.step + 1)[1] > shared:
            return HitEnd("same step", position, token)
        if column * self.page_size + shared > position:
            return HitEnd("no room", position, token)
        digest = hash((last.digest, self._key(tokens, column)))
        if digest in self.history:
            return HitEnd("evicted", position, token)
        if self.former is not None and digest in self.former:
            return HitEnd("other weights", position, token)
        for other in islice(self.trie.roots.values(), 64):
            if other is not table.root and self._has(other, tokens, column):
                return HitEnd("other salt", position, token)
        if near is None and not last.children:
            return HitEnd("new", position, token)
        cached = array("i", (near or last.children[0]).key)[shared]
        return HitEnd("diverged", position, token, cached)

    # Pins ----------------------------------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keeps a node from eviction; its parents must be pinned first."""
        self._hold(node)
        self.num_pinned += node.pins == 0
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Takes one pin off; children first."""
        node.pins -= 1
        self.num_pinned -= node.pins == 0
        self._release(node)

    # Everything at once ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recounts every invariant from scratch; AssertionError where one fails."""
        readers: dict[Node, int] = {}
        pages = list(self.pool.free)
        for table in self.tables:
            parent = table.root
            for page, node in zip(table.pages, table.nodes, strict=False):
                assert node.page == page and node.parent is parent, "a table's published pages are a path of the trie"
                readers[node] = readers.get(node, 0) + 1
                parent = node
            pages += table.pages[len(table.nodes) :]
        for root in self.trie.roots.values():
            assert root.readers == sum(table.root is root for table in self.tables)
            assert root.readers or root.children, "a namespace that nobody uses is forgotten"
            assert root.num_pages == sum(1 for _ in root.subtree())
            over = None not in (self.salt_quota, root.namespace) and root.num_pages > self.salt_quota
            assert over == (root in self.queue.over), "a namespace beyond its quota is known as such"
        nodes = list(self.trie)
        pages += [node.page for node in nodes]
        assert sorted(pages) == list(range(1, self.pool.num_pages + 1)), "every page is in exactly one state"
        assert set(readers) <= set(nodes), "a table reads a page that is not published"
        for node in nodes:
            assert node.readers == readers.get(node, 0), f"page {node.page}: {node.readers} readers counted"
            assert len(node.key) == self.page_size * TOKEN_BYTES
            assert node.keys == sorted(node.keys) == [child.key for child in node.children]
            assert len(set(node.keys)) == len(node.keys), "one key, one child"
            for child in node.children:
                assert child.parent is node and child.readers <= node.readers and child.pins <= node.pins
                assert child.last_use <= node.last_use or node.readers, "a parent is used no earlier than its child"
        assert self.num_idle == sum(node.is_idle for node in nodes)
        assert self.num_pinned == sum(node.pins > 0 for node in nodes)
        queued = set(self.queue.candidates())
        leaves = [node for node in nodes if node.is_idle and not node.children]
        assert all(node in queued for node in leaves), "an idle leaf is queued"
        for root in self.queue.over:
            own = {entry[-1] for entry in root.leaves}
            assert all(node in own for node in leaves if node.root is root), "an idle leaf is queued for its namespace"
        if self.tier is not None:
            self.tier.check()

    # ------------------------------------------------------------------------------------------------------------------

    def _key(self, tokens: array, column: int) -> bytes:
        return tokens[column * self.page_size : (column + 1) * self.page_size].tobytes()

    def _keys(self, tokens: array, first: int, last: int) -> Iterator[bytes]:
        """Those of columns [first, last)."""
        raw, size = tokens[first * self.page_size : last * self.page_size].tobytes(), self.page_size * TOKEN_BYTES
        return (raw[i : i + size] for i in range(0, (last - first) * size, size))

    def follow(self, node: Node, tokens: array, num_pages: int) -> tuple[Node, int]:
        """The last page that a table of `tokens` would find, and the number of pages up to it; the first `num_pages`
        are known to lead to `node`."""
        behind = node.path(self._keys(tokens, num_pages, (len(tokens) - 1) // self.page_size))
        return (behind[-1] if behind else node), num_pages + len(behind)

    def _keys_behind(self, nodes: list[Node], tokens: array) -> Iterator[bytes]:
        return self._keys(tokens, len(nodes), (len(tokens) - 1) // self.page_size)

    def _match(self, root: Node, tokens: array, num_pages: int) -> list[Node]:
        return root.path(self._keys(tokens, 0, num_pages))

    def _has(self, root: Root, tokens: array, column: int) -> bool:
        """Whether a namespace has the page of this column, and so all before it."""
        end = (column + 1) * self.page_size
        return end <= len(tokens) and len(self._match(root, tokens, column + 1)) == column + 1

    def _hold_path(self, table: PageTable) -> PageTable:
        """A new table over published pages becomes one of their readers."""
        for held in table.nodes:
            self._hold(held)
            held.readers += 1
            held.uses += 1
        table.root.readers += 1
        table.step = self.step
        table.cached_len = len(table.nodes) * self.page_size
        self.tables.add(table)
        return table

    def _bring_back(self, table: PageTable, tokens: array) -> None:
        """Continues the match in host memory: fresh pages, which are filled before the step that reads them. Not for a
        sequence that is not going to be admitted."""
        if -(-len(tokens) // self.page_size) - len(table.pages) > len(self.pool) + self.num_idle:
            return
        returned = self.tier.fetch(table.last, self._keys_behind(table.nodes, tokens))
        first = len(table.nodes)
        self.grow(table, (first + len(returned)) * self.page_size)
        for page, (key, values) in zip(table.pages[first:], returned, strict=True):
            self._add(table, key, page)
            self.tier.arrivals[page] = values
        table.cached_len = len(table.nodes) * self.page_size
        self.num_returned += len(returned)

    def _copy_head(self, table: PageTable, tokens: array) -> None:
        column = len(table.nodes)
        head = tokens[column * self.page_size : min((column + 1) * self.page_size, len(tokens) - 1)].tobytes()
        source, shared = table.last.longest_head(head, self.step)
        if source is not None and self.grow(table, table.cached_len + shared):
            table.copy = (source.page, table.pages[-1])
            table.cached_len += shared

    def _add(self, table: PageTable, key: bytes, page: int) -> None:
        """Publishes the table's next page."""
        node = table.last.add(key, page, self.step)
        node.readers = node.uses = 1
        node.last_use = self.clock
        table.nodes.append(node)
        self.history.add(node.digest)
        self._count_page(node.root)
        if node.root.num_pages == self.salt_floor + 1 > 1:  # what waited as within the floor is not any more
            for other in node.root.subtree():
                if other.is_idle and not other.children:
                    self.queue.push(other)

    def _take_over(self, table: PageTable, node: Node) -> None:
        """Puts a published page into the table's next column and frees the own page there, if there is one."""
        column = len(table.nodes)
        self.pool.give(table.pages[column : column + 1])
        table.pages[column : column + 1] = [node.page]
        table.changed.append(column)
        self._hold(node)
        node.readers += 1
        node.uses += 1
        table.nodes.append(node)

    def _turn(self, node: Node) -> int:
        """1 for what is within a salt's floor, else 0."""
        root = node.root
        return int(root.namespace is not None and root.num_pages <= self.salt_floor)

    def _count_page(self, root: Root) -> None:
        """A page of this namespace has come or gone: is it beyond its quota now?"""
        if self.salt_quota is None or root.namespace is None:
            return
        if root.num_pages > self.salt_quota:
            self.queue.over[root] = None
        else:
            self.queue.over.pop(root, None)

    def _hold(self, node: Node) -> None:
        self.num_idle -= node.is_idle

    def _release(self, node: Node) -> None:
        if node.is_idle:
            self.num_idle += 1
            if not node.children:
                self.queue.push(node)

    def _evict(self, node: Node | None, *, spills: bool = True) -> None:
        """spills: to host memory, where there is some."""
        assert node is not None and node.readers == 0 and not node.children
        self.num_idle -= node.is_idle
        self.num_pinned -= node.pins > 0
        self.num_evicted += 1
        self.num_pinned_evicted += node.pins > 0
        parent = node.parent
        if spills and self.tier is not None:
            self.tier.spill(node, self.step)
        node.remove()
        self._count_page(node.root)
        self.pool.give([node.page])
        if isinstance(parent, Root):
            self.trie.drop_unused(parent)
        elif parent.is_idle and not parent.children:
            self.queue.push(parent)

    def _num_unread_pinned(self) -> int:
        return sum(node.pins > 0 and node.readers == 0 for node in self.trie) if self.num_pinned else 0

    def _oldest_pinned_leaf(self) -> Node | None:
        leaves = (node for node in self.trie if node.pins and not node.readers and not node.children)
        return min(leaves, key=lambda node: node.last_use, default=None)
