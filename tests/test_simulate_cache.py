"""Replays of small traces whose hits can be counted by hand."""

import gzip
import json

import pytest
import simulate_cache
from simulate_cache import ideal_rate, num_distinct, read_trace

from prefix_jax import policies


def write(path, content, *, lines=False):
    text = "".join(json.dumps(row) + "\n" for row in content) if lines else json.dumps(content)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.write(text)
    return path


@pytest.fixture
def mooncake(tmp_path):
    """A, B, A, C, A, B: prompts of two blocks, all tokens but the first block's of C known by then."""
    blocks = {"A": [1, 2], "B": [1, 3], "C": [4, 5]}
    rows = [{"hash_ids": blocks[name], "input_length": 1024, "output_length": 1} for name in "ABACAB"]
    return write(tmp_path / "trace.jsonl.gz", rows, lines=True)


def args(*options):
    return simulate_cache.parse_args(["x", "--max-num-seqs", "1", "--window", "1", *options])


def rate(path, num_pages, evicts, *, policy="fifo", page_size=512, options=()):
    asks = read_trace(path, page_size)
    return simulate_cache.replay(asks, page_size, num_pages, policy, evicts, args(*options)).hit_rate


def test_hits_by_hand(mooncake):
    """In blocks: A finds 0, B 1, A 2 (all but its last token), C 0, A 2, B 2, if nothing is ever evicted. A request
    holds three pages: two full ones, and one for what comes after."""
    total, whole = 6 * 1024, 1023
    asks = read_trace(mooncake, 512)
    assert num_distinct(asks) == 5
    assert ideal_rate(asks, 512) == pytest.approx((512 + 3 * whole) / total)
    assert rate(mooncake, 100, "lru") == pytest.approx((512 + 3 * whole) / total)
    # Three pages: B evicts 2, A evicts 3, C evicts 1 and 2, A evicts C's, B evicts 2.
    assert rate(mooncake, 3, "lru") == pytest.approx(4 * 512 / total - 512 / total)
    # Four: B needs nothing evicted (1 2 3), A finds both; C takes two: lru evicts 3, then 2, and A computes 2 again.
    assert rate(mooncake, 4, "lru") == pytest.approx((512 + whole + 512 + 512) / total)
    # Who knows the future evicts 3, then 2 has to go too: the page after C's two. The same.
    assert rate(mooncake, 4, "belady") == pytest.approx((512 + whole + 512 + 512) / total)
    # In trie order, A A A B B C: only C and the first of each find less.
    assert rate(mooncake, 4, "belady", policy="dfs") == pytest.approx((2 * whole + 512 + whole) / total)


@pytest.mark.parametrize(("page_size", "pages"), [(64, 16), (512, 2), (1024, 1)])
def test_a_block_is_cut_or_joined_into_pages(mooncake, page_size, pages):
    asks = read_trace(mooncake, page_size)
    assert [len(ask.pages) for ask in asks] == [pages] * 6
    assert num_distinct(asks) == {64: 40, 512: 5, 1024: 3}[page_size]


def test_a_page_size_that_cuts_across_blocks_is_refused(mooncake, capsys):
    assert simulate_cache.main([str(mooncake), "--page-size", "96"]) == 2
    assert "96 neither divides 512" in capsys.readouterr().err


def test_the_last_block_of_a_prompt_may_be_a_part(tmp_path):
    rows = [{"hash_ids": [1, 2], "input_length": 700}] * 2
    path = write(tmp_path / "trace.jsonl", rows, lines=True)
    assert [len(ask.pages) for ask in read_trace(path, 512)] == [1, 1]
    assert rate(path, 10, "lru") == pytest.approx(512 / 1400)


def test_conversations_grow(tmp_path):
    """Four bytes are a token: turn one is 8 tokens, its answer 4, turn two 4 more."""
    turns = [("human", "x" * 32), ("gpt", "y" * 16), ("human", "z" * 16), ("gpt", "w" * 4)]
    talk = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    path = write(tmp_path / "talks.json", [talk, talk])
    asks = read_trace(path, 4)
    assert [ask.num_tokens for ask in asks] == [8, 8, 16, 16]
    assert [ask.num_output_tokens for ask in asks] == [4, 4, 1, 1]
    assert asks[0] == asks[1]
    assert ideal_rate(asks, 4) == pytest.approx((7 + 8 + 15) / (8 + 8 + 16 + 16))


def test_a_runs_own_log(tmp_path):
    rows = [{"prompt_token_ids": list(range(10)), "output_tokens": 3}, {"prompt_token_ids": [*range(8), 99, 98]}]
    path = write(tmp_path / "run.jsonl", rows, lines=True)
    assert rate(path, 20, "lru", page_size=4) == pytest.approx(8 / 20)


def test_what_is_no_trace_is_refused(tmp_path, capsys):
    path = write(tmp_path / "x.jsonl", [{"a": 1}], lines=True)
    assert simulate_cache.main([str(path)]) == 2
    assert "neither a Mooncake trace" in capsys.readouterr().err
    assert simulate_cache.main([str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt_token_ids": []}], "no request has a token"),
        ([{"hash_ids": [], "input_length": 0}], "no request has a token"),
        ([{"hash_ids": [1, 2]}], "a row is not as its first one says: KeyError('input_length')"),
        ([{"prompt_token_ids": [1]}, {"hash_ids": [1], "input_length": 4}], "a row is not as its first one says"),
        ([{"prompt_token_ids": ["a"]}], "a row is not as its first one says"),
        ([{"prompt_token_ids": [2**40]}], "a row is not as its first one says"),
        ([], "neither a Mooncake trace"),
    ],
)
def test_a_trace_without_sense_is_refused(rows, message, tmp_path, capsys):
    assert simulate_cache.main([str(write(tmp_path / "x.jsonl", rows, lines=True))]) == 2
    assert message in capsys.readouterr().err


def test_conversations_without_words_are_refused(tmp_path, capsys):
    assert simulate_cache.main([str(write(tmp_path / "x.json", []))]) == 2
    assert "no request has a token" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--page-size", "--num-pages", "--max-num-seqs", "--window", "--limit", "--pool"])
def test_sizes_are_positive(option, mooncake, capsys):
    for value in ("0", "-1", "nan"):
        with pytest.raises(SystemExit):
            simulate_cache.main([str(mooncake), option, value])
        assert option in capsys.readouterr().err


@pytest.mark.parametrize("page_size", [16, 512, 1024])
def test_ids_of_blocks_may_be_of_any_size(page_size, tmp_path):
    rows = [{"hash_ids": [2**40, 2**63], "input_length": 1024, "output_length": None}] * 2
    path = write(tmp_path / "x.jsonl", rows, lines=True)
    assert rate(path, 200, "lru", page_size=page_size) == pytest.approx(1023 / 2048)


def test_every_policy_with_every_eviction(mooncake, tmp_path, capsys):
    picture = tmp_path / "found.png"
    options = ["--num-pages", "8", "16", "--page-size", "512", "256", "--schedule-policy", *policies.POLICIES]
    pytest.importorskip("matplotlib")
    assert simulate_cache.main([str(mooncake), *options, "--max-num-seqs", "2", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + 1 + 2 * 2 * 25 + 2 + 1
    assert printed[-1].startswith("--page-size 512 --num-pages 8 --schedule-policy ")
    assert picture.stat().st_size > 1000


def test_the_mooncake_trace(shared_data):
    asks = read_trace(shared_data / "mooncake" / "conversation_trace.jsonl.gz", 512)[:2000]
    found = {name: simulate_cache.replay(asks, 512, 4000, "fifo", name, args()).hit_rate for name in ("lru", "belady")}
    assert found["lru"] <= found["belady"] <= ideal_rate(asks, 512)
