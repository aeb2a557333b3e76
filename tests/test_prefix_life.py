"""Declared prefixes as a state machine: every order of adding, pinning, expiring and deleting, while sequences with and
without salts read, write and are aborted."""

import time
from array import array
from unittest import mock

from fake_device import FakeEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from prefix_jax.prefix_pool import PinBudgetError, Prefix

STEM = [i % 3 for i in range(0, 60, 2)]
SALTS = st.sampled_from([None, "a"])
MODES = st.sampled_from(["readwrite", "readwrite", "read", "write", "off"])


class PrefixLife(RuleBasedStateMachine):
    handles = Bundle("handles")

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.clock = mock.patch.object(time, "monotonic", side_effect=lambda: self.now)
        self.clock.start()
        self.engine = FakeEngine(14, 2, num_seqs=3, budget=8, max_len=26, vocab_size=3, max_pinned=6)
        self.pool = self.engine.prefixes
        self.live: dict[Prefix, float | None] = {}  # until when
        self.num_names = 0

    def teardown(self):
        self.engine.run(2000)
        self.engine.check_outputs()
        self.pool.clear()
        assert self.engine.cache.num_pinned == 0
        self.engine.cache.clear()
        assert len(self.engine.cache.pool) == 14, "at rest no page is held"
        self.clock.stop()

    @rule(cut=st.integers(1, 24), tail=st.integers(0, 3), salt=SALTS, mode=MODES, marked=st.integers(0, 12))
    def ask(self, cut, tail, salt, mode, marked):
        prompt = STEM[:cut] + [2] * tail
        if len(prompt) <= 25:
            self.engine.add(prompt, 3, prefix_pos=min(marked, len(prompt)), salt=salt, cache_mode=mode)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(self.engine.scheduler.running)))

    @rule(target=handles, cut=st.integers(1, 16), salt=SALTS, pin=st.booleans(), ttl=st.sampled_from([None, None, 5]))
    def add(self, cut, salt, pin, ttl):
        self.num_names += 1
        try:
            prefix = self.pool.add(STEM[:cut], name=f"p{self.num_names}", salt=salt, ttl=ttl, pin=pin)
        except PinBudgetError:
            return self.pool.add(STEM[:1], name=f"p{self.num_names}", pin=False)
        self.live[prefix] = None if ttl is None else self.now + ttl
        return prefix

    @rule(target=handles, above=handles, more=st.integers(1, 4))
    def add_below(self, above, more):
        if not self.is_live(above):
            return above
        prefix = self.pool.add(STEM[len(above.tokens) :][:more] or [1], parent=above, pin=False)
        assert prefix.salt == above.salt and prefix.tokens[: len(above.tokens)] == above.tokens
        self.live[prefix] = None
        return prefix

    @rule(prefix=handles)
    def pin(self, prefix):
        if self.is_live(prefix):
            try:
                prefix.pin()
            except PinBudgetError:
                assert not prefix.is_pinned

    @rule(prefix=handles)
    def unpin(self, prefix):
        prefix.unpin()
        assert not prefix.nodes

    @rule(prefix=handles)
    def refresh(self, prefix):
        if self.is_live(prefix):
            prefix.refresh(7)
            self.live[prefix] = self.now + 7

    @rule(prefix=consumes(handles))
    def delete(self, prefix):
        readers = [node.readers for node in prefix.nodes]
        nodes = list(prefix.nodes)
        prefix.delete()
        prefix.delete()
        assert prefix.is_deleted and not prefix.nodes
        assert [node.readers for node in nodes] == readers, "who reads it goes on reading"
        self.live.pop(prefix, None)

    @rule(seconds=st.sampled_from([1, 3, 10]))
    def wait(self, seconds):
        self.now += seconds
        self.engine.step()
        for prefix in [p for p, until in self.live.items() if until is not None and until <= self.now]:
            assert prefix.is_deleted and prefix not in list(self.pool)
            del self.live[prefix]

    @rule()
    def forget_everything(self):
        self.pool.clear()
        self.engine.cache.clear()
        self.live.clear()

    @invariant()
    def everything_adds_up(self):
        cache, pool = self.engine.cache, self.pool
        cache.check()
        assert cache.num_pinned <= pool.max_pinned
        held = [prefix for prefix in pool.added if prefix.is_pinned]
        assert len({(p.salt, p.tokens[: (i + 1) * 2].tobytes()) for p in held for i in range(p.num_pages)}) <= 6
        pins: dict[int, int] = {}
        for prefix in [*pool.added, *pool.prefixes.values()]:
            for i, node in enumerate(prefix.nodes):
                if node.parent is not None:
                    pins[id(node)] = pins.get(id(node), 0) + 1
                    assert node.key == prefix.tokens[i * 2 : i * 2 + 2].tobytes()
            assert prefix.is_pinned or not prefix.nodes
        assert all(node.pins == pins.get(id(node), 0) for node in cache.trie)
        for prefix in self.live:
            found = cache.find(prefix.tokens, prefix.salt)
            stats = prefix.stats() if not prefix.is_deleted else None
            if stats:
                assert stats.pinned + stats.published == len(found) and stats.missing == prefix.num_pages - len(found)
                assert stats.hits <= stats.uses and stats.tokens_saved <= stats.hits * prefix.num_tokens
        assert sorted(map(id, pool.find(array("i", STEM)))) == sorted(
            id(p)
            for p in pool.added
            if p.salt is None and p.num_pages and array("i", STEM)[: len(p.tokens)] == p.tokens
        )

    def is_live(self, prefix) -> bool:
        self.pool.drop_expired()
        return not prefix.is_deleted


PrefixLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_prefix_life = PrefixLife.TestCase
