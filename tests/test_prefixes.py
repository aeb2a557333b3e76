"""Declared prefixes in a user's hands: handles, levels, budgets, what requests behind them find, and the report."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engines import TIGHT, cached_of, check_greedy, generate, greedy, make_llm, random_prompts, tiny_folder, tokens_of
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, PinBudgetError, prefix_pool

TEXT = "the hen and the other one, and then the end of the day when all the hens and the men went home again. "
CHAT = [{"role": "system", "content": TEXT}]


@pytest.fixture
def llm() -> LLM:
    return make_llm()


# A handle's life ------------------------------------------------------------------------------------------------------


def test_a_warmed_prefix_is_found_to_the_token(llm):
    prefix, tail = random_prompts(1, 50, 7)
    handle = llm.prefixes.add(prefix, name="rules")
    assert llm.prefixes["rules"] is handle and "rules" in llm.prefixes and list(llm.prefixes) == [handle]
    before = handle.stats()
    assert (before.pinned, before.published, before.missing, before.uses) == (0, 0, 3, 0)
    handle.warm()
    (output,) = generate(llm, [tail], prefix="rules")
    assert output.prompt_token_ids == [*prefix, *tail]
    assert cached_of([output]) == [48], "full pages; the tail of a prefix is computed anew"
    check_greedy([output])
    after = handle.stats()
    assert (after.pinned, after.published, after.missing, after.readers) == (3, 0, 0, 0)
    assert (after.uses, after.hits, after.tokens_saved) == (2, 1, 48), "the warming and one request"
    assert after.ms_saved > 0 and after.page_seconds > 0 and 0 <= after.last_use < 60


def test_warming_what_is_there_computes_one_token(llm):
    (prefix,) = random_prompts(2, 48)
    handle = llm.prefixes.add(prefix).warm()
    before = llm.stats["computed_prompt_tokens"]
    handle.warm()
    assert llm.stats["computed_prompt_tokens"] - before == 1, "the last token's logits belong to nobody"


def test_a_prefix_is_pinned_by_the_first_request_that_begins_with_it(llm):
    prefix, tail = random_prompts(3, 64, 5)
    handle = llm.prefixes.add(prefix)
    generate(llm, [[*prefix, *tail]])
    assert handle.stats().pinned == 4 and llm.stats["pinned_pages"] == 4
    others = random_prompts(4, *[200] * 6)
    generate(llm, others)
    assert llm.stats["evicted_pages"] > 0 and handle.stats().pinned == 4
    handle.unpin()
    generate(llm, others)
    assert handle.stats().missing == 4
    handle.pin().warm()
    assert handle.stats().pinned == 4


def test_pinning_finds_what_is_published_already(llm):
    (prompt,) = random_prompts(5, 70)
    generate(llm, [prompt])
    assert llm.prefixes.add(prompt[:40]).stats().pinned == 2
    assert llm.prefixes.add(prompt, pin=False).stats().published == 2


def test_levels_share_pages(llm):
    system, tools, shots = random_prompts(6, 32, 20, 30)
    top = llm.prefixes.add(system, name="system")
    middle = llm.prefixes.add(tools, name="tools", parent=top)
    bottom = llm.prefixes.add(shots, name="shots", parent="tools")
    assert [p.num_tokens for p in llm.prefixes] == [32, 52, 82] and bottom.parent.parent is top
    bottom.warm()
    assert llm.stats["pinned_pages"] == 5, "two of the top, one more of the middle, two of the bottom"
    (output,) = generate(llm, [[7, 8, 9]], prefix=middle)
    assert output.prompt_token_ids == [*system, *tools, 7, 8, 9] and output.num_cached_tokens == 52
    bottom.delete()
    assert llm.stats["pinned_pages"] == 3
    with pytest.raises(ValueError, match="prefix 'shots' is deleted or has expired"):
        bottom.warm()
    with pytest.raises(KeyError, match="no prefix 'shots'; there are: 'system', 'tools'"):
        llm.prefixes["shots"]


def test_a_deleted_prefix_is_ordinary_pages(llm):
    (prefix,) = random_prompts(7, 48)
    handle = llm.prefixes.add(prefix, name="a").warm()
    assert llm.delete_prefix("a") and not llm.delete_prefix("a") and not llm.delete_prefix(handle)
    assert llm.stats["pinned_pages"] == 0
    assert cached_of(generate(llm, [[*prefix, 5]])) == [48], "still there"
    generate(llm, random_prompts(8, *[200] * 6))
    assert cached_of(generate(llm, [[*prefix, 5]])) == [0]


def test_deleting_while_read_harms_no_reader(llm):
    prefix, tail = random_prompts(9, 48, 4)
    handle = llm.prefixes.add(prefix).warm()
    deleted = []

    def delete(output):
        deleted.append(handle.stats().readers)
        handle.delete()

    params = [greedy(1), greedy(30)]
    outputs = generate(llm, [[*prefix, 9], [*prefix, *tail]], params, on_output=delete)
    assert deleted[0] == 1
    check_greedy(outputs)


def test_a_prefix_expires_and_can_be_refreshed(llm, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    (prefix,) = random_prompts(10, 32)
    handle = llm.prefixes.add(prefix, name="short", ttl=10).warm()
    now += 9
    handle.refresh(5)
    now += 4
    assert "short" in llm.prefixes
    now += 2
    generate(llm, [[5, 6]])
    assert llm.stats["pinned_pages"] == 0 and handle.is_deleted and "short" not in llm.prefixes
    llm.prefixes.add(prefix, name="short", ttl=1).refresh(None)
    now += 1e6
    assert "short" in llm.prefixes


def test_the_last_deleted_names_are_known_as_such(llm, monkeypatch):
    monkeypatch.setattr(prefix_pool, "MOST_GONE", 2)
    for name in "abac":
        llm.prefixes.add([1, 2, 3], name=name)
        assert llm.delete_prefix(name)
    assert list(llm.prefixes.gone) == ["a", "c"]
    for name in "ac":
        with pytest.raises(ValueError, match=f"prefix '{name}' is deleted or has expired"):
            llm.generate([[5]], prefix=name, use_tqdm=False)


def test_over_budget_adding_and_pinning_say_who_holds_what():
    llm = make_llm(**TIGHT)  # 16 pages of 4, half of them for pins
    a, b, c = random_prompts(11, 12, 16, 8)
    llm.prefixes.add(a, name="a")
    llm.prefixes.add([*a[:8], *b[:8]], name="fork")
    handle = llm.prefixes.add(b, name="b", pin=False)
    message = (
        r"prefix 'b' needs 4 pages; at most 8 may be pinned, of which 5 are taken: prefix 'a' 3 pages, prefix 'fork' 4"
    )
    with pytest.raises(PinBudgetError, match=message):
        handle.pin()
    with pytest.raises(PinBudgetError, match="a prefix of 16 tokens needs 4 pages"):
        llm.prefixes.add(b)
    assert len(llm.prefixes) == 3
    llm.prefixes.add(c)
    generate(llm, [[*c, *c, 4, 5]], prefix_pos=16)
    assert llm.stats["pinned_pages"] <= 8
    llm.prefixes["a"].warm()
    llm.prefixes["fork"].warm()
    assert llm.stats["pinned_pages"] == 8 - 1, "what prefix_pos had marked has lapsed"


def test_bad_prefixes_are_refused(llm):
    llm.prefixes.add([1, 2], name="x")
    for content, options, message in [
        ([3], {"name": "x"}, "a prefix named 'x' exists already, of 2 tokens"),
        ([], {}, "needs at least one token"),
        ("", {}, "needs at least one token"),
        ([1, 10**6], {}, r"token ids must be in \[0, 300\), got \[1000000\]"),
        ([1] * 257, {}, "the prefix has 257 tokens, max_model_len is 256"),
        ([1], {"ttl": 0}, "ttl must be a positive number of seconds or None, got 0"),
        ([1], {"parent": "x", "salt": "s"}, "prefix 'x' has salt None, got 's'"),
        (CHAT, {"parent": "x"}, "messages go behind messages"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.prefixes.add(content, **options)
    with pytest.raises(KeyError, match="no prefix 'y'"):
        llm.prefixes.add([1], parent="y")
    with pytest.raises(TypeError, match="a prompt must be text"):
        llm.prefixes.add(1.5)
    assert len(llm.prefixes) == 1


def test_handles_outlive_a_failed_step(llm, monkeypatch):
    prefix, tail = random_prompts(12, 48, 4)
    handle = llm.prefixes.add(prefix, name="kept").warm()
    dispatch, failures = llm.engine.runner.dispatch, [RuntimeError("the device is gone")]

    def fail_once(batch):
        if failures:
            raise failures.pop()
        return dispatch(batch)

    monkeypatch.setattr(llm.engine.runner, "dispatch", fail_once)
    outputs = generate(llm, [tail], prefix=handle)
    check_greedy(outputs)
    assert llm.prefixes["kept"] is handle and handle.stats().pinned == 3
    llm.engine.cache.check()


def test_a_failed_step_forgets_neither_counts_nor_what_there_was(monkeypatch):
    llm = make_llm(**TIGHT)
    prompts = [[*prompt, 9] for prompt in random_prompts(13, 56, 56)]
    generate(llm, prompts, greedy(1))
    evicted = llm.stats["evicted_pages"]
    assert evicted > 0
    dispatch, failures = llm.engine.runner.dispatch, [RuntimeError("the device is gone")]
    monkeypatch.setattr(
        llm.engine.runner, "dispatch", lambda b: dispatch(b) if not failures else _raise(failures.pop())
    )
    generate(llm, [[5, 6]], greedy(1))
    assert llm.stats["evicted_pages"] == evicted == llm.cache_report().evicted_pages
    before = llm.cache_report().expected_tokens
    (output,) = generate(llm, [prompts[1]], greedy(1))
    assert (output.num_cached_tokens, output.hit_end.reason) == (0, "evicted")
    assert llm.cache_report().expected_tokens - before == 56


def _raise(error: Exception) -> None:
    raise error


# Text and chats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["e", " end", "\n", "n the end", "! 12", "é"])
def test_text_counts_as_far_as_nothing_behind_it_changes_it(llm, after):
    for cut in range(1, len(TEXT)):
        beginning = llm.tokenizer.encode_beginning(TEXT[:cut])
        whole = llm.tokenizer.encode(TEXT[:cut] + after)
        assert whole[: len(beginning)] == beginning
    handle = llm.prefixes.add(TEXT[:60], name="text").warm()
    (output,) = generate(llm, [after], prefix=handle)
    assert output.prompt == TEXT[:60] + after
    assert output.prompt_token_ids == llm.tokenizer.encode(TEXT[:60] + after)
    assert output.num_cached_tokens >= handle.num_pages * 16 > 0


def test_an_eos_that_the_tokenizer_adds_ends_a_prompt_and_nothing_before_it(llm, monkeypatch):
    """Not a prefix, and neither a prompt that is scored nor its continuation."""
    plain = {text: llm.encode(text) for text in (TEXT, TEXT + "the end", TEXT + "the", "the")}
    expected = llm.score(TEXT + "the", " end", use_tqdm=False)[0]
    monkeypatch.setattr(llm.tokenizer, "_add_eos", True)
    assert llm.encode("the") == [*plain["the"], llm.tokenizer.eos_id]
    handle = llm.prefixes.add(TEXT)
    behind, tokens = generate(llm, ["the end", [7, 8]], prefix=handle)
    assert behind.prompt_token_ids == [*plain[TEXT + "the end"], llm.tokenizer.eos_id] == llm.encode(TEXT + "the end")
    assert tokens.prompt_token_ids == [*plain[TEXT], 7, 8]
    (score,) = llm.score(TEXT + "the", " end", use_tqdm=False)
    assert score.token_ids == expected.token_ids == plain[TEXT + "the end"][len(plain[TEXT + "the"]) :]
    assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-3)


def test_a_chat_goes_on_behind_its_beginning(llm):
    handle = llm.prefixes.add(CHAT, name="chat").warm()
    question = [{"role": "user", "content": "and?"}]
    behind, alone = generate(llm, [{"messages": question}], prefix="chat") + generate(
        llm, [{"messages": CHAT + question}]
    )
    assert behind.prompt_token_ids == alone.prompt_token_ids and behind.prompt == alone.prompt
    assert behind.num_cached_tokens >= handle.num_pages * 16 > 0
    deeper = llm.prefixes.add(question, parent=handle)
    assert deeper.num_tokens > handle.num_tokens
    assert deeper.tokens[: handle.num_tokens] == handle.tokens


def test_text_before_a_prompt_is_a_prefix_to_keep(llm):
    outputs = generate(llm, ["and", "the end"], prefix=TEXT)
    assert [o.prompt for o in outputs] == [TEXT + "and", TEXT + "the end"]
    assert llm.stats["pinned_pages"] > 0 and not len(llm.prefixes)
    check_greedy(outputs)


def test_what_does_not_go_together_is_refused_before_anything_runs(llm):
    llm.prefixes.add(CHAT, name="chat")
    llm.prefixes.add([1, 2, 3], name="ids", salt="s")
    outputs = generate(
        llm,
        [[5], "text", {"messages": CHAT}, {"prompt_token_ids": [5], "cache_salt": "t"}, [5]],
        prefix=["ids", "chat", "ids", "ids", None],
        on_error="return",
    )
    assert [o.error for o in outputs] == [
        None,
        "text does not go behind messages: give messages",
        "messages go behind messages: the prefix was not declared by any",
        "the prefix has cache_salt 's', the prompt 't'",
        None,
    ]
    with pytest.raises(ValueError, match="cache_mode must be one of readwrite, read, write, off, got 'no'"):
        generate(llm, [[5]], cache_mode="no")


# What a request asks of the cache -------------------------------------------------------------------------------------


def test_cache_modes_read_and_write_or_do_not(llm):
    (prompt,) = random_prompts(13, 70)
    found = []
    for mode in ("off", "read", "write", "write", "read", "off", "readwrite"):
        (output,) = generate(llm, [prompt], greedy(12), cache_mode=mode)
        found.append((output.num_cached_tokens, output.num_published_tokens))
        check_greedy([output])
    # 81 positions are computed; five pages are full.
    assert found == [(0, 0), (0, 0), (0, 80), (0, 0), (69, 0), (0, 0), (69, 0)]
    llm.engine.cache.check()


def test_each_prompt_may_have_its_own_mode(llm):
    (prompt,) = random_prompts(14, 40)
    prompts = [{"prompt_token_ids": prompt, "cache_mode": "write"}]
    assert generate(llm, prompts, cache_mode="off")[0].num_published_tokens == 32


def test_why_a_hit_ended(llm):
    a, b = random_prompts(15, 40, 40)
    reasons = []

    def ask(prompt, **options):
        (output,) = generate(llm, [prompt], greedy(1), **options)
        reasons.append((output.hit_end.reason, output.hit_end.position))
        return output.hit_end

    ask(a)
    ask(a)
    ask(a[:33])
    diverged = ask([*a[:20], *b])
    assert (diverged.token, diverged.cached_token) == (b[0], a[20])
    assert str(diverged).startswith("diverged at position 20: ") and repr(llm.tokenizer.decode(a[20:21])) in str(
        diverged
    )
    ask({"prompt_token_ids": a, "cache_salt": "other"})
    ask(a, cache_mode="write")
    ask([9])
    generate(llm, random_prompts(16, *[250] * 5))
    ask(a)
    assert reasons == [
        ("new", 0), ("new", 32), ("whole prompt", 32), ("diverged", 20), ("other salt", 0), ("off", 0),
        ("one token", 0), ("evicted", 0),
    ]  # fmt: skip


def test_the_report_adds_up(llm):
    prefix, *tails = random_prompts(17, 64, 5, 6, 7)
    llm.prefixes.add(prefix, name="shared").warm()
    outputs = generate(llm, tails, prefix="shared")
    report = llm.cache_report()
    assert report.free + report.private + report.read + report.pinned + report.idle == report.num_pages == 64
    assert (report.pinned, report.private, report.read, report.num_marked) == (4, 0, 0, 0)
    assert report.prompt_tokens == 64 + sum(len(o.prompt_token_ids) for o in outputs)
    assert report.found_tokens == report.expected_tokens == 3 * 64
    text = str(report)
    assert "64 pages of 16: " in text and f"found 192 ({192 / report.prompt_tokens:.1%})" in text
    assert [line.split()[:5] for line in text.splitlines() if line.startswith("shared")] == [
        ["shared", "64", "4", "0", "0"]
    ]


def test_what_was_expected_counts_what_was_evicted(llm):
    (prompt,) = random_prompts(18, 65)
    generate(llm, [prompt])
    generate(llm, random_prompts(19, *[250] * 5))
    generate(llm, [prompt])
    report = llm.cache_report()
    assert (report.found_tokens, report.expected_tokens) == (0, 64)


# Threads --------------------------------------------------------------------------------------------------------------


def test_prefixes_are_declared_while_another_thread_generates(llm):
    prompts = random_prompts(20, *[30] * 12)
    found: dict[str, object] = {}

    def declare():
        for i, (prefix,) in enumerate(random_prompts(21 + i, 32) for i in range(4)):
            handle = llm.prefixes.add(prefix, name=f"p{i}").warm()
            found[f"p{i}"] = handle.stats()

    thread = threading.Thread(target=declare)
    thread.start()
    outputs = generate(llm, prompts, greedy(40))
    thread.join(60)
    assert not thread.is_alive()
    check_greedy(outputs)
    assert [found[f"p{i}"].pinned for i in range(4)] == [2] * 4


def test_several_threads_generate_at_once(llm):
    groups = [random_prompts(30 + i, *[20 + i] * 5) for i in range(4)]
    outputs: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda i=i: outputs.update({i: generate(llm, groups[i], greedy(10))})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(outputs) == [0, 1, 2, 3]
    for i, group in enumerate(groups):
        assert [o.prompt_token_ids for o in outputs[i]] == group
        check_greedy(outputs[i])
    assert not llm.engine.sequences and not llm._receivers


def test_random_lives_of_prefixes(llm):
    rng = np.random.default_rng(5)
    llm = make_llm(**TIGHT)
    stem = random_prompts(40, 40)[0]
    handles = []
    for _ in range(60):
        what = rng.integers(6)
        try:
            if what == 0:
                handles.append(llm.prefixes.add(stem[: rng.integers(1, 40)], pin=bool(rng.integers(2))))
            elif what == 1 and handles:
                handles.pop(rng.integers(len(handles))).delete()
            elif what == 2 and handles:
                handles[rng.integers(len(handles))].warm()
            elif what == 3 and handles:
                handle = handles[rng.integers(len(handles))]
                (handle.unpin if rng.integers(2) else handle.pin)()
            else:
                prompts = [
                    [*stem[: rng.integers(1, 40)], *rng.integers(4, 300, rng.integers(0, 9)).tolist()] for _ in range(3)
                ]
                outputs = generate(llm, prompts, greedy(int(rng.integers(1, 9))), prefix_pos=int(rng.integers(0, 20)))
                check_greedy(outputs)
        except PinBudgetError:
            pass
        assert llm.stats["pinned_pages"] <= 8
        llm.engine.cache.check()
        report = llm.cache_report()
        assert report.free + report.private + report.read + report.pinned + report.idle == 16
    llm.reset_prefix_cache()
    assert llm.stats["pinned_pages"] == 0 and not len(llm.prefixes) and len(llm.engine.cache.pool) == 16
    assert tokens_of(generate(llm, [stem])) == tokens_of(generate(llm, [stem]))


# Other weights --------------------------------------------------------------------------------------------------------


def test_weights_may_come_with_another_end_of_text(llm, tmp_path):
    """As a base model and its chat model have: what requests were told stays."""
    config = tiny_config() | {"eos_token_id": 9}
    (mine,) = generate(llm, random_prompts(51, 20))
    llm.load_weights(write_checkpoint(tmp_path / "chat", config, tiny_weights(config, seed=1)))
    try:
        assert llm.engine.eos_ids == make_llm().engine.eos_ids
        assert tokens_of(generate(llm, random_prompts(51, 20))) != tokens_of([mine])
    finally:
        llm.load_weights(tiny_folder())


def test_pages_of_other_weights_never_match(llm, tmp_path):
    prefix, tail = random_prompts(50, 48, 5)
    weights = tiny_weights(tiny_config(), seed=1)
    other = write_checkpoint(tmp_path / "other", tiny_config(), weights)
    handle = llm.prefixes.add(prefix, name="kept").warm()
    mine = generate(llm, [[*prefix, *tail]])
    try:
        llm.load_weights(other)
        assert handle.stats().missing == 3
        (output,) = generate(llm, [[*prefix, *tail]])
        assert (output.num_cached_tokens, output.hit_end.reason) == (0, "other weights")
        check_greedy([output], other)
        assert handle.stats().pinned == 3
        again = generate(llm, [[*prefix, *tail]])
        assert cached_of(again) == [48] and tokens_of(again) == tokens_of([output])
    finally:
        llm.load_weights(tiny_folder())
    assert tokens_of(generate(llm, [[*prefix, *tail]])) == tokens_of(mine)
    with pytest.raises(ValueError, match="another model: num_layers differ"):
        llm.load_weights(write_checkpoint(tmp_path / "deep", (deep := tiny_config(num_layers=3)), tiny_weights(deep)))


# Kept beyond the run --------------------------------------------------------------------------------------------------


def test_prefixes_are_saved_and_loaded_with_their_names_and_levels(llm, tmp_path):
    system, tools = random_prompts(60, 40, 30)
    top = llm.prefixes.add(system, name="system", salt="s")
    llm.prefixes.add(tools, name="tools", parent=top, salt="s")
    text = llm.prefixes.add(TEXT, name="text", pin=False)
    expected = generate(llm, [[7, 8], "and then"], prefix=["tools", "text"])
    llm.prefixes.save(tmp_path / "kept")
    llm.reset_prefix_cache()
    handles = llm.prefixes.load(tmp_path / "kept")
    assert [p.name for p in handles] == ["system", "tools", "text"] == [p.name for p in llm.prefixes]
    assert handles[1].parent is handles[0] and handles[0].salt == "s"
    assert [(p.stats().pinned, p.stats().missing) for p in handles[:2]] == [(2, 0), (4, 0)]
    assert handles[2].tokens == text.tokens and handles[2].content == text.content
    outputs = generate(llm, [[7, 8], "and then"], prefix=["tools", "text"])
    assert cached_of(outputs) == [64, text.num_pages * 16]
    assert tokens_of(outputs) == tokens_of(expected)
    again = llm.prefixes.load(tmp_path / "kept")
    assert again == handles, "the handles that there are"


def test_loading_never_fails_for_a_name_or_the_budget(llm, tmp_path, caplog):
    (prefix,) = random_prompts(61, 32)
    llm.prefixes.add(prefix, name="a")
    llm.prefixes.save(tmp_path / "kept", ["a"])
    llm.reset_prefix_cache()
    taken = llm.prefixes.add([5] * 15 * 16, name="a")
    llm.prefixes.add([6] * 15 * 16, name="b")
    llm.prefixes.add([7] * 16, name="c")
    (handle,) = llm.prefixes.load(tmp_path / "kept")
    assert handle.name is None and not handle.is_pinned and llm.prefixes["a"] is taken
    assert "the name 'a' is taken" in caplog.text and "loaded, but not pinned" in caplog.text
    assert cached_of(generate(llm, [[*prefix, 9]])) == [32]


# Tenants --------------------------------------------------------------------------------------------------------------


def ask_as(llm, salt, prompts):
    return [
        cached_of(generate(llm, {"prompt_token_ids": prompt, "cache_salt": salt}, greedy(1)))[0] for prompt in prompts
    ]


def test_what_a_salt_has_beyond_its_quota_goes_first():
    small, *flood = random_prompts(70, 65, *[97] * 20)
    found = {}
    for quota in (None, 12):
        llm = make_llm(salt_quota=quota)
        ask_as(llm, "small", [small])
        ask_as(llm, "flood", flood)
        found[quota] = ask_as(llm, "small", [small])[0]
        assert len(llm.engine.cache.pool) + sum(root.num_pages for root in llm.engine.cache.trie.roots.values()) == 64
        assert ask_as(llm, "flood", flood[-1:]) == [96], "what it had last is there, quota or not"
    assert found == {None: 0, 12: 64}


def test_what_is_within_a_salts_floor_goes_last():
    mine, *others = random_prompts(71, 65, *[97] * 20)
    llm = make_llm(salt_floor=3)
    ask_as(llm, "mine", [mine])
    generate(llm, others, greedy(1))
    assert ask_as(llm, "mine", [mine]) == [48], "one page went, three are its floor"
    (longest,) = random_prompts(72, 250)
    llm = make_llm(**TIGHT, salt_floor=16)
    ask_as(llm, "mine", [mine[:33]])
    assert len(generate(llm, [longest[:60]], greedy(4))[0].outputs[0].token_ids) == 4, "progress comes before floors"
    with pytest.raises(ValueError, match="salt_floor must be at most salt_quota, got 5 and 4"):
        make_llm(salt_quota=4, salt_floor=5)


# What must never go wrong ---------------------------------------------------------------------------------------------


def test_scales_follow_the_weights(tmp_path):
    config = tiny_config()
    weights = tiny_weights(config)
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] *= 64
    other = write_checkpoint(tmp_path / "other", config, weights)
    changed, fresh = make_llm(kv_dtype="float8_e4m3fn"), make_llm(other, kv_dtype="float8_e4m3fn")
    prompts = random_prompts(80, 40, 30)
    try:
        changed.load_weights(other)
        assert tokens_of(generate(changed, prompts)) == tokens_of(generate(fresh, prompts))
    finally:
        changed.load_weights(tiny_folder())


def test_a_save_leaves_what_others_keep_beside_it(llm, tmp_path):
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / "weights.bin").write_text("precious")
    llm.prefixes.add(random_prompts(81, 20)[0], name="a")
    llm.prefixes.save(tmp_path)
    llm.prefixes.save(tmp_path)
    assert (tmp_path / "100" / "weights.bin").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "prefixes-1"]


def test_what_is_too_long_for_an_engine_is_not_loaded(llm, tmp_path):
    short, long = random_prompts(82, 20, 200)
    llm.prefixes.add(short, name="short")
    llm.prefixes.add(long, name="long")
    llm.prefixes.save(tmp_path)
    small = make_llm(**TIGHT, pin_fraction=0.75)
    with pytest.raises(ValueError, match="has a prefix of 200 tokens, the engine takes 64"):
        small.prefixes.load(tmp_path)
    assert not len(small.prefixes) and len(small.engine.cache.pool) == 16


def test_one_output_that_cannot_be_made_loses_no_other(llm, monkeypatch):
    make = llm.engine.outputs.make

    def fail(request, answers, *, finished):
        if request.request_id == "bad":
            raise UnicodeError("no such text")
        return make(request, answers, finished=finished)

    monkeypatch.setattr(llm.engine.outputs, "make", fail)
    prompts = [{"prompt_token_ids": [5, 6, 7], "request_id": name} for name in ("a", "bad", "b")]
    outputs = generate(llm, prompts)
    assert [o.error for o in outputs] == [None, "no such text", None]
    assert not llm.engine.sequences


def test_an_interrupt_while_another_threads_wish_is_done_reaches_both(llm):
    engine, seen = llm.engine, []

    def interrupt():
        raise KeyboardInterrupt

    def wish():
        with pytest.raises(RuntimeError, match="interrupted") as error:
            engine.call(interrupt)
        seen.append(error)

    with engine.lock:
        thread = threading.Thread(target=wish)
        thread.start()
        while engine.commands.queue.empty():
            time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    thread.join(30)
    assert len(seen) == 1 and not thread.is_alive()


def test_an_interrupt_in_the_middle_of_a_reset_or_a_load_loses_no_page(llm, tmp_path, monkeypatch):
    prompts = [[*prompt, 9] for prompt in random_prompts(88, 60, 50)]
    for prompt in prompts:
        llm.prefixes.add(prompt[:-1], pin=False)
    llm.prefixes.save(tmp_path)
    expected = tokens_of(generate(llm, prompts))
    for act, what in ((llm.reset_prefix_cache, "give"), (lambda: llm.prefixes.load(tmp_path), "take")):
        pool, calls = llm.engine.cache.pool, []
        do = getattr(pool, what)
        monkeypatch.setattr(pool, what, lambda n, c=calls, d=do: c.append(n) or (d(n) if len(c) != 2 else _interrupt()))
        with pytest.raises(KeyboardInterrupt):
            act()
        llm.engine.cache.check()
        assert len(llm.engine.cache.pool) == llm.engine.runner.num_pages
        assert tokens_of(generate(llm, prompts)) == expected
        llm.reset_prefix_cache()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_wish_that_nobody_waits_for_is_not_done(llm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.commands, "run", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [{"prompt_token_ids": [5, 6], "request_id": "mine"}])
    llm.engine.step()
    assert not llm.engine.sequences and not llm._receivers


@pytest.mark.parametrize("host_memory_gib", [0.0, 0.01])
@pytest.mark.parametrize(
    "policy",
    [
        lambda waiting, view: [],
        lambda waiting, view: None,
        lambda waiting, view: [1, None],
        lambda waiting, view: [[], []],
        lambda waiting, view: [waiting[0]] * 10**6,
        lambda waiting, view: waiting.clear() or [],
        lambda waiting, view: 1 / 0,
        lambda waiting, view: (_ for _ in ()).throw(RuntimeError("mine")),
    ],
)
def test_whatever_a_policy_does_no_request_is_lost(policy, host_memory_gib):
    llm = make_llm(schedule_policy="fifo", host_memory_gib=host_memory_gib)
    scheduler = llm.engine.scheduler
    before, scheduler.policy = scheduler.policy, policy
    try:
        prompts = random_prompts(83, 20, 30, 20)
        generate(llm, prompts[:1])
        outputs = generate(llm, [*prompts, *prompts])
        check_greedy(outputs)
        assert cached_of(outputs)[0] == 16 and llm.engine.scheduler is scheduler, "the cache was not thrown away"
    finally:
        scheduler.policy = before


def test_own_ids_give_way_to_those_of_other_calls(llm):
    taken = str(next(llm.reader.request_ids) + 2)
    done = threading.Event()
    first = {"prompt_token_ids": [5, 6], "request_id": taken}
    thread = threading.Thread(target=lambda: (generate(llm, [first], greedy(200)), done.set()))
    thread.start()
    while taken not in llm.engine.sequences and not done.is_set():
        time.sleep(0.001)
    outputs = generate(llm, [[5, 6, 7]] * 4, greedy(1))
    thread.join(60)
    assert done.is_set() and len({o.request_id for o in outputs} | {taken}) == 5


def test_loading_keeps_every_name_and_the_right_parent(llm, tmp_path):
    prefix, tail = random_prompts(84, 40, 8)
    llm.prefixes.add(prefix, name="x")
    llm.prefixes.add(prefix, name="y")
    llm.prefixes.add(tail, name="kid", parent="x")
    llm.prefixes.save(tmp_path)
    llm.reset_prefix_cache()
    other = llm.prefixes.add([9] * 20, name="x")
    handles = llm.prefixes.load(tmp_path)
    assert [p.name for p in handles] == [None, "y", "kid"] and llm.prefixes["x"] is other
    assert handles[2].parent is handles[0]


def test_levels_come_back_without_names_and_in_any_order(llm, tmp_path):
    one, two, tail = random_prompts(85, 40, 20, 8)
    tops = [llm.prefixes.add(one), llm.prefixes.add(two)]
    kids = [llm.prefixes.add(tail, parent=top) for top in tops]
    alone = llm.prefixes.add(tail, name="alone")
    llm.prefixes.save(tmp_path, [kids[0], *tops, kids[1], alone, kids[0]])
    llm.reset_prefix_cache()
    handles = llm.prefixes.load(tmp_path)
    assert [p.parent for p in handles] == [handles[1], None, None, handles[2], None]
    llm.reset_prefix_cache()
    there = llm.prefixes.add(one)
    assert llm.prefixes.load(tmp_path)[0].parent is there


def test_one_prefix_is_saved_by_its_handle_or_its_name(llm, tmp_path):
    handle = llm.prefixes.add([5] * 20, name="rules")
    for which in (handle, "rules"):
        llm.prefixes.save(tmp_path, which)
        assert llm.prefixes.load(tmp_path) == [handle]
    with pytest.raises(KeyError, match="no prefix 'rule'; there are: 'rules'"):
        llm.prefixes.save(tmp_path, "rule")


@pytest.mark.parametrize("wish", ["reset", "weights"])
def test_what_others_want_waits_until_a_load_is_done(llm, tmp_path, monkeypatch, wish):
    prompts = [[*prompt, 9] for prompt in random_prompts(86, 40, 50)]
    for prompt in prompts:
        llm.prefixes.add(prompt[:-1])
    wanted = generate(llm, prompts)
    llm.prefixes.save(tmp_path)
    llm.reset_prefix_cache()
    restore, seen = llm.prefixes.restore, []
    clear = {"reset": lambda: (llm.prefixes.clear(), llm.engine.cache.clear()), "weights": llm.engine.start_over}[wish]

    def wishing(*args):
        llm.engine.commands.put(lambda: (seen.append(len(llm.engine.cache.tables)), clear()))
        return restore(*args)

    monkeypatch.setattr(llm.prefixes, "restore", wishing)
    assert len(llm.prefixes.load(tmp_path)) == 2
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == tokens_of(wanted) and seen == [0, 0] and cached_of(outputs) == [0, 0]


def test_of_all_that_delete_a_name_one_has_deleted_it(llm, monkeypatch):
    monkeypatch.setattr(llm.prefixes, "call", lambda do: (llm.engine.call(do), time.sleep(0.002))[0])
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            llm.prefixes.add([5] * 20, name="rules")
            answers = list(threads.map(llm.delete_prefix, ["rules"] * 4))
            assert sorted(answers) == [False, False, False, True]


def test_a_name_that_is_gone_is_no_text(llm):
    llm.prefixes.add(TEXT, name="rules").delete()
    with pytest.raises(ValueError, match="prefix 'rules' is deleted or has expired"):
        generate(llm, ["and"], prefix="rules")


def test_an_expired_handle_says_so(llm, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    handle = llm.prefixes.add([5] * 20, ttl=1)
    now += 2
    for use in (handle.warm, handle.pin, lambda: handle.refresh(5), lambda: generate(llm, [[5]], prefix=handle)):
        with pytest.raises(ValueError, match="a prefix of 20 tokens is deleted or has expired"):
            use()
    assert len(llm.prefixes) == 0


def test_handles_and_messages_of_the_wrong_kind_are_refused(llm):
    other = make_llm(**TIGHT)
    foreign = other.prefixes.add([5, 6], name="foreign")
    for use, error, message in [
        (lambda: generate(llm, [[5]], prefix=foreign), ValueError, "prefix 'foreign' belongs to another LLM"),
        (lambda: llm.prefixes.add([5], parent=foreign), ValueError, "belongs to another LLM"),
        (lambda: llm.delete_prefix(foreign), ValueError, "belongs to another LLM"),
        (lambda: llm.prefixes.add([5], parent=5), TypeError, "got 5|Actual value: 5"),
        (lambda: llm.prefixes.add([5], salt=["x"]), TypeError, r"\['x'\]"),
        (lambda: llm.prefixes.add([5], name=5), TypeError, "got 5|Actual value: 5"),
        (lambda: llm.prefixes.add([{}]), ValueError, 'a message must be a dict with a "role"'),
        (lambda: llm.prefixes.add(b"ab"), TypeError, "must be text, a list of token ids"),
        (lambda: generate(llm, {"messages": "hi"}), ValueError, "messages must be a list"),
        (lambda: generate(llm, {"messages": [1]}), ValueError, 'a message must be a dict with a "role"'),
        (lambda: generate(llm, {"messages": []}), ValueError, "messages must be a list with at least one"),
    ]:
        with pytest.raises(error, match=message):
            use()
    assert len(llm.prefixes) == 0
    messages = [{"role": "system", "content": TEXT}]
    handle = llm.prefixes.add(messages, name="chat")
    messages[0]["content"] = "changed"
    assert handle.content.messages == CHAT


def test_off_leaves_no_declaration(llm):
    generate(llm, [random_prompts(85, 40)[0]], prefix_pos=32, cache_mode="off")
    assert llm.cache_report().num_marked == 0


def test_warming_that_was_aborted_says_so(llm):
    handle = llm.prefixes.add(random_prompts(86, 40)[0])
    upcoming = f"warm-{next(llm.reader.request_ids) + 1}"
    add = llm.engine.add_batch

    def add_and_abort(requests):
        add(requests)
        llm.engine.abort(upcoming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "add_batch", add_and_abort)
        with pytest.raises(RuntimeError, match="a prefix was not computed: abort"):
            handle.warm()


def test_weights_that_do_not_fit_leave_the_former_ones(tmp_path, monkeypatch):
    """The scales of new weights are measured first: else pages of the former ones would lie under new weights."""
    config = tiny_config()
    other = write_checkpoint(tmp_path / "other", config, tiny_weights(config))
    llm = make_llm(kv_dtype="float8_e4m3fn")
    (prompt,) = random_prompts(61, 64)
    first = generate(llm, [prompt])

    def fails(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("prefix_jax.engine.measure_scales", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.load_weights(other)
    again = generate(llm, [prompt])
    assert tokens_of(again) == tokens_of(first)
    assert cached_of(again) == [63]
