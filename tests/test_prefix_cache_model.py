"""Prefix cache, trie, pool and eviction against a dictionary of token prefixes, operation by random operation, with
what the pages hold checked too."""

from array import array
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefix_jax.prefix_cache import PageTable, PrefixCache
from prefix_jax.prefix_trie import Node

Key = tuple[object, tuple[int, ...]]  # namespace, and all tokens up to the end of a page


@dataclass
class Entry:
    """What the dictionary knows of one published page."""

    page: int
    step: int
    last_use: int
    pins: int = 0


@dataclass(eq=False)
class Hold:
    """One open page table, as its holder sees it."""

    namespace: object
    tokens: array
    table: PageTable
    publishes: bool
    published: int  # pages
    computed: int
    start: int = 0  # of the planned chunk
    planned: bool = False


@dataclass
class Model:
    size: int
    num_pages: int
    quota: int
    floor: int
    entries: dict[Key, Entry] = field(default_factory=dict)
    holds: list[Hold] = field(default_factory=list)
    clock: int = 0

    def key(self, namespace, tokens, num_pages) -> Key:
        return namespace, tuple(tokens[: num_pages * self.size])

    def match(self, namespace, tokens, found=0) -> int:
        """Pages found, from page `found` on; the last token is never looked for."""
        while (found + 1) * self.size < len(tokens) and self.key(namespace, tokens, found + 1) in self.entries:
            found += 1
        return found

    def head(self, namespace, tokens, found, step) -> int:
        """Tokens of the longest head that a settled page shares, one by one over all of them."""
        above, rest = tuple(tokens[: found * self.size]), tuple(tokens[found * self.size : -1])
        lengths = [0]
        for (other, path), entry in self.entries.items():
            if other == namespace and path[: -self.size] == above and entry.step < step:
                page = path[-self.size :]
                lengths.append(next((i for i, (a, b) in enumerate(zip(page, rest, strict=False)) if a != b), len(rest)))
        return min(max(lengths), self.size)

    def readers(self, key: Key) -> int:
        return sum(self.key(h.namespace, h.tokens, len(key[1]) // self.size) == key
                   for h in self.holds if h.published * self.size >= len(key[1]))  # fmt: skip

    def free(self) -> int:
        private = sum(len(hold.table.pages) - hold.published for hold in self.holds)
        return self.num_pages - len(self.entries) - private

    def evict(self, count: int) -> None:
        """The least recently used unread leaf goes first: of what the salt has beyond its quota, then of all, then of
        what is within its floor; pinned ones only when no other is left."""
        for _ in range(count):
            parents = {(namespace, path[: -self.size]) for namespace, path in self.entries}
            unread = [
                (key, entry) for key, entry in self.entries.items() if key not in parents and not self.readers(key)
            ]
            leaves = [(e.pins > 0, not e.pins and self.turn(key[0]), e.last_use, key) for key, e in unread]
            del self.entries[min(leaves, key=lambda leaf: leaf[:3])[3]]

    def turn(self, namespace) -> int:
        pages = sum(other == namespace for other, _ in self.entries)
        return 0 if namespace is None else -(pages > self.quota) + (pages <= self.floor)

    def available(self, force: bool) -> int:
        unread = [entry for key, entry in self.entries.items() if not self.readers(key)]
        return self.free() + sum(force or not entry.pins for entry in unread)


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, adopt, publish, decode and go. Between two dispatches lies one plan: its copies run
    first, then all its chunks write, and only then read."""

    @initialize(
        data=st.data(),
        size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 12),
        alphabet=st.integers(2, 3),
        quota=st.sampled_from([None, 0, 1, 2, 4]),
        floor=st.integers(0, 2),
    )
    def start(self, data, size, num_pages, alphabet, quota, floor):
        tokens = st.lists(st.integers(0, alphabet - 1), min_size=4 * size, max_size=4 * size)
        self.stems = data.draw(st.lists(tokens, min_size=1, max_size=2))  # prompts begin alike
        self.max_len = min(4 * size + 2, num_pages * size)
        floor = floor if quota is None else min(floor, quota)
        self.cache = PrefixCache(num_pages, size, salt_quota=quota, salt_floor=floor)
        self.cache.step = 1
        self.model = Model(size, num_pages, num_pages if quota is None else quota, floor)
        self.alphabet = alphabet
        self.store: dict[int, list] = {}  # page -> for each slot the namespace and tokens that its content depends on
        self.copies: list[tuple[int, int]] = []
        self.freed: set[int] = set()
        give = self.cache.pool.give
        self.cache.pool.give = lambda pages: (self.freed.update(pages), give(pages))[1]

    # Tables

    @rule(
        data=st.data(),
        namespace=st.sampled_from([None, None, "salt"]),
        reads=st.sampled_from([True, True, False]),
        publishes=st.sampled_from([True, True, True, False]),
        force=st.sampled_from([False, False, True]),
    )
    def open(self, data, namespace, reads, publishes, force):
        model, cache = self.model, self.cache
        stem = data.draw(st.sampled_from(self.stems))[: data.draw(st.integers(0, 4)) * model.size]
        tail = data.draw(st.lists(st.integers(0, self.alphabet - 1), min_size=not stem, max_size=model.size + 1))
        tokens = array("i", (stem + tail)[: self.max_len])
        found = model.match(namespace, tokens) if reads else 0
        table = cache.open(tokens, namespace, reads=reads, publishes=publishes)
        head = model.head(namespace, tokens, found, cache.step) if reads else 0
        hold = Hold(namespace, tokens, table, publishes, found, 0)
        hold.table = PageTable(table.root, table.nodes, True)  # what it was before it took a page for the head
        model.holds.append(hold)
        if head and model.available(False) == 0:
            head = 0
        if head and model.free() == 0:
            model.evict(1)
        hold.table = table
        assert table.cached_len == found * model.size + head
        assert (table.copy is not None) == (head > 0)
        hold.computed = table.cached_len
        if not self.grow(hold, len(tokens), force):
            self.drop(hold)
        elif table.copy:
            self.copies.append(table.copy)

    def grow(self, hold, length, force) -> bool:
        missing = max(0, -(-length // self.model.size) - len(hold.table.pages))
        fits = missing <= self.model.available(force)
        if fits:
            self.model.evict(max(0, missing - self.model.free()))
        assert self.cache.grow(hold.table, length, force=force) == fits
        return fits

    def drop(self, hold) -> None:
        self.cache.close(hold.table)
        self.model.clock += 1
        self.model.holds.remove(hold)
        for pages in range(1, hold.published + 1):
            self.model.entries[self.model.key(hold.namespace, hold.tokens, pages)].last_use = self.model.clock

    def pick(self, data, planned=(False,)) -> list[Hold]:
        """One of the holds, or none."""
        holds = [hold for hold in self.model.holds if hold.planned in planned]
        return [data.draw(st.sampled_from(holds))] if holds else []

    @rule(data=st.data())
    def close(self, data):
        for hold in self.pick(data):
            self.drop(hold)

    @rule(data=st.data())
    def adopt(self, data):
        model = self.model
        for hold in self.pick(data):
            expected = hold.computed
            if hold.computed == hold.published * model.size:
                hold.published = model.match(hold.namespace, hold.tokens, hold.published)
                expected = hold.published * model.size
            assert self.cache.adopt(hold.table, hold.tokens, hold.computed) == expected
            hold.computed = expected

    # Steps

    @rule(data=st.data(), length=st.integers(1, 9))
    def plan_chunk(self, data, length):
        for hold in self.pick(data):
            hold.start, hold.computed = hold.computed, min(hold.computed + length, len(hold.tokens))
            hold.planned = hold.start < hold.computed
            if hold.planned:
                self.publish(hold, written=False)

    @rule(data=st.data())
    def settle(self, data):
        for hold in self.pick(data):
            self.publish(hold, written=True)

    @rule(data=st.data())
    def decode(self, data):
        """A sampled token arrives, and its position gets a page if there is one."""
        for hold in self.pick(data):
            if hold.computed == len(hold.tokens) < 6 * self.model.size:
                hold.tokens.append(data.draw(st.integers(0, self.alphabet - 1)))
                if not self.grow(hold, len(hold.tokens), False):
                    hold.tokens.pop()
                    self.drop(hold)

    def publish(self, hold, written) -> None:
        model, new = self.model, 0
        for pages in range(hold.published + 1, hold.computed // model.size + 1 if hold.publishes else 0):
            key = model.key(hold.namespace, hold.tokens, pages)
            if key not in model.entries:
                model.entries[key] = Entry(hold.table.pages[pages - 1], self.cache.step, model.clock)
                new += 1
            elif not written:
                break
            hold.published = pages
        assert self.cache.publish(hold.table, hold.tokens, hold.computed, written=written) == new

    @rule()
    def dispatch(self):
        """The device runs the plan: gather, poison what was freed, scatter, write in every chunk, read in every
        chunk."""
        size = self.model.size
        copied = [list(self.store[source]) for source, _ in self.copies]
        for page in self.freed:
            self.store[page] = [None] * size
        for (_, target), slots in zip(self.copies, copied, strict=True):
            self.store[target] = slots
        planned = [hold for hold in self.model.holds if hold.planned]
        for hold in planned:
            for position in range(hold.start, hold.computed):
                self.write(hold, position)
        for hold in planned:
            hold.planned = False
            for position in range(hold.computed):
                content = self.store[hold.table.pages[position // size]][position % size]
                assert content == (hold.namespace, tuple(hold.tokens[: position + 1])), f"position {position} is wrong"
        self.copies, self.freed = [], set()
        self.cache.step += 1

    def write(self, hold, position) -> None:
        size, model = self.model.size, self.model
        if position < hold.published * size:
            entry = model.entries[model.key(hold.namespace, hold.tokens, position // size + 1)]
            assert entry.step == self.cache.step, "a published page is never written again"
        page = self.store.setdefault(hold.table.pages[position // size], [None] * size)
        page[position % size] = (hold.namespace, tuple(hold.tokens[: position + 1]))

    # Pins

    @rule(data=st.data())
    def pin(self, data):
        for hold in self.pick(data, planned=(False, True)):
            for pages in range(1, data.draw(st.integers(0, hold.published)) + 1):
                self.cache.pin(hold.table.nodes[pages - 1])
                self.model.entries[self.model.key(hold.namespace, hold.tokens, pages)].pins += 1

    @rule(data=st.data())
    def unpin(self, data):
        """One declaration of the deepest pinned page goes, and with it its pins of all pages above."""
        size = self.model.size
        pinned = sorted((key for key, entry in self.model.entries.items() if entry.pins), key=lambda key: len(key[1]))
        deepest = {key for key in pinned if not any(
            other[0] == key[0] and other[1][: len(key[1])] == key[1] and other != key for other in pinned
        )}  # fmt: skip
        if not pinned:
            return
        namespace, path = data.draw(st.sampled_from([key for key in pinned if key in deepest]))
        nodes = self.nodes()
        for pages in range(len(path) // size, 0, -1):
            key = self.model.key(namespace, path, pages)
            self.cache.unpin(nodes[key])
            self.model.entries[key].pins -= 1

    # Always

    def nodes(self) -> dict[Key, Node]:
        found = {}
        for namespace, root in self.cache.trie.roots.items():
            stack = [(root, ())]
            while stack:
                node, path = stack.pop()
                for child in node.children:
                    tokens = (*path, *array("i", child.key))
                    found[namespace, tokens] = child
                    stack.append((child, tokens))
        return found

    @invariant()
    def cache_and_model_agree(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        nodes = self.nodes()
        assert {key: node.page for key, node in nodes.items()} == {k: e.page for k, e in self.model.entries.items()}
        assert all(node.pins == self.model.entries[key].pins for key, node in nodes.items())
        assert all(node.readers == self.model.readers(key) for key, node in nodes.items())
        assert len(self.cache.pool) == self.model.free()
        for hold in self.model.holds:
            assert len(hold.table.nodes) == hold.published


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
