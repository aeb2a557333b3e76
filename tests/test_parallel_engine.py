"""The equivalences of the engine, each as it stands in its own file, on two, four and eight devices of the host."""

import inspect

import pytest
import test_engine
import test_engine_limits
import test_generation
import test_host_tier
import test_logit_rules
import test_logprobs
import test_prefixes
from engines import USUAL

EQUIVALENCES = [
    (test_engine.test_no_chunk_size_changes_a_token, {"budget": 7}),
    (test_engine.test_no_chunk_size_changes_a_token, {"budget": 24}),
    (test_engine.test_neighbours_and_order_change_no_token, {}),
    (test_engine.test_what_was_evicted_is_computed_again, {}),
    (test_engine.test_preemption_changes_no_token, {"budget": 16, "caching": True}),
    (test_engine.test_preempted_next_to_a_page_edge_no_token_is_lost_or_said_twice, {"length": 32}),
    (test_engine.test_a_prompt_that_is_cached_whole_still_gets_its_answer, {"length": 32, "max_tokens": 8}),
    (test_engine.test_every_suffix_of_a_cached_prefix_continues_at_its_end, {}),
    (test_engine.test_a_prefill_on_cached_context_equals_a_fresh_one, {"context": 48}),
    (test_engine.test_nothing_behind_the_matched_length_is_seen, {}),
    (test_engine.test_a_page_is_found_no_earlier_than_it_is_full, {"steps": 1, "next_budget": 64}),
    (test_engine.test_the_next_turn_finds_the_answer_of_the_last, {}),
    (test_engine.test_shared_tiles_over_random_work_in_a_tight_pool, {}),
    (test_engine_limits.test_a_seed_gives_the_same_tokens_in_any_company, {}),
    (test_generation.test_answers_share_the_prompts_pages, {"length": 33}),
    (test_host_tier.test_random_work_in_a_tight_pool, {"seed": 0, "pages": 1000}),
    (test_logit_rules.test_the_engine_follows_the_rules_whatever_is_cached, {"name": "repetition"}),
    (test_logit_rules.test_the_engine_follows_the_rules_whatever_is_cached, {"name": "all"}),
    (test_logit_rules.test_preemption_keeps_the_counts, {}),
    (test_logprobs.test_the_prompts_are_the_same_cold_and_warm, {"length": 80, "budget": 16}),
    (test_logprobs.test_overlapping_prompts_in_both_orders_and_side_by_side, {}),
    (test_logprobs.test_more_positions_than_a_step_reads_logits_for_and_a_pool_that_is_tight, {}),
    (test_prefixes.test_random_lives_of_prefixes, {"llm": None}),  # it makes its own
]


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4, 8], ids="{}_devices".format)
@pytest.mark.parametrize(
    ("test", "arguments"), [pytest.param(*pair, id=pair[0].__name__.removeprefix("test_")) for pair in EQUIVALENCES]
)
def test_on_several_devices(num, test, arguments, monkeypatch):
    """Two KV heads of eight query heads: on four and eight devices several have the same KV head."""
    monkeypatch.setitem(USUAL, "model", {"group": 4, "num_kv_heads": 2})
    monkeypatch.setitem(USUAL, "engine", {"tensor_parallel_size": num})
    wants = inspect.signature(test).parameters
    test(**arguments, **({"monkeypatch": monkeypatch} if "monkeypatch" in wants else {}))
