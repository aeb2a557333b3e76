"""Full pools, full contexts, seeds in company, and what breaks: aborts, interrupts, steps that fail."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    SLIM,
    TIGHT,
    add,
    cached_of,
    check_greedy,
    compiling_once,
    drain,
    family,
    forget,
    generate,
    greedy,
    home,
    make_llm,
    pages_of,
    poison,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, SamplingParams
from prefix_jax.commands import hold
from prefix_jax.runner import Runner

# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_tokens", "answer"),
    [
        (112, 16, 16),
        (113, 16, 15),
        (126, 16, 2),
        (127, 1, 1),
        (127, 2, 1),
        (128, 1, 0),
        (128, None, 0),
        (100, None, 28),
    ],
)
def test_the_context_is_used_to_its_last_token(length, max_tokens, answer):
    """One or two tokens too few at the limit, or an index past the table: sglang#33814, vllm#16445 (C31)."""
    llm = make_llm(**SLIM)
    (prompt,) = random_prompts(25, length)
    (output,) = generate(llm, [prompt], greedy(max_tokens))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (answer, "length")
    if answer:
        check_greedy([output])
    else:
        assert "128" in output.outputs[0].stop_reason
    with pytest.raises(ValueError, match=r"129 tokens, max_model_len is 128"):
        generate(llm, [[*prompt, *([5] * 129)][:129]])


def test_padding_never_touches_the_last_page():
    """Negative indices wrap, so padded rows write into the pool's last page: jax#29434 (C33)."""
    llm = make_llm(**TIGHT)
    prompts = random_prompts(26, *([7] * 8))
    outputs = []
    for prompt in prompts:  # each fills two pages: the pool is full, and nobody reads
        outputs += generate(llm, [prompt], greedy(2))
    assert len(llm.engine.cache.pool) == 0 and llm.stats["evicted_pages"] == 0
    last = llm.engine.runner.num_pages
    (owner,) = (output for output in outputs
                if last in pages_of(llm, [*output.prompt_token_ids, *output.outputs[0].token_ids]))  # fmt: skip

    def last_page():
        return [np.asarray(slots[last * 4 :]) for layer in llm.engine.runner.store for slots in layer]

    before = last_page()
    assert all(np.abs(slots).sum() > 0 for slots in before)
    live = [*owner.prompt_token_ids, *owner.outputs[0].token_ids]
    for neighbours in range(4):  # 20 steps with one to four rows of a bucket of one or four, and chunks that fill none
        running = generate(llm, [live, *random_prompts(27 + neighbours, *([3] * neighbours))], greedy(6))
        check_greedy(running)
        assert running[0].num_cached_tokens == 8
    for old, new in zip(before, last_page(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_pool_used_to_its_last_page_gives_the_same_tokens():
    """Scheduler and device disagree on the page count, so high ids land on the last page: tpu-inference#2366 (C34)."""
    llm = make_llm(**TIGHT)
    for layer in llm.engine.runner.store:
        assert all(slots.shape[0] == (llm.engine.cache.pool.num_pages + 1) * 4 for slots in layer)
    prompts = random_prompts(31, 16, 17, 15, 30)
    for index, prompt in enumerate(prompts):
        add(llm, str(index), prompt, greedy(24))
    left, busy = [], []

    def watch():
        left.append(len(llm.engine.cache.pool) + llm.engine.cache.num_idle)
        busy.append(len(llm.engine.scheduler.running))

    outputs = drain(llm, watch)
    assert any(free == 0 and count >= 2 for free, count in zip(left, busy, strict=True)), "the pool was never full"
    assert llm.stats["preemptions"] > 0
    check_greedy(list(outputs.values()))
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs.values())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_row_reads_its_own_pages(count):
    """A flat page list is padded as a whole, and the second request reads a neighbour's pages: sglang-jax#20 (C35)."""
    llm = make_llm()
    prompts = random_prompts(32, 1, 16, 17, 40) + random_prompts(33, 1, 16, 17, 40)
    alone = [tokens_of(generate(llm, [prompt]))[0] for prompt in prompts]
    orders = list(itertools.permutations(range(len(prompts)), count))
    for order in random.Random(2).sample(orders, min(len(orders), 12)):
        forget(llm)
        assert tokens_of(generate(llm, [prompts[i] for i in order])) == [alone[i] for i in order]


COMBINATIONS = [
    {}, {"top_p": 0.5, "min_p": 0.1, "seed": 1}, {"presence_penalty": 1.0, "repetition_penalty": 1.5, "n": 3},
    {"frequency_penalty": -1.0, "logit_bias": {7: 5.0}, "logprobs": 3}, {"allowed_token_ids": [5, 6, 7]},
    {"bad_words": ["the", "a b"], "stop": "e"}, {"prompt_logprobs": 2, "n": 2},
    {"stop_token_ids": [5], "min_tokens": 1},
]  # fmt: skip


def test_nothing_is_compiled_after_the_start():
    """New lengths, batch sizes or table widths compile in service: sglang-jax#117, vllm#14510 (C36). Nor does any
    combination of what rows ask for."""
    llm = make_llm()
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    rng = random.Random(3)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 41)(jnp.zeros(3))
        assert len(compiled) > 0, "the event has another name now"
        compiled.clear()
        (stem,) = random_prompts(34, 250)
        count = 0
        while count < 200:
            prompts = [stem[: rng.randint(0, 120)] + random_prompts(count + i, rng.randint(1, 120))[0]
                       for i in range(rng.randint(1, 10))]  # fmt: skip
            params = [
                SamplingParams(
                    temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 5]), max_tokens=rng.randint(1, 9),
                    **rng.choice(COMBINATIONS),
                )
                for _ in prompts
            ]  # fmt: skip
            generate(llm, prompts, params, prefix_pos=rng.choice([None, 1, 16, 40]))
            count += len(prompts)
        forget(llm)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert llm.stats["num_buckets"] == 4


# Sampling -------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_in_any_company():
    """A seeded row is drawn from a shared key, or by its place in a batch: vllm#51226 (C51). An unfinished chunk moves
    the random state: vllm#4139, vllm#14239 (C52). A recycled row keeps another's settings: vllm#43894 (C45)."""
    llm = make_llm()
    (prompt,) = random_prompts(35, 100)
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True)
    (expected,) = tokens_of(generate(llm, [prompt], params))
    assert tokens_of(generate(llm, [prompt], params)) == [expected], "a hit"
    assert tokens_of(generate(llm, [prompt], SamplingParams(seed=8, max_tokens=20, ignore_eos=True))) != [expected]
    for budget in (1, 7, 16, 32, 64):
        forget(llm)
        llm.engine.scheduler.max_num_batched_tokens = budget
        outputs = generate(llm, [prompt], params)
        assert tokens_of(outputs) == [expected] and outputs[0].metrics.first_token_time is not None
    for neighbours in (1, 3, 7):
        others = random_prompts(36, *([9] * neighbours))
        settings = [
            SamplingParams(temperature=0.1 + i, top_k=1 + i, top_p=0.5, max_tokens=3 + 3 * i) for i in range(neighbours)
        ]
        outputs = generate(llm, [*others, prompt], [*settings, params])
        assert tokens_of(outputs[-1:]) == [expected]
    assert tokens_of(generate(make_llm(enable_prefix_caching=False), [prompt], params)) == [expected]


RESTART = """
import json, sys
from prefix_jax import LLM, SamplingParams
folder, options, prompts, params = json.load(sys.stdin)
params = [SamplingParams(**own) for own in params]
outputs = LLM(folder, use_tqdm=False, **options).generate(prompts, params, use_tqdm=False)
print(json.dumps([[answer.token_ids for answer in output.outputs] for output in outputs]))
"""


def test_a_seed_gives_the_same_tokens_in_another_process():
    """C51, after a restart: another process, another number of rows and pages, other neighbours; what no seed was given
    to is drawn anew there, and finds itself elsewhere in the batch."""
    asked = {"max_tokens": 12, "ignore_eos": True, "temperature": 2.0}
    seeded = [
        {"seed": 7},
        {"seed": 2**64 - 1, "n": 3, "top_p": 0.9},
        {"seed": 0, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 0.0},
    ]
    params = [asked | own for own in seeded]
    prompts = random_prompts(41, 20, 33, 50, 17)
    outputs = generate(make_llm(), prompts, [SamplingParams(**own) for own in params])
    expected = [[answer.token_ids for answer in output.outputs] for output in outputs]
    others = random_prompts(42, 9, 60, 9)
    options = {**SLIM, "max_num_seqs": 3, "page_size": 8, "seed": 11, "num_pages": 48}
    told = [str(tiny_folder()), options, [*others, *prompts], [asked] * 3 + params]
    command, paths = [sys.executable, "-c", RESTART], {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, input=json.dumps(told), env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said[3:] == expected
    assert said[:3] != [[tokens] for tokens in tokens_of(generate(make_llm(), others, [SamplingParams(**asked)] * 3))]


def test_each_request_keeps_its_own_parameters():
    """A list of parameters is collapsed to the last one: lmms-eval#1326 (C54)."""
    llm = make_llm()
    prompts = random_prompts(37, 12, 12, 12)
    params = [greedy(3), SamplingParams(seed=1, max_tokens=7, ignore_eos=True), SamplingParams(temperature=0.5, top_k=3, seed=2, max_tokens=5, ignore_eos=True)]  # fmt: skip # noqa: E501
    together = tokens_of(generate(llm, prompts, params))
    assert [len(tokens) for tokens in together] == [3, 7, 5]
    assert together == [tokens_of(generate(llm, [p], s))[0] for p, s in zip(prompts, params, strict=True)]


def test_the_random_key_moves_on():
    """One key captured at the start serves every step, so outputs loop: sglang-jax#940, tpu-inference#1189 (C37)."""
    config = tiny_config()
    weights = tiny_weights(config)
    weights["lm_head.weight"] *= 0  # every token is as likely as any other
    llm = make_llm(write_checkpoint(home() / "uniform", config, weights))
    params = SamplingParams(max_tokens=125, ignore_eos=True)
    first, second = (tokens_of(generate(llm, [[5, 6, 7]] * 4, params)) for _ in range(2))
    assert len(set(map(tuple, first + second))) == 8
    drawn = np.array(first + second).ravel()
    counts = np.bincount(drawn // 10, minlength=30)
    chi_square = ((counts - len(drawn) / 30) ** 2 / (len(drawn) / 30)).sum()
    assert chi_square < 66.6, "p < 1e-4 for 29 degrees of freedom"
    assert max(np.bincount(drawn)) < 20


# Faults ---------------------------------------------------------------------------------------------------------------


def fail_at(monkeypatch, llm, calls: set[int], error=RuntimeError) -> None:
    """Lets the dispatches of these numbers, counted from 1, fail."""
    dispatch, numbers = llm.engine.runner.dispatch, itertools.count(1)

    def failing(batch):
        if next(numbers) in calls:
            raise error("injected: the device is gone")
        return dispatch(batch)

    monkeypatch.setattr(llm.engine.runner, "dispatch", failing)


@pytest.mark.parametrize("call", [1, 2, 4, 9])
def test_a_step_that_fails_costs_time_but_no_token(call, monkeypatch, caplog):
    llm = make_llm()
    prompts = [*family(38), *random_prompts(39, 70, 5)]
    expected = tokens_of(generate(llm, prompts))
    forget(llm)
    fail_at(monkeypatch, llm, {call, call + 5})
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == expected
    llm.engine.cache.check()
    assert caplog.text.count("injected") >= 1
    assert llm.stats["computed_tokens"] > sum(map(len, prompts)) // 2, "counters outlive the fault"


def test_a_step_whose_result_cannot_be_read_is_run_again(monkeypatch, caplog):
    llm = make_llm()
    prompts = family(38)
    expected = tokens_of(generate(llm, prompts))
    forget(llm)
    launch, numbers = llm.engine._launch, itertools.count(1)

    class Unreadable:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("injected: the result is lost")

    def launch_or_lose(plan):
        launched = launch(plan)
        return SimpleNamespace(plan=plan, tokens=Unreadable()) if next(numbers) == 3 else launched

    monkeypatch.setattr(llm.engine, "_launch", launch_or_lose)
    assert tokens_of(generate(llm, prompts)) == expected
    assert "injected" in caplog.text


@pytest.mark.parametrize("call", [1, 3])
def test_two_faults_in_a_row_are_raised_and_the_engine_serves_again(call, monkeypatch):
    """Pages that a failed step was to write must not be found later."""
    llm = make_llm()
    prompts = family(40)
    expected = tokens_of(generate(llm, prompts))
    forget(llm)
    with monkeypatch.context() as patch:
        fail_at(patch, llm, {call, call + 1})
        with pytest.raises(RuntimeError, match="injected"):
            generate(llm, prompts)
    llm.engine.cache.check()
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == expected
    assert not llm.engine.has_work
    check_greedy(outputs)


@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_interrupt_inside_a_step_leaves_the_engine_clean(call, monkeypatch):
    llm = make_llm()
    prompts = family(41)
    expected = tokens_of(generate(llm, prompts))
    forget(llm)
    poison(llm)
    with monkeypatch.context() as patch:
        fail_at(patch, llm, {call}, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts)
    assert tokens_of(generate(llm, prompts)) == expected
    assert not llm.engine.has_work


def test_an_abort_from_another_thread_ends_that_request_alone(monkeypatch):
    llm = make_llm()
    prompts = random_prompts(42, 20, 20, 20)
    expected = tokens_of(generate(llm, prompts, greedy(30)))
    forget(llm)
    dispatch, numbers = llm.engine.runner.dispatch, itertools.count(1)

    def with_abort(batch):
        if next(numbers) == 10:
            thread = threading.Thread(target=llm.abort, args=("b",))
            thread.start()
            thread.join()
        return dispatch(batch)

    monkeypatch.setattr(llm.engine.runner, "dispatch", with_abort)
    finished = []
    outputs = generate(
        llm,
        [{"prompt_token_ids": prompt, "request_id": name} for prompt, name in zip(prompts, "abc", strict=True)],
        greedy(30),
        on_output=lambda output: finished.append(output.request_id),
    )
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort", "length"]
    tokens = tokens_of(outputs)
    assert tokens[0] == expected[0] and tokens[2] == expected[2]
    assert 0 < len(tokens[1]) < 30 and tokens[1] == expected[1][: len(tokens[1])]
    assert finished[0] == "b"
    llm.abort("b")  # long gone
    llm.abort("nobody")
    assert tokens_of(generate(llm, prompts[:1], greedy(30))) == expected[:1]


def test_an_interrupt_between_two_results_leaves_the_engine_clean():
    llm = make_llm()
    prompts = family(43)
    seen = []

    def interrupt(output):
        seen.append(output)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, [greedy(2 + 3 * i) for i in range(len(prompts))], on_output=interrupt)
    forget(llm)
    assert not llm.engine.sequences and not llm._receivers
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting
    llm.engine.cache.check()
    outputs = generate(llm, prompts)
    check_greedy(outputs)


def test_a_second_engine_of_the_same_kind_answers_alike():
    """A second engine in the process has its own pages (C40: tpu-inference#3408)."""
    first = make_llm()
    with compiling_once():
        second = LLM(tiny_folder(), num_pages=64, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
                     use_tqdm=False)  # fmt: skip
    prompts = family(44)
    assert tokens_of(generate(first, prompts)) == tokens_of(generate(second, prompts))
    assert cached_of(generate(second, [prompts[0]])) == [39]


# What the tokenizer, a signal or the device does to one must not reach the others -------------------------------------


@pytest.mark.parametrize("options", [{"stop": "zzzz"}, {}], ids=["stop", "stream"])
def test_a_token_without_text_ends_its_request_alone(options, monkeypatch):
    """The text of a stop string or of a stream is made inside the step."""
    llm = make_llm()
    prompts = random_prompts(41, 11, 12)
    first, second = tokens_of(generate(llm, prompts, greedy(12)))
    has_text = lambda token: not llm.tokenizer.leaves_out(token, skip_special_tokens=True)  # noqa: E731
    bad, decode = next(token for token in second if token not in first and has_text(token)), llm.tokenizer.decode

    def fail(ids, *args, **named):
        if bad in list(ids):
            raise ValueError(f"no text for {bad}")
        return decode(ids, *args, **named)

    monkeypatch.setattr(llm.tokenizer, "decode", fail)
    asked = [greedy(12, detokenize=False), greedy(12, **options)]
    if options:
        good, refused = generate(llm, prompts, asked)
        told = good.outputs[0].token_ids
    else:
        deltas = list(llm.stream(prompts, asked))
        told = [token for delta in deltas if delta.index == 0 for token in delta.outputs[0].token_ids]
        refused = [delta for delta in deltas if delta.index == 1][-1]
    assert told == first
    assert refused.finished and refused.error == f"no text for {bad}"
    assert not llm.engine.has_work and not llm._receivers and not llm.engine.ready


def test_an_interrupt_while_outputs_are_made_loses_nobodys(monkeypatch):
    """Ctrl-C reaches the thread that steps; the others' outputs are theirs all the same."""
    llm = make_llm()
    prompts = random_prompts(42, 9, 10)
    mine, other = tokens_of(generate(llm, prompts, [greedy(8), greedy(4)]))
    make, done = llm.engine.outputs.make, []

    def interrupt(*args, **named):
        monkeypatch.setattr(llm.engine.outputs, "make", make)
        raise KeyboardInterrupt

    with llm.engine.lock:  # this thread is the one that steps
        waits = threading.Thread(target=lambda: done.extend(tokens_of(generate(llm, prompts[1:], greedy(4)))))
        waits.start()
        while llm.engine.commands.queue.empty():
            pass
        monkeypatch.setattr(llm.engine.outputs, "make", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts[:1], greedy(8))
    waits.join(60)
    assert done == [other]
    assert tokens_of(generate(llm, prompts[:1], greedy(8))) == [mine]
    assert not llm.engine.has_work and not llm._receivers and not llm.engine.ready


@pytest.mark.parametrize("call", [2, 3])
@pytest.mark.parametrize("place", ["collect", "text", "output"])
def test_ctrl_c_waits_for_the_end_of_a_step(place, call, monkeypatch):
    """It may come between any two lines, also where a token has been kept and its text has not."""
    llm = make_llm()
    prompts = random_prompts(45, 9, 10)
    expected = tokens_of(generate(llm, prompts, greedy(8)))
    text = generate(llm, prompts, greedy(8))[1].outputs[0].text
    owner, name = {
        "collect": (llm.engine.scheduler, "settle"),
        "text": (llm.tokenizer, "decode"),
        "output": (llm.engine.outputs, "_completion"),
    }[place]
    do, given, calls = getattr(owner, name), [], itertools.count()

    def interrupted(*args, **named):
        done = do(*args, **named)
        if threading.current_thread() is threading.main_thread() and next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return done

    llm.submit([prompts[1]], given.append, greedy(8))
    stream = llm.stream([prompts[0]], greedy(8))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    while llm.engine.has_work:
        llm.step()
    assert [token for delta in given for token in delta.outputs[0].token_ids] == expected[1]
    assert "".join(delta.outputs[0].text for delta in given) == text
    assert not llm._receivers and not llm.engine.ready
    assert tokens_of(generate(llm, prompts, greedy(8))) == expected


def test_a_second_ctrl_c_does_not_wait():
    came = []

    def interrupt() -> None:
        for number in range(3):
            came.append(number)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), hold(threading.RLock(), 0.1):
        interrupt()
    assert came == [0, 1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_right_behind_its_acquisition_leaves_no_lock_behind():
    """Python handles signals as soon as `acquire` returns, before the next line; every other thread would hang."""
    lock = threading.RLock()

    class Signalled:
        _is_owned, release = lock._is_owned, lock.release

        def acquire(self, timeout):
            lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), hold(Signalled(), 0.1):
        pass
    assert not lock._is_owned()
    with hold(lock, 0.1) as outer, hold(lock, 0.1) as inner:
        assert outer and inner
    assert not lock._is_owned()


def test_a_reset_that_finds_no_memory_is_tried_again(monkeypatch):
    llm = make_llm()
    prompts = random_prompts(43, 20)
    expected = tokens_of(generate(llm, prompts))
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_make_store", lambda self, *args: (_ for _ in ()).throw(MemoryError("none")))
        with pytest.raises(MemoryError):
            llm.engine.call(llm.engine.start_over)
    assert llm.engine.runner.store is None
    assert tokens_of(generate(llm, prompts)) == expected


def test_a_request_whose_states_are_not_finite_ends_with_an_error_and_leaves_nothing():
    """The constant token 0, or garbage, where a model leaves the range of its dtype (C76). Neither its neighbours
    notice nor those who get its pages later."""
    config = tiny_config()
    weights = tiny_weights(config)
    weights["model.embed_tokens.weight"][7] = np.nan
    with compiling_once():
        llm = LLM(write_checkpoint(home() / "not_finite", config, weights), use_tqdm=False, **{**TIGHT, "check": True})
    good = [[5 + i, *range(20, 40)] for i in range(3)]
    want = tokens_of(generate(llm, good, greedy(8)))
    llm.reset_prefix_cache()
    bad = [*range(50, 62), 7, *range(62, 70)]
    for _ in range(3):
        outputs = generate(llm, [good[0], bad, good[1]], greedy(8))
        assert outputs[1].error == "the hidden state at position 20 is not finite in float32"
        assert outputs[1].outputs[0].finish_reason == "error"
        assert tokens_of(outputs[::2]) == want[:2]
        assert not llm.engine.cache.find(array("i", bad))
        assert tokens_of(generate(llm, good, greedy(8))) == want
    (shared,) = generate(llm, [bad[:12]], greedy(2))
    assert not shared.error and shared.num_cached_tokens == 0, "also what was good of it is gone"
    streamed = list(llm.stream([bad], greedy(8)))
    assert [output.outputs[0].finish_reason for output in streamed] == ["error"]
