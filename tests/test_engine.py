"""Cleverness never changes a token: engines over tiny models against a numpy model that recomputes everything."""

import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest
from engines import (
    SLIM,
    TIGHT,
    TINY,
    WIDE,
    add,
    branches,
    cached_of,
    check_alone,
    check_greedy,
    drain,
    family,
    forget,
    generate,
    greedy,
    make_llm,
    other_than,
    pages_of,
    poison,
    random_prompts,
    tiny_folder,
    tokens_of,
)
from oracle import OracleLlama

from pallas_kernels.gated_product import gated_product
from prefix_jax import LLM, tiling
from prefix_jax.models import llama

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


# Shared tiles ---------------------------------------------------------------------------------------------------------


def tree_of_prompts() -> list[list[int]]:
    """24 prompts: one root of 40 tokens, four branches of 24 below it, six tails each, all of another length."""
    (root,) = random_prompts(70, 40)
    branches = random_prompts(71, *([24] * 4))
    tails = random_prompts(72, *(3 + i for i in range(24)))
    return [[*root, *branches[i // 6], *tail] for i, tail in enumerate(tails)]


def forest_engine(forest: bool) -> LLM:
    """One that takes any run of shared pages for worth a tile, however few read it."""
    llm = make_llm(**{**WIDE, "num_pages": 768}, page_size=4, forest=forest)
    batcher = llm.engine.batcher
    if forest:
        batcher.costs = dataclasses.replace(batcher.costs, wide=1.5, tile=0.0, partial=0.0, launch=0.0)
    return llm


def test_shared_tiles_never_change_a_token(nobodys_memory_is_nan, monkeypatch):
    prompts = tree_of_prompts()
    plain = forest_engine(forest=False)
    want = generate(plain, prompts, greedy(12))
    llm = forest_engine(forest=True)
    kinds, reads = [], []
    dispatch = llm.engine.runner.dispatch

    def watch(batch):
        views = batch.bucket.unpack(batch.packed)
        kinds.append(batch.bucket.kind)
        if batch.bucket.kind == "shared":
            wide = views["wide.end"] > views["wide.start"]
            ranges = zip(views["wide.start"][wide], views["wide.end"][wide], strict=True)
            members = (views["wide.token"][wide] < batch.bucket.num_tokens).sum(axis=1)
            reads.append(sorted((int(a), int(b), int(n)) for (a, b), n in zip(ranges, members, strict=True)))
        return dispatch(batch)

    monkeypatch.setattr(llm.engine.runner, "dispatch", watch)
    outputs = generate(llm, prompts, greedy(12))
    assert tokens_of(outputs) == tokens_of(want)
    assert cached_of(outputs) == cached_of(want) == [0, *([64] * 5), *([40, *([64] * 5)] * 3)]
    assert kinds == ["mixed", *(["shared"] * 11)], "one step of prompts, then all decode"
    assert reads[0] == [(0, 40, 24), *([(40, 64, 6)] * 4)], "the root once for all, each branch once for its six"
    assert all(read == reads[0] for read in reads), "and as long as they run"
    check_greedy(outputs)


@pytest.mark.parametrize("attention", ["xla", pytest.param("pallas_interpret", marks=pytest.mark.slow)])
def test_hidden_states_of_padding_may_be_anything(attention, nobodys_memory_is_nan, monkeypatch):
    """The kernel for Hopper leaves them as it finds them: here NaN, in prompts, chunks, hits and shared tiles."""
    counts = []

    def leave_padding(x, weight, activation, num_tokens, *, implementation):
        counts.append((len(x), num_tokens.shape))
        real = jax.numpy.arange(len(x))[:, None] < num_tokens
        return jax.numpy.where(real, gated_product(x, weight, activation), jax.numpy.nan)

    monkeypatch.setattr(llama, "gated_product", leave_padding)
    llm = LLM(tiny_folder(), use_tqdm=False, attention=attention, page_size=4, forest=True, check=True, **WIDE)
    assert set(counts) == {(bucket.num_tokens, (1,)) for bucket in llm.engine.batcher.buckets}
    prompts = tree_of_prompts()
    outputs = generate(llm, prompts, greedy(12))
    assert cached_of(outputs) == [0, *([64] * 5), *([40, *([64] * 5)] * 3)]
    check_greedy(outputs)
    again = generate(llm, prompts, greedy(12))
    assert cached_of(again) == [len(prompt) - 1 for prompt in prompts]
    assert tokens_of(again) == tokens_of(outputs)


def test_short_chunks_over_a_shared_prefix_share_its_tiles(monkeypatch):
    """Prompts that arrive when their prefix is cached: their chunks read it together, mixed with a decode."""
    prompts = tree_of_prompts()[:6]
    answers = {}
    for forest in (False, True):
        llm = forest_engine(forest=forest)
        generate(llm, prompts[:1], greedy(1))
        built, build = [], llm.engine.batcher.build
        with monkeypatch.context() as patch:
            patch.setattr(
                llm.engine.batcher, "build", lambda *a, build=build, built=built: built.append(build(*a)) or built[-1]
            )
            outputs = generate(llm, prompts, greedy(5))
        answers[forest] = tokens_of(outputs)
        assert cached_of(outputs) == [64] * 6
        views = built[0].bucket.unpack(built[0].packed)
        assert built[0].bucket.kind == "mixed"
        assert ((views["wide.start"] == 0) & (views["wide.end"] == 64)).sum() == (forest and 1)
    assert answers[False] == answers[True]


def test_shared_tiles_over_random_work_in_a_tight_pool(monkeypatch):
    """Sequences that come, end, are preempted and replaced in their rows, with runs of any two and with none."""
    options = {"num_pages": 40, "page_size": 4, "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    plain = make_llm(**options, forest=False)
    costs = tiling._shared_costs
    cheap = {"wide": 0.6, "tile": 0.0, "partial": 0.0, "launch": 0.0, "min_sequences": 2}
    with monkeypatch.context() as patch:
        patch.setattr(tiling, "_shared_costs", lambda *args: dataclasses.replace(costs(*args), **cheap))
        llm = make_llm(**options, forest=True)
    kinds, dispatch = [], llm.engine.runner.dispatch
    monkeypatch.setattr(llm.engine.runner, "dispatch", lambda batch: kinds.append(batch.bucket.kind) or dispatch(batch))
    preemptions = 0
    for seed in range(5):
        rng = random.Random(seed)
        forget(llm)
        forget(plain)
        prompts = branches(rng, seed, 14, repeats=0.3)
        params = [greedy(rng.randrange(1, 30)) for _ in prompts]
        outputs, want = generate(llm, prompts, params), generate(plain, prompts, params)
        assert tokens_of(outputs) == tokens_of(want)
        assert cached_of(outputs) == cached_of(want)
        preemptions += llm.stats["preemptions"]
    assert preemptions > 0
    assert kinds.count("shared") > 50 and kinds.count("decode") > 10 and kinds.count("mixed") > 10
