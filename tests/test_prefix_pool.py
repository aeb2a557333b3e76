"""Declared prefixes: what `prefix_pos` keeps, for how long, and that it never stands in anybody's way."""

import logging
import random
from array import array

import pytest
from fake_device import FakeEngine

from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool


def tokens(start: int, length: int) -> array:
    return array("i", range(start, start + length))


def pinned_pages(engine: FakeEngine) -> int:
    assert engine.cache.num_pinned == sum(node.pins > 0 for node in engine.cache.trie)
    return engine.cache.num_pinned


def serve(engine: FakeEngine, prompt, prefix_pos=0, max_tokens=1, salt=None):
    sequence = engine.add(prompt, max_tokens, prefix_pos=prefix_pos, salt=salt)
    engine.run(200)
    engine.check_outputs()
    return sequence


@pytest.mark.parametrize(("prefix_pos", "pages"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_only_full_pages_are_pinned(prefix_pos, pages):
    engine = FakeEngine(20, 4)
    serve(engine, range(11), prefix_pos)
    assert pinned_pages(engine) == pages


def test_a_declaration_does_not_limit_what_others_find():
    engine = FakeEngine(20, 4)
    serve(engine, range(17), prefix_pos=4)
    assert serve(engine, range(17)).num_cached_tokens == 16
    assert serve(engine, [*range(6), 99, 98], prefix_pos=8).num_cached_tokens == 6


def test_pinned_pages_stay_while_others_come_and_go():
    engine = FakeEngine(10, 4, max_pinned=5)
    prefix = list(range(8))
    serve(engine, [*prefix, 50], prefix_pos=8)
    for i in range(20):
        serve(engine, [100 + i] * 24)
    assert engine.cache.num_evicted > 50
    assert pinned_pages(engine) == 2
    assert serve(engine, [*prefix, 60]).num_cached_tokens == 8


def test_over_budget_the_least_recently_used_declaration_lapses():
    engine = FakeEngine(20, 4, max_pinned=4)
    a, b, c = ([letter] * 9 for letter in (1, 2, 3))
    serve(engine, a, prefix_pos=8)
    serve(engine, b, prefix_pos=8)
    serve(engine, a, prefix_pos=8)
    serve(engine, c, prefix_pos=8)
    assert {node.key for node in engine.cache.trie if node.pins} == {array("i", [x] * 4).tobytes() for x in (1, 3)}
    assert pinned_pages(engine) == 4
    assert not engine.prefixes.delete(array("i", b[:8])), "it lapsed"
    assert engine.prefixes.delete(array("i", a[:8]))


def test_a_declaration_longer_than_the_budget_is_pinned_as_far_as_it_goes():
    engine = FakeEngine(20, 4, max_pinned=2)
    serve(engine, range(30), prefix_pos=30)
    assert pinned_pages(engine) == 2
    assert serve(engine, range(30)).num_cached_tokens == 28 + 0


def test_without_a_budget_a_declaration_pins_nothing_and_fails_nothing():
    engine = FakeEngine(20, 4, max_pinned=0)
    serve(engine, range(30), prefix_pos=30)
    assert pinned_pages(engine) == 0


def test_without_caching_a_declaration_is_ignored():
    engine = FakeEngine(20, 4, caching=False)
    serve(engine, range(30), prefix_pos=30)
    assert pinned_pages(engine) == 0
    assert not engine.prefixes.prefixes


def test_shared_pages_stay_pinned_until_the_last_declaration_goes():
    engine = FakeEngine(20, 4)
    serve(engine, [*range(8), 50], prefix_pos=8)
    serve(engine, [*range(13), 60], prefix_pos=12)
    assert pinned_pages(engine) == 3
    assert engine.prefixes.delete(tokens(0, 8))
    assert pinned_pages(engine) == 3
    assert engine.prefixes.delete(tokens(0, 12))
    assert pinned_pages(engine) == 0
    assert not engine.prefixes.delete(tokens(0, 12)), "it is gone already"
    engine.cache.check()


def test_namespaces_have_their_own_declarations():
    engine = FakeEngine(20, 4)
    serve(engine, range(9), prefix_pos=8, salt="a")
    assert not engine.prefixes.delete(tokens(0, 8))
    assert engine.prefixes.delete(tokens(0, 8), "a")


def test_deleting_while_read_takes_effect_when_the_last_reader_closes():
    engine = FakeEngine(12, 4)
    reader = engine.add(range(9), 20, prefix_pos=8)
    for _ in range(4):
        engine.step()
    assert pinned_pages(engine) == 2
    assert engine.prefixes.delete(tokens(0, 8))
    assert pinned_pages(engine) == 0
    engine.step()
    assert pinned_pages(engine) == 0, "who still reads it does not pin it again"
    assert reader.table.nodes[0].readers == 1
    engine.run(100)
    engine.check_outputs()
    serve(engine, [77] * 45)
    assert serve(engine, range(9)).num_cached_tokens == 0, "an ordinary page, evicted like any other"


def test_it_is_pinned_while_the_prompt_is_still_being_computed():
    engine = FakeEngine(20, 4, budget=5)
    engine.add(range(16), 1, prefix_pos=16)
    for pages in (1, 2, 3, 4):
        engine.step()
        assert pinned_pages(engine) == pages
    engine.run(10)


def test_pinned_pages_go_only_when_nothing_else_lets_the_only_sequence_go_on(caplog):
    """Progress comes before pins: the oldest unread ones go, leaves first, and a warning says so."""
    engine = FakeEngine(10, 4, max_pinned=10, max_len=41)
    old, new = [1] * 13, [2] * 9
    serve(engine, old, prefix_pos=12)
    serve(engine, new, prefix_pos=8)
    assert pinned_pages(engine) == 5
    with caplog.at_level(logging.WARNING):
        serve(engine, [3] * 10, max_tokens=10)
    assert (pinned_pages(engine), engine.cache.num_pinned_evicted, caplog.records) == (5, 0, [])
    with caplog.at_level(logging.WARNING):
        serve(engine, [4] * 20, max_tokens=8)
    assert engine.cache.num_pinned_evicted == 2, "27 positions take seven pages, and five of ten were pinned"
    assert "evicted 1 pages of declared prefixes" in caplog.text
    assert serve(engine, old).num_cached_tokens == 4
    assert serve(engine, new).num_cached_tokens == 8


def test_a_prompt_that_pins_leave_no_room_for_is_admitted_when_it_is_alone(caplog):
    engine = FakeEngine(8, 4, max_pinned=8)
    for letter in (1, 2, 3):
        serve(engine, [letter] * 9, prefix_pos=8)
    waiting = engine.add([9] * 30, 1)
    with caplog.at_level(logging.WARNING):
        engine.run(20)
    assert waiting.finish_reason == "length"
    assert len(waiting.output_token_ids) == 1
    assert engine.cache.num_pinned_evicted == 6
    engine.check_outputs()


def test_an_evicted_declaration_is_pinned_anew_by_its_next_request():
    engine = FakeEngine(8, 4, max_pinned=8)
    serve(engine, range(9), prefix_pos=8)
    serve(engine, [9] * 31)
    assert pinned_pages(engine) == 0
    serve(engine, range(9), prefix_pos=8)
    assert pinned_pages(engine) == 2
    assert engine.prefixes.delete(tokens(0, 8))
    assert pinned_pages(engine) == 0


def test_declarations_that_nobody_repeats_do_not_pile_up():
    pool = PrefixPool(PrefixCache(10, 4), 5)
    for i in range(1000):
        pool.declare(array("i", [i]))
    assert len(pool.prefixes) == 5
    assert pool.declare(array("i", [996])) is pool.declare(array("i", [996]))
    pool.declare(array("i", [5000]))
    assert not pool.delete(array("i", [995])), "the least recently used"
    assert pool.delete(array("i", [996]))


def test_random_declarations_never_fail_and_stay_within_the_budget():
    rng = random.Random(7)
    for max_pinned in (0, 1, 3, 8, 30):
        engine = FakeEngine(16, 2, num_seqs=4, budget=16, max_len=28, max_pinned=max_pinned)
        stem = [rng.randrange(3) for _ in range(20)]
        for _ in range(40):
            prompt = stem[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
            engine.add(prompt, rng.randint(1, 5), prefix_pos=rng.randint(0, len(prompt)))

        def delete_some(engine):
            assert pinned_pages(engine) <= engine.prefixes.max_pinned
            if rng.random() < 0.1 and engine.prefixes.prefixes:
                namespace, declared = rng.choice(list(engine.prefixes.prefixes))
                assert engine.prefixes.delete(array("i", declared), namespace)

        engine.run(3000, delete_some)
        engine.check_outputs()
        for namespace, declared in list(engine.prefixes.prefixes):
            engine.prefixes.delete(array("i", declared), namespace)
        assert pinned_pages(engine) == 0
        engine.cache.check()
