"""What a caller may ask for, and that everything else is refused with what was got."""

import math

import numpy as np
import pytest

from prefix_jax.request import Request, SamplingParams, Sequence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", 1e39), ("top_p", 0), ("top_p", 1.01),
        ("top_p", -1), ("top_p", math.nan), ("top_k", -2), ("top_k", 2**31), ("max_tokens", 0), ("max_tokens", -5),
        ("seed", -2), ("seed", 2**64), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("n", 0), ("min_p", -0.1),
        ("min_p", 1.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", -1), ("min_tokens", -1), ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21),
        ("bad_words", [""]), ("logits_processors", [3]),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be .*got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"), ("temperature", None), ("temperature", True), ("top_p", "0.5"), ("top_k", 1.5),
        ("top_k", False), ("max_tokens", 2.0), ("max_tokens", True), ("seed", 1.0), ("seed", "x"),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [1.0]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("stop", 5), ("ignore_eos", "no"), ("detokenize", None),
        ("logit_bias", [5]), ("allowed_token_ids", ["a"]), ("min_p", None), ("n", 1.0), ("logprobs", True),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name(field, value):
    with pytest.raises(TypeError, match=rf"{field} must be .*got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64])
def test_numbers_of_numpy_become_pythons(kind):
    """They would wrap around in the first sum."""
    params = SamplingParams(
        n=kind(2), max_tokens=kind(100), min_tokens=kind(99), top_k=kind(3), seed=kind(1), logprobs=kind(2),
        stop_token_ids=[kind(7)], allowed_token_ids=np.array([7, 8], kind), temperature=np.float16(0.5),
    )  # fmt: skip
    values = [params.n, params.max_tokens, params.min_tokens, params.top_k, params.seed, params.logprobs]
    values += [*params.stop_token_ids, *params.allowed_token_ids]
    assert values == [2, 100, 99, 3, 1, 2, 7, 7, 8]
    assert {type(value) for value in values} == {int} and type(params.temperature) is float


def test_the_edges_of_every_range_are_allowed():
    assert SamplingParams(top_k=None) == SamplingParams(top_k=0), "C43"
    SamplingParams(temperature=0, top_p=1, top_k=-1, max_tokens=1, seed=0)
    SamplingParams(temperature=3.4e38)
    assert SamplingParams(seed=-1) == SamplingParams(seed=None), "as in vLLM"
    SamplingParams(temperature=1e-30, top_p=1e-6, top_k=2**31 - 1, max_tokens=10**9, seed=2**64 - 1)
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), seed=np.uint32(7), max_tokens=None)


def test_one_stop_string_or_many_and_none_at_all():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a")), "frozen all through"


def test_a_new_sequence_has_everything_to_compute():
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams(), max_len=10), 0, seed=7)
    assert (sequence.length, sequence.remaining, sequence.prompt_len, sequence.output_token_ids) == (3, 3, 3, [])
    sequence.tokens.append(9)
    sequence.computed_len = 3
    assert (sequence.length, sequence.remaining, sequence.output_token_ids) == (4, 1, [9])
    sequence.pending = 1
    assert (sequence.length, sequence.remaining) == (5, 2)


def test_the_last_token_of_all_is_never_computed():
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams(), max_len=4), 0, seed=7)
    sequence.tokens.append(9)
    sequence.computed_len = 3
    assert sequence.remaining == 0


def test_a_sequence_that_starts_over_keeps_its_tokens_and_nothing_of_the_device():
    sequence = Sequence(Request("r", (1, 2, 3), SamplingParams(), max_len=9), 4, seed=7)
    sequence.tokens.append(9)
    sequence.computed_len, sequence.pending, sequence.row, sequence.planned_step = 4, 1, 2, 57
    sequence.reset()
    assert sequence.tokens.tolist() == [1, 2, 3, 9]
    assert (sequence.order, sequence.seed, sequence.remaining) == (4, 7, 4)
    assert (sequence.row, sequence.table, sequence.planned_step) == (None, None, -1), "steps are counted anew"


def test_what_contradicts_itself_is_refused():
    """min_tokens over max_tokens (C50), zero tokens but for scoring (C65), a text that is not made."""
    for params, words in [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, got 5 and 4"),
        ({"stop": "x", "detokenize": False}, "stop strings need the text"),
        ({"best_of": 3}, "best_of is not supported, got 3"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name a token"),
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "at most 512 tokens, got 513"),
        ({"logit_bias": {1: math.inf}}, "the bias of token 1 must be finite, got inf"),
    ]:
        with pytest.raises(ValueError, match=words):
            SamplingParams(**params)
    SamplingParams(max_tokens=0, prompt_logprobs=0)
    SamplingParams(min_tokens=4, max_tokens=4)


def test_biases_are_clamped_and_come_as_json_has_them():
    """And what a caller changes afterwards changes nothing (C54: lmms-eval#1326)."""
    biases = {"7": 250, 8: -1e9, 9: 0.5}
    params = SamplingParams(logit_bias=biases)
    biases[9] = 3
    assert params.logit_bias == ((7, 100.0), (8, -100.0), (9, 0.5))
    assert params.has_rules and not SamplingParams(top_k=3, min_p=0.1).has_rules
    with pytest.raises(TypeError, match="a token in logit_bias must be an integer, got 'a'"):
        SamplingParams(logit_bias={"a": 1})


def test_a_sequence_that_scores_reads_logits_from_there_on():
    request = Request("r", (1, 2, 3, 4, 5), SamplingParams(prompt_logprobs=1), max_len=7, score_from=2)
    leader, other = Sequence(request, 0, seed=7), None
    other = Sequence(request, 1, seed=8, index=1, leader=leader)
    assert (leader.scored_len, leader.next_read, leader.is_scoring) == (2, 1, True)
    assert (other.scored_len, other.next_read, other.is_scoring) == (5, 4, False), "one of the answers is enough"
    leader.scored_len = 5
    assert leader.next_read == 4, "the position that yields the first token of the output"
    leader.prompt_logprobs = [None]
    leader.reset()
    assert leader.scored_len == 3, "what has not arrived is computed again"
