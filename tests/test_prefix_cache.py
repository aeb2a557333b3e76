"""What the prefix cache finds, keeps, evicts and gives back, one request after the other."""

import random
from array import array

import pytest

from prefix_jax.eviction import EvictionQueue, lru
from prefix_jax.page_pool import PagePool
from prefix_jax.prefix_cache import PageTable, PrefixCache
from prefix_jax.prefix_trie import Node, common_len

# --------------------------------------------------------------------------------


def fill(cache: PrefixCache, tokens, namespace=None, check=True, **options) -> tuple[int, PageTable]:
    """Opens, computes and publishes; what was found, and the table."""
    tokens = array("i", tokens)
    cache.step += 1
    table = cache.open(tokens, namespace, **options)
    assert cache.grow(table, len(tokens)), "no pages"
    cache.publish(table, tokens, len(tokens), written=False)
    if check:
        cache.check()
    return table.cached_len, table


def serve(cache: PrefixCache, tokens, namespace=None, **options) -> int:
    """A whole request; returns what it found."""
    cached, table = fill(cache, tokens, namespace, **options)
    cache.close(table)
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
    assert serve(cache, [*x, 9]) == 0
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
            known = set(map(path_of, cache.trie))
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
        tokens = array(
            "i", stem[: rng.randint(0, len(stem))] + [rng.randrange(3) for _ in range(rng.randint(1, 2 * size))]
        )
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
    """C18: of a chain freed at one time the first page goes, and the rest can never be found
    (llm-d-inference-sim#704)."""
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
    """C19: the order is not refreshed by a hit (vllm#5411). 1,000 pages, half of them used again, against a sorted
    list."""
    rng, cache = random.Random(2), PrefixCache(1001, 1)
    last_use = {}
    for i in range(500):
        serve(cache, [i, i + 1000], check=False)
        last_use[i] = i
    for time, i in enumerate(rng.sample(range(500), 250), 1000):
        assert serve(cache, [i, i + 1000, 0], check=False, publishes=False) == 2
        last_use[i] = time
    gone = []
    for count in range(1, 200):
        _, table = fill(cache, [5000] * count, check=False, reads=False, publishes=False)
        left = {path[0] for path in map(path_of, cache.trie)}
        gone += sorted(set(last_use) - left - set(gone), key=last_use.__getitem__)
        cache.close(table)
    assert gone == sorted(last_use, key=last_use.__getitem__)[: len(gone)]
    assert len(gone) > 50


def test_evicting_looks_at_each_page_about_once(monkeypatch):
    """C19: each eviction looks through all pages (vllm#7193, vllm#7209). Here what the queue ranks is counted."""
    cache = PrefixCache(20_000, 1)
    for i in range(400):
        serve(cache, [i, *range(49)], check=False)
    for i in random.Random(0).sample(range(400), 200):
        cache.close(cache.open(array("i", [i, *range(50)])))
    assert cache.num_idle == 20_000
    ranked = 0

    def counting(node):
        nonlocal ranked
        ranked += 1
        return lru(node)

    monkeypatch.setattr(cache.queue, "policy", counting)
    table = cache.open(array("i", [0]), reads=False)
    assert cache.grow(table, 2000)
    assert cache.num_evicted == 2000
    assert ranked < 3 * 2000 + 400, "each victim and each stale entry a few times, not all pages each time"


def some_pages(cache: PrefixCache, first: int, num_pages: int, namespace=None, *, held: bool = False) -> array:
    """The tokens, from `first` on, of full pages that were computed, and are still read or not."""
    tokens = array("i", range(first, first + num_pages * cache.page_size))
    (fill if held else serve)(cache, tokens, namespace)
    return tokens


def kept(cache: PrefixCache, tokens, namespace=None) -> int:
    return len(cache.find(tokens, namespace))


def test_what_a_salt_has_beyond_its_quota_goes_by_the_policy():
    cache = PrefixCache(20, 4, salt_quota=4)
    old, new = some_pages(cache, 0, 4, "A"), some_pages(cache, 100, 4, "A")
    theirs = some_pages(cache, 200, 3, "B")
    some_pages(cache, 300, 11)
    assert [kept(cache, old, "A"), kept(cache, new, "A"), kept(cache, theirs, "B")] == [2, 4, 3]


def test_a_salt_beyond_its_quota_costs_no_other_a_page():
    """Its pages were unread before it grew, and what made it grow is still being read."""
    cache = PrefixCache(16, 4, salt_quota=4)
    theirs, old = some_pages(cache, 200, 3, "B"), some_pages(cache, 0, 4, "A")
    some_pages(cache, 100, 4, "A", held=True)
    some_pages(cache, 300, 7)
    assert [kept(cache, theirs, "B"), kept(cache, old, "A")] == [3, 2]


def test_what_was_within_a_floor_is_not_when_the_salt_has_grown():
    cache = PrefixCache(16, 4, salt_floor=2)
    old = some_pages(cache, 0, 2, "A")
    some_pages(cache, 100, 4, "A", held=True)
    theirs = some_pages(cache, 200, 3)
    some_pages(cache, 300, 8)
    assert [kept(cache, old, "A"), kept(cache, theirs)] == [1, 3]


def test_endless_touching_does_not_grow_the_queue_of_a_salt():
    cache = PrefixCache(8, 4, salt_quota=4)
    for _ in range(500):
        serve(cache, range(9), "A")
        (root,) = cache.trie.roots.values()
        assert len(root.leaves) <= 64 + 2 * 8


def test_endless_touching_does_not_grow_the_queue():
    """C19: a heap that is cleaned lazily grows with every touch (vllm#7209)."""
    queue, nodes = EvictionQueue(lru), [Node(b"", i, Node(b"", 0, None, 0), 0) for i in range(1000)]
    for time in range(50_000):
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
        serve(cache, page, check=False, reads=False)
    cache.check()
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


def test_of_two_that_fill_the_same_page_the_later_one_takes_the_first_ones():
    """But only once its own step has been dispatched: before, it would write into a published page."""
    cache, tokens = PrefixCache(20, 4), array("i", range(12))
    first, second = cache.open(tokens), cache.open(tokens)
    assert cache.grow(first, 12)
    assert cache.grow(second, 12)
    cache.step += 1
    assert cache.publish(first, tokens, 6, written=False) == 1
    assert cache.adopt(second, tokens, 2) == 2, "in the middle of a page it goes on with its own"
    own = list(second.pages)
    assert cache.publish(second, tokens, 10, written=False) == 0
    assert cache.adopt(second, tokens, 10) == 10
    assert second.pages == own
    assert cache.publish(second, tokens, 10, written=True) == 1, "the second page, which the first has not filled yet"
    assert second.pages == [first.pages[0], *own[1:]]
    assert own[0] in cache.pool.free
    assert cache.adopt(first, tokens, 6) == 6
    assert cache.publish(first, tokens, 10, written=True) == 0
    assert first.pages[:2] == second.pages[:2]
    cache.check()


def test_pages_published_since_are_adopted_all_but_the_one_with_the_last_token():
    cache, tokens = PrefixCache(20, 4), array("i", range(12))
    late = cache.open(tokens)
    assert cache.grow(late, 12)
    cache.close(fill(cache, tokens)[1])
    free = len(cache.pool)
    assert cache.adopt(late, tokens, 0) == 8, "something is left to compute, or there is nothing to sample from"
    assert len(cache.pool) == free + 2
    assert late.changed[-2:] == [0, 1]
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


def test_no_lookup_trusts_a_hash():
    """A collision serves another prompt's keys and values: vllm#12621, vllm#15297 (C11). Pages are compared by their
    tokens and have no hash; namespaces have one, and here all of them the same."""

    class Salt(str):
        __hash__ = lambda self: 7  # noqa: E731

    cache = PrefixCache(100, 4)
    rng = random.Random(11)
    prompts = [(Salt(name), array("i", rng.choices(range(3), k=17))) for name in "abcde"]
    for salt, tokens in prompts:
        cache.step += 1
        table = cache.open(tokens, salt)
        assert table.cached_len == 0, "nothing of another namespace"
        assert cache.grow(table, 17)
        cache.publish(table, tokens, 17, written=False)
        cache.close(table)
    for salt, tokens in prompts:
        cache.step += 1
        table = cache.open(tokens, salt)
        assert table.cached_len == 16
        cache.close(table)
    cache.check()
