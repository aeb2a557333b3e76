"""Executables on disk: found before anything is traced, and only where everything is the same."""

import jax
import jax.numpy as jnp
import pytest
from engines import SLIM, generate, random_prompts, tiny_folder

from prefix_jax import LLM, executables, runner
from prefix_jax.kv_store import page_bytes
from prefix_jax.runner import Runner


@pytest.fixture
def kept_in(tmp_path, monkeypatch):
    """Keeps executables in a folder of its own, also on a CPU, and JAX keeps none."""
    monkeypatch.setattr(executables, "NOT_KEPT", ())
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 1e9}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield tmp_path / "prefix_jax"
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def lowered(monkeypatch):
    """The buckets that were lowered since."""
    names, lower = [], Runner.lower

    def record(self, bucket, *args, **options):
        names.append(bucket.name)
        return lower(self, bucket, *args, **options)

    monkeypatch.setattr(Runner, "lower", record)
    return names


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in generate(llm, prompts)]


def start(**options) -> LLM:
    return LLM(tiny_folder(), use_tqdm=False, **{**SLIM, **options})


def test_a_second_start_traces_nothing_and_says_the_same(kept_in, lowered):
    prompts = random_prompts(3, 20)
    first = start()
    made = list(lowered)
    assert sorted(made) == sorted(bucket.name for bucket in first.engine.batcher.buckets)
    assert len(list(kept_in.iterdir())) == len(made)
    second = start()
    assert lowered == made, "nothing was lowered again"
    assert answers(second, prompts) == answers(first, prompts)


@pytest.mark.parametrize("options", [{"num_pages": 25}, {"dtype": "bfloat16"}])
def test_another_engine_finds_nothing(options, kept_in, lowered):
    start()
    made = len(lowered)
    changed = start(**options)
    assert len(lowered) - made == len(changed.engine.batcher.buckets)


@pytest.fixture
def memory(monkeypatch):
    """What the device says that it has: `memory["bytes_limit"]`, all of it free."""
    stats = {"bytes_limit": 0, "bytes_in_use": 0}
    monkeypatch.setattr(runner, "_memory_stats", lambda mesh: [stats])
    return stats


def test_a_little_less_memory_or_more_takes_the_pages_and_executables_that_are_there(kept_in, lowered, memory):
    page, options = page_bytes(start().model_config, 16, "float32"), {"num_pages": None, "memory_fraction": 1.0}
    memory["bytes_limit"] = 1 << 22
    num_pages, made = start(**options).stats["num_pages"], len(lowered)
    assert num_pages >= 64 and num_pages % (1 << num_pages.bit_length() - 6) == 0, "the rest is room for chance"
    for more in (0, page, num_pages // 32 * page):
        memory["bytes_limit"] = (1 << 22) + more
        assert (start(**options).stats["num_pages"], len(lowered)) == (num_pages, made)
    memory["bytes_limit"] = (1 << 22) - num_pages // 32 * page
    fewer = start(**options).stats["num_pages"]
    assert num_pages * 15 // 16 < fewer < num_pages and len(lowered) > made, "there is no room for as many"
    made, memory["bytes_limit"] = len(lowered), 1 << 22
    assert (start(**options).stats["num_pages"], len(lowered)) == (fewer, made)
    assert start(**options | {"memory_fraction": 0.95}).stats["num_pages"] < fewer, "as it was asked"
    assert start(**options).stats["num_pages"] == fewer
    memory["bytes_limit"] = (1 << 22) * 9 // 8
    assert start(**options).stats["num_pages"] > num_pages, "too much to do without"


def test_a_size_that_nobody_can_read_is_chosen_anew(kept_in):
    devices = jax.devices()[:1]
    assert executables.keep_size(("key",), devices, 5, 10) == 10
    assert executables.keep_size(("key",), devices, 5, 12) == 10
    assert executables.keep_size(("other",), devices, 5, 12) == 12
    for path in kept_in.iterdir():
        path.write_text("ten")
    assert executables.keep_size(("key",), devices, 5, 12) == 12
    assert executables.keep_size(("key",), devices, 5, 13) == 12


def test_other_sources_find_nothing(kept_in, lowered, monkeypatch):
    llm = start()
    monkeypatch.setattr(executables, "sources", lambda: "others")
    monkeypatch.setattr(executables, "IMPORTED", "others")
    start()
    assert len(lowered) == 2 * len(llm.engine.batcher.buckets)


def test_a_damaged_file_is_made_anew(kept_in, lowered, caplog):
    prompts = random_prompts(2, 12)
    before = answers(start(), prompts)
    made = len(lowered)
    for path in kept_in.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert answers(start(), prompts) == before
    assert len(lowered) == 2 * made and "made anew" in caplog.text
    start()
    assert len(lowered) == 2 * made, "and is whole again"


def test_a_full_disk_costs_the_file_alone(kept_in, caplog, monkeypatch):
    def full(path, content):
        raise OSError("no space left on device")

    monkeypatch.setattr(executables, "_write", full)
    assert generate(start(), [[1, 2, 3]]) and "no space left" in caplog.text
    assert executables.keep_size(("key",), jax.devices()[:1], 5, 10) == 10


def test_functions_of_the_caller_are_never_kept(kept_in):
    start(logits_processors={"none": lambda logits, *_: logits})
    assert not kept_in.exists()


def test_a_cpu_keeps_none(kept_in, monkeypatch):
    monkeypatch.setattr(executables, "NOT_KEPT", ("cpu",))
    start()
    assert not kept_in.exists()


@pytest.mark.parametrize("folder", [None, "gs://bucket/folder"])
def test_without_a_folder_nothing_is_kept(folder, kept_in):
    jax.config.update("jax_compilation_cache_dir", folder)
    assert executables.keep(("key",), jax.devices()[:1], lambda: jnp.add) is jnp.add


def test_files_that_were_changed_since_the_import_make_nothing_to_keep(kept_in, monkeypatch):
    """A package is updated while weights load: nobody may find the old code's executables under the new code's name."""
    monkeypatch.setattr(executables, "sources", lambda: "others")
    start()
    assert not kept_in.exists()


def test_whoever_wants_no_compilation_cache_has_none(kept_in):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        start()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not kept_in.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(executables.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        executables._write(tmp_path / "folder" / "name", b"content")
    assert not list((tmp_path / "folder").iterdir())
