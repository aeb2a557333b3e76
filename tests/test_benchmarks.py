"""Workloads whose sharing can be counted by hand, rooflines that can be computed by hand, and each script in process
over one small engine: which rows it writes, not how fast."""

import argparse
import csv
import dataclasses
import gzip
import json
import math
import subprocess
from array import array
from types import SimpleNamespace

import benchmark_all
import benchmark_generation
import benchmark_models
import benchmark_peers
import benchmark_prefix_caching
import benchmark_serving
import benchmark_step
import benchmark_throughput
import benchmark_two_gpus
import processes
import profiles
import pytest
import render_results
import rooflines
import runs
import workloads
from benchmark_step import MODELS
from engines import SMALL, compiling_once, tiny_folder
from render_results import Figure
from rooflines import max_running, roofline
from runs import ALL_ON, OFF, Arm, Bench, Run
from workloads import Item, Workload, expected_hit_rate, novel_lens, num_distinct, text_encoder

from prefix_jax.models.llama import LlamaConfig
from prefix_jax.request import CompletionOutput, Logprob

OPTIONS = {**SMALL, "num_pages": 128, "max_model_len": 1024, "forest": True}
FOUR_BYTES = text_encoder(None, 10_000)  # "x" * 16 is four tokens


def lists(workload):
    return [list(tokens) for tokens in workload.prompts]


# Workloads ------------------------------------------------------------------------------------------------------------


def test_what_a_cache_can_find():
    """Of 16 tokens the second prompt finds 2, the third all but its last, the fourth nothing."""
    prompts = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4], [7, 7, 7, 7, 7]]
    assert novel_lens(prompts) == [4, 1, 0, 5]
    assert num_distinct(prompts) == 10
    assert expected_hit_rate(prompts) == (2 + 3) / 16
    assert novel_lens(reversed(prompts)) == [5, 4, 1, 0]


def test_an_answer_is_known_behind_its_prompt():
    prompts, answers = [[1, 2], [1, 2, 8, 9, 3], [1, 2, 8, 4]], [[8, 9], [], []]
    assert novel_lens(prompts) == [2, 3, 1]
    assert novel_lens(prompts, answers) == [2, 1, 1]
    assert expected_hit_rate(prompts, answers) == (4 + 3) / 11


def test_prompts_over_one_prefix():
    made = workloads.prefix_repetition(num=4, prefix_len=6, suffix_len=3, output_len=5, vocab_size=10**6, seed=1)
    assert [(len(item.tokens), item.output_len, item.shared_len) for item in made.items] == [(9, 5, 6)] * 4
    assert len({tuple(item.tokens[:6]) for item in made.items}) == 1
    assert expected_hit_rate(made.prompts) == 3 * 6 / 36
    assert (made.num_prompt_tokens, made.num_output_tokens) == (36, 20)


def test_groups_come_in_random_order_and_share_within():
    options = {"num": 12, "prefix_len": 8, "suffix_len": 2, "output_len": 1, "vocab_size": 10**6, "groups": 3}
    made, same, other = (workloads.prefix_repetition(seed=seed, **options) for seed in (1, 1, 2))
    prefixes = [tuple(item.tokens[:8]) for item in made.items]
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert prefixes[:3] * 4 != prefixes
    assert lists(made) == lists(same) != lists(other)
    assert expected_hit_rate(made.prompts) == 9 * 8 / 120


def test_a_tree_has_a_prompt_for_each_leaf():
    made = workloads.tree([(1, 4), (2, 3), (6, 2)], output_len=7, vocab_size=10**6, seed=0)
    assert [(len(item.tokens), item.output_len, item.shared_len) for item in made.items] == [(9, 7, 7)] * 6
    assert num_distinct(made.prompts) == 4 + 2 * 3 + 6 * 2
    assert expected_hit_rate(made.prompts) == (54 - 22) / 54
    with pytest.raises(ValueError, match="3 nodes do not divide among the 2 above"):
        workloads.tree([(2, 1), (3, 1)], output_len=1, vocab_size=9, seed=0)


def test_requests_that_are_too_long_are_left_out_and_counted():
    made = workloads.random_lengths([(5, 5), (6, 5), (2, 1)], vocab_size=9, seed=0)
    fitting = made.fitting(10)
    assert [len(item.tokens) for item in fitting.items] == [5, 2]
    assert fitting.skipped == {"longer than 10": 1}


def test_poisson_arrivals_follow_the_seed_and_the_rate():
    items = workloads.random_lengths([(1, 1)] * 2000, vocab_size=9, seed=0).items
    one, same, other = (workloads.poisson(items, 50.0, seed) for seed in (3, 3, 4))
    times = [item.arrival for item in one]
    assert times == [item.arrival for item in same] != [item.arrival for item in other]
    assert times == sorted(times) and times[-1] == pytest.approx(2000 / 50, rel=0.1)
    assert {item.arrival for item in workloads.poisson(items, math.inf, 0)} == {0.0}


def conversation(*texts, first="human"):
    names = [first, "gpt" if first == "human" else "human"]
    return {"id": "same", "conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]}


DEFECTS = [
    None,
    7,
    [],
    {"id": "x"},
    {"conversations": None},
    {"conversations": "text"},
    {"conversations": [{"from": "human"}, {"from": "gpt", "value": "y" * 16}]},
    {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "y" * 16}]},
    {"conversations": [{"from": "human", "value": ["x" * 16]}, {"from": "gpt", "value": "y" * 16}]},
]
SHORT = [{"conversations": []}, conversation("x" * 16)]
WRONG_LENGTH = [
    conversation("", "y" * 16),
    conversation("x" * 12, "y" * 16),
    conversation("x" * 16, "y" * 12),
    conversation("x" * 4100, "y" * 16),
    conversation("x" * 4096, "y" * 4100),
]
GOOD = [
    conversation("x" * 16, "y" * 20),
    conversation("z" * 4096, "y" * 4096),
    conversation("w" * 16, "v" * 16, "again"),
]


@pytest.mark.parametrize("form", ["array", "lines", "gzipped", "cut off", "BOM and CRLF"])
def test_malformed_sharegpt_rows_are_skipped_and_counted(tmp_path, form):
    """Rows with fewer than two turns, missing or wrong values, or the model first: a crash, or empty requests that are
    sent: sglang#7274 (C78)."""
    rows = [*DEFECTS, *SHORT, *WRONG_LENGTH, conversation("y" * 16, "x" * 16, first="gpt"), *GOOD]
    assert len(rows) == 20
    malformed = len(DEFECTS)
    path = tmp_path / "talks.json"
    text = json.dumps(rows)
    if form == "lines":
        text = "\n".join(json.dumps(row) for row in [GOOD[0], *rows[:-3], *GOOD[1:]]) + "\n{broken\n"
        malformed += 1
    if form == "cut off":
        text = text[:-1] + ', {"conversations": [{"from": "hum'
        malformed += 1
    if form == "BOM and CRLF":
        text = "\ufeff" + json.dumps(rows, indent=1).replace("\n", "\r\n")
    if form == "gzipped":
        path = tmp_path / "talks.json.gz"
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(text.encode())
    made = workloads.sharegpt(path, num=100, seed=0, encode=FOUR_BYTES, vocab_size=10_000)
    assert made.skipped == {
        "malformed": malformed, "fewer than two turns": 2, "the model begins": 1, "too short or too long": 5
    }  # fmt: skip
    assert sorted((len(item.tokens), item.output_len) for item in made.items) == [(4, 4), (4, 5), (1024, 1024)]
    again = workloads.sharegpt(path, num=2, seed=0, encode=FOUR_BYTES, vocab_size=10_000)
    assert lists(again) == lists(made)[:2]


def test_what_is_no_sharegpt_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("")
    assert workloads.sharegpt(path, num=1, seed=0, encode=FOUR_BYTES, vocab_size=9).items == []
    path.write_text("hello")
    with pytest.raises(ValueError, match="neither a JSON array nor JSON lines: 'hello'"):
        workloads.sharegpt(path, num=1, seed=0, encode=FOUR_BYTES, vocab_size=9)


def test_lengths_without_text(tmp_path):
    """A .csv is filtered and shuffled, first turns alone; a list of pairs keeps its order."""
    pairs = [(4, 4), (3, 9), (1024, 1024), (1025, 4), (1024, 1025), (9, 3), (5, 6), (7, 8)]
    with open(tmp_path / "lengths.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["conv", "turn", "user_tok_llama3", "asst_tok_llama3"])
        for number, pair in enumerate(pairs):
            out.writerows([[number, 0, *pair], [number, 1, 500, 500]])
    (tmp_path / "lengths.json").write_text(json.dumps(pairs))
    from_table, from_list = (
        workloads.sharegpt(tmp_path / name, num=9, seed=0, encode=FOUR_BYTES, vocab_size=9)
        for name in ("lengths.csv", "lengths.json")
    )
    assert [(len(i.tokens), i.output_len) for i in from_list.items] == [(4, 4), (1024, 1024), (5, 6), (7, 8)]
    assert {len(i.tokens) for i in from_table.items} == {4, 1024, 5, 7}
    assert from_table.skipped == from_list.skipped == {"too short or too long": 4}


def test_the_thousand_sharegpt_lengths(shared_data):
    """Mean 114 in, 278 out."""
    folder = shared_data / "sharegpt"
    made, again = (
        workloads.sharegpt(folder / name, num=1000, seed=0, encode=FOUR_BYTES, vocab_size=1000)
        for name in ("lengths_1000_llama3.json", "sharegpt_lengths_17k.csv.gz")
    )
    assert (made.num_prompt_tokens, made.num_output_tokens) == (113_852, 278_328)
    assert made.items == again.items


def test_real_conversations_share_and_first_turns_do_not(shared_data):
    """First turns alone show no reuse whatever the engine does: vllm#54783 (C80)."""
    path = shared_data / "sharegpt" / "sharegpt_clean_bench.json.gz"
    first = workloads.sharegpt(path, num=300, seed=0, encode=FOUR_BYTES, vocab_size=10_000)
    whole = workloads.conversations(path, num=300, seed=0, encode=FOUR_BYTES)
    assert first.skipped.keys() <= {"too short or too long", "fewer than two turns"}
    assert len(first.items) == len(whole.items) == 300
    assert expected_hit_rate(first.prompts) < 0.1 < 0.3 < expected_hit_rate(whole.prompts)


def test_conversations_take_turns_and_grow(tmp_path):
    talks = [conversation("a" * 8, "b" * 16, "c" * 4, "d" * 4), conversation("e" * 8, "f" * 4, "g" * 4)]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([*talks, 7]))
    made = workloads.conversations(path, num=9, seed=0, encode=FOUR_BYTES)
    a = next(i for i, item in enumerate(made.items) if item.tokens == FOUR_BYTES("a" * 8))
    assert [len(item.tokens) for item in made.items] == [2, 2, *((7, 4) if a == 0 else (4, 7))]
    assert made.items[2 + a].tokens == FOUR_BYTES("a" * 8 + "b" * 16 + "c" * 4)
    assert sorted(item.output_len for item in made.items) == [1, 1, 1, 4]  # the last has no answer: one token
    assert made.skipped == {"malformed": 1}
    fixed = workloads.conversations(path, num=9, seed=0, encode=FOUR_BYTES, output_len=3)
    assert {item.output_len for item in fixed.items} == {3}


def test_traces_have_times(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [1, 9]},
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = workloads.mooncake(tmp_path / "m.jsonl", num=None, seed=0, vocab_size=10**6)
    assert [(len(i.tokens), i.output_len, i.arrival) for i in made.items] == [(700, 3, 0.0), (1024, 1, 1.5)]
    assert novel_lens(made.prompts) == [700, 512]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:16:50.9305900,396,109"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    made = workloads.azure(tmp_path / "a.csv", num=None, seed=0, vocab_size=9)
    assert [(len(i.tokens), i.output_len, i.arrival) for i in made.items] == [(374, 44, 0.0), (396, 109, 64.25)]


def test_a_workload_file_is_read_back(tmp_path):
    items = [Item(array("i", [1, 2, 3]), 4, 2, 0.5), Item(array("i", [9]), 1)]
    path = tmp_path / "w.jsonl"
    workloads.write_custom(Workload("x", items), path)
    assert workloads.custom(path, num=None, encode=FOUR_BYTES, output_len=None).items == items
    path.write_text('{"prompt": "abcd"}\n{"prompt_token_ids": [1]}\n')
    made = workloads.custom(path, num=1, encode=FOUR_BYTES, output_len=6)
    assert made.items == [Item(FOUR_BYTES("abcd"), 6)]
    with pytest.raises(ValueError, match=r"w.jsonl:1: want .* got \['prompt'\]"):
        workloads.custom(path, num=None, encode=FOUR_BYTES, output_len=None)


@pytest.fixture
def texts(tmp_path):
    """A folder as --data wants it."""
    for name in ("mmlu", "mt_bench", "sharegpt"):
        (tmp_path / name).mkdir()
    shots = [{"subject": "a_b", "question": f"Q{i}", "choices": list("wxyz"), "answer": i % 4} for i in range(6)]
    questions = [{**shots[0], "question": f"test {i}"} for i in range(3)]
    (tmp_path / "mmlu" / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shots))
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in questions).encode())
    (tmp_path / "mmlu" / "test_half.jsonl.gz").write_bytes(packed)
    turns = [{"turns": [f"Say {word}.", "Once more, louder."]} for word in ("the one", "an other", "a third")]
    (tmp_path / "mt_bench" / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    talks = [
        conversation("hi the " * 6, "an on " * 6, "er in", "the"),
        conversation("one", "two"),
        conversation("er", "in", "th"),
    ]
    (tmp_path / "sharegpt" / "sharegpt_clean_bench.json.gz").write_bytes(gzip.compress(json.dumps(talks).encode()))
    return tmp_path


def test_mmlu_prompts_begin_with_five_shots(texts):
    asked = []
    made = workloads.mmlu(texts / "mmlu", num=None, encode=lambda text: asked.append(text) or [1])
    assert len(made.items) == 3
    assert asked[0].startswith(
        "The following are multiple choice questions (with answers) about a b.\n\nQ0\nA. w\nB. x"
    )
    assert asked[0].count("Answer:") == 6 and "Q4" in asked[0] and "Q5" not in asked[0]
    assert asked[0].endswith("test 0\nA. w\nB. x\nC. y\nD. z\nAnswer:")
    assert len(workloads.mmlu(texts / "mmlu", num=2, encode=lambda text: [1]).items) == 2


def test_dialogues(texts):
    path = texts / "sharegpt" / "sharegpt_clean_bench.json.gz"
    (whole,) = workloads.sharegpt_dialogues(path, num=None, max_chars=100)
    assert whole == workloads.Dialogue(("hi the " * 6, "er in"), ("an on " * 6, "the"))
    assert workloads.sharegpt_dialogues(path, num=None, max_chars=80) == []
    two = workloads.mt_bench(texts / "mt_bench" / "question.jsonl", num=2)
    assert [(len(d.asks), d.answers) for d in two] == [(2, None)] * 2


# Rooflines ------------------------------------------------------------------------------------------------------------

ONE = LlamaConfig(
    vocab_size=5, hidden_size=2, intermediate_size=3, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
)
LIMITS = {"copy_bytes_per_s": 1000.0, "product_flop_per_s": 100.0}


def test_what_a_model_costs():
    """Layer: query and output 2 x 4, key and value 2 x 4, MLP 3 x 6, norms 4; the last norm 2. Head: 10."""
    assert rooflines.layer_params(ONE) == 8 + 8 + 18 + 4 + 2
    assert rooflines.weight_bytes(ONE, 2) == 100
    assert rooflines.kv_bytes(ONE, 2) == 8
    assert rooflines.decode_bytes(ONE, 2, 6) == 148
    # Three tokens behind two see 3 + 4 + 5 positions; 4 L Hq D = 8.
    assert rooflines.prefill_operations(ONE, 3, 2) == 2 * 40 * 3 + 8 * 12


def test_a_roofline_by_hand():
    """Two prompts of 3 tokens, 2 shared; 3 tokens out: two decode steps, over 4 and 5 positions each."""
    items = [Item(array("i", [1, 2, 3]), 3), Item(array("i", [1, 2, 4]), 3)]
    off = roofline(items, ONE, 2, 2, caches=False, reads_once=False)
    assert (off.num_steps, off.num_decoded, off.positions) == (2, 4, 2 * (4 + 5))
    assert off.prefill == 2 * (240 + 8 * 6)
    computed_once = roofline(items, ONE, 2, 2, caches=True, reads_once=False)
    assert computed_once.prefill == (240 + 8 * 6) + (80 + 8 * 3)
    assert computed_once.positions == 18
    read_once = roofline(items, ONE, 2, 2, caches=True, reads_once=True)
    assert read_once.positions == 18 - 2 * 2  # the shared two, once less in each step
    # Multiplying with 50 parameters for four tokens takes longer than reading 100 bytes twice.
    assert read_once.seconds(LIMITS) == pytest.approx(392 / 100 + 400 / 100 + 14 * 8 / 1000)
    slow_copy = {**LIMITS, "copy_bytes_per_s": 10.0}
    assert read_once.seconds(slow_copy) == pytest.approx(392 / 100 + 200 / 10 + 14 * 8 / 10)


def test_waves_of_a_roofline():
    """One at once: twice the steps, and nothing is read for two."""
    items = [Item(array("i", [1, 2, 3]), 3), Item(array("i", [1, 2, 4]), 3)]
    alone = roofline(items, ONE, 2, 1, caches=True, reads_once=True)
    assert (alone.num_steps, alone.positions) == (4, 18)
    # A range is read for as long as the longest of those that share it runs: 2 positions in 4 steps, 1 each in 4 and 1.
    uneven = [Item(array("i", [1, 2, 3]), 2), Item(array("i", [1, 2, 4]), 5)]
    made = roofline(uneven, ONE, 2, 2, caches=True, reads_once=True)
    assert (made.num_steps, made.positions) == (4, 3 * 4 + 1 * 1 + (1 + 2 + 3 + 4) + 1)


def test_as_many_run_as_the_pool_has_room_for():
    items = [Item(array("i", [1, 2, 3, number]), 6) for number in range(4)]
    assert max_running(items, 8, 1000, caches=False) == 4
    assert max_running(items, 2, 1000, caches=False) == 2
    assert max_running(items, 8, 30, caches=False) == 3  # 10 each
    assert max_running(items, 8, 30, caches=True) == 3  # (7 + 24) / 4 each
    assert max_running(items, 8, 3, caches=True) == 1


# The scripts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench():
    with compiling_once():
        return Bench(str(tiny_folder()), product_size=64, seed=0, **OPTIONS)


@pytest.fixture
def scripts(bench, monkeypatch, tmp_path):
    """Runs a script on that engine; gives its exit status and the rows of a file by name."""
    monkeypatch.setattr(runs, "Bench", lambda *args, **options: bench)

    def run(script, *argv, name):
        status = script.main(["--folder", str(tmp_path), "--repeats", "1", *argv])
        path = tmp_path / f"{name}.json"
        content = json.loads(path.read_text()) if path.exists() else {"rows": []}
        return SimpleNamespace(status=status, content=content, rows={row["what"]: row for row in content["rows"]})

    return run


def test_arms_answer_alike_and_find_what_the_ids_say(bench):
    """Actual = ideal reuse when the pool is large (C80); page ends and the tokens behind them included."""
    made = workloads.prefix_repetition(num=6, prefix_len=40, suffix_len=9, output_len=4, vocab_size=300, seed=5)
    arms = [OFF, ALL_ON, runs.AUTOMATIC, runs.DECLARED, runs.GROUPED, Arm("tight", evicts="cost", num_pages=8)]
    found = bench.measure(made, arms, 1)
    answers = [run.answers for (run,) in found.values()]
    assert all(one == answers[0] for one in answers) and {len(answer) for answer in answers[0]} == {4}
    cached = {arm.name: run.num_cached_tokens for arm, (run,) in found.items()}
    assert cached["cache off"] == 0
    assert 5 * 32 <= cached["all on"] <= 5 * 40
    assert cached["automatic"] == cached["prefix_pos declared"] == cached["all on"]
    assert bench.llm.engine.cache.pool.num_pages == 8
    bench.switch(runs.AUTOMATIC)
    assert bench.llm.engine.batcher.costs is None
    bench.switch(ALL_ON)
    assert bench.llm.engine.batcher.costs is bench.costs is not None
    assert bench.llm.engine.cache.pool.num_pages == len(bench.llm.engine.cache.pool) == 128
    with pytest.raises(ValueError, match="big: 129 pages, the store has 128"):
        bench.switch(Arm("big", num_pages=129))


def test_an_arm_runs_once_where_it_is_asked_to(bench):
    made = workloads.random_lengths([(5, 2)], vocab_size=300, seed=0)
    found = bench.measure(made, [ALL_ON, OFF], 3, once=[OFF])
    assert (len(found[ALL_ON]), len(found[OFF])) == (3, 1)


def test_a_ratio_against_a_slow_arm_is_void():
    off, on = [Run(6.0, 1, 1, 0, 0, [])], [Run(2.0, 1, 1, 0, 0, []), Run(3.0, 1, 1, 0, 0, [])]
    good = runs.gain("x", off, on, Figure("share", 0.7, "x"), must=2.0, aim=3.0)
    assert (good.what, good.value, good.repeats, good.must) == ("x", 2.5, [3.0, 2.0], 2.0)
    void = runs.gain("x", off, on, Figure("share", 0.69, "x"), must=2.0, aim=3.0)
    assert void.what == "x (void: cache off reaches 69% of its roofline)"
    assert (void.must, void.aim) == (None, None)


def test_the_original_command_runs(scripts, tmp_path, capsys):
    path = tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json"
    path.write_text(json.dumps([conversation("the one " * 4, "an on " * 3), {"id": 1}, *GOOD]))
    command = ["--model", "m", "--tokenizer", str(tiny_folder()), "--dataset", str(path)]
    found = scripts(benchmark_throughput, *command, name="throughput")
    assert found.status == 0
    printed = capsys.readouterr().out
    assert "1 requests left out: malformed" in printed
    assert "1 requests left out: too short or too long" in printed
    assert "3 requests, 1000 were asked for" in printed
    assert json.loads(printed.splitlines()[-1]) == found.content
    assert found.content["command"].startswith("python scripts/benchmark_throughput.py --folder")
    (on,) = [row for what, row in found.rows.items() if what.endswith(", all on")]
    assert "sharegpt: 3 requests" in on["what"] and on["unit"] == "output tokens/s"
    parts = (": share of its roofline", ": hit rate", ": hit rate expected from the ids")
    assert all(on["what"] + part in found.rows for part in parts)
    assert {"copy_bytes_per_s", "product_flop_per_s"} == found.content["ceilings"].keys()


def test_random_weights_on_two_devices():
    with compiling_once():
        bench = Bench("tiny", tensor_parallel_size=2, product_size=64, **SMALL)
    assert bench.name == "tiny on 2 devices"
    assert all(len(array.devices()) == 2 for array in bench.llm.engine.runner.params)
    made = workloads.random_lengths([(5, 2)], vocab_size=300, seed=0)
    assert bench.run(made, ALL_ON).answers == bench.run(made, OFF).answers != []


def test_more_devices_than_there_are_are_refused(tmp_path, capsys):
    with compiling_once():
        status = benchmark_throughput.main(
            [
                "--model",
                str(tiny_folder()),
                "--tensor-parallel-size",
                "99",
                "--product",
                "64",
                "--folder",
                str(tmp_path),
            ]
        )
    assert status == 2
    assert "tensor_parallel_size is 99, but JAX has 8 devices" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset-name", "mooncake"], "--dataset-name mooncake needs --dataset-path"),
        (["--dataset-path", "nowhere.json"], "nowhere.json"),
        (["--dataset-name", "random", "--input-len", "1100"], "no request of random is left"),
    ],
)
def test_options_that_do_not_go_together_are_refused(scripts, capsys, options, message):
    found = scripts(benchmark_throughput, "--num-prompts", "2", *options, name="throughput")
    assert (found.status, found.rows) == (2, {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["random", "prefix-repetition", "generated-shared-prefix"])
def test_made_datasets(scripts, name):
    options = [
        "--dataset-name",
        name,
        "--num-prompts",
        "6",
        "--input-len",
        "9",
        "--output-len",
        "2",
        "--prefix-len",
        "20",
    ]
    found = scripts(benchmark_throughput, *options, "--num-prefixes", "2", name="throughput")
    (hits,) = [row["value"] for what, row in found.rows.items() if what.endswith("expected from the ids")]
    assert hits == 4 * 20 / (6 * 29)


def test_the_table_has_a_row_for_each_line_of_it(scripts, tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([[5, 6]] * 3))
    found = scripts(benchmark_throughput, "--table", "--scale", "64", "--dataset-path", str(lengths), name="throughput")
    lines = benchmark_throughput.table_lines(lengths, 64)
    assert len(lines) == 7
    for line in lines:
        assert any(what.endswith(f", {line.what}") for what in found.rows), line.what
    assert any(": all on ÷ cache off" in what for what in found.rows)
    assert all(row["must"] in (None, 0.7) for row in found.rows.values())  # at this size nothing is claimed


def test_the_full_table_has_the_goals(tmp_path):
    lines = benchmark_throughput.table_lines(tmp_path / "lengths.json")
    assert {line.what: (line.goals, line.gains) for line in lines} == {
        "original: 1000 x 700 tokens, 596 shared, 100 out": (
            {"llama-3-8b": (16_500, 19_000), "llama-2-7b": (12_000, 15_000)},
            {"llama-3-8b": (3.3, 3.7), "llama-2-7b": (3.2, 3.8), "baichuan2-13b": (3.3, 4.0)},
        ),
        "256 x (2048 shared + 64), 128 out": ({"llama-3-8b": (18_000, 23_000), "llama-2-7b": (13_000, 18_000)}, {}),
        "256 x (8192 shared + 64), 128 out": ({"llama-3-8b": (12_000, 17_000), "llama-2-7b": (9_000, 14_000)}, {}),
        "tree 512 → 4 x 1024 → 32 x 256 → 256 x 64, 128 out": ({"llama-3-8b": (15_000, 19_000)}, {}),
        "64 groups x 16 x (2048 + 128), 256 out, grouped by the engine": ({"llama-3-8b": (13_000, 16_500)}, {}),
        "16 x 8192 prefill": ({"llama-3-8b": (42_000, 48_000)}, {}),
        "1000 ShareGPT lengths": ({"llama-3-8b": (18_500, 21_000)}, {}),
    }
    assert [line.peer for line in lines if "llama-2-7b" in line.peer] == [
        {"llama-3-8b": 13_100, "llama-2-7b": 7_970},
        {"llama-3-8b": 10_100, "llama-2-7b": 4_140},
        {"llama-3-8b": 4_340, "llama-2-7b": 1_300},
    ]
    made = {line.what: line.make(1000, 0) for line in lines[:6]}
    assert [len(workload.items) for workload in made.values()] == [1000, 256, 256, 256, 1024, 16]
    assert [len(workload.items[0].tokens) for workload in made.values()] == [700, 2112, 8256, 1856, 2176, 8192]


@pytest.mark.parametrize("device", ["NVIDIA H200", "another"])
def test_goals_and_the_peers_figure_belong_to_model_and_device(bench, monkeypatch, device):
    """Of a line that is the bench's: goal, share, hits, and on the peer's own card the ratio."""
    monkeypatch.setattr(benchmark_throughput, "device_name", lambda: device)
    first, *others = benchmark_throughput.table_lines(None, 64)
    goals = {"goals": {bench.name: (1e9, 2e9)}, "gains": {bench.name: (3.0, 4.0)}, "peer": {bench.name: 10.0}}
    lines = [dataclasses.replace(first, **goals), dataclasses.replace(others[0], models=("another",))]
    rows = list(benchmark_throughput.table_figures(bench, lines, repeats=2, seed=0))
    speed = rows[0]
    assert (speed.what, speed.must, speed.aim) == (f"{bench.name}, {first.what}", 1e9, 2e9)
    assert len(speed.repeats) == 2 and not speed.reached
    ratios = [row for row in rows if row.what.endswith("÷ vLLM 0.26's")]
    assert [row.repeats for row in ratios] == [[rate / 10 for rate in speed.repeats]] * (device == "NVIDIA H200")
    assert [row.must for row in rows if "cache off: share" in row.what] == [0.7]
    assert not any(others[0].what in row.what for row in rows)


def test_prefix_caching_has_all_its_parts(scripts):
    found = scripts(benchmark_prefix_caching, "--scale", "64", name="prefix_caching")
    assert found.status == 0
    whats = list(found.rows)
    for rate in (25, 50, 75, 90):
        start = f"measured cache gain ÷ roofline's gain at {rate}% hits (32 in, 2 out)"
        assert sum(start in what for what in whats) == 1
    for part in (
        "nothing shared",
        "prefix_pos declared",
        "automatic + shared-prefix tiles",
        "prefix length: ",
        "batch: ",
    ):
        assert any(part in what for what in whats), part
    for policy, evicts in benchmark_prefix_caching.TIGHT:
        assert sum(what.endswith(f"{policy} + {evicts}: hit rate") for what in whats) == 1
    expected = {what: row["value"] for what, row in found.rows.items() if what.endswith("expected from the ids")}
    assert max(expected.values()) == 3 * 32 / (4 * 34)


def test_a_missed_deadline_keeps_what_is_there(scripts):
    found = scripts(benchmark_prefix_caching, "--scale", "64", "--deadline", "0", name="prefix_caching")
    assert [what.partition(", ")[2] for what in found.rows] == ["engine start, compilation and warm-up"]


def test_answers_to_real_text_are_the_same_with_the_cache_on_and_off(scripts, texts):
    found = scripts(benchmark_prefix_caching, "--data", str(texts), "--max-tokens", "6", name="prefix_caching")
    assert found.status == 0
    same = {what: row for what, row in found.rows.items() if "answers the same" in what}
    assert [(row["value"], row["must"]) for row in same.values()] == [(1.0, 1.0)] * 3
    assert [what.split(", ")[2] for what in same] == ["MT-bench two-turn", "ShareGPT conversations", "MMLU 5-shot"]
    for what in same:
        start = what.partition(": answers")[0]
        actual, ideal = (found.rows[start + end]["value"] for end in (": hit rate", ": hit rate expected from the ids"))
        assert 0 < actual <= ideal


def test_serving_counts_every_request_from_its_arrival(scripts):
    options = ["--prefix-len", "20", "--input-len", "5", "--output-len", "3", "--num-prompts", "8"]
    found = scripts(benchmark_serving, *options, "--request-rate", "200", "inf", name="serving")
    assert found.status == 0
    for arm in ("all on", "cache off"):
        for rate in ("200", "inf"):
            start = f"8 requests, 25 tokens in and 3 out on average, {rate} requests/s, {arm}: "
            mine = {what.partition(start)[2]: row["value"] for what, row in found.rows.items() if start in what}
            for name in ("time to first token", "time per output token", "end to end"):
                assert 0 < mine[f"{name}, p50"] <= mine[f"{name}, p90"] <= mine[f"{name}, p99"]
            assert mine["time to first token, p99"] <= mine["end to end, p99"]
    assert found.rows[next(what for what in found.rows if what.endswith("all on: hit rate"))]["value"] > 0


def test_serving_follows_a_traces_times(bench):
    items = [Item(array("i", [5] * 8), 3, arrival=0.4), Item(array("i", [6] * 8), 3, arrival=0.0)]
    served = benchmark_serving.serve(bench, items, ALL_ON)
    assert len(served.timings) == 2 and served.num_output_tokens == 6
    assert served.seconds > 0.4
    assert all(timing.first_token < 0.4 or timing.whole < served.seconds for timing in served.timings)


def test_goodput_needs_both_limits():
    timing = benchmark_serving.Timing(0.5, 0.05, 2.0)
    assert timing.within(0.5, 0.05)
    assert not timing.within(0.4, 0.05) and not timing.within(0.5, 0.04)
    assert benchmark_serving.Timing(0.5, None, 0.5).within(0.5, 0.0)
    served = benchmark_serving.Served([timing, dataclasses.replace(timing, first_token=9.0)], 4.0, 80, 0.0)
    rows = {row.what: row.value for row in benchmark_serving.timing_figures("w", served, 500, 50)}
    assert rows["w: goodput, first token within 500 ms and 50 ms a token"] == 1 / 4
    assert rows["w: throughput"] == 20
    assert rows["w: time to first token, p50"] == pytest.approx((500 + 9000) / 2)


def test_serving_needs_times_for_a_trace(scripts, capsys):
    options = ["--dataset-name", "random", "--input-len", "4", "--num-prompts", "2", "--request-rate", "trace"]
    assert scripts(benchmark_serving, *options, "--prefix-len", "0", name="serving").status == 2
    assert "needs a dataset with times, got random" in capsys.readouterr().err


@pytest.mark.slow
def test_one_process_writes_all_files_and_keeps_what_was_there(scripts, tmp_path):
    options = ["--scale", "64", "--request-rate", "100", "--seconds", "0.1", "--no-off"]
    found = scripts(benchmark_all, *options, "--only", "throughput", "arms", "serving", name="throughput")
    assert found.status == 0
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["prefix_caching", "serving", "throughput"]
    before = json.loads((tmp_path / "prefix_caching.json").read_text())
    after = scripts(benchmark_all, *options, "--only", "policies", name="prefix_caching").content
    names = [row["what"] for row in after["rows"]]
    assert len(names) == len(set(names))
    assert {row["what"] for row in before["rows"]} < set(names)
    assert after["command"].count(" && ") == 1 and after["command"].startswith(before["command"])


def test_rows_of_other_commands_and_machines_are_kept(tmp_path):
    """One row a name: the latest. What another machine measured says so."""
    jax_version = render_results.versions()["jax"]
    for device, rows in (("one", ["a", "b"]), ("one", ["b", "c"]), ("two", ["c", "d"]), ("one", ["e"])):
        results = render_results.Results("x", command=f"make {rows}", device=device, folder=tmp_path, keep=True)
        for number, name in enumerate(rows):
            results.add(Figure(name, number, "s"))
            written = json.loads((tmp_path / "x.json").read_text())  # after each row
            assert written["rows"][-1]["what"] == name
        if rows == ["b", "c"]:
            assert [(row["what"], row["value"], row.get("on", "")) for row in written["rows"]] == [
                ("a", 0, ""), ("b", 0, ""), ("c", 1, "")
            ]  # fmt: skip
            assert written["command"] == "make ['a', 'b'] && make ['b', 'c']"
    two = f"two, JAX {jax_version}"
    assert [(row["what"], row.get("on", "")) for row in written["rows"]] == [
        ("a", ""), ("b", ""), ("c", two), ("d", two), ("e", "")
    ]  # fmt: skip
    assert written["device"] == "one"
    assert f"| d ({two}) | 1 s |" in render_results.table([Figure(**row) for row in written["rows"]])


def test_a_workload_meets_no_rules_of_the_one_before(bench):
    """Rows that asked for something leave it on the device, for whoever takes the row next to clear."""
    workload = workloads.random_lengths([(12, 4)] * 4, vocab_size=bench.vocab_size, seed=3)
    plain = bench.run(workload, OFF).answers
    banned = bench.run(workload, OFF, {"allowed_token_ids": [5, 6, 7]}).answers
    assert {token for answer in banned for token in answer} <= {5, 6, 7}
    assert bench.run(workload, OFF).answers == plain != banned


def test_a_new_profile_takes_the_place_of_the_old_one(tmp_path):
    first = ["a", "a: profile, one", "a: profile, two", "b: profile, one", "c", "c: profile, one"]
    for names in (first, ["a: profile, three", "c"]):
        results = render_results.Results("x", device="d", folder=tmp_path, keep=True)
        results.add(*(Figure(name, 1, "%") for name in names))
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["a", "b: profile, one", "a: profile, three", "c"]


def test_a_command_names_no_place_outside_the_checkout():
    found = render_results.own_command("/home/me/scripts/x.py", ["--data", "/home/me/data", "--folder", "a/b", ""])
    assert found == "python scripts/x.py --data data --folder a/b "


def test_peers_get_the_same_lengths_and_the_same_sharing():
    items = [Item(array("i", [1, 2, 3]), 4), Item(array("i", [1, 2, 9]), 5)]
    moved = benchmark_peers.moved(Workload("x", items), 3, 10)
    assert lists(moved) == [[4, 5, 6], [4, 5, 2]]
    args = SimpleNamespace(repeats=2)
    made = benchmark_peers.repeats_of(Workload("x", items), args, 10)
    assert [novel_lens(one.prompts) for one in made] == [[3, 1]] * 3
    assert len({tuple(one.items[0].tokens) for one in made}) == 3
    assert [[item.output_len for item in one.items] for one in made] == [[4, 5]] * 3


class Manager:
    """Of transformers' continuous batching, as far as it is used."""

    def __init__(self, fails=False):
        self.done, self.fails = [], fails

    def add_requests(self, prompts, max_new_tokens):
        error = "no room" if self.fails else None
        for prompt in prompts:
            answer = SimpleNamespace(request_id=str(prompt), generated_tokens=[0] * max_new_tokens, error=error)
            self.done.append(SimpleNamespace(**vars(answer), is_finished=lambda: True))

    def get_result(self, timeout):
        return self.done.pop(0) if self.done else None

    def is_running(self):
        return False


def test_each_request_of_a_peer_yields_as_many_tokens_as_it_was_asked_for():
    items = [Item(array("i", [1]), 4), Item(array("i", [2]), 5), Item(array("i", [3]), 4)]
    assert benchmark_peers.continuous_batch(Manager(), items) == 13
    with pytest.raises(RuntimeError, match=r"request \[1\] failed: no room"):
        benchmark_peers.continuous_batch(Manager(fails=True), items)


def test_ratios_to_a_peer(monkeypatch, tmp_path, capsys):
    """Both read one file; the ratio is of medians."""

    def run_apart(name, file, arguments, seconds):
        made = workloads.custom(file, num=None, encode=FOUR_BYTES, output_len=None)
        assert [(len(item.tokens), item.output_len) for item in made.items] == [(12, 3)] * 4
        head = [{"ceilings": {"copy_bytes_per_s": 1.0}, "device": "a card"}] if name == "prefix-jax" else []
        speed = {"prefix-jax": 4, "transformers": 2}[name]
        ran = [{"seconds": took, "num_output_tokens": 12 * speed} for took in (1.0, 3.0, 2.0)]
        return [*head, {"start_seconds": 5.0, "name": f"{name} 1"}, *ran]

    monkeypatch.setattr(benchmark_peers, "run_apart", run_apart)
    argv = ["--model", "tiny", "--folder", str(tmp_path), "--peers", "transformers", "--num-prompts", "4"]
    assert benchmark_peers.main([*argv, "--prefix-len", "8", "--input-len", "4", "--output-len", "3"]) == 0
    content = json.loads((tmp_path / "peers.json").read_text())
    values = {row["what"].rpartition("average")[2]: row["value"] for row in content["rows"]}
    assert values[", prefix-jax 1"] == 24 and values[", transformers 1"] == 12
    assert values[": prefix-jax ÷ transformers 1"] == 2
    assert content["device"] == "a card"
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == content


def test_where_the_time_goes():
    """Of 10 ns, 1 in which nothing ran; what ran side by side counts for both."""
    events = [("gemm_12", 0, 4), ("gemm_7", 5, 8), ("attend.3", 6, 10), ("attend.3", 0, 1)]
    idle, shares = profiles.time_shares(events)
    assert idle == pytest.approx(0.1)
    assert shares == {"gemm": 0.7, "attend": 0.5}


def test_a_profile_of_kernels_and_of_graphs(monkeypatch):
    def line(name, *events):
        return SimpleNamespace(
            name=name, events=[SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events]
        )

    gpu = [line("Stream #7", ("gemm_1", 0, 6), ("attend", 8, 2)), line("XLA Ops", ("fusion", 0, 10))]
    host = [
        line("python", ("command_buffer::update", 1, 3), ("other", 1, 1)),
        line("x", ("command_buffer::update", 5, 1)),
    ]
    planes = [SimpleNamespace(name="/device:GPU:0", lines=gpu), SimpleNamespace(name="/host:CPU", lines=host)]
    monkeypatch.setattr(profiles, "profile_of", lambda call: SimpleNamespace(planes=planes))
    assert {row.what: row.value for row in profiles.profile_figures("x", lambda: None)} == pytest.approx({
        "x: profile, device idle": 20, "x: profile, gemm": 60, "x: profile, attend": 20,
        "x: profile, host, command_buffer::update": 40,
    })  # fmt: skip


def test_the_idle_share_is_of_steps_in_which_everyone_decodes(bench, monkeypatch):
    engine = bench.llm.engine
    sizes, build = [], engine.batcher.build
    monkeypatch.setattr(engine.batcher, "build", lambda plan: sizes.append(len(plan.chunks)) or build(plan))

    def profiled(call):
        sizes.clear()
        call()
        assert sizes == [4] * 16
        return [("gemm", 0, 1), ("gemm", 3, 4)]

    monkeypatch.setattr(benchmark_step, "profiled", profiled)
    assert benchmark_step.idle_shares(bench.llm, 4, 20, repeats=2) == [0.5, 0.5]
    assert not engine.has_work


def test_every_wish_is_set_against_plain_greedy(scripts, bench):
    sizes = ["--num-prompts", "8", "--input-len", "20", "--output-len", "8"]
    run = scripts(benchmark_generation, *sizes, name="generation")
    size = f"{bench.name}, 8 x 20, 8 out: "
    shares = {what: row for what, row in run.rows.items() if "÷" in what}
    arms = [*(f"{arm} ÷ plain greedy" for arm in benchmark_generation.ARMS), "n = 4 ÷ 4 requests"]
    assert run.status == 0 and list(shares) == [size + arm for arm in arms]
    assert all(row["value"] > 0 and row["must"] is None for row in shares.values()), "goals are those of 256 rows of 8B"
    assert f"{bench.name}, 8 continuations of 16 tokens behind one prompt of 20" in run.rows


def test_a_profile_without_a_gpu_is_empty(bench):
    made = workloads.random_lengths([(5, 2)], vocab_size=300, seed=0)
    assert list(profiles.profile_figures("x", lambda: bench.run(made, ALL_ON))) == []


@pytest.mark.slow
def test_a_process_of_its_own_runs_this_engine(tmp_path):
    """The worker's own path: an engine, the file, rows of JSON."""
    made = workloads.prefix_repetition(num=3, prefix_len=20, suffix_len=4, output_len=2, vocab_size=300, seed=0)
    file = tmp_path / "w.jsonl"
    workloads.write_custom(made, file)
    options = ["--num-pages", "64", "--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
    arguments = ["--model", str(tiny_folder()), "--product", "64", *options]
    found = benchmark_peers.run_apart("prefix-jax", file, arguments, 300)
    assert [row["num_output_tokens"] for row in found if "seconds" in row] == [6, 6]
    assert found[0].keys() == {"ceilings", "device"}


@pytest.mark.slow
def test_pictures_of_all_files(scripts, texts, tmp_path):
    pytest.importorskip("matplotlib")
    import plot_results

    scripts(benchmark_throughput, "--table", "--scale", "64", "--plot", name="throughput")
    scripts(benchmark_prefix_caching, "--scale", "64", "--plot", name="prefix_caching")
    scripts(benchmark_serving, "--request-rate", "100", "50", "--num-prompts", "8", "--prefix-len", "20", "--input-len",
            "5", "--output-len", "3", "--plot", name="serving")  # fmt: skip
    for name in ("throughput", "prefix_caching", "serving"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    content = json.loads((tmp_path / "prefix_caching.json").read_text())
    panels = plot_results.prefix_caching_panels(plot_results.Rows(content["rows"]))
    assert len(panels) == 6  # all but real text
    content = json.loads((tmp_path / "serving.json").read_text())
    assert len(plot_results.serving_panels(plot_results.Rows(content["rows"]))) == 3


def test_the_readmes_table_shows_rows_with_goals_of_long_files(tmp_path):
    rows = [Figure(f"row {number}", number, "x", must=1 if number < 2 else None) for number in range(14)]
    render_results.write_results("many", rows, command="make x", device="a card", folder=tmp_path)
    text = f"before\n{render_results.START}\nold\n{render_results.END}\nafter\n"
    shown = render_results.render_readme(text, tmp_path)
    assert shown.startswith("before\n") and shown.endswith("\nafter\n") and "old" not in shown
    assert "| row 1 | 1 x | ≤ 1 |  |" in shown and "row 2" not in shown
    assert "12 more rows are in `many.json`." in shown and "![" not in shown
    (tmp_path / "many.png").touch()
    assert "\n\n![many](benchmarks/results/many.png)\n" in render_results.render_readme(text, tmp_path)
    (tmp_path / "many.png").unlink()
    assert render_results.render_readme(shown, tmp_path) == shown


def test_the_readmes_scaling_sentence(tmp_path):
    gain = "llama-2-13b, {}: times as fast on two GPUs"
    works = "decode step, B = 1", "decode step, B = 64", "prefill step of 9 tokens"
    rows = [Figure(gain.format(work), 1.234, "x") for work in works]
    rows += [
        Figure(f"{model} on 2 devices: {work}", 34.567, "ms") for model in ("llama-2-13b", "large") for work in works
    ]
    rows += [Figure("large on 2 devices: prefill step of 9 tokens, in collectives", 5, "% of the time")]
    render_results.write_results("two_gpus", rows, command="make x", device="2 x a card", folder=tmp_path)
    text = f"{render_results.SCALING_START}\nold\n{render_results.SCALING_END}"
    assert render_results.render_readme(text, tmp_path).splitlines()[1:-1] == [
        "2 x a card. Times as fast as one: llama-2-13b 1.23 (decode step, B = 64), 1.23 (prefill step of 9 tokens). "
        "Only on two: large 34.57 ms (decode step, B = 64), 34.57 ms (prefill step of 9 tokens)."
    ]


def test_two_gpus_are_compared_by_what_both_ran():
    rows = [
        Figure("llama-2-13b: decode step, B = 64", 30.0, "ms", repeats=[30.0, 32.0]),
        Figure("llama-2-13b on 2 devices: decode step, B = 64", 16.0, "ms", repeats=[16.0, 16.0]),
        Figure("llama-2-13b: some workload, all on", 100.0, "output tokens/s", repeats=[100.0], better="higher"),
        Figure("llama-2-13b on 2 devices: some workload, all on", 150.0, "output tokens/s", repeats=[150.0]),
        Figure("llama-2-70b on 2 devices: decode step, B = 64", 40.0, "ms", repeats=[40.0]),
        Figure("llama-2-13b: decode step, B = 64, in collectives", 5.0, "% of the time"),
    ]
    found = {row.what: row for row in benchmark_two_gpus.ratio_figures(rows)}
    assert {what: (row.value, row.must) for what, row in found.items()} == {
        "llama-2-13b, decode step, B = 64: times as fast on two GPUs": (1.9375, 1.5),
        "llama-2-13b, some workload, all on: times as fast on two GPUs": (1.5, None),
    }


def test_one_process_for_each_engine_of_the_table():
    arguments = argparse.Namespace(models=["llama-2-70b", "llama-2-13b"], kinds=["workload", "same"])
    assert benchmark_two_gpus.planned(arguments) == [
        ("llama-2-13b", "1", "workload"),
        ("llama-2-13b", "2", "workload"),
        ("llama-2-70b", "2", "workload"),
        ("9 / 3 heads", "2", "same"),
        ("32 / 8 heads", "2", "same"),
    ]
    arguments = argparse.Namespace(models=["tiny"], kinds=["steps", "side-by-side"])
    want = [("tiny", "1", "steps"), ("tiny", "2", "steps"), ("tiny", "2", "side-by-side")]
    assert benchmark_two_gpus.planned(arguments) == want


def test_a_process_that_measures_ends_with_what_reads_it(monkeypatch):
    """Nobody finds the devices taken by a process whose reader is gone."""
    started, begin = [], subprocess.Popen.__init__
    monkeypatch.setattr(
        subprocess.Popen, "__init__", lambda self, *a, **k: started.append(self) or begin(self, *a, **k)
    )
    script = """import os, sys, time; print('{"a": 1}\\n{cut\\n{"b": ' + os.environ["B"] + "}", flush=True); {end}"""
    endless = processes.printed(["-c", script.replace("{end}", "time.sleep(600)")], env={"B": "2"})
    assert next(endless) == {"a": 1}
    endless.close()
    assert started[0].returncode == -9
    stopped = processes.printed(["-c", script.replace("{end}", "time.sleep(600)")], env={"B": "2"}, seconds=2)
    failed = processes.printed(["-c", script.replace("{end}", "sys.exit(3)")], env={"B": "2"})
    for rows, code in ((stopped, -9), (failed, 3)):
        assert [next(rows), next(rows)] == [{"a": 1}, {"b": 2}]
        with pytest.raises(subprocess.CalledProcessError) as ended:
            next(rows)
        assert ended.value.returncode == code
    assert list(processes.printed(["-c", script.replace("{end}", "")], env={"B": "2"})) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(("gap", "ties"), [(2e-5, True), (2e-3, False)])
def test_two_devices_may_part_at_a_tie_alone(gap, ties):
    tops = [{1: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)}, {3: Logprob(-0.7, 1), 4: Logprob(-0.7 - gap, 2)}, {}]
    one, two = (CompletionOutput(0, "", tokens, "length", logprobs=tops) for tokens in ([1, 3, 5], [1, 4, 6]))
    assert benchmark_two_gpus.parts_at_tie(one, two) is ties


def test_models_are_compared_with_the_first(tmp_path, monkeypatch):
    """The workload on one, decode steps of others by their share of the limit."""
    monkeypatch.setitem(MODELS, "other", MODELS["tiny"])
    options = [
        "--workload",
        "tiny",
        "--steps",
        "tiny",
        "other",
        "--batch",
        "1",
        "4",
        "--context",
        "64",
        "--scale",
        "32",
    ]
    with compiling_once():
        status = benchmark_models.main([*options, "--calls", "2", "--repeats", "2", "--folder", str(tmp_path)])
    assert status == 0
    rows = {row["what"]: row for row in json.loads((tmp_path / "models.json").read_text())["rows"]}
    assert any("all on ÷ cache off" in what for what in rows)
    for batch in (1, 4):
        name = f"decode step, B = {batch}, context 64 ÷ (bytes / copy bandwidth)"
        assert rows[f"tiny {name}"]["must"] is None
        compared = rows[f"other {name} ÷ tiny's"]
        pairs = zip(rows[f"other {name}"]["repeats"], rows[f"tiny {name}"]["repeats"], strict=True)
        assert (compared["must"], compared["repeats"]) == (1.05, [a / b for a, b in pairs])


@pytest.mark.parametrize("model", ["qwen3-8b", "mistral-7b", "baichuan2-13b"])
def test_a_peer_is_not_given_another_model(model):
    """It would run a plain Llama of the same sizes, and the ratio would mean nothing."""
    with pytest.raises(ValueError, match="plain Llamas"):
        benchmark_peers.hf_config(MODELS[model])
