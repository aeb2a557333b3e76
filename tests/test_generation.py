"""Several answers to a prompt, answers while they grow, conversations, beams, and SGLang's words for it all."""

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import threading

import jax
import numpy as np
import pytest
from engines import (
    SMALL,
    TIGHT,
    TINY,
    WIDE,
    IdealCache,
    cached_of,
    check_greedy,
    compiling_once,
    family,
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

from prefix_jax import BeamSearchParams, SamplingParams, sglang
from prefix_jax.output_text import OutputText


def answers_of(outputs) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def sampled(max_tokens=6, **params) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 5, "temperature": 3.0, **params})


# Several answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 16, 31, 32, 33, 40])
def test_answers_share_the_prompts_pages(length):
    """Each answer after the first starts with the prompt's pages and a copy of the one in which it ends: it computes
    the prompt's last position and no other of it."""
    llm = make_llm()
    (prompt,) = random_prompts(20, length)
    (output,) = generate(llm, [prompt], sampled(n=5))
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    assert all(len(answer.token_ids) == 6 and answer.finish_reason == "length" for answer in output.outputs)
    assert len(set(map(tuple, answers_of([output])[0]))) > 1, "they differ"
    assert llm.stats["forked_tokens"] == 4 * (length - 1)
    assert llm.stats["computed_prompt_tokens"] == length + 4
    assert output.num_cached_tokens == 0 and llm.stats["cached_tokens"] == 0
    singles = [[*prompt, *answer.token_ids][:-1] for answer in output.outputs]
    pages = {tuple(tokens[: 16 * (i + 1)]) for tokens in singles for i in range(len(tokens) // 16)}
    assert len(list(llm.engine.cache.trie)) == len(pages)
    ideal = IdealCache(16)
    ideal.known = [tokens[: len(tokens) // 16 * 16] for tokens in singles]
    assert cached_of(generate(llm, [prompt], greedy(1))) == [ideal.hits(prompt)]


def test_each_answer_is_reproducible_and_none_is_another():
    """The n samples of a request differ, each reproducible: alone, in company, without a cache, in a tight pool."""
    prompts = random_prompts(21, 20, 37, 6)
    params = [sampled(n=3), sampled(n=2, seed=9), greedy(6)]
    llm = make_llm()
    alone = [answers_of(generate(llm, [prompt], own))[0] for prompt, own in zip(prompts, params, strict=True)]
    for options in (SMALL, {"enable_prefix_caching": False}, TIGHT):
        llm = make_llm(**options)
        outputs = generate(llm, prompts, params)
        assert answers_of(outputs) == alone
        check_greedy(outputs[2:])
    assert llm.stats["preemptions"] > 0
    assert generate(make_llm(), prompts[:1], sampled(n=3, seed=6))[0].outputs[1].token_ids != alone[0][1]
    assert answers_of(generate(make_llm(), prompts[:1], sampled(n=1)))[0][0] == alone[0][0]


def test_what_a_follower_finds_when_it_resumes_is_cached_and_not_forked():
    llm = make_llm(**TIGHT)
    (prompt,) = random_prompts(19, 20)
    (output,) = generate(llm, [prompt], sampled(20, n=3))
    assert llm.stats["preemptions"] > 0 and llm.stats["forked_tokens"] == 2 * 19
    assert llm.stats["cached_tokens"] > 0 == output.num_cached_tokens and llm.stats["prompt_tokens"] == 20


def test_greedy_answers_are_alike_and_more_than_there_are_rows():
    llm = make_llm(**TINY)
    (prompt,) = random_prompts(22, 21)
    (output,) = generate(llm, [prompt], greedy(5, n=7))
    assert len(set(map(tuple, answers_of([output])[0]))) == 1
    check_greedy([output])
    assert llm.stats["computed_prompt_tokens"] < 21 + 6 * 6, "those that come late find the pages"


def test_an_answer_may_end_before_the_first_begins_to_share():
    llm = make_llm(**TINY)
    (prompt,) = random_prompts(23, 21)
    (output,) = generate(llm, [prompt], greedy(1, n=5))
    assert len(set(map(tuple, answers_of([output])[0]))) == 1
    (zero,) = generate(llm, [prompt], greedy(0, n=3, prompt_logprobs=0))
    assert answers_of([zero]) == [[[], [], []]] and len(zero.prompt_logprobs) == 21
    llm.abort("nobody")


def test_a_request_ends_when_its_last_answer_does():
    llm = make_llm()
    (prompt,) = random_prompts(33, 9)
    (plain,) = generate(llm, [prompt], sampled(12, n=2))
    stop = next(token for token in plain.outputs[1].token_ids[1:6] if token not in plain.outputs[0].token_ids)
    stopped, ends = sampled(12, n=2, stop_token_ids=[stop]), []
    finish = llm.engine.scheduler.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "finish", lambda *all: (ends.append(all[0]), finish(*all))[1])
        (output,) = generate(llm, [prompt], stopped)
    assert [sequence.index for sequence in ends] == [1, 0]
    assert output.metrics.finished_time == ends[1].finished_time > ends[0].finished_time


def test_an_abort_ends_all_answers(monkeypatch):
    llm = make_llm()
    (prompt,) = random_prompts(24, 9)
    step, count = llm.engine.step, itertools.count()
    monkeypatch.setattr(llm.engine, "step", lambda: (llm.abort("mine") if next(count) == 4 else None, step())[1])
    (output,) = generate(llm, [{"prompt_token_ids": prompt, "request_id": "mine"}], sampled(40, n=3))
    assert {answer.finish_reason for answer in output.outputs} == {"abort"}
    assert all(0 < len(answer.token_ids) < 40 for answer in output.outputs) and not llm.engine.sequences


WISHES = [
    {"n": 3}, {"n": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"n": 2, "logprobs": 20},
    {"prompt_logprobs": 2}, {"min_p": 0.05, "top_k": 50, "top_p": 0.9}, {"min_tokens": 6, "stop_token_ids": [5, 6, 7]},
    {"n": 2, "allowed_token_ids": range(4, 100)}, {"max_tokens": 0, "prompt_logprobs": 1}, {"n": 4, "stop": ["e"]},
    {"presence_penalty": 1.0, "logit_bias": {9: 5.0}},
]  # fmt: skip
CROWDED = {**TIGHT, "num_pages": 20}


@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, CROWDED, {**CROWDED, "schedule_policy": "dfs"},
     {**CROWDED, "host_memory_gib": 0.01}, {"bitwise": True}, {**WIDE, "forest": True}],
    ids=["off", "crowded", "dfs", "tier", "bitwise", "forest"],
)  # fmt: skip
def test_all_wishes_at_once_get_the_same_answers_in_every_engine(options):
    """Cold, warm and streamed; a leader that starts anew finds its own pages on their way from the host."""
    prompts = [*family(40), *random_prompts(41, 3, 50)]
    params = [sampled(**{"max_tokens": 12, "temperature": 2.0, **wish}) for wish in WISHES]

    def said(outputs):
        return {(o.index, a.index): (a.text, a.token_ids, a.finish_reason) for o in outputs for a in o.outputs}

    expected = said(generate(make_llm(), prompts, params))
    llm = make_llm(**options)
    assert said(generate(llm, prompts, params)) == expected
    assert said(generate(llm, prompts, params)) == expected
    assert joined(llm.stream(prompts, params)) == expected
    if "num_pages" in options and options["num_pages"] == 20:
        assert llm.stats["preemptions"] > 10 and llm.stats["forked_tokens"] > 300
    if "host_memory_gib" in options:
        assert llm.stats["host_hit_pages"] > 0


# While they grow ------------------------------------------------------------------------------------------------------


def joined(deltas) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    """Text, tokens and reason of each (prompt, answer)."""
    whole: dict = {}
    for output in deltas:
        (answer,) = output.outputs
        text, tokens, reason = whole.get((output.index, answer.index), ("", [], None))
        assert reason is None, "nothing comes after the end"
        whole[output.index, answer.index] = (text + answer.text, tokens + answer.token_ids, answer.finish_reason)
    return whole


def test_deltas_together_are_the_answer():
    """Characters split over tokens: exo#1691, ferrox#124, dynamo#12630 (C57)."""
    llm = make_llm()
    prompts, params = family(25), [sampled(9, seed=i, n=1 + i % 3, logprobs=1) for i in range(8)]
    expected = generate(llm, prompts, params)
    deltas = []
    for delta in llm.stream(prompts, params):
        assert delta.prompt_token_ids == prompts[delta.index], "whatever was done to the list of an earlier result"
        delta.prompt_token_ids.clear()
        deltas.append(delta)
    assert len(deltas) > 8 * 5 and sum(delta.finished for delta in deltas) == 8
    whole = joined(deltas)
    for output in expected:
        for answer in output.outputs:
            got = whole.pop((output.index, answer.index))
            assert got == (answer.text, answer.token_ids, "length")
            own = [
                d.outputs[0].logprobs for d in deltas if (d.index, d.outputs[0].index) == (output.index, answer.index)
            ]
            assert [list(e) for part in own for e in part] == [list(e) for e in answer.logprobs]
    assert not whole


@pytest.mark.parametrize("include", [False, True])
def test_what_may_become_a_stop_string_waits(include):
    """Text is given out before a match can be seen: vllm#45636, vllm#11089 (C56)."""
    llm = make_llm()
    (prompt,) = random_prompts(26, 12)
    text = generate(llm, [prompt], sampled(30))[0].outputs[0].text
    for begin, length in [(5, 1), (5, 2), (9, 4), (2, 6)]:
        stop = [text[begin : begin + length], "never, I hope"]
        params = sampled(30, stop=stop, include_stop_str_in_output=include)
        (output,) = generate(llm, [prompt], params)
        found = text.find(stop[0])
        assert output.outputs[0].text == text[: found + (len(stop[0]) if include else 0)]
        assert output.outputs[0].stop_reason == stop[0]
        deltas = list(llm.stream([prompt], params))
        assert joined(deltas)[0, 0] == (output.outputs[0].text, output.outputs[0].token_ids, "stop")


def test_min_tokens_holds_against_every_kind_of_end():
    """Stop strings, further end tokens: vllm#21987 (C50)."""
    llm = make_llm()
    (prompt,) = random_prompts(27, 12)
    plain = generate(llm, [prompt], sampled(30))[0].outputs[0]
    ends = {"stop_token_ids": plain.token_ids[2:3], "stop": plain.text[1:2]}
    for name, value in ends.items():
        (early,) = generate(llm, [prompt], sampled(30, **{name: value}))
        assert len(early.outputs[0].token_ids) < 10
        (late,) = generate(llm, [prompt], sampled(30, min_tokens=10, **{name: value}))
        assert len(late.outputs[0].token_ids) >= 10
    eos = make_llm(tiny_folder(eos_token_id=plain.token_ids[1]))
    assert len(generate(eos, [prompt], sampled(30, ignore_eos=False))[0].outputs[0].token_ids) == 2
    assert len(generate(eos, [prompt], sampled(30, ignore_eos=False, min_tokens=10))[0].outputs[0].token_ids) >= 10
    ends_at_once = {"logit_bias": {plain.token_ids[1]: 100.0}, "ignore_eos": True}  # which only stops it from ending
    (held,) = generate(eos, [prompt], sampled(8, min_tokens=6, **ends_at_once))
    assert [token == plain.token_ids[1] for token in held.outputs[0].token_ids] == [False] * 6 + [True] * 2
    (exact,) = generate(llm, [prompt], sampled(10, min_tokens=10, stop=plain.text[1:2]))
    assert len(exact.outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    ("stop", "min_tokens", "pushed"), [("c", 0, 3), ("c", 2, 3), ("c", 3, 6), ("bcd", 3, 4), ("bcd", 4, 6)]
)
def test_a_stop_string_that_the_last_of_min_tokens_completes_does_not_count(stop, min_tokens, pushed):
    """As in vLLM, which looks for stop strings in what comes behind min_tokens."""
    tokenizer = make_llm().tokenizer
    text = OutputText(tokenizer, [], SamplingParams(stop=stop, min_tokens=min_tokens))
    found = [text.push(token) for token in tokenizer.encode("abcdef")[:pushed]]
    assert found == [None] * (pushed - 1) + [stop if pushed < 6 else None]


STOPS = [
    ["bc"], ["abcd", "bc"], ["bc", "abcd"], [" "], ["\n\n"], ["\n\n\n", "\n\n"], ["he"], ["e", "he ", " the"], ["🙂"],
    ["é", "never"], ["x the"], ["never"], ["nd a", "d ab"],
]  # fmt: skip


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_a_stop_string_is_found_as_in_the_whole_text(stop, include):
    """C56: over token borders, inside a token with text behind it, as the beginning of another, and never in the prompt
    or across its end."""
    tokenizer = make_llm().tokenizer
    ids = tokenizer.encode("x the hen and abcd\n\n\nthe 🙂 and é")
    for cut in range(len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        texts = [tokenizer.decode_output(prompt, output[:end]) for end in range(len(output) + 1)]
        certain = [text.rstrip("\ufffd") for text in texts]
        end = next((end for end, text in enumerate(certain) if any(s in text for s in stop)), None)
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        text, found, deltas = OutputText(tokenizer, prompt, params), None, []
        for pushed, token in enumerate(output, start=1):  # noqa: B007
            found = text.push(token)
            deltas.append(text.take())
            if found is not None:
                break
        text.finish()
        deltas.append(text.take())
        if end is None:
            assert found is None and "".join(deltas) == texts[-1]
            continue
        place, expected = min((certain[end].find(s), s) for s in stop if s in certain[end])
        assert (pushed, found) == (end, expected)
        assert "".join(deltas) == certain[end][: place + (len(expected) if include else 0)]


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_what_ended_it_is_text_on_demand(stop):
    """Of stop tokens and the model's own end tokens, too."""
    (prompt,) = random_prompts(27, 12)
    allowed = range(4, 260)
    plain = generate(make_llm(), [prompt], sampled(12, allowed_token_ids=allowed))[0].outputs[0]
    end = plain.token_ids[7]
    tokens = plain.token_ids[: plain.token_ids.index(end) + 1]
    for llm, params in [
        (make_llm(), {"stop_token_ids": [end]}),
        (make_llm(tiny_folder(eos_token_id=end)), {"ignore_eos": False}),
    ]:
        for include, shown in [(False, tokens[:-1]), (True, tokens)]:
            options = {"stop": stop, "include_stop_str_in_output": include, "allowed_token_ids": allowed}
            asked = sampled(12, **options, **params)
            (output,) = generate(llm, [prompt], asked)
            text = llm.tokenizer.decode_output(prompt, shown)
            assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, tokens)
            assert joined(llm.stream([prompt], asked))[0, 0] == (text, tokens, "stop")


@pytest.mark.parametrize("stop", [(), ("never said",)])
def test_a_character_that_the_prompt_left_open_is_no_text_of_an_empty_answer(stop):
    llm = make_llm()
    prompt = llm.encode("the é")[:-1] + llm.tokenizer.encode_rendered("🙂")[:1]
    assert llm.tokenizer.decode(prompt).endswith("\ufffd")
    (said,) = tokens_of(generate(llm, [prompt], sampled(1)))
    asked = sampled(9, stop_token_ids=said, stop=stop)
    (output,) = generate(llm, [prompt], asked)
    assert joined(llm.stream([prompt], asked))[0, 0] == (output.outputs[0].text, said, "stop") == ("", said, "stop")


def test_a_stream_that_is_left_leaves_nothing_behind():
    llm = make_llm()
    for _, _ in zip(llm.stream(random_prompts(28, 9, 9), sampled(50)), range(3), strict=False):
        pass
    assert not llm._receivers
    llm.reset_prefix_cache()
    assert not llm.engine.sequences and len(llm.engine.cache.pool) == llm.engine.runner.num_pages
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt is empty"):
        llm.stream([[]])


@pytest.mark.parametrize("started", [False, True])
def test_a_stream_that_ends_inside_a_step_steps_no_further(started, monkeypatch):
    """Garbage collection ends a stream anywhere, also in the thread that holds the lock."""
    llm = make_llm()
    left, kept = random_prompts(34, 20, 21)
    expected = generate(llm, [kept], sampled(20))[0].outputs
    streams = [llm.stream([left], sampled(40))]
    if started:
        next(streams[0])
    collect, count = llm.engine._collect, itertools.count()
    monkeypatch.setattr(llm.engine, "_collect", lambda: (streams.clear() if next(count) == 4 else None, collect())[1])
    assert generate(llm, [kept], sampled(20))[0].outputs == expected
    assert not llm.engine.sequences and not streams


def test_an_id_is_taken_from_the_call_on_and_free_once_the_stream_is_left():
    llm = make_llm()
    asked = {"prompt_token_ids": random_prompts(35, 9)[0], "request_id": "mine"}
    first = llm.stream([asked], sampled(9))
    for call in (llm.stream, llm.generate):
        with pytest.raises(ValueError, match="'mine' is taken"):
            call([asked], sampled(9))
    expected = joined(first)
    second = llm.stream([asked], sampled(9))
    next(second)
    second.close()
    assert joined(llm.stream([asked], sampled(9))) == expected


def test_a_stream_leaves_the_callers_device_alone():
    """A context that is entered across a yield is the caller's, too."""
    llm = make_llm(device="cpu")
    stream = llm.stream(random_prompts(36, 9), sampled(3))
    next(stream)
    assert jax.config.jax_default_device is None
    stream.close()


def test_streams_of_two_threads_and_an_abort_from_a_third():
    llm = make_llm()
    prompts = random_prompts(29, 11, 12)
    expected = [generate(llm, [prompt], sampled(40))[0].outputs[0].token_ids for prompt in prompts]
    got: dict[int, list] = {}

    def run(i: int) -> None:
        asked = {"prompt_token_ids": prompts[i], "request_id": f"r{i}"}
        got[i] = []
        for delta in llm.stream([asked], sampled(40)):
            got[i].append(delta)
            if i == 1 and len(got[i]) == 5:
                threading.Thread(target=llm.abort, args=("r1",)).start()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    (whole,), (cut,) = (joined(got[i]).values() for i in range(2))
    assert whole[1:] == (expected[0], "length")
    assert cut[2] == "abort" and 5 <= len(cut[1]) < 40 and cut[1] == expected[1][: len(cut[1])]


@pytest.mark.parametrize("at_end", [False, True])
def test_an_output_that_cannot_be_made_ends_its_request_alone(at_end, monkeypatch, caplog):
    """Of one answer among several, while they grow or at the end."""
    llm = make_llm()
    prompts = random_prompts(37, 9, 12)
    asked = [{"prompt_token_ids": prompt, "request_id": name} for prompt, name in zip(prompts, "ab", strict=True)]
    expected = joined(llm.stream(asked[1:], sampled(8, n=2)))
    make = llm.engine.outputs.make

    def fail(request, answers, *, finished):
        if request.request_id == "a" and len(answers[0].tokens) == 9 + 4 and bool(answers[0].finish_reason) == at_end:
            raise KeyError("injected")
        return make(request, answers, finished=finished)

    monkeypatch.setattr(llm.engine.outputs, "make", fail)
    deltas = list(llm.stream(asked, [sampled(4 if at_end else 8, n=3), sampled(8, n=2)]))
    bad, good = ([delta for delta in deltas if delta.request_id == name] for name in "ab")
    assert [delta.finished for delta in bad].count(True) == 1 and bad[-1].error == "'injected'"
    assert {(0, index): said for (_, index), said in joined(good).items()} == expected
    assert not llm.engine.has_work and not llm._receivers and "injected" in caplog.text


def test_what_raises_at_its_outputs_ends_its_request_alone(caplog):
    """An event loop that is closed, say; whoever steps goes on."""
    llm = make_llm()
    prompts = random_prompts(53, 9, 12, 10)
    expected = joined(llm.stream(prompts[:2], sampled(12)))
    forget(llm)
    given = []

    def fail(output):
        given.append(output)
        if len(given) == 3:
            raise RuntimeError("Event loop is closed")

    ids = llm.submit([{"prompt_token_ids": prompts[2], "request_id": "bad"}], fail, sampled(200))
    assert ids == ["bad"]
    assert joined(llm.stream(prompts[:2], sampled(12))) == expected
    assert len(given) == 3 and "outputs of request bad failed" in caplog.text
    assert not llm._receivers and not llm.engine.sequences
    with pytest.raises(ValueError, match="'bad' is taken"):
        llm.submit([{"prompt_token_ids": prompts[2], "request_id": "bad"}] * 2, fail, sampled(200))


def test_the_last_output_comes_though_an_interrupt_came_first():
    """Ctrl-C reaches a front's thread as it passes on what is left; it goes on while there is work."""
    llm = make_llm()
    (prompt,) = random_prompts(55, 9)
    (expected,) = tokens_of(generate(llm, [prompt], greedy(3)))
    given = []

    def give(output):
        if not output.finished:
            return
        given.append(output.outputs[0].token_ids)
        if len(given) == 1:
            raise KeyboardInterrupt

    llm.submit([prompt], give, greedy(3))
    for _ in range(20):
        if llm.engine.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                llm.step()
    assert given == [expected[-1:], expected[-1:]]
    assert not llm.engine.ready and not llm._receivers


def test_what_takes_no_outputs_is_refused_before_anything_is_queued():
    llm = make_llm()
    for give in (None, greedy(3)):
        with pytest.raises(TypeError, match="give must be a function that takes an output, got"):
            llm.submit([[5, 6]], give, greedy(3))
    assert not llm.engine.has_work


class AsyncFront:
    """What an asyncio front needs of an LLM: one thread that steps, and outputs that it passes on to an event loop."""

    def __init__(self, llm):
        self.llm, self.wake, self.closed = llm, threading.Event(), False
        self.thread = threading.Thread(target=self._step)
        self.thread.start()

    def _step(self) -> None:
        while not self.closed:
            while self.llm.engine.has_work:
                self.llm.step()
            self.wake.wait()
            self.wake.clear()

    async def stream(self, prompt, params):
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue()
        give = functools.partial(loop.call_soon_threadsafe, outputs.put_nowait)
        submitted = asyncio.ensure_future(asyncio.to_thread(self.llm.submit, [prompt], give, params))
        submitted.add_done_callback(lambda _: self.wake.set())
        try:
            await asyncio.shield(submitted)
            while not (output := await outputs.get()).finished:
                yield output
            yield output
        finally:
            submitted.add_done_callback(self._abort)  # of one that is left early, also while it submits

    def _abort(self, submitted: asyncio.Future) -> None:
        for request_id in () if submitted.exception() else submitted.result():
            self.llm.abort(request_id)
        self.wake.set()

    def close(self) -> None:
        self.closed = True
        self.wake.set()
        self.thread.join(60)


def test_an_asyncio_front_sits_on_top():
    """Beside generate and prefixes in other threads, with a client that leaves."""
    llm = make_llm()
    prompts, params = family(50), [sampled(30, seed=i, n=1 + i % 2) for i in range(8)]
    expected = joined(llm.stream(prompts, params))
    forget(llm)
    front = AsyncFront(llm)

    async def ask(i: int) -> list:
        return [delta async for delta in front.stream(prompts[i], params[i])]

    async def leave() -> int:
        stream = front.stream(random_prompts(51, 9)[0], sampled(200))
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                await stream.aclose()
        return count

    async def all_at_once() -> list:
        beside = asyncio.to_thread(generate, llm, prompts, params)
        with pytest.raises(ValueError, match="the prompt is empty"):
            await anext(front.stream([], sampled()))
        return await asyncio.gather(leave(), beside, *map(ask, range(8)))

    try:
        left, whole, *deltas = asyncio.run(asyncio.wait_for(all_at_once(), 300))
        llm.prefixes.add(random_prompts(52, 40)[0]).warm()
    finally:
        front.close()
    assert left == 3
    for i, own in enumerate(deltas):
        assert joined(own) == {(0, index): said for (of, index), said in expected.items() if of == i}
    assert {(o.index, a.index): (a.text, a.token_ids, "length") for o in whole for a in o.outputs} == expected
    llm.reset_prefix_cache()
    assert not front.thread.is_alive() and not llm._receivers and not llm.engine.sequences


def test_a_client_of_a_front_may_leave_while_it_submits(monkeypatch):
    llm = make_llm()
    front, submit = AsyncFront(llm), llm.submit
    begun, left, queued = threading.Event(), threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        left.wait(60)
        request_ids = submit(*args)
        queued.set()
        return request_ids

    async def leave() -> None:
        client = asyncio.ensure_future(anext(front.stream(random_prompts(54, 9)[0], sampled(200))))
        await asyncio.to_thread(begun.wait, 60)
        client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await client
        left.set()
        await asyncio.to_thread(queued.wait, 60)
        while llm.engine.has_work:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(llm, "submit", slow)
    steps = llm.engine.num_steps
    try:
        asyncio.run(asyncio.wait_for(leave(), 300))
    finally:
        front.close()
    assert llm.engine.num_steps - steps < 100 and not llm._receivers and not llm.engine.sequences


# Conversations --------------------------------------------------------------------------------------------------------


def test_chat_renders_one_conversation_or_many():
    """BOS twice: vllm#27486, vllm#15695, tpu-inference#936 (C60)."""
    llm = make_llm()
    user = {"role": "user", "content": "and?"}
    (one,) = llm.chat([user], greedy(3), use_tqdm=False)
    assert one.prompt_token_ids == llm.tokenizer.encode_chat([user])
    many = llm.chat([[user], [user, {"role": "assistant", "content": "the hen"}, user]], greedy(3), use_tqdm=False)
    assert tokens_of(many[:1]) == tokens_of([one]) and cached_of(many)[0] == len(one.prompt_token_ids) // 16 * 16
    (same,) = generate(llm, [one.prompt_token_ids], greedy(3))
    assert tokens_of([same]) == tokens_of([one])
    parts = [{"type": "text", "text": "and"}, {"type": "text", "text": "?"}]
    (joined_parts,) = llm.chat([{**user, "content": parts}], greedy(3), use_tqdm=False)
    assert joined_parts.prompt == llm.tokenizer.render_chat([{**user, "content": "and\n?"}])
    image = {"type": "image_url", "image_url": {"url": "x"}}
    good, bad = llm.chat([[user], [{**user, "content": [image]}]], greedy(3), use_tqdm=False, on_error="return")
    assert tokens_of([good]) == tokens_of([one]) and "a part of a message must be" in bad.error
    for wrong in ([], "hi", {}):
        with pytest.raises(ValueError, match="messages must be a conversation"):
            llm.chat(wrong, greedy(3))


def test_chat_goes_on_with_the_last_message_and_names_tools():
    llm = make_llm()
    user, begun = {"role": "user", "content": "and?"}, {"role": "assistant", "content": " the hen "}
    how = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat([user, begun], greedy(3), use_tqdm=False, **how)
    assert output.prompt == "<|user|>and?<|end|><|assistant|> the hen "
    template = (
        "{% for t in tools %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.content | trim }}{% endfor %}!"
    )
    own = {"chat_template": template, "tools": [{"name": "f"}, {"name": "g"}]}
    assert llm.chat([user], greedy(3), use_tqdm=False, **own)[0].prompt == "[f][g]and?!"
    assert llm.chat([user, begun], greedy(3), use_tqdm=False, **own, **how)[0].prompt == "[f][g]and?the hen"
    told = {"chat_template": "{{ mood }}{{ messages[0].content }}{{ eos_token }}"}
    for words, prompt in [(None, "and?<|end|>"), ({"mood": "!", "eos_token": "."}, "!and?.")]:
        (output,) = llm.chat([user], greedy(3), use_tqdm=False, chat_template_kwargs=words, **told)
        assert output.prompt == prompt
    for messages, options, error in [
        ([user], {"chat_template_kwargs": {"tools": []}, **told}, "refused the messages: .*tools"),
        ([user], {"continue_final_message": True}, "exclude each other"),
        ([{"role": "user", "content": " "}], how, "no content to continue"),
        ([user], {"chat_template": "{{ raise_exception('no') }}"}, "refused the messages: no"),
        ([user], {"chat_template": "{{ 1 / 0 }}"}, "refused the messages: division by zero"),
    ]:
        with pytest.raises(ValueError, match=error):
            llm.chat(messages, greedy(3), **options)


def test_messages_as_openai_has_them_become_what_templates_expect():
    """As in vLLM: no content is an empty one, and arguments of tool calls are no JSON inside JSON."""
    llm = make_llm()
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": '{"é": [1, null]}'}}
    bare = {"id": "1", "type": "function", "function": {"name": "g", "arguments": ""}}
    chat = [
        {"role": "user", "content": "and?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "0"},
        {"role": "assistant", "content": "the", "tool_calls": []},
    ]
    before = copy.deepcopy(chat)
    template = (
        "{% for m in messages %}[{{ m.content }}]{% if 'tool_calls' in m %}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
    )
    (output,) = llm.chat(chat, greedy(1), chat_template=template, use_tqdm=False)
    assert output.prompt == '[and?][]{"é": [1, null]}{}[][the]' and chat == before
    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    (same,) = llm.chat(chat, greedy(1), chat_template=template, use_tqdm=False)
    assert same.prompt == output.prompt
    call["function"]["arguments"] = "{no JSON"
    with pytest.raises(ValueError, match="arguments of a tool call must be JSON"):
        llm.chat(chat, greedy(1))


def test_encode_gives_what_generate_takes():
    llm = make_llm()
    text = "the hen and the other one"
    assert generate(llm, [text])[0].prompt_token_ids == llm.encode(text) == llm.encode([text, "x"])[0]


def test_a_text_is_made_only_where_it_is_wanted():
    llm = make_llm()
    (prompt,) = random_prompts(30, 12)
    (output,) = generate(llm, [prompt], sampled(5, detokenize=False))
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 5
    assert {text for text, *_ in joined(llm.stream([prompt], sampled(5, detokenize=False))).values()} == {""}


# Beams ----------------------------------------------------------------------------------------------------------------


def beams_by_hand(prompt, width: int, max_tokens: int) -> list[tuple[list[int], float]]:
    """All answers that a search without end tokens keeps, by the oracle."""
    oracle, beams = oracle_of(tiny_folder()), [([], 0.0)]
    for _ in range(max_tokens):
        longer = [
            ([*tokens, int(token)], total + logprob)
            for tokens, total in beams
            for token, logprob in enumerate(log_softmax(oracle.logits([*prompt, *tokens])[-1]))
        ]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return beams


def test_beams_are_those_of_a_search_by_hand():
    llm = make_llm()
    prompts = random_prompts(31, 20, 7)
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = beams_by_hand(prompt, 3, 4)
        assert output.prompt_token_ids == prompt
        assert [beam.token_ids for beam in output.sequences] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([beam.cum_logprob for beam in output.sequences], [x for _, x in expected], atol=1e-2)
        assert {beam.finish_reason for beam in output.sequences} == {"length"}
    greedy_answer = tokens_of(generate(llm, prompts, greedy(4)))
    alone = llm.beam_search(prompts, BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    assert [output.sequences[0].token_ids for output in alone] == greedy_answer


def test_a_beam_ends_at_an_end_token_and_ranks_by_its_length():
    (prompt,) = random_prompts(32, 9)
    (said,) = tokens_of(generate(make_llm(), [prompt], greedy(4)))
    llm = make_llm(tiny_folder(eos_token_id=said[2]))
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=6))
    ended = [beam for beam in output.sequences if beam.finish_reason == "stop"]
    end = said.index(said[2])
    assert ended and ended[0].token_ids == said[: end + 1]
    assert ended[0].text == llm.tokenizer.decode_output(prompt, said[:end]), "the token that ended it is no text"
    scores = [
        beam.cum_logprob / max(1, len(beam.token_ids) - (beam.finish_reason == "stop")) for beam in output.sequences
    ]
    assert scores == sorted(scores, reverse=True)
    for bad in (
        {"beam_width": 11, "max_tokens": 3},
        {"beam_width": 0, "max_tokens": 3},
        {"beam_width": 1, "max_tokens": 0},
        {"beam_width": 2.0, "max_tokens": 3},
        {"beam_width": 2, "max_tokens": 3, "temperature": 0.5},
    ):
        with pytest.raises((ValueError, TypeError), match=r"must be .*, got "):
            BeamSearchParams(**bad)


def test_beams_keep_to_their_tenant_and_their_cache_mode():
    llm = make_llm()
    (prompt,) = random_prompts(38, 40)
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    (plain,) = llm.beam_search(prompt, params)
    assert plain.sequences[0].tokens == prompt + plain.sequences[0].token_ids
    forget(llm)
    mine = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert llm.beam_search([mine], params) == [plain]
    assert cached_of(generate(llm, [prompt, {**mine, "cache_salt": "yours"}, mine], greedy(1))) == [0, 0, 32]
    forget(llm)
    for silent in ({"cache_mode": "off"}, {"cache_mode": "read"}):
        assert llm.beam_search([prompt], params, **silent) == [plain]
        assert not list(llm.engine.cache.trie)
    assert llm.beam_search([prompt], params, prefix_pos=32) == [plain] and llm.stats["pinned_pages"] == 2


def test_beams_that_fill_the_context_stay_while_others_go_on():
    llm = make_llm(**TINY)
    prompts = random_prompts(39, 126, 20)
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    full, free = llm.beam_search(prompts, params)
    assert [len(beam.tokens) for beam in full.sequences] == [128, 128]
    assert full == llm.beam_search(prompts[:1], params)[0] and len(free.sequences[0].token_ids) == 5
    small = make_llm(**{**TINY, "num_pages": 2})
    (full,) = small.beam_search(prompts[0][:31], params)
    assert [len(beam.tokens) for beam in full.sequences] == [33, 33], "as far as the pool goes"


# SGLang's words -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    with compiling_once():
        return sglang.Engine(
            model_path=tiny_folder(), context_length=256, max_running_requests=8, chunked_prefill_size=64, num_pages=64
        )


def test_sglangs_words_mean_the_same(engine):
    llm = make_llm()
    text = "the hen and the other one"
    (expected,) = generate(llm, [text], greedy(6, stop=["zzz"]))
    asked = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "stop": ["zzz"], "top_k": -1}
    answer = engine.generate(text, asked)
    assert answer["text"] == expected.outputs[0].text and answer["output_ids"] == expected.outputs[0].token_ids
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(llm.encode(text)), 6, 0)
    ids = llm.encode(text)
    both = engine.generate(input_ids=[ids, ids[:4]], sampling_params=asked, return_logprob=True, top_logprobs_num=2)
    assert both[0]["output_ids"] == answer["output_ids"] and len(both) == 2
    assert [entry[1] for entry in both[0]["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    assert len(engine.generate(text, {**asked, "n": 3})) == 3
    stop = engine.generate(text, {**asked, "stop_token_ids": answer["output_ids"][1:2]})
    assert stop["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][1]}
    parts = list(engine.generate(text, asked, stream=True))
    assert parts[-1]["text"] == answer["text"] and parts[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(parts)) and len(parts) == 6
    assert [part["output_ids"] for part in parts] == [answer["output_ids"][: i + 1] for i in range(6)]
    engine.flush_cache()
    engine.shutdown()


def test_sglangs_log_probabilities(engine):
    llm = engine.llm
    ids = random_prompts(43, 9)[0]
    asked = {"temperature": 2.0, "max_new_tokens": 4, "ignore_eos": True, "sampling_seed": 3}
    params = SamplingParams(temperature=2.0, max_tokens=4, ignore_eos=True, seed=3, logprobs=3, prompt_logprobs=3)
    (expected,) = generate(llm, [ids], params)
    plain = engine.generate(input_ids=ids, sampling_params=asked, return_logprob=True)["meta_info"]
    own = [
        entry[token].logprob
        for entry, token in zip(expected.outputs[0].logprobs, expected.outputs[0].token_ids, strict=True)
    ]
    assert [entry[1:] for entry in plain["output_token_logprobs"]] == [(t, None) for t in expected.outputs[0].token_ids]
    np.testing.assert_allclose([entry[0] for entry in plain["output_token_logprobs"]], own, atol=1e-3)
    assert plain["input_token_logprobs"] == [] and not any("top" in key for key in plain)
    how = {"return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True, "logprob_start_len": 5}
    for meta in (
        engine.generate(input_ids=ids, sampling_params=asked, **how)["meta_info"],
        list(engine.generate(input_ids=ids, sampling_params=asked, stream=True, **how))[-1]["meta_info"],
    ):
        np.testing.assert_allclose([entry[0] for entry in meta["output_token_logprobs"]], own, atol=1e-3)
        text = [llm.tokenizer.decode([token], skip_special_tokens=False) for token in ids[5:]]
        first, *others = meta["input_token_logprobs"]
        assert first == (None, ids[5], text[0])
        found = expected.prompt_logprobs[6:]
        assert [entry[1:] for entry in others] == list(zip(ids[6:], text[1:], strict=True))
        np.testing.assert_allclose(
            [entry[0] for entry in others],
            [of[token].logprob for of, token in zip(found, ids[6:], strict=True)],
            atol=1e-3,
        )
        assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == 4
        for entry, tops in zip(expected.outputs[0].logprobs, meta["output_top_logprobs"], strict=True):
            assert [token for _, token, _ in tops] == sorted(entry, key=lambda token: -entry[token].logprob)[:3]


def test_sglangs_answers_have_a_number_and_an_id_each(engine):
    asked = [{"n": n, "max_new_tokens": 3, "ignore_eos": True} for n in (2, 1, 2)]
    prompts = random_prompts(44, 5, 6, 7)
    last = {part["index"]: part for part in engine.generate(input_ids=prompts, sampling_params=asked, stream=True)}
    assert sorted(last) == [0, 1, 2, 3, 4] and len({part["meta_info"]["id"] for part in last.values()}) == 5
    assert [last[i]["meta_info"]["prompt_tokens"] for i in range(5)] == [5, 5, 6, 7, 7]
    whole = engine.generate(input_ids=prompts, sampling_params=asked)
    assert len({part["meta_info"]["id"] for part in whole}) == 5


def test_what_sglang_takes_is_taken(engine):
    (ids,) = random_prompts(45, 6)
    asked = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    expected = engine.generate(input_ids=ids, sampling_params=asked)["output_ids"]
    for given in (np.array(ids), tuple(ids)):
        assert engine.generate(input_ids=given, sampling_params=asked)["output_ids"] == expected
    assert engine.generate(input_ids=np.array([ids, ids]), sampling_params=asked)[1]["output_ids"] == expected
    assert engine.generate([]) == [] == engine.generate(input_ids=[], sampling_params=[])
    with pytest.raises(ValueError, match="sampling_params has 0 entries for 2 prompts"):
        engine.generate(["a", "b"], [])
    unset = {**asked, "json_schema": None, "top_p": None, "n": None}
    assert engine.generate(input_ids=ids, sampling_params=unset)["output_ids"] == expected
    assert (
        len(engine.generate(input_ids=ids * 41, sampling_params={**asked, "max_new_tokens": None})["output_ids"]) == 10
    )
    nothing = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 0})
    assert (nothing["output_ids"], nothing["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})
    stop = {**asked, "stop_token_ids": expected[1:2], "no_stop_trim": True}
    decoded = engine.llm.tokenizer.decode_output(ids, expected[:2])
    assert engine.generate(input_ids=ids, sampling_params=stop)["text"] == decoded


def test_sglangs_unknown_words_are_refused_by_name(engine):
    with pytest.raises(ValueError, match="unknown in sampling_params: json_schema; known: max_new_tokens"):
        engine.generate("the hen", {"json_schema": "{}"})
    for both in ({"prompt": "a", "input_ids": [1]}, {}):
        with pytest.raises(ValueError, match="give prompt or input_ids"):
            engine.generate(**both)
    with pytest.raises(
        ValueError, match=r"unknown options of Engine: ep_size, log_level; known: .*context_length.*dtype"
    ):
        sglang.Engine(model_path=tiny_folder(), ep_size=2, context_length=64, log_level="error")


def test_a_search_draws_no_id_that_a_caller_has():
    llm = make_llm()
    (prompt,) = random_prompts(62, 9)
    alone = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))
    taken = [{"prompt_token_ids": prompt, "request_id": f"beam-{number}"} for number in range(4)]
    stream = llm.stream(taken, greedy(40))
    llm.reader.request_ids = itertools.count()
    next(stream)
    found = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))
    stream.close()
    assert [beam.tokens for beam in found[0].sequences] == [beam.tokens for beam in alone[0].sequences]
    generate(llm, [prompt], greedy(1))
