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
        ("seed", -1), ("seed", 2**64), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]),
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
        ("stop", 5),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name(field, value):
    with pytest.raises(TypeError, match=rf"{field} must be .*got "):
        SamplingParams(**{field: value})


def test_the_edges_of_every_range_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=-1, max_tokens=1, seed=0)
    SamplingParams(temperature=3.4e38)
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
