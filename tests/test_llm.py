"""What a caller gets from LLM: results in order, reasons, texts and prefixes."""

import gc
import gzip
import json

import numpy as np
import pytest
from engines import (
    TINY,
    IdealCache,
    cached_of,
    check_greedy,
    compiling_once,
    generate,
    greedy,
    home,
    make_llm,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from safetensors.numpy import load_file
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, BeamSearchParams, SamplingParams, pauses
from prefix_jax.pauses import no_full_collections
from prefix_jax.request import RequestOutput

SMALL_POOL = {**TINY, "num_pages": 3, "max_num_seqs": 1}


@pytest.fixture
def llm() -> LLM:
    return make_llm()


# Results --------------------------------------------------------------------------------------------------------------


def test_prompts_are_texts_token_lists_and_dicts(llm):
    text = "the hen and the other one"
    ids = llm.tokenizer.encode(text)
    forms = [
        text,
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": "shown, not read", "prompt_token_ids": ids},
    ]
    outputs = generate(llm, forms)
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, None, None, text, None, "shown, not read"]
    assert len(set(map(tuple, tokens_of(outputs)))) == 1
    check_greedy(outputs[:1])
    for single in (text, ids, {"prompt_token_ids": ids}):
        assert tokens_of(generate(llm, single)) == tokens_of(outputs[:1])
    assert generate(llm, []) == []


def test_a_conversation_goes_through_the_chat_template(llm):
    (output,) = generate(llm, {"messages": [{"role": "user", "content": "and?"}]})
    assert output.prompt == "<|user|>and?<|end|><|assistant|>"
    assert output.prompt_token_ids == llm.tokenizer.encode_chat([{"role": "user", "content": "and?"}])


def test_an_output_says_all_about_its_request(llm):
    (output,) = generate(llm, {"prompt": "the end", "request_id": "mine"}, greedy(5))
    assert isinstance(output, RequestOutput) and output.finished and output.error is None
    assert output.request_id == "mine"
    (answer,) = output.outputs
    assert (answer.index, answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == (0, "length", None, 5)
    assert answer.text == llm.tokenizer.decode(output.prompt_token_ids + answer.token_ids)[len("the end") :]
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time
    assert "mine" in str(output)


def test_results_come_in_the_order_of_the_prompts_and_are_shown_as_they_finish(llm):
    prompts = random_prompts(0, *range(1, 13))
    params = [greedy(14 - i) for i in range(12)]
    shown = []
    outputs = generate(llm, prompts, params, on_output=shown.append)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [14 - i for i in range(12)]
    assert sorted(output.request_id for output in shown) == sorted(output.request_id for output in outputs)
    assert [output.request_id for output in shown] != [output.request_id for output in outputs]


def test_own_request_ids_never_meet_those_that_are_made_up(llm):
    start = int(generate(llm, [[5]], greedy(1))[0].request_id)
    taken = [{"prompt_token_ids": [5 + i], "request_id": str(start + 1 + i)} for i in range(3)]
    outputs = generate(llm, [[9], *taken, [10]], greedy(1))
    assert [output.request_id for output in outputs[1:4]] == [str(start + 1 + i) for i in range(3)]
    assert len({output.request_id for output in outputs}) == 5


def test_unseeded_requests_differ_and_say_their_seed(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = generate(llm, [[7, 8, 9]] * 2, params)
    assert tokens_of([first]) != tokens_of([second])
    again = generate(llm, [[7, 8, 9]], SamplingParams(max_tokens=20, ignore_eos=True, seed=first.seed))
    assert tokens_of(again) == tokens_of([first])


# How an answer ends ---------------------------------------------------------------------------------------------------


@pytest.fixture
def said(llm) -> RequestOutput:
    """The greedy answer whose tokens and text the tests below stop at."""
    (output,) = generate(llm, random_prompts(3, 9), greedy(30))
    make_llm()
    return output


def test_a_stop_string_ends_the_text_before_it_wherever_token_borders_are(llm, said):
    """A stop string across token borders is missed, or a part of it shown (C56)."""
    text, tokens = said.outputs[0].text, said.outputs[0].token_ids
    for start, length in [(2, 1), (3, 2), (5, 4), (1, 7)]:
        stop = text[start : start + length]
        (output,) = generate(llm, [said.prompt_token_ids], greedy(30, stop=["never said", stop]))
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: text.find(stop)]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        decoded = llm.tokenizer.decode(said.prompt_token_ids + answer.token_ids[:-1])
        assert stop not in decoded[len(llm.tokenizer.decode(said.prompt_token_ids)) :], "not one token late"


def test_a_stop_string_that_never_comes_changes_nothing(llm, said):
    (output,) = generate(llm, [said.prompt_token_ids], greedy(30, stop="never said"))
    assert output.outputs == said.outputs


def test_a_stop_token_ends_the_answer_and_stays_in_its_tokens(llm, said):
    tokens = said.outputs[0].token_ids
    stop = tokens[6]
    first = tokens.index(stop)
    texts = set()
    for stop_strings in ((), ("never said",)):
        params = greedy(30, stop_token_ids=(stop, 299 if stop != 299 else 298), stop=stop_strings)
        answer = generate(llm, [said.prompt_token_ids], params)[0].outputs[0]
        assert answer.token_ids == tokens[: first + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        texts.add(answer.text)
    assert len(texts) == 1, "the text is the same with stop strings and without"


@pytest.fixture(scope="module")
def ended() -> LLM:
    """EOS ids in all three places: the tokenizer's is 0."""
    weights = load_file(tiny_folder() / "model.safetensors")
    folder = write_checkpoint(home() / "other_ends", tiny_config(eos_token_id=[0, 7]), weights)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    with compiling_once():
        return LLM(folder, use_tqdm=False, **TINY)


@pytest.mark.parametrize(("end", "reason"), [(0, None), (7, 7), (9, 9), (11, 11)])
def test_every_end_token_ends_the_answer_and_all_but_the_tokenizers_are_named(ended, end, reason):
    """Only one of several EOS ids is honoured: vllm#4180, vllm#4182, mlx-vlm#2112 (C62). As in vLLM the others count as
    stop_token_ids, which are named, and the tokenizer's own is not, whoever else asks for it."""
    (prompt,) = random_prompts(3, 9)
    forced = {"ignore_eos": False, "logit_bias": {end: 100.0}, "min_tokens": 2}
    for stop in ((), (end,), (9,)):
        answer = generate(ended, [prompt], greedy(30, stop_token_ids=stop, **forced))[0].outputs[0]
        assert len(answer.token_ids) >= 3 and answer.token_ids.index(end) == len(answer.token_ids) - 1
        assert (answer.finish_reason, answer.stop_reason) == ("stop", reason)
    answer = generate(ended, [prompt], greedy(6, allowed_token_ids=[end]))[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == ([end] * 6, "length"), "unless they are ignored"
    answer = generate(ended, [prompt], greedy(6, allowed_token_ids=[end], stop_token_ids=[end]))[0].outputs[0]
    assert (answer.token_ids, answer.stop_reason) == ([end], end)


def test_the_models_end_tokens_count_whatever_tokenizer_it_gets():
    """C62: those of its generation_config.json, or of the one that takes its place; ids that it has no logits of end
    nothing."""
    weights = load_file(tiny_folder() / "model.safetensors")
    folder = write_checkpoint(home() / "ends_of_its_own", tiny_config(eos_token_id=[0, -1]), weights)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11, 300]}))
    with compiling_once():
        own = LLM(folder, tokenizer=tiny_folder(), use_tqdm=False, **TINY)
        lent = LLM(tiny_folder(), generation_config=folder, use_tqdm=False, **TINY)
        none = LLM(tiny_config(eos_token_id=[300]), load_format="dummy", use_tqdm=False, **TINY)
    prompt, ends = [5, 6, 7], SamplingParams(temperature=0, max_tokens=9, min_tokens=2, logit_bias={11: 100.0})
    for llm in (own, lent):
        assert llm.engine.eos_ids == {0, 9, 11}
        answer = generate(llm, [prompt], ends)[0].outputs[0]
        assert (len(answer.token_ids) > 2, answer.finish_reason, answer.stop_reason) == (True, "stop", 11)
    assert len(generate(none, [prompt], ends)[0].outputs[0].token_ids) == 9


def test_defaults_are_the_checkpoints_where_nothing_is_given_and_else_the_callers():
    """A checkpoint's penalty or top_k is applied unasked, ignored where promised, or only some keys are:
    lm-evaluation-harness#3154, NeMo-RL#3497, vllm#50767 (C63)."""
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    stated |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    weights = load_file(tiny_folder() / "model.safetensors")
    folder = write_checkpoint(home() / "own_defaults", tiny_config(), weights)
    others = {"max_new_tokens": 7, "do_sample": False, "typical_p": None, "transformers_version": "5"}
    (folder / "generation_config.json").write_text(json.dumps(stated | others))
    llm, plain = make_llm(folder), make_llm()
    (prompt,) = random_prompts(12, 20)
    effective = SamplingParams(**stated, max_tokens=7)
    assert llm.get_default_sampling_params() == effective != plain.get_default_sampling_params() == SamplingParams()
    add, seen = llm.engine.add_batch, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "add_batch", lambda requests: (seen.extend(requests), add(requests)))
        llm.generate([prompt], use_tqdm=False)
        llm.generate([prompt], [effective], use_tqdm=False)
        list(llm.stream([prompt]))
        llm.chat([{"role": "user", "content": "and?"}], use_tqdm=False)
    assert [request.sampling for request in seen] == [effective] * 4
    (unasked,) = llm.generate([prompt], use_tqdm=False)
    told = SamplingParams(**stated, max_tokens=7, seed=unasked.seed)
    assert tokens_of([unasked]) == tokens_of(generate(plain, [prompt], told))
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16}
    expected = tokens_of(generate(plain, [prompt], SamplingParams(seed=3)))
    assert expected != tokens_of(generate(plain, [prompt], SamplingParams(**stated, seed=3)))
    for given in (neutral, {"top_k": -1}, *({name: value} for name, value in neutral.items()), {}):
        assert tokens_of(generate(llm, [prompt], SamplingParams(seed=3, **given))) == expected
    check_greedy(generate(llm, [prompt], greedy(12)))
    found = [
        one.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences for one in (llm, plain)
    ]
    assert [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
    assert llm.score([prompt], [[5, 6]], use_tqdm=False)[0].logprob == pytest.approx(
        plain.score([prompt], [[5, 6]], use_tqdm=False)[0].logprob, abs=1e-3
    )


def test_defaults_may_come_from_elsewhere_or_nowhere(tmp_path):
    """C63: and one that is out of range is no reason against a caller who names his own."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 5}))
    assert make_llm(generation_config=tmp_path).get_default_sampling_params() == SamplingParams(top_k=5)
    weights = load_file(tiny_folder() / "model.safetensors")
    folder = write_checkpoint(home() / "bad_defaults", tiny_config(), weights)
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 0}))
    assert make_llm(folder, generation_config="vllm").get_default_sampling_params() == SamplingParams()
    llm = make_llm(folder)
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be in \(0, 1\], got 0"):
        llm.generate([[5, 6]], use_tqdm=False)
    check_greedy(generate(llm, [[5, 6]], greedy(3)))
    with pytest.raises(ValueError, match=r"generation_config\.json is missing"):
        LLM(tiny_folder(), generation_config=tmp_path / "nowhere", use_tqdm=False)


def test_special_tokens_are_shown_on_demand_only(llm):
    (prompt,) = random_prompts(5, 9)
    plain, shown = (
        generate(llm, [prompt], SamplingParams(max_tokens=200, seed=1, ignore_eos=True, skip_special_tokens=skip))[
            0
        ].outputs[0]
        for skip in (True, False)
    )
    assert plain.token_ids == shown.token_ids and min(shown.token_ids) < 4, "a special token was drawn"
    assert "<|" in shown.text and "<|" not in plain.text


def test_a_request_that_alone_fills_the_pool_ends_and_says_why():
    """Prompt and growth exceed the pool: the request holds the head of the queue for ever: vllm#39734 (C23)."""
    llm = make_llm(**SMALL_POOL)
    (prompt,) = random_prompts(6, 40)
    for max_tokens in (100, None):
        grown, short = generate(llm, [prompt, prompt[:3]], [greedy(max_tokens), greedy(2)])
        answer = grown.outputs[0]
        assert len(prompt) + len(answer.token_ids) == 3 * 16 + 1, "the last token needs no page"
        assert answer.finish_reason == "length"
        assert answer.stop_reason == "the next token needs 4 pages, the pool has 3"
        assert len(short.outputs[0].token_ids) == 2
        check_greedy([grown, short])


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    """vllm#39734, vllm#35570 (C23)."""
    llm = make_llm(**SMALL_POOL)
    fits, too_long = random_prompts(7, 48, 49)
    outputs = generate(llm, [fits, too_long, fits[:5]], greedy(3), on_error="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "a prompt of 49 tokens needs 4 pages of 16, the pool has 3"
    assert len(outputs[0].outputs[0].token_ids) == 1


# Prefixes -------------------------------------------------------------------------------------------------------------


def test_a_declared_prefix_outlives_others(llm):
    prefix, *others = random_prompts(8, 70, *([120] * 12))
    generate(llm, [prefix], prefix_pos=64)
    assert llm.stats["pinned_pages"] == 4
    generate(llm, others)
    assert llm.stats["evicted_pages"] > 0
    assert cached_of(generate(llm, [prefix[:65]])) == [64]
    assert llm.delete_prefix(prefix[:64]) and llm.stats["pinned_pages"] == 0
    assert not llm.delete_prefix(prefix[:64]), "it is gone"
    generate(llm, others)
    assert cached_of(generate(llm, [prefix[:65]])) == [0]


def test_prefix_pos_is_one_for_all_or_one_each(llm):
    a, b = random_prompts(9, 40, 50)
    generate(llm, [a, b], prefix_pos=32)
    assert llm.stats["pinned_pages"] == 4
    llm = make_llm()
    generate(llm, [a, b], prefix_pos=[16, None])
    assert llm.stats["pinned_pages"] == 1
    generate(llm, [a, b], prefix_pos=(0, np.int64(48)))
    assert llm.stats["pinned_pages"] == 4
    llm.reset_prefix_cache()
    assert llm.stats["pinned_pages"] == 0 and cached_of(generate(llm, [a, b])) == [0, 0]


def test_a_prefix_beyond_the_prompt_is_cut_to_it_with_one_warning(llm, caplog):
    llm.reader._warned_prefix_pos = False
    (prompt,) = random_prompts(10, 20)
    outputs = generate(llm, [prompt, prompt], prefix_pos=[99, 100])
    generate(llm, [prompt], prefix_pos=21)
    check_greedy(outputs)
    (record,) = caplog.records
    assert record.getMessage() == "prefix_pos 99 is beyond a prompt of 20 tokens: clamped, here and later"
    assert llm.delete_prefix(prompt) and llm.stats["pinned_pages"] == 0


@pytest.mark.parametrize(
    ("end", "joins"), [("a", True), ("the ", True), ("th", True), ("the oth", True), ("the", False), ("hen\n", False)]
)
def test_a_prefix_that_ends_where_tokens_meet_changes_no_id(llm, end, joins):
    """Prefix and rest are tokenized apart, or the prefix's last token is none of the whole: TensorRT-LLM#18389,
    prime-rl#1863, vllm#3355 (C61)."""
    prefix = 6 * "in the hen and other " + end
    apart = llm.encode(prefix)
    texts = [prefix + rest for rest in ("nd all", "er", "the end", "\nin", "é, and then", "")]
    whole = [llm.encode(text) for text in texts]
    assert any(ids[: len(apart)] != apart for ids in whole) == joins
    plain = generate(make_llm(), texts, cache_mode="off")
    for position in (len(apart) - 1, len(apart), None):
        make_llm()
        ideal, most = IdealCache(16), 0
        for text, ids, expected in zip(texts, whole, plain, strict=True):
            (output,) = generate(llm, text, prefix_pos=position)
            assert output.prompt_token_ids == ids == expected.prompt_token_ids
            assert output.outputs == expected.outputs
            assert cached_of([output]) == [ideal.hits(ids)], "what does not match at the seam lowers the hit alone"
            most = max(most, ideal.hits(ids))
            ideal.learn([output])
        marked = {tuple(ids[: end + 16]) for ids in whole for end in range(0, min(position or 0, len(ids)) - 15, 16)}
        assert llm.stats["pinned_pages"] == len(marked) and most >= len(apart) - 2


def test_text_that_is_tokenized_anew_finds_what_its_ids_share(llm):
    """C61: a conversation goes on as text, whose ids need not be those that were sampled."""
    text, ideal, kept = "the hen and the other one, and th", IdealCache(16), []
    for _ in range(4):
        (output,) = generate(llm, text, greedy(9, allowed_token_ids=range(4, 272)), prefix_pos=len(llm.encode(text)))
        assert output.prompt_token_ids == llm.encode(text)
        assert cached_of([output]) == [ideal.hits(output.prompt_token_ids)]
        ideal.learn([output])
        kept.append([*output.prompt_token_ids, *output.outputs[0].token_ids])
        text += output.outputs[0].text + "e hen and th"
    assert ideal.hits(llm.encode(text)) >= 48 and llm.encode(text)[: len(kept[-1])] != kept[-1], "and it was not void"


def test_salted_requests_share_pages_among_themselves_only(llm):
    (prompt,) = random_prompts(11, 40)
    salts = [None, "a", "a", "b", None]
    outputs = [generate(llm, {"prompt_token_ids": prompt, "cache_salt": salt})[0] for salt in salts]
    assert cached_of(outputs) == [0, 0, 32, 0, 32]
    assert len(set(map(tuple, tokens_of(outputs)))) == 1


@pytest.mark.parametrize(
    "tokenizer", ["llama2", "llama3", "mistral-v1", "mistral-v3", "qwen3", "smollm2", "baichuan-7b"]
)
def test_the_example_of_the_first_prefix_cache_runs(tokenizer, shared_data, tmp_path, capsys):
    """Its prompts may be shorter than 16 tokens, and share none."""
    vocab_size = 152_000  # room for the largest; one shape for all
    config = tiny_config(vocab_size=vocab_size, hidden_size=8, head_dim=8, num_kv_heads=1, group=1, num_layers=1)
    path = write_checkpoint(tmp_path, config | {"eos_token_id": None}, tiny_weights(config))
    packed = shared_data / "tokenizers" / f"{tokenizer}.tokenizer.json.gz"
    (path / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    (path / "tokenizer_config.json").write_text("{}")
    with compiling_once():
        llm = LLM(
            model=path, tensor_parallel_size=1, num_pages=24, max_model_len=128, max_num_seqs=2,
            max_num_batched_tokens=16, use_tqdm=False,
        )  # fmt: skip

    prefix = (
        "You are an expert school principal, skilled in effectively managing faculty and staff. "
        "Draft 10-15 questions for a potential first grade Head Teacher for my K-12, all-girls', "
        "independent school that emphasizes community, joyful discovery, and life-long learning. "
        "The candidate is coming in for a first-round panel interview for a 8th grade Math "
        "teaching role."
    )
    for prompts in (
        ["Hello, my name is", "The president of the United States is"],
        [prefix[:60] + " a", prefix[:60] + " b"],
    ):
        sampling_params = SamplingParams(temperature=0, max_tokens=100)
        outputs = llm.generate(prompts, sampling_params, prefix_pos=[16, 16])
        for output in outputs:
            print(output)
        assert [output.prompt for output in outputs] == prompts
        assert all(len(tokens) == 100 for tokens in tokens_of(outputs))
        again = llm.generate(prompts, sampling_params, prefix_pos=[16, 16])
        assert tokens_of(again) == tokens_of(outputs)
    assert capsys.readouterr().out.count("RequestOutput(") == 4


def test_no_full_garbage_collection_begins_inside_a_step(monkeypatch):
    """One takes 0.1 s and more, in which no step is planned and the device waits. But once a minute one may, and
    whoever holds a stream holds up none: what it has left behind in a cycle would never be found."""
    llm, before = make_llm(), gc.get_threshold()
    schedule, found = llm.engine.scheduler.schedule, []
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: (found.append(gc.get_threshold()), schedule())[1])
    stream = llm.stream([[1, 2, 3]], greedy(8))
    next(stream)
    assert gc.get_threshold() == before
    list(stream)
    assert set(found) == {(*before[:2], pauses.NEVER)}
    monkeypatch.setattr(pauses, "EVERY", 0.0)
    found.clear()
    generate(llm, [[1, 2, 3]], greedy(8))
    assert set(found) == {before}


def test_the_last_to_leave_restores():
    before = gc.get_threshold()
    with no_full_collections():
        with no_full_collections():
            pass
        assert gc.get_threshold() == (*before[:2], pauses.NEVER)
    assert gc.get_threshold() == before
