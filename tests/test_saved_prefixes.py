"""What was saved comes back to the bit, or not at all: prefixes on disk, whole, damaged, and of another engine."""

import dataclasses
import errno
import json
import resource
from array import array
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TINY, cached_of, generate, greedy, make_llm, pages_of, random_prompts, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_jax import saved_prefixes, weights
from prefix_jax.checkpoint import CheckpointError
from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.saved_prefixes import SavedPrefix, load_prefixes, save_prefixes

SIZES = {4: 96, 8: 64, 16: 32}  # page size: pages


def engine(page_size: int = 16, folder: Path | None = None, **options):
    return make_llm(folder, **{**TINY, "page_size": page_size, "num_pages": SIZES[page_size], **options})


def prefix(name: str | None, tokens, **options) -> SavedPrefix:
    return SavedPrefix(name, array("i", tokens), **options)


def compute(llm, prefixes) -> None:
    for p in prefixes:
        generate(llm, [{"prompt_token_ids": list(p.tokens), "cache_salt": p.salt}], greedy(1))


def values_of(llm, tokens, salt=None) -> np.ndarray:
    """K and V of the full pages that the cache has of these tokens."""
    nodes = llm.engine.cache.find(array("i", tokens), salt)
    slots = saved_prefixes._slots(np.array([node.page for node in nodes], np.int32), llm.engine.config.page_size)
    return np.asarray(llm.engine.runner.read_slots(slots)).astype(np.float32)


def at_rest(llm) -> None:
    cache = llm.engine.cache
    cache.check()
    assert not cache.tables and len(cache.pool) + len(list(cache.trie)) == cache.pool.num_pages


def a_family() -> list[SavedPrefix]:
    """One root, two below it, one of them salted too, one shorter than a page."""
    (root,) = random_prompts(1, 40)
    left, right = ([*root, *tail] for tail in random_prompts(2, 30, 21))
    return [
        prefix("root", root),
        prefix("left", left, parent=0),
        prefix(None, right, parent=0),
        prefix("theirs", left, salt="them"),
        prefix("short", root[:3]),
    ]


@pytest.mark.parametrize("new_size", SIZES)
@pytest.mark.parametrize("saved_size", SIZES)
def test_what_was_saved_is_found_at_any_page_size(saved_size, new_size, tmp_path):
    llm, family = engine(saved_size), a_family()
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family)
    known = [values_of(llm, p.tokens, p.salt) for p in family]
    at_rest(llm)
    other = engine(new_size)
    at_rest(other)
    loaded = load_prefixes(tmp_path, other.engine)
    at_rest(other)
    assert [(p.name, p.tokens, p.parent, p.salt) for p in loaded] == [
        (p.name, p.tokens, p.parent, p.salt) for p in family
    ]
    for p, values in zip(loaded, known, strict=True):
        assert p.num_pages == len(values) // new_size, "of the positions that were saved, those that fill pages"
        end = p.num_pages * new_size  # a longer one may have brought more
        np.testing.assert_array_equal(values_of(other, p.tokens, p.salt)[:end], values[:end])
    question = [*family[1].tokens, 7]
    found = cached_of(generate(other, [question], greedy(1)))
    assert found == [len(known[1]) // new_size * new_size] and other.stats["computed_prompt_tokens"] == 71 - found[0]


def test_a_loaded_prefix_is_answered_as_a_computed_one(tmp_path):
    llm, family = engine(), a_family()
    prompts = [[*p.tokens, *tail] for p, tail in zip(family, random_prompts(3, 1, 9, 20, 3, 40), strict=True)]
    want = tokens_of(generate(llm, prompts))
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family)
    llm = engine()
    load_prefixes(tmp_path, llm.engine)
    outputs = generate(llm, prompts)
    assert tokens_of(outputs) == want
    assert cached_of(outputs)[:3] == [40, 64, 48], "of the root's last page the longer one has all"
    assert load_prefixes(tmp_path, llm.engine)[1].num_pages == 4, "loading twice finds what is there"
    at_rest(llm)


def test_shared_pages_are_saved_once_and_many_groups_are_one_save(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_prefixes, "SLOT_GROUP", 16)
    monkeypatch.setattr(saved_prefixes, "AHEAD", 2)
    llm, family = engine(4), a_family()
    compute(llm, family)
    read = []
    read_slots = llm.engine.runner.read_slots
    monkeypatch.setattr(llm.engine.runner, "read_slots", lambda slots: read.append(slots) or read_slots(slots))
    save_prefixes(tmp_path, llm.engine, family)
    # 10 pages of the root, 7 and 5 below it, and 17 that are salted.
    assert len(np.unique(np.concatenate(read))) == 4 * (10 + 7 + 5 + 17)
    known = [values_of(llm, p.tokens, p.salt) for p in family]
    llm = engine(8)
    for p, values in zip(load_prefixes(tmp_path, llm.engine), known, strict=True):
        end = p.num_pages * 8
        np.testing.assert_array_equal(values_of(llm, p.tokens, p.salt)[:end], values[:end])


@pytest.mark.parametrize(("stats", "want"), [
    ({"bytes_limit": 1800, "bytes_in_use": 1000}, 20),
    ({"bytes_limit": 1100, "bytes_in_use": 1000}, saved_prefixes.AHEAD),
    (None, saved_prefixes.AHEAD),
])  # fmt: skip
def test_as_many_groups_stay_on_the_device_as_a_quarter_of_what_is_free_takes(stats, want):
    device = SimpleNamespace(memory_stats=lambda: stats)
    assert saved_prefixes._room_for_groups(device, group_bytes=10) == want


@settings(max_examples=12, deadline=None)
@given(
    data=st.data(),
    saved_size=st.sampled_from(sorted(SIZES)),
    new_size=st.sampled_from(sorted(SIZES)),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=4),
)
def test_any_set_comes_back(tmp_path_factory, data, saved_size, new_size, cuts):
    stem = random_prompts(5, 60)[0]
    tails = random_prompts(6, *(length for _, length in cuts))
    prefixes = [prefix(str(i), stem[:cut] + tail) for i, ((cut, _), tail) in enumerate(zip(cuts, tails, strict=True))]
    llm, path = engine(saved_size), tmp_path_factory.mktemp("save")
    compute(llm, prefixes)
    missing = [p for p in prefixes if len(llm.engine.cache.find(p.tokens)) < len(p.tokens) // saved_size]
    prefixes = [p for p in prefixes if p not in missing]
    save_prefixes(path, llm.engine, prefixes)
    known = [values_of(llm, p.tokens) for p in prefixes]
    llm = engine(new_size)
    compute(llm, data.draw(st.lists(st.sampled_from(prefixes), max_size=1)) if prefixes else [])
    computed_here = [len(llm.engine.cache.find(p.tokens)) * new_size for p in prefixes]
    for p, values, here in zip(load_prefixes(path, llm.engine), known, computed_here, strict=True):
        assert p.num_pages * new_size >= min(len(values) // new_size * new_size, len(p.tokens))
        got = values_of(llm, p.tokens)
        end = min(len(got), len(values))
        np.testing.assert_array_equal(got[here:end], values[here:end])
    at_rest(llm)


def test_half_of_the_bytes_come_back_too(tmp_path):
    llm, family = engine(kv_dtype="float8_e4m3fn"), a_family()
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family)
    known = values_of(llm, family[1].tokens)
    llm = engine(kv_dtype="float8_e4m3fn")
    load_prefixes(tmp_path, llm.engine)
    np.testing.assert_array_equal(values_of(llm, family[1].tokens), known)
    with pytest.raises(CheckpointError, match=r"kv_dtype is 'float8_e4m3fn' in the save, 'float32' in the engine"):
        load_prefixes(tmp_path, engine().engine)


def test_what_is_not_computed_is_named():
    llm, family = engine(), a_family()
    compute(llm, family[:1])
    with pytest.raises(ValueError, match=r"left \(2 of 4 pages\), prefixes\[2\] \(2 of 3 pages\), theirs \(0 of 4"):
        save_prefixes("/nowhere", llm.engine, family)
    at_rest(llm)


def test_nothing_saved_is_nothing_loaded(tmp_path):
    llm = engine()
    with pytest.raises(CheckpointError, match="no saved prefixes"):
        load_prefixes(tmp_path / "none", llm.engine)
    save_prefixes(tmp_path, llm.engine, [])
    assert load_prefixes(tmp_path, llm.engine) == []


# The pool is short ----------------------------------------------------------------------------------------------------


def test_a_short_pool_takes_the_first_pages(tmp_path, caplog):
    llm, (a, b) = engine(4), [prefix(str(i), tokens) for i, tokens in enumerate(random_prompts(7, 60, 60))]
    compute(llm, [a, b])
    save_prefixes(tmp_path, llm.engine, [a, b])
    known = values_of(llm, b.tokens)
    llm = engine(4, num_pages=24)
    generate(llm, random_prompts(8, 40), greedy(1))
    seen = []
    loaded = load_prefixes(tmp_path, llm.engine, lambda p, table: seen.append((p.name, len(table.nodes))))
    assert [p.num_pages for p in loaded] == [15, 9], "what nobody reads made room, the first stays for the second"
    assert seen == [("0", 15), ("1", 9)] and "the pool is short" in caplog.text
    np.testing.assert_array_equal(values_of(llm, b.tokens), known[:36])
    at_rest(llm)


def test_pages_that_are_read_stay(tmp_path):
    llm, family = engine(), a_family()
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family)
    cache = (llm := engine(num_pages=8)).engine.cache
    table = cache.open(array("i", range(7 * 16)))
    cache.grow(table, 7 * 16)
    assert [p.num_pages for p in load_prefixes(tmp_path, llm.engine)] == [1, 1, 1, 0, 0]
    cache.close(table)
    at_rest(llm)


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=8), st.integers(1, 4), st.integers(1, 10))
def test_insert_holds_the_longest_beginning_that_fits(prompts, size, num_pages):
    cache = PrefixCache(num_pages, size)
    for prompt in prompts:
        tokens = array("i", prompt)
        before = len(cache.find(tokens))
        table = cache.insert(tokens)
        cache.check()
        full = len(tokens) // size
        assert len(table.nodes) == before
        assert len(table.pages) == full or len(cache.pool) + cache.num_idle == 0
        cache.publish(table, tokens, len(tokens), written=True)
        cache.check()
        assert len(cache.find(tokens)) == len(table.pages)
        cache.close(table)
        cache.check()


# Another engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    llm, family = engine(), a_family()
    compute(llm, family)
    save_prefixes(path, llm.engine, family)
    return path


def check_refused(path: Path, llm, match: str) -> None:
    """Nothing is loaded, nothing changes, and the engine goes on."""
    before = [(node.page, node.key) for node in llm.engine.cache.trie]
    with pytest.raises(CheckpointError, match=match):
        load_prefixes(path, llm.engine)
    assert [(node.page, node.key) for node in llm.engine.cache.trie] == before
    at_rest(llm)
    assert generate(llm, random_prompts(9, 20), greedy(2))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"rope_theta": 5000.0}, r"rope_theta is 10000.0 in the save, 5000.0 in the engine"),
        ({"rope_divisors": (1.0,) * 8}, r"rope_divisors is None in the save, \[1.0"),
        ({"rms_norm_eps": 1e-6}, r"rms_norm_eps is 1e-05 in the save, 1e-06 in the engine"),
        (
            {"num_layers": 3, "num_kv_heads": 1},
            r"(?s)num_layers is 2 in the save, 3 in .*num_kv_heads is 2 in the save, 1 in",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_model_is_refused_with_both_values(other, match, saved, monkeypatch):
    runner = (llm := engine()).engine.runner
    monkeypatch.setattr(runner, "config", dataclasses.replace(runner.config, **other))
    check_refused(saved, llm, match)


def test_another_dtype_is_refused_with_both_values(saved):
    llm = engine(dtype="bfloat16")
    check_refused(saved, llm, r"(?s)dtype is 'float32' in the save, 'bfloat16' in.*kv_dtype is 'float32'")


def test_other_weights_are_refused(saved, monkeypatch):
    llm = engine()
    params = llm.engine.runner.params
    monkeypatch.setitem(llm.engine.runner.__dict__, "fingerprint", weights.fingerprint([*params[1:], params[0]]))
    check_refused(saved, llm, r"weights is '\w+' in the save, '\w+' in the engine")


def test_a_fingerprint_sees_every_bit_place_dtype_and_shape():
    a = np.random.default_rng(0).standard_normal((33, 7)).astype(np.float32)
    swapped, bit = a.copy(), a.copy()
    swapped[3, 2], swapped[20, 5] = a[20, 5], a[3, 2]
    bit.view(np.int32)[32, 6] ^= 1
    others = [swapped, bit, a.reshape(7, 33), a[:-1], a.astype(np.float16), a.astype(jnp.bfloat16), a.T.copy()]
    prints = {weights.fingerprint([jnp.asarray(other)]) for other in [a, *others]}
    assert len(prints) == len(others) + 1
    assert weights.fingerprint({"x": jnp.asarray(a)}) == weights.fingerprint([jnp.asarray(a)])
    words = a.view(np.uint32).reshape(-1).astype(np.uint64)
    odd = 2 * np.arange(words.size, dtype=np.uint64) + 1
    assert int(weights.checksum(jnp.asarray(a))) == int((words * odd).sum() % 2**32), "the same on any device"


# Damage ---------------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def cut_to_nothing(content: bytes) -> bytes:
    return b""


def garbage(content: bytes) -> bytes:
    return bytes(np.random.default_rng(0).integers(0, 256, len(content), dtype=np.uint8))


def one_bit(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]


@pytest.mark.parametrize("damage", [cut, cut_to_nothing, garbage, one_bit])
def test_a_damaged_file_is_refused_or_harmless(damage, saved):
    whole, llm = files_of(saved), engine()
    load_prefixes(saved, llm.engine)
    known = values_of(llm, a_family()[1].tokens)
    refused = []
    for file, content in whole.items():
        llm = engine()
        file.write_bytes(damage(content))
        try:
            load_prefixes(saved, llm.engine)
        except CheckpointError:
            refused.append(str(file.relative_to(saved)))
            assert not list(llm.engine.cache.trie)
        else:
            np.testing.assert_array_equal(values_of(llm, a_family()[1].tokens), known)
        file.write_bytes(content)
        at_rest(llm)
    assert any("prefixes" in name for name in refused) and any("kv" in name for name in refused), refused
    load_prefixes(saved, llm.engine)


def test_a_save_that_was_stopped_leaves_the_one_before(saved, tmp_path, monkeypatch):
    llm, family = engine(), a_family()
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family[:1])
    before = files_of(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    import orbax.checkpoint as ocp

    with monkeypatch.context() as patch:
        patch.setattr(ocp.JsonCheckpointHandler, "finalize", lambda *a: (_ for _ in ()).throw(full), raising=False)
        patch.setattr(Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(full))
        with pytest.raises(OSError, match=r"could not be saved.*No space left"):
            save_prefixes(tmp_path, llm.engine, family)
    assert files_of(tmp_path) == before
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a disk that takes no larger file
    try:
        with pytest.raises(OSError, match="could not be saved"):
            save_prefixes(tmp_path, llm.engine, family)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_of(tmp_path) == before
    at_rest(llm)
    assert [p.name for p in load_prefixes(tmp_path, llm.engine)] == ["root"]
    save_prefixes(tmp_path, llm.engine, family[1:3])
    assert [p.name for p in load_prefixes(tmp_path, llm.engine)] == ["left", None]
    assert len(list(tmp_path.iterdir())) == 1, "the one before is gone"


def test_a_stopped_process_leaves_no_half_save(tmp_path):
    """What Orbax has not renamed yet does not count, nor does a stranger's folder; the next save clears it away."""
    llm, family = engine(), a_family()
    compute(llm, family)
    save_prefixes(tmp_path, llm.engine, family)
    (tmp_path / "notes").mkdir()
    half = tmp_path / "prefixes-1.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "junk").write_text("junk")
    assert len(load_prefixes(tmp_path, llm.engine)) == 5
    save_prefixes(tmp_path, llm.engine, family[:2])
    assert len(load_prefixes(tmp_path, llm.engine)) == 2
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["notes", "prefixes-1"]


def test_a_device_that_fails_in_the_middle_costs_what_it_had(saved, monkeypatch):
    llm = engine()
    runner = llm.engine.runner
    write, calls = runner.write_slots, []

    def fail(slots, values):
        calls.append(slots)
        if len(calls) == 2:
            jax.tree.map(lambda x: x.delete(), runner.store)  # it was donated
            raise RuntimeError("out of memory")
        write(slots, values)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_slots", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            load_prefixes(saved, llm.engine)
    at_rest(llm)
    assert not list(llm.engine.cache.trie) and not pages_of(llm, list(a_family()[1].tokens))
    assert [p.num_pages for p in load_prefixes(saved, llm.engine)] == [2, 4, 3, 4, 0]
    assert cached_of(generate(llm, [[*a_family()[1].tokens, 3]])) == [64]


def test_an_engine_without_a_cache_loads_nothing(saved):
    with pytest.raises(ValueError, match="this engine has none"):
        load_prefixes(saved, engine(enable_prefix_caching=False).engine)


def test_the_settings_are_plain_json(saved):
    (file,) = saved.rglob("prefixes/metadata")
    save = json.loads(file.read_text())["save"]
    assert save["page_size"] == 16 and save["prefixes"][0]["name"] == "root" and save["kv_dtype"] == "float32"
