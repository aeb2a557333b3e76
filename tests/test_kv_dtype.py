"""K and V in one byte: what is lost, and that nothing else changes."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, IdealCache, cached_of, family, forget, generate, greedy, make_llm, tokens_of

from prefix_jax import LLM, SamplingParams
from prefix_jax.kv_store import measure_scales
from prefix_jax.weights import load_model, read_config

FP8 = {"kv_dtype": "float8_e4m3fn"}


def test_answers_from_the_cache_are_the_first_ones():
    """A fresh prompt reads what it computed, a hit what was stored, and both differ: TensorRT-LLM#2699 (C09)."""
    llm = make_llm(**TINY, **FP8)
    for slots in llm.engine.runner.store[0]:
        assert slots.dtype == jnp.float8_e4m3fn
    first = generate(llm, family(0), greedy(6))
    again = generate(llm, family(0), greedy(6))
    assert tokens_of(first) == tokens_of(again), "what is read from the cache is what was computed"
    ideal = IdealCache(llm.engine.config.page_size)
    ideal.learn(first)
    assert cached_of(again) == [ideal.hits(prompt) for prompt in family(0)]
    forget(llm)
    assert tokens_of(generate(llm, family(0)[:3], greedy(6))) == tokens_of(first)[:3]
    uncached = make_llm(**TINY, **FP8, enable_prefix_caching=False)
    for _ in range(2):
        assert tokens_of(generate(uncached, family(0), greedy(6))) == tokens_of(first)


def test_scales_leave_room_above_the_largest_value(default_model):
    config = read_config(default_model)
    model = load_model(default_model, config, dtype=jnp.float32)
    scales = measure_scales(model, list(range(100, 164)))
    assert len(scales) == config.num_layers
    for layer in scales:
        for scale in (layer.k, layer.v):
            assert scale.shape == (config.num_kv_heads,)
            assert (np.asarray(scale) > 1e-4).all() and (np.asarray(scale) < 10).all()


@pytest.mark.slow
def test_quality_holds(default_model, shared_texts):
    """Greedy tokens under teacher forcing: what the model would say next, after each of some hundred tokens of its own
    answers, with K and V in one byte against float32."""
    options = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "use_tqdm": False}
    exact, small = LLM(default_model, **options), LLM(default_model, **options, **FP8)
    same = total = 0
    for text in shared_texts:
        (answer,) = exact.generate(
            [text], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False
        )
        tokens = answer.prompt_token_ids + answer.outputs[0].token_ids
        begin = len(answer.prompt_token_ids)
        prompts = [tokens[:end] for end in range(begin, len(tokens))]
        outputs = small.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        same += sum(o.outputs[0].token_ids[0] == tokens[begin + i] for i, o in enumerate(outputs))
        total += len(prompts)
    assert total == 24 * len(shared_texts)
    assert same / total >= 0.9


@pytest.fixture
def shared_texts() -> list[str]:
    return [
        "The history of the steam engine begins in the first century, when Hero of Alexandria described",
        "Question: What is the difference between a lake and a sea?\nAnswer:",
        'def fibonacci(n):\n    """Returns the n-th number."""\n',
        "Dear Sir or Madam,\nI am writing to you because the washing machine that I bought last month",
    ]


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ValueError, match=r"kv_dtype must be None.* got 'int4'"):
        make_llm(**TINY, kv_dtype="int4")
