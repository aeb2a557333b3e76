"""Every kind of bad input: what is refused, what the error says, and that the others run."""

from array import array
from collections import deque

import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    SMALL,
    check_greedy,
    compiling_once,
    generate,
    greedy,
    make_llm,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, BeamSearchParams, SamplingParams


@pytest.fixture
def llm() -> LLM:
    return make_llm()


class Sly:
    """Says that it is an integer, and is not."""

    def __index__(self):
        raise RuntimeError("it was a lie")

    def __repr__(self):
        return "Sly()"


BAD_PROMPTS = {
    "the prompt is empty: it has no tokens": [],
    "the prompt has 257 tokens, max_model_len is 256": [5] * 257,
    "token ids must be in [0, 300), got [300]": [5, 300, 6],
    "token ids must be in [0, 300), got [-1, 2147483648]": [5, -1, 2**31],
    "a prompt must be text, a list of token ids, or a dict of these, got [1.5]": [1.5],
    "a prompt must be text, a list of token ids, or a dict of these, got [5, True]": {"prompt_token_ids": [5, True]},
    "a prompt must be text, a list of token ids, or a dict of these, got [[5]]": [[5]],
    "a prompt must be text, a list of token ids, or a dict of these, got [0, 1, False]": [0, 1, False],
    "a prompt must be text, a list of token ids, or a dict of these, got [5, array([5, 6])]": [5, np.array([5, 6])],
    "a prompt must be text, a list of token ids, or a dict of these, got [5, Sly()]": [5, Sly()],
    "a prompt must be text, a list of token ids, or a dict of these, got None": None,
    "a prompt must be text, a list of token ids, or a dict of these, got 3.0": 3.0,
    "a prompt dict needs one of prompt, prompt_token_ids, messages, got none": {},
    "a prompt dict needs one of prompt, prompt_token_ids, messages, got text": {"text": "hi"},
    "a prompt dict needs one of prompt, prompt_token_ids, messages, got prompt, messages": {
        "prompt": "a",
        "messages": [],
    },
    "cache_salt must be a string, got ['a']": {"prompt": "a", "cache_salt": ["a"]},
    "request_id 'twice' is taken": {"prompt": "a", "request_id": "twice"},
}


def test_one_error_names_every_bad_prompt_and_nothing_is_run(llm):
    """Out-of-range ids silently take another token's row: vllm#51795, vllm#22471 (C47)."""
    prompts = ["fine", {"prompt": "fine too", "request_id": "twice"}, *BAD_PROMPTS.values(), "", "fine"]
    with pytest.raises(ValueError, match="prompts cannot run; nothing was run") as raised:
        generate(llm, prompts)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"{len(BAD_PROMPTS) + 1} of {len(prompts)} prompts")
    assert lines[1:] == [
        *(f"  prompts[{index}]: {error}" for index, error in enumerate(BAD_PROMPTS, start=2)),
        f"  prompts[{len(prompts) - 2}]: the prompt is empty: it has no tokens",
    ]
    assert llm.stats["computed_tokens"] == 0 and not llm.engine.has_work


def test_an_empty_text_is_refused_also_where_the_tokenizer_adds_a_token_to_it(llm, monkeypatch):
    """Zero tokens reach the scheduler and kill the engine, or only where there is no BOS: vllm#7283 (C64)."""
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [1])
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(llm, [""])


def test_with_on_error_return_the_others_run(llm):
    """One too long prompt loses the good ones, or is left over for the next call: vllm#1655, vllm#16732 (C32)."""
    good = random_prompts(12, 5, 6)
    shown = []
    prompts = [good[0], {"prompt": "x", "request_id": "twice"}, *BAD_PROMPTS.values(), good[1]]
    outputs = generate(llm, prompts, on_error="return", on_output=shown.append)
    assert len(outputs) == len(shown) == len(prompts)
    assert [output.error for output in outputs] == [None, None, *BAD_PROMPTS, None]
    for output in outputs[2:-1]:
        assert output.outputs[0].finish_reason == "error" and output.finished
        assert output.outputs[0].token_ids == [] == output.prompt_token_ids
    check_greedy([outputs[0], outputs[-1]])
    assert [output.prompt_token_ids for output in (outputs[0], outputs[-1])] == good
    assert len(generate(llm, good)) == 2, "the next call has its own only"
    for only_bad in ([[]], [[5] * 257, []]):
        assert all(output.error for output in generate(llm, only_bad, on_error="return"))


def test_a_message_without_end_is_refused(llm):
    endless: list = []
    for _ in range(100_000):
        endless = [endless]
    chat = {"messages": [{"role": "user", "content": "and?", "more": endless}]}
    good, bad = generate(llm, ["the hen", chat], on_error="return")
    check_greedy([good])
    assert "recursion" in bad.error


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_too_long_prompt_leaves_the_order_as_it_is(llm, place):
    """vllm#1655, vllm#16732 (C32)."""
    prompts = random_prompts(13, 4, 5)
    prompts.insert(place, [5] * 257)
    outputs = generate(llm, prompts, on_error="return")
    assert [bool(output.error) for output in outputs] == [i == place for i in range(3)]
    check_greedy([output for output in outputs if not output.error])
    assert [len(output.prompt_token_ids) for output in generate(llm, random_prompts(14, 3))] == [3]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefix_pos": -1}, r"prompts\[0\]: prefix_pos must not be negative, got -1"),
        ({"prefix_pos": [0, -5]}, r"1 of 2 prompts.*\n  prompts\[1\]: prefix_pos must not be negative, got -5"),
        ({"prefix_pos": [1]}, "prefix_pos has 1 entries for 2 prompts"),
        ({"prefix_pos": [1, 2, 3]}, "prefix_pos has 3 entries for 2 prompts"),
        ({"prefix_pos": 1.5}, r"prefix_pos\[0\] is not usable: 1.5"),
        ({"prefix_pos": [1, "2"]}, r"prefix_pos\[1\] is not usable: '2'"),
        ({"prefix_pos": [None, True]}, r"prefix_pos\[1\] is not usable: True"),
        ({"params": [greedy()]}, "sampling_params has 1 entries for 2 prompts"),
        ({"params": [greedy(), None]}, r"sampling_params\[1\] is not usable: None"),
        ({"params": {"temperature": 0}}, r"sampling_params\[0\] is not usable"),
        ({"on_output": 5}, "on_output must be a function that takes an output, got 5"),
        ({"on_error": "ignore"}, 'on_error must be "raise" or "return", got \'ignore\''),
        ({"params": greedy(stop_token_ids=[300])}, r"prompts\[0\]: stop_token_ids must be in \[0, 300\), got \[300\]"),
        ({"params": greedy(stop_token_ids=[-1])}, r"stop_token_ids must be in \[0, 300\), got \[-1\]"),
    ],
)
def test_bad_options_show_what_was_got(llm, options, error):
    """Ids past the vocabulary index a neighbour's row: vllm#54195, vllm#16529 (C46)."""
    options = dict(options)
    params = options.pop("params", None)
    with pytest.raises((ValueError, TypeError), match=error):
        generate(llm, ["a", "b"], params, **options)
    assert llm.stats["computed_tokens"] == 0 and not llm.engine.has_work


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0.*got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0.*got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0.*got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -2}, "top_k must be -1 or 0"),
        ({"top_k": 2**31}, "top_k must be -1 or 0"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2**31}, r"max_tokens must be at least 1 and below 2\*\*31, got 2147483648"),
        ({"min_tokens": 2**31}, r"min_tokens must be at least 0 and below 2\*\*31, got 2147483648"),
        ({"max_tokens": True}, "max_tokens must be an integer, got True"),
        ({"seed": -2}, r"seed must be -1, for none, or in \[0"),
        ({"seed": 2**64}, "seed must be -1"),
        ({"stop": ["a", ""]}, "stop must be non-empty strings, got ''"),
        ({"stop": [5]}, "stop must be non-empty strings, got 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer, got 'a'"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(values, error):
    """C44: NaN, negative and infinite temperatures (vllm#1623)."""
    with pytest.raises((ValueError, TypeError), match=error):
        SamplingParams(**values)


def test_sampling_parameters_at_the_edges_are_accepted(llm):
    for values in ({"temperature": 1e-8}, {"top_p": 1e-6}, {"top_k": -1}, {"top_k": 2**31 - 1}, {"seed": 2**64 - 1},
                   {"max_tokens": None}, {"max_tokens": 10**6}, {"stop": None}, {"temperature": 1000}):  # fmt: skip
        (output,) = generate(llm, [[5, 6]], SamplingParams(**values))
        assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tensor_parallel_size": 99}, "tensor_parallel_size is 99, but JAX has 8 devices"),
        ({"page_size": 0}, "page_size must be a positive integer, got 0"),
        ({"num_pages": -1}, "num_pages must be a positive integer, got -1"),
        ({"max_num_seqs": True}, "max_num_seqs must be a positive integer, got True"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be a positive integer, got 0"),
        ({"max_model_len": 0}, "max_model_len must be a positive integer, got 0"),
        ({"memory_fraction": 0}, r"memory_fraction must be in \(0, 1\], got 0"),
        ({"memory_fraction": 1.5}, r"memory_fraction must be in \(0, 1\], got 1.5"),
        ({"pin_fraction": -1}, r"pin_fraction must be in \(0, 1\], got -1"),
        ({"schedule_policy": "luck"}, "schedule_policy must be one of fifo.*, got 'luck'"),
        ({"eviction_policy": "luck"}, "eviction_policy must be one of lru.*, got 'luck'"),
        ({"dtype": "float8"}, "dtype must be auto, float32, bfloat16, float16, got 'float8'"),
        ({"device": "abacus"}, "no device 'abacus': JAX has .*cpu"),
        ({"attention": "guess"}, "guess"),
        ({"load_format": "guess"}, "guess"),
    ],
)
def test_options_that_make_no_engine_are_refused(options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        LLM(tiny_folder(), use_tqdm=False, **options)


@pytest.mark.parametrize("prompts", [b"abc", [b"abc"], [bytearray(b"abc")], [[1, 2], bytearray(b"x")]])
def test_bytes_are_no_token_ids(llm, prompts):
    with pytest.raises(ValueError, match=r"a prompt must be text, a list of token ids.*got b"):
        generate(llm, prompts)


@pytest.mark.parametrize("request_id", [7, None, ["a", "b"]])
def test_an_abort_of_what_is_no_id_is_refused(llm, request_id):
    with pytest.raises(TypeError, match="request_id must be a string, as outputs have it, got"):
        llm.abort(request_id)


@pytest.mark.parametrize("prompts", [None, 5, np.int32(5)])
def test_what_is_no_prompt_at_all_is_shown(llm, prompts):
    with pytest.raises(TypeError, match="prompts must be text, token ids, a dict, or a list of these, got"):
        generate(llm, prompts)


@pytest.mark.parametrize(
    "make",
    [
        np.array,
        jnp.array,
        lambda ids: np.array(ids, np.uint16),
        lambda ids: array("q", ids),
        deque,
        tuple,
        lambda ids: [np.int64(i) for i in ids],
    ],
)
def test_arrays_are_prompts(llm, make):
    want = [output.outputs[0].token_ids for output in generate(llm, [[5, 6, 7], [8, 9, 10]])]
    for prompts in ([make([5, 6, 7]), make([8, 9, 10])], [[5, 6, 7], make([8, 9, 10])]):
        assert [output.outputs[0].token_ids for output in generate(llm, prompts)] == want
    assert [output.outputs[0].token_ids for output in generate(llm, make([5, 6, 7]))] == want[:1]


def test_a_prompt_beside_token_ids_is_a_label(llm):
    (output,) = generate(llm, [{"prompt": "", "prompt_token_ids": [5, 6], "request_id": 0}])
    assert (output.prompt_token_ids, output.request_id) == ([5, 6], "0")
    with pytest.raises(ValueError, match="the prompt beside prompt_token_ids must be text, got 7"):
        generate(llm, [{"prompt": 7, "prompt_token_ids": [5, 6]}])


def test_a_prefix_of_tokens_that_cannot_be_is_not_there(llm):
    assert llm.delete_prefix([2**40]) is False


@pytest.mark.parametrize(("value", "error"), [("x", TypeError), (float("nan"), ValueError), (True, TypeError)])
def test_a_length_penalty_is_a_finite_number(value, error):
    with pytest.raises(error, match=r"length_penalty must be .*got"):
        BeamSearchParams(2, 4, length_penalty=value)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path):
    """Ids past the embedding take another token's row: trl#3425, vllm#9634 (C79)."""
    small = write_checkpoint(tmp_path, tiny_config(vocab_size=200), tiny_weights(tiny_config(vocab_size=200)))
    with pytest.raises(ValueError, match="the tokenizer does not fit the model: its highest id is 271"):
        LLM(small, use_tqdm=False)
    with pytest.raises(ValueError, match="the tokenizer does not fit the model"):
        LLM(small, tokenizer=tiny_folder(), use_tqdm=False)


def test_a_model_without_a_tokenizer_takes_token_ids_alone():
    with compiling_once():
        llm = LLM(tiny_config(), load_format="dummy", use_tqdm=False, **SMALL)
    assert (
        tokens_of(generate(llm, [[5, 6, 7]], greedy(3)))[0] and generate(llm, [[5]], greedy(3))[0].outputs[0].text == ""
    )
    outputs = generate(llm, ["text", {"messages": []}, [5]], [greedy(), greedy(), greedy(stop="a")], on_error="return")
    why = "text needs a tokenizer, and this model was loaded without one: give token ids"
    assert [output.error for output in outputs] == [
        why,
        why,
        "stop strings need a tokenizer, and this model was loaded without one",
    ]


def test_no_memory_for_one_page_is_said_in_bytes():
    """The pool is sized without what else needs memory, and fails at the first large step: vllm#54383 (C40)."""
    with pytest.raises((MemoryError, ValueError), match=r"no memory for one page: a page takes [\d,]+ bytes"):
        LLM(tiny_folder(), use_tqdm=False, memory_fraction=1e-15, max_num_seqs=1, max_num_batched_tokens=1)
