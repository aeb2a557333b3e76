"""Cleverness never changes a token: engines over tiny models against a numpy model that recomputes everything."""

import itertools
import random
import threading
from array import array
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    TIGHT,
    TINY,
    WIDE,
    IdealCache,
    cached_of,
    check_greedy,
    compiling_once,
    forget,
    generate,
    greedy,
    home,
    make_llm,
    other_than,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from oracle import OracleLlama
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, SamplingParams
from prefix_jax.request import Request

POISON = 1e4
SLIM = {**TINY, "max_num_batched_tokens": 8, "num_pages": 24}


def family(seed: int) -> list[list[int]]:
    """Prompts that branch off one of 40 tokens: inside its pages, at their edges, beyond its end."""
    (stem,) = random_prompts(seed, 40)
    tails = random_prompts(seed + 1, *([9] * 6))
    cuts = (5, 16, 31, 32, 33, 40)
    branches = [[*stem[:cut], other_than([*stem, 0][cut]), *tail] for cut, tail in zip(cuts, tails, strict=True)]
    return [stem, *branches, stem]


def check_alone(llm, prompts, params=None, folder=None) -> list[list[int]]:
    """Runs the prompts one after the other: the oracle's tokens, and exactly the ideal hits. Returns the tokens."""
    ideal, tokens = IdealCache(llm.engine.config.page_size), []
    for prompt in prompts:
        outputs = generate(llm, [prompt], params)
        expected = ideal.hits(prompt) if llm.engine.config.enable_prefix_caching else 0
        assert cached_of(outputs) == [expected]
        check_greedy(outputs, folder)
        ideal.learn(outputs)
        tokens += tokens_of(outputs)
    return tokens


def poison(llm, spare_pages=(), spare_slots=()) -> None:
    """Overwrites every slot of the store but these."""
    size = llm.engine.config.page_size
    slots = (llm.engine.runner.num_pages + 1) * size
    bad = np.ones(slots, bool)
    for page in spare_pages:
        bad[page * size : (page + 1) * size] = False
    bad[list(spare_slots)] = False
    overwrite = jax.jit(
        lambda store: jax.tree.map(lambda x: jnp.where(bad[:, None, None], jnp.full_like(x, POISON), x), store)
    )
    llm.engine.runner.store = overwrite(llm.engine.runner.store)


def pages_of(llm, tokens: list[int]) -> list[int]:
    """The pages that the cache has for the full pages of these tokens, but for the last token."""
    table = llm.engine.cache.open(array("i", tokens), publishes=False)
    pages = [node.page for node in table.nodes]
    llm.engine.cache.close(table)
    return pages


def add(llm, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    llm.engine.add(Request(request_id, tuple(prompt), params, len(prompt) + params.max_tokens))


def drain(llm, between=lambda: None, limit: int = 5000) -> dict[str, object]:
    """Steps until nothing is left, calling `between` before each; outputs by request id."""
    outputs = {}
    for _ in range(limit):
        if not llm.engine.has_work:
            return outputs
        between()
        outputs |= {output.request_id: output for output in llm.engine.step()}
    raise AssertionError(f"not done after {limit} steps: {llm.engine.scheduler.__dict__}")


# Against the oracle ---------------------------------------------------------------------------------------------------

MODELS = [
    ({"group": 1, "head_dim": 8, "tied": True}, 1),
    ({"group": 3, "head_dim": 64, "tied": False}, 4),
    ({"group": 4, "head_dim": 96, "tied": True, "num_kv_heads": 1}, 16),
    ({"group": 3, "head_dim": 128, "tied": False, "num_kv_heads": 1}, 32),
]


@pytest.mark.parametrize(("model", "page_size"), MODELS, ids=["G1-D8", "G3-D64", "G4-D96", "G3-D128"])
def test_every_model_says_what_the_oracle_says_at_every_page_size(model, page_size):
    folder = tiny_folder(**model)
    llm = make_llm(folder, **{**TINY, "page_size": page_size, "num_pages": 1024 // page_size})
    tokens = check_alone(llm, family(0), folder=folder)
    assert tokens[0] == tokens[-1] and len(set(map(tuple, tokens))) > 4, "the answers hang on the prompts"
    forget(llm)
    together = generate(llm, family(0))
    assert tokens_of(together) == tokens
    assert llm.stats["cached_tokens"] > 0


def test_stories_come_out_as_the_oracle_tells_them(shared_data):
    folder = shared_data / "models" / "stories260K-hf"
    llm = make_llm(folder, **TINY)
    start = "Once upon a time, there was a little girl named Lily. She"
    outputs = generate(llm, [start, start + " loved to play outside", start], greedy(40))
    check_greedy(outputs, folder)
    assert outputs[0].outputs[0].text == outputs[2].outputs[0].text != ""
    again = generate(llm, [start], greedy(40))
    assert tokens_of(again) == tokens_of(outputs[:1])
    length = len(again[0].prompt_token_ids)
    assert cached_of(again) == [length - 1], "its own answer filled the page in which the prompt ends"


@pytest.mark.slow
def test_smollm2_says_what_the_oracle_says(default_model):
    llm = LLM(default_model, dtype="float32", num_pages=32, max_model_len=128, max_num_seqs=1,
              max_num_batched_tokens=32, use_tqdm=False)  # fmt: skip
    oracle = OracleLlama.from_gguf(default_model, np.float32)
    prompts = ["The capital of France is", "The capital of France is not far from"]
    outputs = generate(llm, prompts, greedy(12))
    check_greedy(outputs, oracle=oracle)
    again = generate(llm, prompts[0], greedy(12))
    assert tokens_of(again) == tokens_of(outputs[:1]) and 0 <= cached_of(again)[0] < len(again[0].prompt_token_ids)


# Equivalences ---------------------------------------------------------------------------------------------------------


def test_the_cache_changes_no_token():
    cached, plain = make_llm(), make_llm(enable_prefix_caching=False)
    assert check_alone(cached, family(1)) == check_alone(plain, family(1))
    assert cached.stats["cached_tokens"] == sum([5, 16, 31, 32, 32, 33, 39]) and plain.stats["cached_tokens"] == 0
    together = [tokens_of(generate(llm, family(2))) for llm in (cached, plain)]
    assert together[0] == together[1]
    assert plain.stats["published_pages"] == plain.stats["cached_tokens"] == plain.stats["adopted_tokens"] == 0


@pytest.mark.parametrize("budget", [1, 7, 16, 24, 63, 64])
def test_no_chunk_size_changes_a_token(budget):
    llm = make_llm()
    expected = tokens_of(generate(llm, family(3)))
    forget(llm)
    llm.engine.scheduler.max_num_batched_tokens = budget
    assert check_alone(llm, family(3)) == expected
    forget(llm)
    outputs = generate(llm, family(3))
    assert tokens_of(outputs) == expected
    check_greedy(outputs)


@pytest.mark.parametrize(
    "options",
    [
        {**TINY, "max_num_batched_tokens": 1, "max_num_seqs": 1},
        SLIM,
        WIDE,
    ],
    ids=lambda options: str(options["max_num_batched_tokens"]),
)
def test_engines_of_any_budget_agree_on_any_length(options):
    """Chunks are capped by one setting, padded shapes by another, and the first long prompt kills the scheduler:
    sglang-jax#1551 (C29). A budget below one page is a budget too."""
    llm = make_llm(**options)
    prompts = random_prompts(4, 1, 15, 63, 64, 65, 119, 120)
    outputs = generate(llm, prompts)
    check_greedy(outputs)
    assert cached_of(outputs) == [0] * len(prompts)
    assert tokens_of(outputs) == check_alone(make_llm(**options), prompts)


def test_neighbours_and_order_change_no_token():
    llm = make_llm()
    prompts = [*family(5), *random_prompts(6, 1, 2, 17, 60)]
    alone = []
    for prompt in prompts:
        forget(llm)
        alone += tokens_of(generate(llm, [prompt]))
    rng = random.Random(0)
    for _ in range(6):
        forget(llm)
        order = rng.sample(range(len(prompts)), len(prompts))
        assert tokens_of(generate(llm, [prompts[i] for i in order])) == [alone[i] for i in order]


def test_what_was_evicted_is_computed_again():
    """Eviction forgets to drop the key, and a later lookup finds another's tokens: vllm#4761, kvcached#362 (C14)."""
    llm = make_llm(**TIGHT)
    a, b, c, d = random_prompts(8, 20, 20, 20, 20)
    outputs = []
    for prompt in (a, b, c, d, a, b, b):
        outputs += generate(llm, [prompt], greedy(4))
    check_greedy(outputs)
    # Each leaves 5 pages of the 16 and asks for 6: d, a and b throw out a, b and c; at last one more has to go.
    assert cached_of(outputs) == [0, 0, 0, 0, 0, 0, 19]
    assert llm.stats["evicted_pages"] == 16


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 24, 64])
def test_preemption_changes_no_token(budget, caching):
    """Chunks after a preemption see a wrong state, and answers get worse: sglang-jax#1010, vllm#18055 (C26)."""
    llm = make_llm(enable_prefix_caching=caching)
    llm.engine.scheduler.max_num_batched_tokens = budget
    prompts = [*family(9), *random_prompts(10, 3, 50, 64, 90)]
    expected = tokens_of(generate(llm, prompts, greedy(20)))
    forget(llm)
    for index, prompt in enumerate(prompts):
        add(llm, str(index), prompt, greedy(20))
    rng, steps = random.Random(1), itertools.count(1)
    every = 3 if caching else 9  # without a cache all that was computed is lost

    def preempt():
        if next(steps) % every == 0 and llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(rng.choice(llm.engine.scheduler.running))

    outputs = drain(llm, preempt)
    assert [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))] == expected
    assert llm.stats["preemptions"] >= (10 if caching else 4)
    check_greedy(list(outputs.values()))


@pytest.mark.parametrize("length", [16 * k + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_preempted_next_to_a_page_edge_no_token_is_lost_or_said_twice(length):
    """After recompute the new token is skipped or appended twice: nano-vllm#217, nano-vllm#66 (C25)."""
    llm = make_llm()
    (prompt,) = random_prompts(11, 10)
    (expected,) = tokens_of(generate(llm, [prompt], greedy(50)))
    for pause in (0, 5):
        forget(llm)
        add(llm, "a", prompt, greedy(50))
        outputs = drain_with_preemption(llm, length, pause)
        assert outputs["a"].outputs[0].token_ids == expected
        assert llm.stats["preemptions"] == 1


def drain_with_preemption(llm, length: int, pause: int) -> dict[str, object]:
    """Preempts the one running sequence at a length, and lets it wait for so many steps."""
    scheduler, rows, steps = llm.engine.scheduler, [], itertools.count()
    until = None

    def between():
        nonlocal until
        if until is None and scheduler.running and len(scheduler.running[0].tokens) == length:
            scheduler.preempt(scheduler.running[0])
            until = next(steps) + pause
            rows.extend(scheduler.free_rows)
            scheduler.free_rows.clear()
        if until is not None and next(steps) > until:
            scheduler.free_rows.extend(rows)
            rows.clear()

    return drain(llm, between)


@pytest.mark.parametrize("count", [2, 64])
def test_equal_prompts_of_one_call_are_computed_once(count):
    """Of many equal prompts each is prefilled, or all wait for ever: vllm#7414, vllm#14686 (C28)."""
    llm = make_llm(**WIDE)
    (prompt,) = random_prompts(12, 100)
    outputs = generate(llm, [prompt] * count)
    check_greedy(outputs[:1])
    assert len(set(map(tuple, tokens_of(outputs)))) == 1
    assert cached_of(outputs) == [0] + [96] * (count - 1)
    assert llm.stats["computed_prompt_tokens"] == 100 + 4 * (count - 1)


# Computing on top of a hit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_cached_whole_still_gets_its_answer(length, max_tokens):
    """Every page hits and nothing is left to run: nano-vllm#144, vllm#3239, vllm#17999 (C01)."""
    llm = make_llm()
    (prompt,) = random_prompts(13, length)
    params = greedy(max_tokens)
    first, second = generate(llm, [prompt], params), generate(llm, [prompt], params, prefix_pos=length)
    published = (length + max_tokens - 1) // 16 * 16
    assert cached_of(first + second) == [0, min(length - 1, published)]
    forget(llm)
    pair = generate(llm, [prompt, prompt], params)
    assert cached_of(pair) == [0, (length - 1) // 16 * 16], "a page of this very step is read whole or not at all"
    outputs = [*first, *second, *pair]
    check_greedy(outputs)
    assert len(set(map(tuple, tokens_of(outputs)))) == 1
    assert llm.stats["computed_prompt_tokens"] >= length + 1


def test_every_suffix_of_a_cached_prefix_continues_at_its_end():
    """The entry is stored one token short, and every later position is shifted: vllm-mlx#311 (C02)."""
    llm = make_llm()
    (prefix,) = random_prompts(14, 48)
    check_alone(llm, [prefix, *(prefix + tail for tail in random_prompts(15, *range(1, 18)))])


@pytest.mark.parametrize("context", [16, 48, 112])
def test_a_prefill_on_cached_context_equals_a_fresh_one(context):
    """The path with computed tokens has a wrong mask, length or page table: tenstorrent/vllm#415 (C03)."""
    llm = make_llm()
    (prefix,) = random_prompts(16, context)
    prompts = [prefix + tail for tail in random_prompts(17, 1, 2, 15, 16, 17, 100)]
    fresh = []
    for prompt in prompts:
        forget(llm)
        fresh += tokens_of(generate(llm, [prompt]))
    for prompt, expected in zip(prompts, fresh, strict=True):
        forget(llm)
        generate(llm, [prefix], greedy(1))
        outputs = generate(llm, [prompt])
        assert cached_of(outputs) == [context] and tokens_of(outputs) == [expected]
    forget(llm)
    generate(llm, [prefix], greedy(1))
    mixed = generate(llm, [*random_prompts(18, 30, 90), *prompts])  # hits, misses and, later, decodes in one step
    assert tokens_of(mixed[2:]) == fresh and cached_of(mixed)[:2] == [0, 0]
    assert all(cached >= context for cached in cached_of(mixed)[2:])
    check_greedy(mixed)


def test_nothing_behind_the_matched_length_is_seen():
    """A longer entry is shortened to its match by the length alone, its tail stays visible: vllm-mlx#380 (C04)."""
    llm = make_llm()
    prefix, secret = random_prompts(19, 53, 150)
    prompts = [[*prefix, other_than(secret[0]), *tail] for tail in random_prompts(20, *range(20))]
    fresh = []
    for prompt in prompts:
        forget(llm)
        fresh += tokens_of(generate(llm, [prompt]))
    forget(llm)
    generate(llm, [prefix + secret], greedy(1))
    kept, (split,) = pages_of(llm, prefix)[:3], pages_of(llm, prefix + secret)[3:4]
    poison(llm, kept, [split * 16 + offset for offset in range(5)])
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == fresh
    assert cached_of(outputs)[0] == 53, "three pages, and the head of a fourth copied"
    assert min(cached_of(outputs)) >= 48


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_page_of_the_step_itself_is_written_before_it_is_read(count):
    """A sibling of the same step attends to a page that is registered but not written: vllm#42359, vllm#7414 (C05)."""
    llm = make_llm(**WIDE)
    (prefix,) = random_prompts(21, 64)
    prompts = [[*prefix, 4 + i, *tail] for i, tail in enumerate(random_prompts(22, *([6] * count)))]
    poison(llm)
    outputs = generate(llm, prompts)
    check_greedy(outputs)
    assert cached_of(outputs) == [0] + [64] * (count - 1)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("next_budget", [24, 64])
def test_a_page_is_found_no_earlier_than_it_is_full(steps, next_budget):
    """A page that two chunks fill is visible before it is full: ROCm/ATOM#902 (C06)."""
    llm = make_llm()
    (prompt,) = random_prompts(23, 48)
    poison(llm)
    llm.engine.scheduler.max_num_batched_tokens = 24
    add(llm, "first", prompt, greedy())
    for _ in range(steps):
        llm.engine.step()
    full = len(list(llm.engine.cache.trie))
    assert full == 24 * steps // 16
    llm.engine.scheduler.max_num_batched_tokens = next_budget
    add(llm, "second", prompt, greedy())
    outputs = drain(llm)
    check_greedy(list(outputs.values()))
    assert outputs["first"].num_cached_tokens == 0
    # After one step the pages of the second are planned, so written, before it reads; after two the third is settled.
    expected = 32 if (steps, next_budget) == (1, 64) else 47
    assert outputs["second"].num_cached_tokens == expected


def test_the_next_turn_finds_the_answer_of_the_last():
    """On finish only the prompt is kept, so turn 2 computes turn 1's answer again: sglang#16521 (C07)."""
    llm = make_llm()
    prompt, more = random_prompts(24, 100, 50)
    first = generate(llm, [prompt], greedy(50))
    second = generate(llm, [prompt + tokens_of(first)[0] + more])
    assert cached_of(second) == [144]
    check_greedy(first + second)


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


def test_nothing_is_compiled_after_the_start():
    """New lengths, batch sizes or table widths compile in service: sglang-jax#117, vllm#14510 (C36)."""
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
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 5]), max_tokens=rng.randint(1, 9)
            )
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
    assert not llm.engine.has_work
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == expected
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
    assert not llm.engine.has_work
    assert tokens_of(generate(llm, prompts)) == expected


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
    assert not llm.engine.has_work and not llm.engine.sequences and not llm.engine.decoders
    assert not llm.engine.scheduler.running and not llm.engine.scheduler.waiting
    llm.engine.cache.check()
    forget(llm)
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
