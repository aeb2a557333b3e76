"""Prefix cache, trie, pool and eviction against a dictionary of token prefixes, with what the pages hold checked too."""

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefix_jax.eviction import EvictionQueue, lru
from prefix_jax.page_pool import PagePool
from prefix_jax.prefix_cache import PageTable, PrefixCache
from prefix_jax.prefix_trie import Node, common_len

# The model ---------------------------------------------------------------------------------------------------------

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
        """The least recently used unread leaf goes first; pinned ones only when no other is left."""
        for _ in range(count):
            parents = {(namespace, path[: -self.size]) for namespace, path in self.entries}
            leaves = [(entry.pins > 0, entry.last_use, key) for key, entry in self.entries.items()
                      if key not in parents and not self.readers(key)]  # fmt: skip
            del self.entries[min(leaves, key=lambda leaf: leaf[:2])[2]]

    def available(self, force: bool) -> int:
        unread = [entry for key, entry in self.entries.items() if not self.readers(key)]
        return self.free() + sum(force or not entry.pins for entry in unread)


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, adopt, publish, decode and go. Between two dispatches lies one plan: its copies run first,
    then all its chunks write, and only then read."""

    @initialize(size=st.sampled_from([1, 2, 4]), num_pages=st.integers(4, 12), alphabet=st.integers(2, 3))
    def start(self, size, num_pages, alphabet):
        self.cache = PrefixCache(num_pages, size)
        self.cache.step = 1
        self.model = Model(size, num_pages)
        self.alphabet = alphabet
        self.store: dict[int, list] = {}  # page -> for each slot the namespace and tokens that its content depends on
        self.copies: list[tuple[int, int]] = []
        self.freed: set[int] = set()
        give = self.cache.pool.give
        self.cache.pool.give = lambda pages: (self.freed.update(pages), give(pages))[1]

    # Tables

    @rule(data=st.data(), namespace=st.sampled_from([None, None, None, "salt"]), reads=st.sampled_from([True, True, False]),
          publishes=st.sampled_from([True, True, True, False]), force=st.sampled_from([False, False, True]))  # fmt: skip
    def open(self, data, namespace, reads, publishes, force):
        model, cache = self.model, self.cache
        longest = min(4 * model.size + 2, model.num_pages * model.size)
        tokens = array("i", data.draw(st.lists(st.integers(0, self.alphabet - 1), min_size=1, max_size=longest)))
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

    @precondition(lambda self: any(not hold.planned for hold in self.model.holds))
    @rule(data=st.data())
    def close(self, data):
        self.drop(data.draw(st.sampled_from([hold for hold in self.model.holds if not hold.planned])))

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def adopt(self, data):
        hold, model = data.draw(st.sampled_from(self.model.holds)), self.model
        if hold.planned:
            return
        expected = hold.computed
        if hold.computed == hold.published * model.size:
            hold.published = model.match(hold.namespace, hold.tokens, hold.published)
            expected = hold.published * model.size
        assert self.cache.adopt(hold.table, hold.tokens, hold.computed) == expected
        hold.computed = expected

    # Steps

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data(), length=st.integers(1, 9))
    def plan_chunk(self, data, length):
        hold = data.draw(st.sampled_from(self.model.holds))
        length = min(length, len(hold.tokens) - hold.computed)
        if not hold.planned and length:
            hold.planned, hold.start, hold.computed = True, hold.computed, hold.computed + length
            self.publish(hold, written=False)

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def settle(self, data):
        hold = data.draw(st.sampled_from(self.model.holds))
        if not hold.planned:
            self.publish(hold, written=True)

    @precondition(lambda self: self.model.holds)
    @rule(data=st.data())
    def decode(self, data):
        """A sampled token arrives, and its position gets a page if there is one."""
        hold = data.draw(st.sampled_from(self.model.holds))
        if not hold.planned and hold.computed == len(hold.tokens) < 6 * self.model.size:
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
        """The device runs the plan: gather, poison what was freed, scatter, write in every chunk, read in every chunk."""
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

    @precondition(lambda self: any(hold.published for hold in self.model.holds))
    @rule(data=st.data())
    def pin(self, data):
        hold = data.draw(st.sampled_from([hold for hold in self.model.holds if hold.published]))
        for pages in range(1, data.draw(st.integers(1, hold.published)) + 1):
            self.cache.pin(hold.table.nodes[pages - 1])
            self.model.entries[self.model.key(hold.namespace, hold.tokens, pages)].pins += 1

    @precondition(lambda self: any(entry.pins for entry in self.model.entries.values()))
    @rule(data=st.data())
    def unpin(self, data):
        """One declaration of the deepest pinned page goes, and with it its pins of all pages above."""
        size = self.model.size
        pinned = sorted((key for key, entry in self.model.entries.items() if entry.pins), key=lambda key: len(key[1]))
        deepest = {key for key in pinned if not any(
            other[0] == key[0] and other[1][: len(key[1])] == key[1] and other != key for other in pinned
        )}  # fmt: skip
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
TestCacheMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# One cache, one sequence after the other --------------------------------------------------------------------------------


def fill(cache: PrefixCache, tokens, namespace=None, **options) -> tuple[int, PageTable]:
    """Opens, computes and publishes; what was found, and the table."""
    tokens = array("i", tokens)
    cache.step += 1
    table = cache.open(tokens, namespace, **options)
    assert cache.grow(table, len(tokens)), "no pages"
    cache.publish(table, tokens, len(tokens), written=False)
    cache.check()
    return table.cached_len, table


def serve(cache: PrefixCache, tokens, namespace=None, **options) -> int:
    """A whole request; returns what it found."""
    cached, table = fill(cache, tokens, namespace, **options)
    cache.close(table)
    cache.check()
    return cached


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_cached_whole_leaves_its_last_token_to_compute(length):
    """C01: every page hits and nothing is left to run (nano-vllm#144, vllm#3239, vllm#17999)."""
    cache = PrefixCache(20, 16)
    assert serve(cache, range(length)) == 0
    expected = min(length // 16 * 16, length - 1)  # full pages, and of the last one all but one token
    assert serve(cache, range(length)) == expected
    assert serve(cache, range(length)) == expected


@pytest.mark.parametrize("suffix", range(1, 18))
def test_what_is_found_and_what_is_computed_meet_without_gap(suffix):
    """C02: the entry is stored one token short, and every later position is shifted (vllm-mlx#311)."""
    cache = PrefixCache(20, 16)
    serve(cache, range(48))
    tokens = array("i", [*range(48), *range(100, 100 + suffix)])
    cache.step += 1
    table = cache.open(tokens)
    assert table.cached_len == 48
    assert [node.key for node in table.nodes] == [tokens[i : i + 16].tobytes() for i in (0, 16, 32)]


def test_only_whole_written_pages_are_found():
    """C06: a page that two chunks fill is visible before it is full (ROCm/ATOM#902)."""
    cache, tokens = PrefixCache(20, 16), array("i", range(48))
    table = cache.open(tokens)
    assert cache.grow(table, 48)
    for end, found in ((24, 16), (47, 32), (48, 47)):
        cache.step += 1
        cache.publish(table, tokens, end, written=False)
        cache.step += 1
        other = cache.open(tokens)
        assert other.cached_len == found
        cache.close(other)
        cache.check()


def test_generated_tokens_are_found_by_the_next_turn():
    """C07: on finish only the prompt is kept (sglang#16521)."""
    cache, tokens = PrefixCache(40, 16), array("i", range(100))
    cache.step += 1
    table = cache.open(tokens)
    for token in range(200, 250):
        assert cache.grow(table, len(tokens))
        cache.publish(table, tokens, len(tokens), written=True)
        tokens.append(token)  # the last one is sampled but never computed
    cache.close(table)
    assert serve(cache, [*tokens, *range(50)]) == 149 // 16 * 16


def test_a_page_is_found_only_behind_the_tokens_it_was_computed_behind():
    """C12: the key covers only the page's own tokens, not what precedes them (LMCache#443)."""
    cache = PrefixCache(40, 16)
    a, b, x = [[letter] * 16 for letter in (1, 2, 3)]
    serve(cache, a + x + [9])
    assert serve(cache, b + x + [9]) == 0
    assert serve(cache, x + [9]) == 0
    assert serve(cache, a[:8] + x + [9]) == 8, "the head of A, and X at another offset is not X"
    assert serve(cache, a + x + [9], namespace="other") == 0
    assert serve(cache, a + x + [8]) == 32


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("page", [0, 2])
@pytest.mark.parametrize("differs_at", [0, 3, 15])
def test_prompts_that_differ_inside_a_page_live_side_by_side(differs_at, page, turned):
    """C13: children must be told apart by the whole page, and what is shorter than a page is no key (sglang#10637)."""
    cache = PrefixCache(40, 16)
    first, second = list(range(64)), list(range(64))
    second[page * 16 + differs_at] = 99
    if turned:
        first, second = second, first
    assert serve(cache, first) == 0
    assert serve(cache, second) == page * 16 + differs_at
    assert serve(cache, first) == serve(cache, second) == 63
    assert len(list(cache.trie)) == 8 - page, "pages before the difference are one, those after it two"


@pytest.mark.parametrize("length", range(1, 17))
def test_what_is_shorter_than_a_page_is_not_kept(length):
    """C13: truncating to whole pages leaves an empty key that is matched or inserted (sglang#10637)."""
    cache = PrefixCache(40, 16)
    assert serve(cache, range(length)) == 0
    assert serve(cache, range(length)) == (15 if length == 16 else 0)
    assert len(list(cache.trie)) == length // 16


def test_an_evicted_page_is_not_found():
    """C14: eviction forgets to drop the key, and a later lookup finds another's tokens (vllm#4761, kvcached#362)."""
    rng = random.Random(0)
    for _ in range(50):
        cache = PrefixCache(12, 4)
        prompts = [[letter] * 20 for letter in range(3)]
        for prompt in (*prompts, *rng.choices(prompts, k=5)):
            known = {path for path in map(path_of, cache.trie)}
            pages = 0
            while tuple(prompt[: 4 * (pages + 1)]) in known and 4 * (pages + 1) < len(prompt):
                pages += 1
            assert 4 * pages <= serve(cache, prompt) <= 4 * pages + 3


def path_of(node: Node) -> tuple[int, ...]:
    return () if node.parent is None else (*path_of(node.parent), *array("i", node.key))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_idle_read_and_free_pages_add_up(size):
    """C15: evictable pages are counted twice or go below zero; later the scheduler admits too much (sglang#35270)."""
    rng, cache = random.Random(size), PrefixCache(64, size)
    tables, stems = [], [[i] * rng.randint(1, 3 * size) for i in range(20)]
    for _ in range(500):
        stem = rng.choice(stems)
        tokens = array("i", stem[: rng.randint(0, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(1, 2 * size))])
        cache.step += 1
        table = cache.open(tokens)
        if cache.grow(table, len(tokens)):
            cache.publish(table, tokens, len(tokens), written=False)
            tables.append(table)
        else:
            cache.close(table)
        while len(tables) > rng.randint(0, 12):
            cache.close(tables.pop(rng.randrange(len(tables))))
        cache.check()
        held = {page for table in tables for page in table.pages}
        assert len(cache.pool) + cache.num_idle + len(held) == 64
    for table in tables:
        cache.close(table)
    cache.check()
    assert len(cache.pool) + cache.num_idle == 64


@pytest.mark.parametrize("new", [1, 2, 3, 4])
def test_pages_that_are_found_are_not_counted_as_room(new):
    """C16: idle pages that a request takes over count as free for its new tokens too (Megatron-LM#5822, vllm#11310)."""
    cache = PrefixCache(10, 4)
    found = list(range(24))
    serve(cache, found)
    cache.close(held := fill(cache, [77] * 8)[1]) if new < 3 else None
    blocker = held if new < 3 else fill(cache, [88] * 8, publishes=False)[1]
    tokens = array("i", [*found, *range(100, 100 + 4 * new)])
    cache.step += 1
    table = cache.open(tokens)
    assert table.cached_len == 24
    room = 4 if new < 3 else 2  # pages that are free, or idle and not found
    before = list(table.pages), len(cache.pool), cache.num_evicted
    assert cache.grow(table, len(tokens)) == (new <= room)
    if new > room:
        assert (list(table.pages), len(cache.pool), cache.num_evicted) == before, "nothing changed"
    assert blocker.pages
    cache.check()


def test_taking_over_an_idle_page_keeps_its_key():
    """C17: the first hit works and nobody hits again, because taking a page over resets it (ROCm/ATOM#902)."""
    cache, prompt = PrefixCache(40, 16), list(range(64))
    serve(cache, [*prompt, 1])
    assert [serve(cache, [*prompt, end]) for end in (2, 3, 4)] == [64] * 3
    tables = [fill(cache, [*prompt, end]) for end in (5, 6, 7)]
    assert [cached for cached, _ in tables] == [64] * 3


def test_a_hit_falls_by_exactly_what_was_evicted():
    """C18: of a chain freed at one time the first page goes, and the rest can never be found (llm-d-inference-sim#704)."""
    for evicted in range(4):
        cache = PrefixCache(3, 4)
        serve(cache, range(12))
        if evicted:
            cache.close(fill(cache, [99] * (4 * evicted), reads=False, publishes=False)[1])
        cache.step += 1
        table = cache.open(array("i", [*range(12), 50]))
        assert table.cached_len == 12 - 4 * evicted


def test_evicted_pages_are_always_leaves():
    """C18: whatever branches, evicting any number of pages leaves every page's parent in its place (LMCache#443)."""
    rng = random.Random(4)
    for _ in range(50):
        cache = PrefixCache(40, 2)
        while cache.num_evicted == 0:
            serve(cache, [rng.randrange(2) for _ in range(rng.randint(2, 12))] + [rng.randrange(100)] * 4)
        before = set(map(path_of, cache.trie))
        _, table = fill(cache, [200] * rng.randint(1, 30), reads=False, publishes=False)
        after = set(map(path_of, cache.trie))
        assert after < before or after == before
        assert all(path[:-2] in after or len(path) == 2 for path in after)
        cache.close(table)
        cache.check()


def test_victims_are_the_least_recently_used_leaves_of_many():
    """C19: the order is not refreshed by a hit (vllm#5411). 1,000 pages, half of them used again, against a sorted list."""
    rng, cache = random.Random(2), PrefixCache(1000, 1)
    last_use = {}
    for i in range(500):
        serve(cache, [i, i + 1000])
        last_use[i] = i
    for time, i in enumerate(rng.sample(range(500), 250), 1000):
        assert serve(cache, [i, i + 1000, 0], publishes=False) == 2
        last_use[i] = time
    gone = []
    for count in range(1, 200):
        _, table = fill(cache, [5000] * count, reads=False, publishes=False)
        left = {path[0] for path in map(path_of, cache.trie)}
        gone += sorted(set(last_use) - left - set(gone), key=last_use.__getitem__)
        cache.close(table)
    assert gone == sorted(last_use, key=last_use.__getitem__)[: len(gone)]
    assert len(gone) > 50


def test_evicting_looks_at_each_page_about_once(monkeypatch):
    """C19: each eviction looks through all pages (vllm#7193, vllm#7209). Here what the queue ranks is counted."""
    cache = PrefixCache(20_000, 1)
    for i in range(20_000):
        table = cache.open(array("i", [i, 0]))
        assert cache.grow(table, 1)
        cache.publish(table, array("i", [i, 0]), 1, written=False)
        cache.close(table)
    for i in random.Random(0).sample(range(20_000), 10_000):
        cache.close(cache.open(array("i", [i, 0])))
    ranked = 0

    def counting(node):
        nonlocal ranked
        ranked += 1
        return lru(node)

    monkeypatch.setattr(cache.queue, "policy", counting)
    table = cache.open(array("i", [0]), reads=False)
    assert cache.grow(table, 2000)
    assert cache.num_evicted == 2000
    assert ranked < 20_000, "stale entries are passed over once"


def test_endless_touching_does_not_grow_the_queue():
    """C19: a heap that is cleaned lazily grows with every touch (vllm#7209)."""
    queue, nodes = EvictionQueue(lru), [Node(b"", i, Node(b"", 0, None, 0), 0) for i in range(1000)]
    for time in range(100_000):
        node = nodes[time * 7 % 1000]
        node.last_use = time
        queue.push(node)
        assert len(queue.heap) <= 2001
    order = []
    while node := queue.pop():
        order.append(node.last_use)
        node.parent = None
    assert order == sorted(order)
    assert len(order) == 1000


@pytest.mark.parametrize("publishes", [True, False])
def test_nothing_is_lost_or_returned_twice(publishes):
    """C20: two code paths free a slot, or an unaligned tail page is never freed (sglang-jax#70, sglang#4977)."""
    rng, cache = random.Random(6), PrefixCache(50, 16)
    for _ in range(300):
        tokens = array("i", [rng.randrange(2) for _ in range(rng.randint(1, 100))])
        cache.step += 1
        table = cache.open(tokens, reads=publishes, publishes=publishes)
        for _ in range(rng.randint(1, 60)):
            assert cache.grow(table, len(tokens))
            cache.publish(table, tokens, len(tokens) - 1, written=True)
            tokens.append(rng.randrange(2))
        cache.close(table)
        cache.check()
        assert len(cache.pool) + cache.num_idle == 50
    if not publishes:
        assert len(cache.pool) == 50


def test_what_was_found_is_what_the_table_holds():
    """C22: hits counted at one time, pages taken at another (vllm#17305). Here both happen in `open`."""
    cache = PrefixCache(4, 4)
    serve(cache, range(16))
    _, other = fill(cache, [50] * 8, publishes=False)  # evicts half of what a request that waits has counted on
    cache.step += 1
    table = cache.open(array("i", range(16)))
    assert table.cached_len == 8
    assert len(table.nodes) == 2
    cache.close(other)
    cache.close(table)
    cache.check()


def test_the_longest_head_is_found_among_thousands_of_siblings():
    rng, size = random.Random(8), 8
    cache = PrefixCache(4001, size)
    pages = {tuple(rng.choices(range(-1, 4), k=size)) for _ in range(4000)}
    for page in pages:
        serve(cache, page, reads=False)
    for _ in range(200):
        wanted = rng.choices(range(-1, 5), k=rng.randint(1, 12))
        visible = wanted[:-1][:size]
        expected = max(common(visible, page) for page in pages)
        cache.step += 1
        table = cache.open(array("i", wanted))
        assert table.cached_len == expected
        cache.close(table)


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_common_len_counts_whole_tokens():
    rng = random.Random(9)
    for _ in range(500):
        a, b = ([rng.choice([0, 1, 256, 65536, 2**31 - 1, -1]) for _ in range(rng.randint(0, 9))] for _ in range(2))
        b[: rng.randint(0, 9)] = a[: rng.randint(0, 9)]
        assert common_len(array("i", a).tobytes(), array("i", b).tobytes()) == common(a, b)


def test_a_head_is_copied_only_from_a_page_that_an_earlier_step_filled():
    cache, tokens = PrefixCache(20, 4), array("i", range(8))
    cache.step += 1
    first = cache.open(tokens)
    assert cache.grow(first, 8)
    cache.publish(first, tokens, 8, written=False)
    same_step = cache.open(array("i", [0, 1, 2, 3, 4, 5, 9, 9]))
    assert same_step.cached_len == 4, "the full page is read in the step that fills it, but not copied in it"
    assert same_step.copy is None
    cache.step += 1
    later = cache.open(array("i", [0, 1, 2, 3, 4, 5, 9, 9]))
    assert later.cached_len == 6
    assert later.copy == (first.pages[1], later.pages[1])


def test_a_claimed_page_is_waited_for_and_an_unclaimed_one_is_not():
    cache, tokens = PrefixCache(20, 4), array("i", range(12))
    leader = cache.open(tokens)
    assert cache.grow(leader, 12)
    claim = cache.next_page(leader, tokens)
    assert cache.open(tokens, claimed={claim}) is None
    assert not (cache.tables - {leader}), "who waits holds nothing"
    assert cache.open(array("i", [0, 1, 2, 9, 4]), claimed={claim}) is not None
    assert cache.open(tokens, reads=False, claimed={claim}) is not None
    cache.publish(leader, tokens, 12, written=False)
    assert cache.next_page(leader, tokens) is None
    cache.check()


def test_an_unread_namespace_is_forgotten():
    """A salt for each user must not fill the memory with empty roots."""
    cache = PrefixCache(4, 4)
    for user in range(100):
        serve(cache, range(10), namespace=str(user))
    assert len(cache.trie.roots) <= 4
    assert serve(cache, range(10), namespace="99") == 8
    held = cache.open(array("i", range(3)), "new")
    assert "new" in cache.trie.roots, "an open table may publish into it"
    cache.close(held)
    assert "new" not in cache.trie.roots


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_pool_without_pages_is_refused(num_pages):
    with pytest.raises(ValueError, match=f"num_pages={num_pages}"):
        PagePool(num_pages)


def test_a_page_size_below_one_is_refused():
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        PrefixCache(4, 0)


def test_the_scratch_page_is_never_handed_out():
    pool = PagePool(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="want 1 pages, 0 of 5 free"):
        pool.take(1)
