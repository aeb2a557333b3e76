"""Policies in the engine: they choose who starts and what is forgotten, never a token."""

import functools

import pytest
from engines import TIGHT, cached_of, check_greedy, generate, greedy, make_llm, random_prompts, tokens_of

from prefix_jax import eviction, policies
from prefix_jax.request import Request


@functools.cache
def prompts() -> list[list[int]]:
    """Three groups, shuffled, that want several times the pool."""
    stems = random_prompts(50, 17, 12, 22)
    tails = random_prompts(51, *([5] * 12))
    return [stems[i * 7 % 3] + tail for i, tail in enumerate(tails)]


@functools.cache
def expected() -> list[list[int]]:
    outputs = generate(make_llm(**TIGHT, enable_prefix_caching=False), prompts(), greedy(6))
    check_greedy(outputs)
    return tokens_of(outputs)


@pytest.mark.parametrize("evicts", eviction.POLICIES)
@pytest.mark.parametrize("policy", policies.POLICIES)
def test_no_policy_changes_a_token(policy, evicts):
    llm = make_llm(**TIGHT, schedule_policy=policy, eviction_policy=evicts)
    for _ in range(2):
        given = [{"prompt_token_ids": prompt, "priority": i % 3, "ttl": 0.01 * i} for i, prompt in enumerate(prompts())]
        assert tokens_of(generate(llm, given, greedy(6))) == expected()
    assert llm.stats["evicted_pages"] > 0


def test_a_batch_is_planned_as_a_whole():
    llm = make_llm(**TIGHT, schedule_policy="dfs")
    assert llm.engine.cache.queue.policy is eviction.belady
    by_order = make_llm(**TIGHT)
    for engine in (llm, by_order):
        generate(engine, prompts(), greedy(1))
    assert llm.stats["computed_prompt_tokens"] < by_order.stats["computed_prompt_tokens"]


def test_a_fresh_start_after_a_failure_plans_again(monkeypatch):
    llm = make_llm(**TIGHT, schedule_policy="dfs")
    dispatch, calls = llm.engine.runner.dispatch, []

    def fail_once(batch):
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("a step is lost")
        return dispatch(batch)

    monkeypatch.setattr(llm.engine.runner, "dispatch", fail_once)
    assert tokens_of(generate(llm, prompts(), greedy(6))) == expected()
    assert llm.engine.scheduler.forecast is not None


def test_the_higher_priority_is_answered_first():
    llm = make_llm(**TIGHT, schedule_policy="priority")
    done = []
    given = [{"prompt_token_ids": prompt, "priority": i, "request_id": str(i)} for i, prompt in enumerate(prompts())]
    generate(llm, given, greedy(2), on_output=lambda output: done.append(int(output.request_id)))
    assert done[0] >= len(given) - 4
    assert done[-1] < 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"ttl": "long"}, "ttl must be a number of seconds, got 'long'"),
        ({"ttl": -1}, "ttl must be at least 0 seconds, got -1"),
        ({"ttl": float("nan")}, "ttl must be at least 0 seconds, got nan"),
    ],
)
def test_a_bad_priority_is_named(options, error):
    llm = make_llm(**TIGHT)
    (output,) = generate(llm, [{"prompt_token_ids": [5], **options}], on_error="return")
    assert output.error == error


def test_a_batch_is_added_whole_or_not_at_all():
    engine = make_llm(**TIGHT).engine
    request = Request("a", (5, 6), greedy(1), 3)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_batch([request, request])
    with pytest.raises(ValueError, match="the pool has 16"):
        engine.add_batch([request, Request("b", (5,) * 80, greedy(1), 81)])
    assert not engine.has_work


def test_recompute_time_is_measured_where_steps_follow_one_another():
    llm = make_llm(**TIGHT, eviction_policy="cost")
    generate(llm, prompts(), greedy(6))
    assert llm.engine.recompute.tt > 0
    assert llm.engine.recompute(0, 16) > 0


def test_a_users_own_policy():
    def last_first(waiting, view):
        return sorted(waiting, key=lambda sequence: -sequence.order)

    llm = make_llm(**TIGHT, schedule_policy=last_first)
    outputs = generate(llm, prompts(), greedy(6))
    assert tokens_of(outputs) == expected()
    assert cached_of(outputs)[-1] == 0
