"""The scheduler, the prefix cache and the step batches together, over a fake device: cleverness never changes a
token."""

import random

import pytest
from fake_device import FakeEngine
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefix_jax import eviction, policies

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a workload is a seed: nothing to shrink


def shared_prompts(rng: random.Random, count: int, longest: int, alphabet: int = 3) -> list[list[int]]:
    """Prompts that branch off one another: equal ones, extended ones, ones that differ inside a page."""
    prompts = [[rng.randrange(alphabet) for _ in range(rng.randint(1, longest))]]
    while len(prompts) < count:
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.7 else list(stem)
        tail = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest - len(stem)))]
        prompts.append(stem + tail or [0])
    return prompts


def tokens_needed(engine: FakeEngine) -> int:
    """Positions that all sequences have to compute if nothing is shared and nothing recomputed."""
    return sum(len(sequence.tokens) for sequence in engine.sequences)


@st.composite
def workloads(draw):
    page_size = draw(st.sampled_from([1, 2, 4]))
    max_len = draw(st.sampled_from([8, 17, 40]))
    budget = draw(st.sampled_from([1, 2, 7, 16, 64, 300]))
    return {
        "engine": {
            "num_pages": draw(st.integers(-(-max_len // page_size), 3 * max_len // page_size)),
            "page_size": page_size,
            "budget": budget,
            "num_seqs": min(budget, draw(st.sampled_from([1, 2, 3, 8]))),
            "max_len": max_len,
            "caching": draw(st.sampled_from([True, True, False])),
            "vocab_size": draw(st.sampled_from([2, 3, 5])),
            "max_pinned": draw(st.sampled_from([None, 0, 1, 1000])),
            "policy": draw(st.sampled_from(policies.POLICIES)),
            "eviction": draw(st.sampled_from(eviction.POLICIES)),
        },
        "batch": draw(st.integers(0, 12)),
        "count": draw(st.integers(1, 12)),
        "stops": draw(st.sampled_from([(), (0,)])),
        "preempt_every": draw(st.sampled_from([0, 0, 2, 3])),
        "abort_rate": draw(st.sampled_from([0.0, 0.0, 0.05])),
        "seed": draw(st.integers(0, 2**32)),
    }


@given(workloads())
@settings(max_examples=120, deadline=None, phases=PHASES)
def test_every_sequence_says_what_it_says_alone(workload):
    rng = random.Random(workload["seed"])
    engine = FakeEngine(**workload["engine"])
    engine.add_batch(shared_prompts(rng, workload["batch"], engine.max_len - 1) if workload["batch"] else [], 3)
    for prompt in shared_prompts(rng, workload["count"], engine.max_len - 1):
        salt = rng.choice([None, None, "a"])
        prefix_pos = rng.randint(0, len(prompt)) if rng.random() < 0.3 else 0
        engine.add(prompt, rng.choice([1, 3, None]), stops=workload["stops"], prefix_pos=prefix_pos, salt=salt)

    needed = sum(sequence.request.max_len for sequence in engine.sequences)

    def disturb(engine):
        running = engine.scheduler.running
        if len(engine.plans) > 5 * needed:
            return  # who is thrown out in every step never gets on
        if workload["preempt_every"] and rng.randrange(workload["preempt_every"]) == 0 and running:
            engine.scheduler.preempt(rng.choice(running))
        if rng.random() < workload["abort_rate"]:
            engine.abort(rng.choice(engine.sequences))

    engine.run(50 + 10 * needed, disturb)
    engine.check_outputs()


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_siblings_of_one_step_read_pages_that_are_written_in_it(count, page_size):
    """C05: a sibling attends to a page that was registered when scheduled but not written yet (vllm#42359). Here writes
    come before reads inside a step, so all of them are right in the first step, and the 64 tokens are computed once."""
    engine = FakeEngine(1000, page_size, budget=2000, num_seqs=64, max_len=80)
    for i in range(count):
        engine.add([1] * 64 + [2 + i, 0, i % 3], 4)
    plan = engine.step()
    assert len(plan.chunks) == count
    assert plan.num_tokens == 64 + 3 * count
    engine.run(20)
    engine.check_outputs()


@pytest.mark.parametrize("length", [63, 64, 65])
def test_equal_prompts_are_computed_once(length):
    """C28: of many equal prompts each is prefilled, or all wait for ever (vllm#7414, vllm#14686)."""
    engine = FakeEngine(200, 4, budget=1000, num_seqs=64, max_len=80)
    for _ in range(64):
        engine.add([i % 5 for i in range(length)], 1)
    engine.run(10)
    engine.check_outputs()
    tail = (length - 1) % 4 + 1  # what no page can give: a copy needs a page of an earlier step
    assert engine.scheduler.counts["computed_tokens"] == length + 63 * tail
    assert [sequence.num_cached_tokens for sequence in engine.sequences] == [0] + [length - tail] * 63


@pytest.mark.parametrize("count", [1, 2, 64, 1000])
@pytest.mark.parametrize("length", [100, 10])
def test_many_equal_prompts_in_a_small_pool_compute_the_prefix_about_once(count, length):
    """C28: a thousand copies of a prompt, a pool of 40 pages, the leader aborted after the first step (sglang#2442)."""
    engine = FakeEngine(40, 16, budget=64, num_seqs=32, max_len=128)
    for _ in range(count):
        engine.add([i % 5 for i in range(length)], 3)
    engine.step()
    engine.abort(engine.sequences[0])
    engine.run(20 + 2 * count)
    engine.check_outputs()
    tail = length % 16 + 2  # of each, after the full pages: what is left of the prompt, and two of three outputs
    assert engine.scheduler.counts["computed_tokens"] <= 2 * length + count * tail
    assert len(engine.finished) == count


@pytest.mark.parametrize("abort_after", [1, 2, 3])
def test_an_aborted_leader_strands_nobody(abort_after):
    """C28: all wait for a leader that never finishes (sglang#2442). The followers have
    to wait while it takes the whole budget, then go on."""
    engine = FakeEngine(100, 4, budget=6, num_seqs=8, max_len=60)
    for _ in range(5):
        engine.add([1, 2, 0] * 10, 5)
    for _ in range(abort_after):
        plan = engine.step()
        assert [chunk.sequence for chunk in plan.chunks] == engine.sequences[:1], "the others wait, and compute nothing"
    engine.abort(engine.sequences[0])
    plan = engine.step()
    assert plan.chunks[0].sequence is engine.sequences[1]
    assert plan.chunks[0].start == 6 * abort_after // 4 * 4, "what the leader has computed is not computed again"
    engine.run(60)
    engine.check_outputs()


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_nine_sequences_that_need_a_page_at_once_get_on_with_eight(page_size):
    """C21: space is checked in tokens, so a page for each of many sequences is missing in the same step
    (marin#1838)."""
    engine = FakeEngine(17, page_size, budget=9 * page_size, num_seqs=9, max_len=3 * page_size)
    for i in range(9):
        engine.add([i] * (page_size - 1), page_size)
    engine.run(40 * page_size)
    engine.check_outputs()
    assert engine.scheduler.counts["preemptions"] > 0
    assert all(len(sequence.output_token_ids) == page_size for sequence in engine.sequences)


def test_prompts_that_can_never_fit_are_refused_with_the_numbers():
    """C23: a prompt larger than the pool holds the head of the queue for ever (vllm#39734)."""
    engine = FakeEngine(8, 16, budget=64, max_len=512)
    engine.add([1] * 127)
    engine.add([2] * 128)
    for length in (129, 300):
        with pytest.raises(ValueError, match=f"{length} tokens needs {-(-length // 16)} pages of 16, the pool has 8"):
            engine.add([3] * length)
    engine.add([4] * 100, 100)
    engine.add([5] * 20, 5)
    engine.run(1000)
    engine.check_outputs()
    assert [len(sequence.output_token_ids) for sequence in engine.sequences] == [2, 1, 29, 5]
    filled = [sequence for sequence in engine.sequences if len(sequence.tokens) == 129]
    assert len(filled) == 3
    for sequence in filled:
        assert sequence.finish_reason == "length"
        assert "9 pages" in sequence.stop_reason or "do not fit" in sequence.stop_reason


@pytest.mark.parametrize("budget", [4, 16])
def test_preempted_sequences_do_not_lose_their_work_again_and_again(budget):
    """C24: a long sequence is resumed when only a chunk of it fits and thrown out in the next step (vllm#25538)."""
    engine = FakeEngine(20, 4, budget=budget, num_seqs=4, max_len=60)
    for i in range(2):
        engine.add([i] * 30, 30)
    for i in range(6):
        engine.add([2, i, i], 4)
    engine.run(600)
    engine.check_outputs()
    assert engine.scheduler.counts["computed_tokens"] <= 3 * tokens_needed(engine)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("num_pages", [16, 20, 40])
def test_recompute_is_bounded_under_pressure(page_size, num_pages):
    """C24: under steady pressure what is computed stays within three times what is needed (vllm#25538)."""
    rng = random.Random(page_size * num_pages)
    engine = FakeEngine(num_pages, page_size, budget=16, num_seqs=8, max_len=15 * page_size, vocab_size=1000)
    for _ in range(30):
        length = rng.randint(1, 8 * page_size)
        engine.add([rng.randrange(1000) for _ in range(length)], rng.randint(1, 7 * page_size))
    engine.run(3000)
    engine.check_outputs()
    assert engine.scheduler.counts["computed_tokens"] <= 3 * tokens_needed(engine)


@pytest.mark.parametrize("wait", [0, 1, 5])
@pytest.mark.parametrize("length", [k * 4 + d for k in (1, 2, 3, 4) for d in (-1, 0, 1)])
def test_preempted_at_a_page_edge_no_token_is_lost_or_repeated(length, wait):
    """C25: after recompute the new token is skipped or appended twice (nano-vllm#217, nano-vllm#66)."""
    engine = FakeEngine(12, 4, budget=16, num_seqs=2, max_len=30)
    victim = engine.add([1, 2, 3], 25)
    while victim.row is None or victim.length < length:
        engine.step()
    blockers = engine.scheduler.free_rows
    engine.scheduler.preempt(victim)
    kept, engine.scheduler.free_rows = blockers[:], []
    engine.scheduler.max_num_seqs -= len(kept)
    for _ in range(wait):
        assert not engine.scheduler.schedule().chunks
        engine.collect()
        engine.in_flight = None
    engine.scheduler.free_rows = kept
    engine.scheduler.max_num_seqs += len(kept)
    engine.run(100)
    engine.check_outputs()
    assert victim.prompt_len == 3
    assert len(victim.output_token_ids) == 25


@pytest.mark.parametrize("budget", [16, 24, 128])
@pytest.mark.parametrize("caching", [True, False])
def test_preempting_at_random_every_third_step_changes_nothing(budget, caching):
    """C26: small chunks after preemption see a wrong state, and answers get worse (sglang-jax#1010, vllm#18055)."""
    rng = random.Random(budget)
    engine = FakeEngine(60, 4, budget=budget, num_seqs=8, max_len=40, caching=caching)
    for prompt in shared_prompts(rng, 24, 20):
        engine.add(prompt, 20)

    def preempt(engine):
        if len(engine.plans) % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))

    engine.run(2000, preempt)
    engine.check_outputs()
    assert engine.scheduler.counts["preemptions"] > 20


def test_a_resumed_sequence_finds_its_own_pages():
    """C22: the hit length is taken before admission and no longer true at it (nano-vllm#211, vllm#17305)."""
    engine = FakeEngine(30, 4, budget=64, num_seqs=2, max_len=60)
    sequence = engine.add([1, 2, 0, 1, 1, 2, 2, 0, 1], 20)
    for _ in range(8):
        engine.step()
    known = len(sequence.tokens)
    engine.scheduler.preempt(sequence)
    engine.step()
    plan = engine.step()
    assert plan.chunks[0].start >= known // 4 * 4, "only what no page holds is computed again"
    assert sequence.num_cached_tokens == 0, "what was found at the first admission"
    engine.run(60)
    engine.check_outputs()


def test_many_short_requests_in_a_pool_of_a_tenth_of_what_they_want():
    """C22: preempted, admitted again, hitting its own old pages, with the pool always nearly full (nano-vllm#233)."""
    rng = random.Random(3)
    engine = FakeEngine(24, 2, budget=32, num_seqs=16, max_len=24)
    for prompt in shared_prompts(rng, 150, 12):
        engine.add(prompt, rng.randint(1, 12))
    engine.run(3000)
    engine.check_outputs()


def test_concurrency_is_not_tied_to_max_tokens():
    """C30: admission reserves all of a huge max_tokens, so the batch shrinks to one (sglang#961)."""
    engine = FakeEngine(100, 4, budget=64, num_seqs=30, max_len=400)
    for i in range(30):
        engine.add([i, 1, 2], None, stops=(0,))
    engine.step()
    plan = engine.step()
    assert len({chunk.sequence for chunk in plan.chunks}) >= 20
    engine.run(1000)
    engine.check_outputs()


def test_one_sequence_runs_to_the_context_limit_in_a_pool_just_large_enough():
    """C30: the estimate is clipped, then pages run out with a single request left (sglang#1038)."""
    engine = FakeEngine(16, 4, budget=64, max_len=65)
    sequence = engine.add([1] * 5)
    engine.run(100)
    engine.check_outputs()
    assert (sequence.finish_reason, sequence.stop_reason, len(sequence.tokens)) == ("length", None, 65)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "said"), [(48, 16, 16), (49, 16, 15), (62, 16, 2), (63, 1, 1), (63, 2, 1)]
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_exactly_as_many_tokens_as_the_context_holds(prompt_len, max_tokens, said, page_size):
    """C31: one or two tokens too few at the limit, or an index past the table (sglang#33814, vllm#16445)."""
    engine = FakeEngine(64 // page_size, page_size, budget=64, max_len=64)
    sequence = engine.add([1] * prompt_len, max_tokens)
    engine.run(100)
    engine.check_outputs()
    assert len(sequence.output_token_ids) == said
    assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    assert engine.scheduler.counts["computed_tokens"] == prompt_len + said - 1, "the last token is not computed"


@pytest.mark.parametrize("bad", [(1,), (0,), (2,), (0, 1, 2)])
def test_a_refused_prompt_leaves_nothing_behind(bad):
    """C32: one too long prompt loses the good ones, or is left over for the next call (vllm#1655, vllm#16732)."""
    engine = FakeEngine(4, 4, max_len=64)
    for i in range(3):
        if i in bad:
            with pytest.raises(ValueError, match="the pool has 4"):
                engine.add([i] * 20, 2)
        else:
            engine.add([i] * 5, 2)
    engine.run(30)
    engine.check_outputs()
    assert len(engine.finished) == 3 - len(bad)
    assert not engine.scheduler.waiting


def test_first_come_first_served():
    engine = FakeEngine(20, 4, budget=16, num_seqs=3, max_len=40)
    rng = random.Random(5)
    for i in range(12):
        engine.add([i % 5, i] + [rng.randrange(5) for _ in range(rng.randint(0, 20))], 4)
    started: dict[int, None] = {}
    for _ in range(200):
        if engine.has_work:
            started |= dict.fromkeys(chunk.sequence.order for chunk in engine.step().chunks)
    assert list(started) == list(range(12))
    engine.check_outputs()


def test_nobody_younger_takes_the_pages_of_a_preempted_sequence():
    """A preempted sequence keeps its place in the queue also while its last token is in flight."""
    engine = FakeEngine(10, 4, budget=64, num_seqs=4, max_len=40)
    for i in range(2):
        engine.add([i] * 15, 12)
    engine.step()
    engine.step()
    engine.add([3, 3], 2)
    late = engine.add([4] * 12, 2)
    engine.scheduler.preempt(engine.sequences[1])
    plan = engine.step()
    assert late not in {chunk.sequence for chunk in plan.chunks}
    plan = engine.step()
    assert engine.sequences[1] in {chunk.sequence for chunk in plan.chunks}
    engine.run(100)
    engine.check_outputs()


def test_the_oldest_sequence_is_never_preempted_for_a_younger_one():
    rng = random.Random(11)
    engine = FakeEngine(14, 2, budget=32, num_seqs=6, max_len=24, vocab_size=1000)
    for _ in range(10):
        engine.add([rng.randrange(1000) for _ in range(rng.randint(1, 10))], 12)
    preempt, victims = engine.scheduler.preempt, []

    def watch(sequence):
        running = [other.order for other in engine.scheduler.running]
        assert sequence.order == max(
            other.order for other in engine.scheduler.running if other.planned_step != engine.cache.step
        )
        assert sequence.order != min(running) or len(running) == 1
        victims.append(sequence)
        preempt(sequence)

    engine.scheduler.preempt = watch
    engine.run(1000)
    engine.check_outputs()
    assert len(victims) > 3


def test_decodes_go_on_while_a_long_prompt_is_computed():
    engine = FakeEngine(100, 4, budget=8, num_seqs=4, max_len=120)
    first = engine.add([1, 2], 30)
    engine.step()
    engine.add([3] * 80, 2)
    for _ in range(8):
        plan = engine.step()
        assert plan.num_tokens == 8, "the rest of the budget is filled"
        assert plan.chunks[0].sequence is first
    engine.run(100)
    engine.check_outputs()


def test_a_token_that_comes_after_a_stop_is_dropped_and_never_published():
    """The stop token is found one step late: its successor is computed for nothing and is nobody's."""
    engine = FakeEngine(40, 1, budget=16, num_seqs=2, max_len=30)
    stop = engine.expected(engine.add([1, 2], 10))[3]
    stopped = engine.add([1, 2], 10, stops=(stop,))
    engine.run(40)
    engine.check_outputs()
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop


def test_output_pages_are_found_by_the_next_turn():
    """C07: only the prompt is kept at the end, so that turn 2 computes turn 1's answer again (sglang#16521)."""
    engine = FakeEngine(40, 16, budget=256, max_len=256)
    first = engine.add([i % 7 for i in range(100)], 50)
    engine.run(60)
    second = engine.add([*first.tokens, *range(50)], 1)
    engine.run(10)
    engine.check_outputs()
    assert second.num_cached_tokens == 149 // 16 * 16 == 144


def test_a_half_filled_page_is_not_found():
    """C06: a page that two chunks fill is found before it is full (ROCm/ATOM#902)."""
    engine = FakeEngine(40, 16, budget=24, num_seqs=4, max_len=80)
    prompt = [i % 7 for i in range(48)]
    engine.add(prompt, 1)
    engine.step()
    assert [node.page for node in engine.cache.trie] == engine.sequences[0].table.pages[:1]
    for _ in range(2):
        engine.add(prompt, 1)
        engine.step()
        assert len(list(engine.cache.trie)) == 3, "one budget filled what was left of the second page, and the third"
    engine.run(20)
    engine.check_outputs()
    assert engine.scheduler.counts["computed_prompt_tokens"] <= 48 + 16 + 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_thousand_requests_leave_no_page_behind(caching):
    """C20: two paths free a slot, or a tail page is never freed; later no space is left (sglang-jax#70,
    sglang#4977)."""
    rng = random.Random(1)
    engine = FakeEngine(64, 16, budget=64, num_seqs=8, max_len=80, caching=caching)
    single = engine.add([1, 2, 3, 4, 0], 60)
    engine.run(100)
    assert len(single.output_token_ids) == 60
    for prompt in shared_prompts(rng, 150, 60, alphabet=4):
        engine.add(prompt, rng.randint(1, 12), stops=rng.choice([(), (1,)]))
    engine.run(4000, lambda engine: engine.abort(rng.choice(engine.sequences)) if rng.random() < 0.02 else None)
    engine.check_outputs()
    if not caching:
        assert len(engine.cache.pool) == 64


@pytest.mark.parametrize("seed", range(12))
def test_answers_to_one_prompt_over_random_work_in_a_tight_pool(seed):
    """Pages are copied as earlier steps left them, whoever was preempted, aborted or started anew in this one."""
    rng = random.Random(seed)
    caching, size = seed % 3 > 0, rng.choice([2, 4, 16])
    engine = FakeEngine(
        72 // size, size, budget=rng.choice([8, 24, 64]), num_seqs=rng.choice([2, 5, 8]), caching=caching
    )
    for prompt in shared_prompts(rng, 25, 40):
        mode = rng.choice(["readwrite", "readwrite", "read", "write", "off"])
        engine.add_answers(prompt, rng.randint(1, 5), rng.randint(1, 20), stops=rng.choice([(), (1,)]), cache_mode=mode)
    engine.run(6000, lambda engine: engine.abort(rng.choice(engine.sequences)) if rng.random() < 0.01 else None)
    engine.check_outputs()
    counts = engine.scheduler.counts
    assert counts["preemptions"] or engine.scheduler.max_num_seqs < 8
    assert counts["forked_tokens"] or not caching


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(length):
    """C01: every page hits, nothing is left to compute, there is nothing to sample from (nano-vllm#144, vllm#3239)."""
    engine = FakeEngine(40, 16, budget=256, max_len=64)
    prompt = [i % 3 for i in range(length)]
    for _ in range(2):
        engine.add(prompt, 1, prefix_pos=length)
        engine.run(5)
    for _ in range(2):
        engine.add(prompt, 3)
    engine.run(10)
    engine.check_outputs()
    full = length // 16 * 16  # pages that were published whole; nothing but full pages is ever found
    cached = [sequence.num_cached_tokens for sequence in engine.sequences]
    assert cached == [0] + [min(full, length - 1)] * 3
