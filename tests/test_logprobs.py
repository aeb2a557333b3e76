"""Log-probabilities of output and prompt: of the logits as the model gives them, whatever is cached or in the batch."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    SMALL,
    TIGHT,
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
from scipy.special import log_softmax
from test_kernel_lowering import an_h200

from pallas_kernels.logprobs import BLOCK, MAX_LOGPROBS, logprobs
from prefix_jax import SamplingParams

IMPLEMENTATIONS = ["xla", "pallas_interpret"]
CLOSE = 2e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [5, 300, BLOCK + 9])
def test_the_kernel_is_numpys(vocab, implementation):
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((6, vocab)) * 5).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, ::2] = -np.inf
    num_top = np.array([0, 20, 3, -1, 1, 7], np.int32)
    token = rng.integers(0, vocab, 6).astype(np.int32)
    token[2] |= 1
    run = jax.jit(logprobs, static_argnames="implementation")
    found = run(*map(jnp.asarray, (logits, token, num_top)), implementation=implementation)
    assert found.top_tokens.shape == (6, min(MAX_LOGPROBS, vocab))
    for row in (0, 1, 2, 4, 5):
        expected = log_softmax(logits[row].astype(np.float64))
        np.testing.assert_allclose(found.logprob[row], expected[token[row]], atol=2e-5)
        assert found.rank[row] == 1 + (logits[row] > logits[row, token[row]]).sum()
        top = min(num_top[row], vocab, int(np.isfinite(logits[row]).sum()))
        order = np.argsort(-logits[row], kind="stable")[:top]
        assert np.asarray(found.top_tokens)[row, :top].tolist() == order.tolist()
        np.testing.assert_allclose(np.asarray(found.top_logprobs)[row, :top], expected[order], atol=2e-5)


def test_nothing_is_computed_for_a_batch_that_asks_for_nothing():
    found = logprobs(jnp.ones((3, 9)), jnp.zeros(3, jnp.int32), jnp.full(3, -1), implementation="xla")
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(found))


def test_the_kernel_lowers_for_cuda():
    ints = jax.ShapeDtypeStruct((8,), jnp.int32)
    with an_h200():
        traced = jax.jit(lambda *a: logprobs(*a, implementation="pallas")).trace(jax.ShapeDtypeStruct((8, 5000), jnp.float32), ints, ints)  # fmt: skip # noqa: E501
        assert "logprobs" in traced.lower(lowering_platforms=("cuda",)).as_text()


# In the engine --------------------------------------------------------------------------------------------------------


def check_positions(found, tokens, logits, num_top: int) -> None:
    """Entries of consecutive positions against the oracle's logits there."""
    assert len(found) == len(tokens) == len(logits)
    for entry, token, x in zip(found, tokens, logits, strict=True):
        expected = log_softmax(np.asarray(x, np.float64))
        assert next(iter(entry)) == token, "the position's own token comes first"
        assert num_top <= len(entry) <= num_top + 1
        for other, of in entry.items():
            assert abs(of.logprob - expected[other]) < CLOSE * max(1, abs(expected[other]))
            assert abs((x > x[other]).sum() + 1 - of.rank) <= ((x - x[other]) ** 2 < 1e-4).sum() - 1
        ranks = [of.rank for other, of in entry.items() if other != token]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.1, "seed": 1}, {"temperature": 2.0, "seed": 2},
        {"temperature": 1.0, "seed": 3, "logit_bias": {7: 50.0}, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"temperature": 1.0, "seed": 4, "allowed_token_ids": [4, 5, 6]},
    ],
)  # fmt: skip
def test_they_are_of_the_logits_before_all_else(params):
    """Values change with temperature or penalties, or -inf breaks JSON: vllm#9453 (C55)."""
    llm = make_llm()
    prompts = random_prompts(11, 20, 7)
    asked = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=4, **params)
    unasked = SamplingParams(max_tokens=6, ignore_eos=True, **params)
    plain = tokens_of(generate(llm, prompts, unasked))
    outputs = generate(llm, [*prompts, *random_prompts(12, 9)], [asked, asked, greedy(9)])
    assert tokens_of(outputs[:2]) == plain, "asking changes no token"
    assert outputs[2].outputs[0].logprobs is None and outputs[2].outputs[0].cumulative_logprob is None
    for output in outputs[:2]:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        logits = oracle_of(tiny_folder()).logits([*prompt, *answer.token_ids][:-1])[len(prompt) - 1 :]
        check_positions(answer.logprobs, answer.token_ids, logits, 4)
        own = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert answer.cumulative_logprob == list(itertools.accumulate(own))[-1]
        json.dumps([[of.logprob for of in entry.values()] for entry in answer.logprobs], allow_nan=False)
        decoded = [entry[token].decoded_token for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert decoded == [llm.tokenizer.decode([token], skip_special_tokens=False) for token in answer.token_ids]


def test_without_text_no_token_is_spelled():
    llm = make_llm()
    (prompt,) = random_prompts(11, 9)
    (output,) = generate(llm, [prompt], greedy(3, logprobs=2, prompt_logprobs=1, detokenize=False))
    entries = [of for entry in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]] for of in entry.values()]
    assert len(entries) >= 9 + 8 and {of.decoded_token for of in entries} == {None}


def test_each_delta_has_the_sum_so_far():
    llm = make_llm()
    (prompt,) = random_prompts(11, 9)
    deltas = [delta.outputs[0] for delta in llm.stream([prompt], greedy(6, logprobs=0))]
    own = [
        entry[token].logprob for delta in deltas for entry, token in zip(delta.logprobs, delta.token_ids, strict=True)
    ]
    assert len(deltas) == 6 and [delta.cumulative_logprob for delta in deltas] == list(itertools.accumulate(own))


def check_prompt(output, num_top: int, score_from: int = 1) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs[:score_from] == [None] * score_from and len(output.prompt_logprobs) == len(prompt)
    logits = oracle_of(tiny_folder()).logits(prompt)[score_from - 1 : -1]
    check_positions(output.prompt_logprobs[score_from:], prompt[score_from:], logits, num_top)


@pytest.mark.parametrize("budget", [64, 16, 3])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 80])
def test_the_prompts_are_the_same_cold_and_warm(length, budget):
    """Only uncached positions have logits, so values shift: vllm#8268, vllm#3251, vllm#42019 (C53). A chunk that does
    not end the prompt yields a token: vllm#4139 (C52)."""
    llm = make_llm()
    llm.engine.scheduler.max_num_batched_tokens = budget
    (prompt,) = random_prompts(13, 80)
    prompt = prompt[:length]
    params = greedy(3, prompt_logprobs=2, logprobs=1)
    (plain,) = tokens_of(generate(llm, [prompt], greedy(3)))
    forget(llm)
    outputs = [generate(llm, [prompt], params)[0] for _ in range(2)]
    num_pages = (length + 2) // 16  # the last token of the output is never computed
    for output in outputs:
        check_prompt(output, 2)
        assert tokens_of([output]) == [plain] and len(output.outputs[0].logprobs) == 3
    ends = ["one token" if length == 1 else "new", "scored" if num_pages else "one token" if length == 1 else "new"]
    assert [output.hit_end.reason for output in outputs] == ends
    assert cached_of(outputs) == [0, 0], "all positions are computed again, on top of the pages that are there"
    assert cached_of(generate(llm, [prompt], greedy(3))) == [min(length - 1, 16 * num_pages)]
    assert llm.stats["published_pages"] == num_pages, "nothing is published twice"


@pytest.mark.parametrize("length", [2, 12, 80])
def test_an_answer_that_ends_at_once_loses_no_score(length):
    llm = make_llm()
    (prompt,) = random_prompts(19, 80)
    (output,) = generate(llm, [prompt[:length]], greedy(1, prompt_logprobs=1, seed=np.int64(5)))
    check_prompt(output, 1)


def test_overlapping_prompts_in_both_orders_and_side_by_side():
    """C53, and pages that others fill in the same step."""
    llm = make_llm()
    (stem,) = random_prompts(14, 40)
    prompts = [stem, [*stem[:33], 9, 8, 7], stem[:16], stem]
    params = [greedy(2, prompt_logprobs=i) for i in (0, 3, 1)] + [greedy(2)]
    alone = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        forget(llm)
        outputs = {i: generate(llm, [prompts[i]], params[i])[0] for i in order}
        for i in (0, 1, 2):
            check_prompt(outputs[i], params[i].prompt_logprobs)
        alone.append([tokens_of([outputs[i]]) for i in range(4)])
    assert alone[0] == alone[1]
    forget(llm)
    outputs = generate(llm, prompts, params)
    assert [tokens_of([output]) for output in outputs] == alone[0] and outputs[3].prompt_logprobs is None
    for output, own in zip(outputs[:3], params, strict=False):
        check_prompt(output, own.prompt_logprobs)


def test_only_what_was_asked_for_is_computed_again():
    """A continuation is scored behind a cached prompt: its positions and the one before are computed, no others."""
    llm = make_llm()
    (prompt,) = random_prompts(15, 64)
    generate(llm, [prompt], greedy(1))
    before = llm.stats["computed_tokens"]
    asked = [{"prompt_token_ids": prompt[:60] + tail, "score_from": 60} for tail in ([4, 5], [6], prompt[60:])]
    outputs = generate(llm, asked, greedy(0, prompt_logprobs=0))
    assert cached_of(outputs) == [59, 59, 59]
    assert llm.stats["computed_tokens"] - before == 2 + 1 + 4, "the last token's own logits are nobody's"
    for output in outputs:
        check_prompt(output, 0, score_from=60)
        (answer,) = output.outputs
        assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == ([], "", "length", None)


def test_zero_tokens_score_and_nothing_else():
    """vllm#6521 (C65)."""
    llm = make_llm()
    outputs = generate(llm, [[5], [5, 6], list(range(4, 4 + 256))], greedy(0, prompt_logprobs=1))
    assert tokens_of(outputs) == [[], [], []] and outputs[0].prompt_logprobs == [None]
    for output in outputs:
        check_prompt(output, 1)
    assert not llm.engine.sequences and not llm.engine.has_work
    for score_from, error in ((0, "at least 1"), (True, "an integer")):
        (bad,) = generate(llm, [{"prompt_token_ids": [5, 6], "score_from": score_from}], greedy(0, prompt_logprobs=1), on_error="return")  # fmt: skip # noqa: E501
        assert error in bad.error
    (output,) = generate(llm, [{"prompt_token_ids": [5, 6], "score_from": 9}], greedy(0, prompt_logprobs=1))
    assert output.prompt_logprobs == [None, None]


def test_more_positions_than_a_step_reads_logits_for_and_a_pool_that_is_tight():
    """Scores of several prompts at once share the rows of logits; preempted in the middle they go on from there."""
    llm = make_llm(**TIGHT)
    prompts = random_prompts(16, 20, 30, 25, 28, 22)
    params = [greedy(12, prompt_logprobs=1), greedy(12), greedy(12, prompt_logprobs=0), greedy(0, prompt_logprobs=2), greedy(12)]  # fmt: skip # noqa: E501
    alone = [generate(llm, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    forget(llm)
    seen = []
    schedule = llm.engine.scheduler.schedule
    llm.engine.scheduler.schedule = lambda: (plan := schedule(), seen.append(plan.num_reads))[0]
    try:
        outputs = generate(llm, prompts, params)
    finally:
        del llm.engine.scheduler.schedule
    assert max(seen) == 4 == llm.engine.max_num_seqs and llm.stats["preemptions"] > 0
    assert tokens_of(outputs) == tokens_of(alone)
    for output, own in zip(outputs, params, strict=True):
        if own.prompt_logprobs is not None:
            check_prompt(output, own.prompt_logprobs)


def test_a_failed_step_loses_no_score(monkeypatch):
    llm = make_llm(**SMALL)
    (prompt,) = random_prompts(17, 60)
    expected = generate(llm, [prompt], greedy(4, prompt_logprobs=1))[0]
    forget(llm)
    runner, calls = llm.engine.runner, []
    dispatch = runner.dispatch

    def fail_once(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("device")
        return dispatch(batch)

    monkeypatch.setattr(runner, "dispatch", fail_once)
    (output,) = generate(llm, [prompt], greedy(4, prompt_logprobs=1))
    assert len(calls) > 4 and tokens_of([output]) == tokens_of([expected])
    check_prompt(output, 1)


# Scores ---------------------------------------------------------------------------------------------------------------


def test_a_score_is_the_sum_over_the_continuation():
    llm = make_llm()
    (prompt,) = random_prompts(18, 30)
    continuations = [[5, 6, 7], [9], generate(llm, [prompt], greedy(3))[0].outputs[0].token_ids]
    forget(llm)
    scores = llm.score([prompt], continuations, use_tqdm=False)
    for score, tail in zip(scores, continuations, strict=True):
        logits = oracle_of(tiny_folder()).logits(prompt + tail)[29:-1]
        expected = [log_softmax(x)[token] for x, token in zip(logits, tail, strict=True)]
        np.testing.assert_allclose(score.token_logprobs, expected, rtol=CLOSE, atol=CLOSE)
        assert score.logprob == sum(score.token_logprobs) and score.token_ids == tail
        assert score.is_greedy == all(x.argmax() == token for x, token in zip(logits, tail, strict=True))
    assert [score.is_greedy for score in scores] == [False, False, True]
    assert llm.stats["computed_prompt_tokens"] <= 32 + 3 * 16 + 7, "the prompt's full pages are computed once"


def test_texts_are_cut_where_the_prompt_alone_would_end():
    llm = make_llm()
    (score,) = llm.score("the hen ", ["and the other"], use_tqdm=False)
    whole, head = llm.encode(["the hen and the other", "the hen"])
    assert score.token_ids == whole[len(head) :] and llm.encode("the hen") == head
    for bad, error in [
        ((["a"], [[5]]), "both be text"),
        (([[5]], [[]]), "has no tokens, got \\[\\]"),
        (("a", ["b", "", "c"]), r"1 of 3 prompts cannot run.*\n  prompts\[1\]: the continuation has no tokens, got ''"),
        (([[]], [[5]]), "nothing stands before"),
        ((["a", "b"], ["c"]), "1 continuations for 2 prompts"),
    ]:
        with pytest.raises(ValueError, match=error):
            llm.score(*bad, use_tqdm=False)


def test_one_continuation_may_stand_alone():
    llm = make_llm()
    for prompt, continuation in [("the hen", " and the other"), ([5, 6, 7], [8, 9])]:
        assert llm.score(prompt, continuation, use_tqdm=False) == llm.score([prompt], [continuation], use_tqdm=False)
    (score,) = llm.score([5], [6], use_tqdm=False)
    assert score.token_ids == [6]


def test_a_token_that_takes_the_whole_continuation_in_is_scored():
    """The prompt alone would end with other tokens."""
    llm = make_llm()
    whole = llm.encode("on the")
    assert len(whole) < len(llm.encode("on th")) + 1 and whole[:-1] == llm.encode("on")
    scores = llm.score("on th", ["e", "a"], use_tqdm=False)
    assert [score.token_ids for score in scores] == [whole[-1:], llm.encode("on tha")[-1:]]
    with pytest.raises(ValueError, match="nothing stands before the continuation's first token"):
        llm.score("th", "e", use_tqdm=False)


def test_a_score_that_was_aborted_is_none(monkeypatch):
    llm = make_llm()
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: ([llm.abort(name) for name in llm.engine.sequences], step())[1])
    with pytest.raises(RuntimeError, match="a continuation was not scored: abort"):
        llm.score(random_prompts(18, 30), [[5, 6]], use_tqdm=False)


def test_every_pair_that_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match=r"(?s)\[1\].*\[2\]"):
        make_llm().score([[1, 2], None, [3]], [[3], [4], 5.5])
