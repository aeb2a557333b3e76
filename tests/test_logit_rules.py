"""Penalties, biases and bans against numpy: the kernels, one row's arrays, and the whole engine against the oracle."""

import itertools
from array import array

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    SMALL,
    SURE,
    TIGHT,
    TINY,
    cached_of,
    forget,
    generate,
    greedy,
    make_llm,
    oracle_of,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from test_kernel_lowering import an_h200

from pallas_kernels.logit_rules import BLOCK, MAX_BIASES, LogitRules, apply_rules
from pallas_kernels.logprobs import MAX_LOGPROBS
from prefix_jax import LLM, SamplingParams, request
from prefix_jax.step import set_rules
from prefix_jax.token_rules import TokenRules, no_rules

IMPLEMENTATIONS = ["xla", "pallas_interpret"]


def ruled(logits, params: SamplingParams, prompt, output, *, end_ids=(), bad_words=()) -> np.ndarray:
    """float64 [V], in the order and with the meanings of vLLM's documentation."""
    x = np.array(logits, np.float64)
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    for word in bad_words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]) and len(output) >= len(word) - 1:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return x


def random_rules(rng, vocab: int) -> tuple[SamplingParams, list[int], list[int], list[int], list[list[int]]]:
    """Parameters, prompt, output, ids that end it, bad words."""
    few = lambda most: rng.integers(0, vocab, rng.integers(0, most + 1)).tolist()  # noqa: E731
    prompt, output = [*few(9), 1], few(9)
    output += output[:3]
    params = SamplingParams(
        presence_penalty=rng.choice([0, 0.7, -1]),
        frequency_penalty=rng.choice([0, 0.4, -2]),
        repetition_penalty=rng.choice([1, 1.5, 0.5]),
        logit_bias={token: float(rng.normal(0, 5)) for token in few(5)},
        allowed_token_ids=sorted({*few(vocab), 2}) if rng.random() < 0.5 else None,
        min_tokens=int(rng.choice([0, len(output), len(output) + 1])),
        max_tokens=99,
    )
    bad_words = [few(1), [*output[-2:], 5], [*output[-1:], 6], [5, *few(2)]]
    return params, prompt, output, few(3), [word for word in bad_words if word]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [40, 300, BLOCK + 45])
def test_every_rule_is_numpys(vocab, implementation):
    rng = np.random.default_rng(vocab)
    places, count = 7, 6 if vocab > BLOCK else 20

    def rows(rules, row, new):
        packed = np.zeros((1, new.packed_len), np.int32)
        new.pack_into(packed[0])
        return set_row(rules, row[None], packed)

    set_row = jax.jit(lambda rules, rows, packed: set_rules(rules, rows, packed))
    apply = jax.jit(apply_rules, static_argnames="implementation")
    for _ in range(count // 5 + 1):
        logits = (rng.standard_normal((5, vocab)) * 4).astype(np.float32)
        place = rng.permutation(places)[:5].astype(np.int32)
        rules, expected, last, position = LogitRules.empty(places, vocab), [], [], []
        for row in range(5):
            params, prompt, output, end_ids, bad_words = random_rules(rng, vocab)
            said = array("i", prompt + output)
            if row == 2:  # asks for nothing, where something was asked before
                rules = rows(rules, place[row], TokenRules(params, 1, vocab).row(array("i", [3])))
                rules = rows(rules, place[row], no_rules(vocab))
                expected.append(logits[row])
            else:
                own = TokenRules(params, len(prompt), vocab, end_ids=end_ids, bad_words=bad_words)
                rules = rows(rules, place[row], own.row(said))
                expected.append(ruled(logits[row], params, prompt, output, end_ids=end_ids, bad_words=bad_words))
            last.append(said[-1])
            position.append(len(said))
        before = np.asarray(rules.counts)
        arguments = (jnp.asarray(np.asarray(a, np.int32)) for a in (place, last, position))
        got, after = apply(jnp.asarray(logits), rules, *arguments, implementation=implementation)
        asks = np.asarray(rules.asks)[place] > 0
        assert asks.tolist() == [True, True, False, True, True]
        kept = asks if implementation != "xla" else np.ones(5, bool)
        np.testing.assert_allclose(np.asarray(got)[kept], np.array(expected)[kept], rtol=1e-5, atol=1e-5)
        counted = np.asarray(after.counts) - before
        for row in range(5):
            is_output = asks[row] and position[row] > np.asarray(rules.prompt_len)[place[row]]
            assert counted[place[row], last[row]] == 2 * is_output, "the token before the new one, once"
            counted[place[row], last[row]] = 0
        assert not counted.any()


def test_the_kernels_lower_for_cuda_in_place():
    """The counts are updated where they are; the logits as the model gave them stay for log-probabilities."""
    rules = jax.eval_shape(lambda: LogitRules.empty(9, 5000))
    leaves, tree = jax.tree.flatten(rules)
    integers = [jax.ShapeDtypeStruct((8,), jnp.int32)] * 3

    def run(logits, leaves, *rest):
        return apply_rules(logits, tree.unflatten(leaves), *rest, implementation="pallas")

    with an_h200():
        traced = jax.jit(run, donate_argnums=1).trace(jax.ShapeDtypeStruct((8, 5000), jnp.float32), leaves, *integers)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "output_operand_alias" in text and "operand_index = 13" in text, "the counts, and nothing else"


def test_the_limits_are_the_kernels():
    assert (request.MAX_BIASES, request.MAX_LOGPROBS) == (MAX_BIASES, MAX_LOGPROBS)


# One row's arrays -----------------------------------------------------------------------------------------------------


def test_a_row_counts_all_but_the_last_token_and_the_prompt_once():
    """Resuming turns outputs into prompt: vllm-metal#128, vllm#5349 (C49)."""
    rules = TokenRules(SamplingParams(presence_penalty=1, min_tokens=2, max_tokens=9), 3, 70, end_ids=[69, 31])
    row = rules.row(array("i", [5, 5, 8, 8, 9, 9]))
    assert {int(token): int(row.counts[token]) for token in np.flatnonzero(row.counts)} == {5: 1, 8: 3, 9: 2}
    assert rules.row(array("i", [5, 5, 8])).counts.sum() == 2
    assert (row.prompt_len, row.until, row.asks, row.banned.any()) == (3, 5, 1, False)
    assert row.banned_early.tolist() == [1 << 31, 0, 1 << 5], "bit t % 32 of word t // 32"


def test_a_bad_word_is_banned_where_its_head_was_said():
    rules = TokenRules(SamplingParams(), 2, 64, bad_words=[[7], [3, 4], [9, 3, 5]], processors=[0, 2])
    assert rules.needs_tokens and rules.asks == 0b1011
    assert not TokenRules(SamplingParams(), 2, 64, bad_words=[[7]]).needs_tokens
    for said, ends in [([1, 3], []), ([1, 3, 3], [4]), ([9, 9, 3], [4]), ([1, 9, 9, 3], [4, 5]), ([1, 9, 3, 9], [])]:
        assert rules.ends_of_phrases(array("i", said)) == ends, "of the output, not of the prompt"
        row = rules.row(array("i", said))
        assert {t for t in range(64) if row.banned[t // 32] >> np.uint32(t % 32) & 1} == {7, *ends}
    assert no_rules(64).asks == 0 and {len(getattr(no_rules(64), f)) for f in ("banned", "banned_early")} == {2}
    assert no_rules(64)._fields == LogitRules._fields


# The engine -----------------------------------------------------------------------------------------------------------


def check_ruled(output, params: SamplingParams, end_ids=(), bad_words=()) -> None:
    """Every token is the best by the oracle's logits and numpy's rules, or within SURE of it."""
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    logits = oracle_of(tiny_folder()).logits([*prompt, *answer][:-1])[len(prompt) - 1 :]
    for i, token in enumerate(answer):
        x = ruled(logits[i], params, prompt, answer[:i], end_ids=end_ids, bad_words=bad_words)
        assert x.max() - x[token] < SURE, f"token {i} of {answer}: {token}, not {x.argmax()}"


RULES = {
    "repetition": {"repetition_penalty": 1.5},
    "rewarded": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0, "presence_penalty": -0.5, "logit_bias": {7: 80.0}},
    "bias": {"logit_bias": {7: 60.0, 9: 61.0, 16: -100.0}, "frequency_penalty": 2.0},
    "allowed": {"allowed_token_ids": list(range(50, 90)), "repetition_penalty": 1.2},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {9: 30.0},
        "allowed_token_ids": list(range(4, 200)), "min_tokens": 5, "stop_token_ids": [5],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_engine_follows_the_rules_whatever_is_cached(name):
    """Penalties do not see the cached part of the prompt: llama.cpp#8971, omlx#960 (C48)."""
    llm, params = make_llm(), greedy(14, **RULES[name])
    (stem,) = random_prompts(5, 48)
    prompts = [stem, stem[:32] + [stem[3]] * 4, stem[:40]]
    plain = tokens_of(generate(llm, prompts, greedy(14)))
    for hits in ([0, 32, 39], [47, 35, 39]):
        if not hits[0]:
            forget(llm)
        outputs = [generate(llm, [prompt], params)[0] for prompt in prompts]
        assert cached_of(outputs) == hits
        for output in outputs:
            check_ruled(output, params, end_ids=params.stop_token_ids)
        assert tokens_of(outputs) != plain
    together = generate(llm, prompts, [params, greedy(14), params])
    assert tokens_of(together) == [tokens_of(outputs)[0], plain[1], tokens_of(outputs)[2]], "each row its own"


def test_a_row_forgets_the_rules_of_its_last_owner():
    """A recycled row keeps the previous request's settings: vllm#43894 (C45)."""
    llm = make_llm(max_num_seqs=2, num_pages=32, max_model_len=64, max_num_batched_tokens=16)
    rng = np.random.default_rng(0)
    prompts = random_prompts(6, *([9] * 40))
    choices = [greedy(5), *(greedy(int(rng.integers(1, 7)), **RULES[name]) for name in RULES if name != "all")]
    params = [choices[rng.integers(len(choices))] for _ in prompts]
    alone = [tokens_of(generate(llm, [prompt], own))[0] for prompt, own in zip(prompts, params, strict=True)]
    forget(llm)
    assert tokens_of(generate(llm, prompts, params)) == alone


def test_preemption_keeps_the_counts():
    """After a preemption past tokens count as prompt, or counters restart: vllm-metal#128, vllm#5349 (C49)."""
    llm = make_llm(**TIGHT)
    prompts = random_prompts(7, 20, 21, 22, 23)
    params = greedy(20, presence_penalty=2.0, frequency_penalty=1.0, min_tokens=10, repetition_penalty=1.2)
    alone = [tokens_of(generate(llm, [prompt], params))[0] for prompt in prompts]
    forget(llm)
    outputs = generate(llm, prompts, params)
    assert tokens_of(outputs) == alone and llm.stats["preemptions"] > 0
    assert [len(output.prompt_token_ids) for output in outputs] == [20, 21, 22, 23]
    for output in outputs:
        check_ruled(output, params, end_ids=llm.tokenizer.eos_ids)


def test_a_bad_word_never_comes_also_across_a_token_that_is_in_flight():
    llm = make_llm(**SMALL)
    (prompt,) = random_prompts(8, 20)
    (said,) = tokens_of(generate(llm, [prompt], greedy(12)))
    for word in (said[3:4], said[2:4], said[4:7]):
        llm.tokenizer.encode_word = lambda text, word=word: [word]
        try:
            (output,) = generate(llm, [prompt], greedy(12, bad_words=["x"]))
        finally:
            del llm.tokenizer.encode_word
        answer = output.outputs[0].token_ids
        assert answer != said and all(answer[i : i + len(word)] != word for i in range(12))
        check_ruled(output, greedy(12), bad_words=[word])
    assert tokens_of(generate(llm, [prompt], greedy(12))) == [said]


def test_bad_words_are_encoded_with_a_space_in_front_and_without():
    """However they are given, as in vLLM; white space alone as it stands."""
    llm = make_llm()
    encode = llm.tokenizer.encode_rendered
    assert encode("the") != encode(" the")
    for word in ("the", " the", "\tthe"):
        assert llm.tokenizer.encode_word(word) == [encode("the"), encode(" the")]
    assert llm.tokenizer.encode_word("\n") == [encode("\n")]


def test_the_bans_alone_cross_from_the_host_and_only_when_they_change(monkeypatch):
    llm = make_llm()
    (prompt,) = random_prompts(8, 20)
    penalties = {"frequency_penalty": 1.0, "presence_penalty": 0.5}
    (said,) = tokens_of(generate(llm, [prompt], greedy(12, **penalties)))
    phrases = [said[2:4], said[6:8]]
    monkeypatch.setattr(llm.tokenizer, "encode_word", lambda text: phrases)
    forget(llm)
    dispatch, batches = llm.engine.runner.dispatch, []
    monkeypatch.setattr(llm.engine.runner, "dispatch", lambda batch: (batches.append(batch), dispatch(batch))[1])
    (output,) = generate(llm, [prompt], greedy(12, bad_words=["x"], **penalties))
    check_ruled(output, greedy(12, **penalties), bad_words=phrases)
    assert sum(len(batch.rules) for batch in batches) == 1
    begun = [any(token == phrase[0] for phrase in phrases) for token in [0, *output.outputs[0].token_ids[:-1]]]
    assert sum(len(batch.bans) for batch in batches) == sum(a != b for a, b in itertools.pairwise(begun)) > 0


def test_rules_that_leave_no_token_are_refused():
    """The first of the vocabulary would be drawn."""
    llm = make_llm()
    a, b = ([token] for token in (llm.encode("a")[0], llm.encode("b")[0]))
    prompts = random_prompts(9, *[5] * 5)
    params = [
        greedy(4, allowed_token_ids=a, bad_words=["a"]),
        greedy(4, allowed_token_ids=a, stop_token_ids=a, min_tokens=2),
        greedy(4, allowed_token_ids=a, stop_token_ids=a),
        greedy(4, allowed_token_ids=a + b, bad_words=["a"]),
        greedy(4),
    ]
    outputs = generate(llm, prompts, params, on_error="return")
    assert [output.error for output in outputs] == [
        "allowed_token_ids and bad_words leave no token",
        "allowed_token_ids and bad_words leave only tokens that end the answer, min_tokens is 2",
        None,
        None,
        None,
    ]
    assert tokens_of(outputs)[2:4] == [a, b * 4]


def test_an_answer_ends_where_its_bad_words_leave_no_token(monkeypatch):
    llm = make_llm()
    prompts = random_prompts(10, 5, 6)
    expected = generate(llm, prompts[1:], greedy(9))
    monkeypatch.setattr(llm.tokenizer, "encode_word", lambda text: [[7, 8, 7], [7, 8, 8], [8, 7], [7, 7]])
    stuck, other = generate(
        llm, prompts, [greedy(9, allowed_token_ids=[7, 8], bad_words=["x"], logit_bias={7: 99}), greedy(9)]
    )
    (answer,) = stuck.outputs
    assert (answer.token_ids, answer.finish_reason) == ([7, 8], "length")
    assert answer.stop_reason == "allowed_token_ids and bad_words leave no token"
    assert other.outputs == expected[0].outputs
    monkeypatch.setattr(llm.tokenizer, "encode_word", lambda text: [[8, 7]])
    early = greedy(9, allowed_token_ids=[7, 8], bad_words=["x"], stop_token_ids=[8], min_tokens=5, logit_bias={7: 99})
    assert tokens_of(generate(llm, prompts[:1], early)) == [[7] * 9]


@pytest.mark.parametrize("min_tokens", [250, 2**31 - 1])
def test_min_tokens_beyond_the_room_end_with_it(min_tokens):
    """As in vLLM, which only keeps the end tokens away; and the others in the step never notice."""
    llm = make_llm(**TINY)
    prompts = random_prompts(11, 112, 20)
    expected = tokens_of(generate(llm, prompts, greedy(None)))
    params = [greedy(None, min_tokens=min_tokens, stop_token_ids=[expected[0][3]]), greedy(9)]
    endless, other = generate(llm, prompts, params)
    (answer,) = endless.outputs
    assert (len(answer.token_ids), answer.finish_reason) == (16, "length")
    assert answer.stop_reason == "the context of 128 tokens is full" and expected[0][3] not in answer.token_ids
    assert tokens_of([other]) == [expected[1][:9]]


def test_ids_out_of_the_vocabulary_are_refused_one_by_one():
    """They index the logits of a neighbour: vllm#54195, vllm#16529 (C46)."""
    llm = make_llm()
    prompts = random_prompts(9, 5, 5)
    good = tokens_of(generate(llm, prompts[:1], greedy(4)))
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token in (300, 1300, -1, 2**31):
            value = {token: 1.0} if name == "logit_bias" else [4, token]
            refused = greedy(4, **{name: value})
            ok, bad = generate(llm, prompts, [greedy(4), refused], on_error="return")
            assert bad.error == f"{name} must be in [0, 300), got [{token}]"
            assert tokens_of([ok]) == good


def test_processors_come_last_and_see_what_was_said():
    """A function of a request's logits, compiled with the step."""

    def never_again(logits, context):
        return jnp.where(context.output_counts > 0, -jnp.inf, logits)

    def odd(logits, context):
        token = jnp.arange(logits.shape[0])
        return jnp.where((token + context.position) % 2 == 1, logits, -jnp.inf)

    llm = make_llm(**SMALL, logits_processors=FrozenDict(odd=odd, never_again=never_again))
    (prompt,) = random_prompts(10, 20)
    plain = generate(llm, [prompt], greedy(10))
    outputs = generate(llm, [prompt] * 4, [greedy(10), greedy(10, logits_processors=["odd"]),
                       greedy(10, logits_processors=[never_again]), greedy(10, logits_processors=["odd", "never_again"])])  # fmt: skip # noqa: E501
    assert tokens_of(outputs[:1]) == tokens_of(plain)
    for output, parity, once in zip(outputs[1:], (True, False, True), (False, True, True), strict=True):
        answer = output.outputs[0].token_ids
        logits = oracle_of(tiny_folder()).logits([*prompt, *answer][:-1])[19:]
        for i, token in enumerate(answer):
            x = logits[i].copy()
            if parity:
                x[(np.arange(300) + 20 + i) % 2 == 0] = -np.inf
            if once:
                x[answer[:i]] = -np.inf
            assert x.max() - x[token] < SURE
    (bad,) = generate(llm, [prompt], greedy(3, logits_processors=["even"]), on_error="return")
    assert "logits_processors must be among those given to LLM" in bad.error and "odd, never_again" in bad.error


class FrozenDict(dict):
    """Of options by which engines of tests are kept."""

    def __hash__(self):
        return hash(tuple(self))


def test_a_processor_that_returns_something_else_is_named_at_the_start():
    for wrong, got in [
        (lambda logits, context: logits[:-1], r"float32\[299\]"),
        (lambda logits, context: logits.argmax(), r"int32\[\]"),
        (lambda logits, context: None, "nothing"),
    ]:
        with pytest.raises(ValueError, match=rf"the logits processor .*lambda.* must return float32\[300\], got {got}"):
            LLM(tiny_folder(), use_tqdm=False, logits_processors={"wrong": wrong}, **SMALL)
