"""Prefixes on disk: tokens, names, and the K and V of their full pages, through Orbax.

A save is a numbered folder below its path. Orbax makes a folder under another name and renames it once it is whole;
only then does the one before it go. Positions are stored one by one, all layers together, in arrays of `SLOT_GROUP`
positions: one launch reads or writes an array, and pages of another size are the same positions cut elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from prefix_jax.checkpoint import CheckpointError, open_array, orbax_checkpointer
from prefix_jax.engine import Engine
from prefix_jax.kv_store import page_bytes
from prefix_jax.prefix_cache import PageTable
from prefix_jax.prefix_trie import Node
from prefix_jax.runner import SLOT_GROUP, Runner
from prefix_jax.weights import checksum

log = logging.getLogger(__name__)
VERSION = 2
FOLDER = "prefixes-"  # and a number: one save
AHEAD = 8  # groups of positions on their way to or from the device at once
NOT_IN_KV = ("max_position", "bos_id", "eos_ids")  # of a model's config

Values = Shaped[np.ndarray, "_ L 2 Hkv D"]  # of some positions; the last group of several is shorter


@dataclass(frozen=True)
class SavedPrefix:
    """A prefix to save, or one that was loaded, of which the first `num_pages` full pages are in the cache. `parent` is
    the place of another among those that are saved together; equal `salt`s share pages. content: what it was declared
    by, as JSON takes it."""

    name: str | None
    tokens: array
    parent: int | None = None
    salt: str | None = None
    content: Any = None
    num_pages: int = 0


def save_prefixes(path: str | Path, engine: Engine, prefixes: Sequence[SavedPrefix]) -> None:
    """Saves them below `path`, pages that several share once, in place of what was saved there. Between two steps.

    ValueError names those of which a full page is not in the cache: to compute it is the caller's part. OSError when
    the disk does not take it; what was there before then still is.
    """
    if not engine.config.enable_prefix_caching:
        raise ValueError("prefixes are saved from the prefix cache, and this engine has none")
    paths = [engine.cache.find(array("i", prefix.tokens), prefix.salt) for prefix in prefixes]
    _check_computed(engine, prefixes, paths)
    nodes = list(dict.fromkeys(node for path in paths for node in path))
    place = {node: index for index, node in enumerate(nodes)}
    groups, sums = _read_pages(engine.runner, [node.page for node in nodes])
    entries = [
        {
            "name": prefix.name,
            "parent": prefix.parent,
            "salt": prefix.salt,
            "content": prefix.content,
            "tokens": list(prefix.tokens),
            "pages": [place[node] for node in path],
        }
        for prefix, path in zip(prefixes, paths, strict=True)
    ]
    save = {"version": VERSION, "page_size": engine.config.page_size, **_settings(engine)}
    save |= {"num_pages": len(nodes), "checksums": sums, "prefixes": entries}
    _write(Path(path), {"checksum": _json_sum(save), "save": save}, groups)


def load_prefixes(
    path: str | Path, engine: Engine, on_loaded: Callable[[SavedPrefix, PageTable], None] = lambda prefix, table: None
) -> list[SavedPrefix]:
    """Brings what was saved into the cache, evicting what nobody reads. Between two steps. Where the pool is short, the
    first pages of a prefix are loaded, as many as fit. `on_loaded` sees each prefix while nothing of it can be evicted
    yet, to pin it.

    CheckpointError when the save is damaged, or of another model, dtype or RoPE; nothing is loaded then.
    """
    if not engine.config.enable_prefix_caching:
        raise ValueError("prefixes are loaded into the prefix cache, and this engine has none")
    save, groups = _read(Path(path), engine)
    runner, put = engine.runner, engine.runner.put
    room = _room_for_groups(runner.devices[0], SLOT_GROUP * page_bytes(runner.config, 1, runner.kv_dtype))
    sources, sums = [], []  # the first ones stay on the device until they are written
    for group in groups:
        here = put(group)
        sums.append(checksum(here))
        sources.append(here if len(sources) < room else group)
        if len(sources) > room:
            sums[-1].block_until_ready()
    if [int(value) for value in jax.device_get(sums)] != save["checksums"]:
        raise CheckpointError(f"{path}: the K and V are damaged")
    tables: list[PageTable] = []
    loaded: list[SavedPrefix] = []
    num_short = 0
    try:
        for entry in save["prefixes"]:
            tokens = array("i", entry["tokens"])
            pages = np.array(entry["pages"], np.int32)
            saved = tokens[: len(pages) * save["page_size"]]
            tables.append(table := engine.cache.insert(saved, entry["salt"]))
            engine.spill()
            _write_pages(runner, table, pages, save["page_size"], sources)
            engine.cache.publish(table, saved, len(saved), written=True)
            num_short += len(table.nodes) < len(saved) // engine.config.page_size
            named = [entry[name] for name in ("parent", "salt", "content")]
            loaded.append(SavedPrefix(entry["name"], tokens, *named, len(table.nodes)))
            on_loaded(loaded[-1], table)
    finally:
        for table in tables:
            engine.cache.close(table)
        if any(slots.is_deleted() for slots in jax.tree.leaves(runner.store)):
            engine.start_over()  # a write failed that had the store
    if num_short:
        log.warning("the pool is short: of %d prefixes only the first pages are loaded", num_short)
    return loaded


# The device -----------------------------------------------------------------------------------------------------------


def _read_pages(runner: Runner, pages: list[int]) -> tuple[list[Values], list[int]]:
    """Their positions in groups, and the checksum of each; one that is not full repeats its last position for it."""
    slots = _slots(np.array(pages, np.int32), runner.page_size)
    groups, sums, ahead = [], [], deque()
    for start in range(0, len(slots), SLOT_GROUP):
        group = slots[start : start + SLOT_GROUP]
        values = runner.read_slots(np.pad(group, (0, SLOT_GROUP - len(group)), mode="edge"))
        sums.append(checksum(values))
        values.copy_to_host_async()
        ahead.append((values, len(group)))
        if len(ahead) == AHEAD:
            groups.append(_take(*ahead.popleft()))
    groups += [_take(*group) for group in ahead]
    return groups, [int(value) for value in jax.device_get(sums)]


def _take(values: jax.Array, count: int) -> Values:
    return np.asarray(values)[:count]


def _write_pages(
    runner: Runner, table: PageTable, pages: Int[np.ndarray, " n"], saved_size: int, groups: Sequence[Any]
) -> None:
    """Writes a table's private pages from the saved ones, which may be of another size."""
    first, last = len(table.nodes) * runner.page_size, len(table.pages) * runner.page_size
    targets = _slots(np.array(table.pages, np.int32), runner.page_size)[first:last]
    sources = _slots(pages, saved_size)[first:last]
    for index in np.unique(sources // SLOT_GROUP).tolist():
        slots = np.zeros(SLOT_GROUP, np.int32)  # what is not wanted goes to page 0
        chosen = sources // SLOT_GROUP == index
        slots[sources[chosen] % SLOT_GROUP] = targets[chosen]
        runner.write_slots(slots, runner.put(groups[index]))


def _room_for_groups(device: Any, group_bytes: int) -> int:
    """Groups that may lie on the device beside all that it has: in a quarter of what is free, where it tells."""
    stats = device.memory_stats()
    return max(AHEAD, (stats["bytes_limit"] - stats["bytes_in_use"]) // 4 // group_bytes) if stats else AHEAD


def _slots(pages: Int[np.ndarray, " n"], page_size: int) -> Int[np.ndarray, " slots"]:
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)


# The disk -------------------------------------------------------------------------------------------------------------


def _write(path: Path, document: dict[str, Any], groups: list[Values]) -> None:
    import orbax.checkpoint as ocp

    arrays = {str(index): group for index, group in enumerate(groups)}
    kv = {"kv": ocp.args.PyTreeSave(arrays)} if arrays else {}
    args = ocp.args.Composite(prefixes=ocp.args.JsonSave(document), **kv)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(path)
        before = _saves(path)
        folder = path / f"{FOLDER}{before[-1] + 1 if before else 0}"
        with orbax_checkpointer("prefixes", "kv") as checkpointer:
            checkpointer.save(folder, args)
    except Exception as error:  # Orbax and TensorStore raise whatever comes
        _remove_unfinished(path)
        raise OSError(f"{path}: the prefixes could not be saved: {error}") from error
    for number in before:
        shutil.rmtree(path / f"{FOLDER}{number}", ignore_errors=True)


def _read(path: Path, engine: Engine) -> tuple[dict[str, Any], Iterator[Values]]:
    """The latest save below `path` and its groups, padded; CheckpointError, now or from the iterator, unless it is
    whole and fits the engine."""
    import orbax.checkpoint as ocp

    saves = _saves(path)
    if not saves:
        raise CheckpointError(f"{path}: there are no saved prefixes")
    folder = path / f"{FOLDER}{saves[-1]}"
    with orbax_checkpointer("prefixes", "kv") as checkpointer:
        try:
            document = checkpointer.restore(folder, ocp.args.Composite(prefixes=ocp.args.JsonRestore())).prefixes
            save = document["save"]
            whole = document["checksum"] == _json_sum(save) and save["version"] == VERSION
        except Exception as error:
            raise CheckpointError(f"{folder} is damaged or cut short: {error}") from error
        if not whole:
            raise CheckpointError(f"{folder} is damaged, or of another version than {VERSION}")
        _check_settings(folder, save, engine)
        _check_lengths(folder, save, engine)
    config = engine.runner.config
    shape, dtype = (config.num_layers, 2, config.num_kv_heads, config.head_dim), engine.runner.kv_dtype
    return save, _groups(folder.absolute(), len(save["checksums"]), shape, dtype)


def _groups(folder: Path, count: int, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Values]:
    """Each as soon as it is read; all are read side by side."""
    try:
        arrays = [open_array(folder / "kv" / str(index)) for index in range(count)]
        if any(array.shape[1:] != shape or array.dtype.numpy_dtype != dtype for array in arrays):
            raise CheckpointError(f"{folder} is damaged: its arrays are not of the shape and dtype that it states")
        for reading in [array.read() for array in arrays]:
            yield _pad(reading.result())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged or cut short: {error}") from error


def _saves(path: Path) -> list[int]:
    """The numbers of the saves that are whole."""
    names = (folder.name.removeprefix(FOLDER) for folder in path.glob(f"{FOLDER}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _remove_unfinished(path: Path) -> None:
    """What Orbax had not renamed yet when it failed, or its process ended."""
    for folder in path.glob(f"{FOLDER}*.orbax-checkpoint-tmp*"):
        shutil.rmtree(folder, ignore_errors=True)


def _pad(group: Values) -> Shaped[np.ndarray, "group L 2 Hkv D"]:
    missing = SLOT_GROUP - len(group)
    return np.concatenate([group, np.repeat(group[-1:], missing, axis=0)]) if missing else group


def _json_sum(save: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(save, sort_keys=True).encode())


# What must agree ------------------------------------------------------------------------------------------------------


def _settings(engine: Engine) -> dict[str, Any]:
    """All that K and V depend on beside the tokens, as JSON has it; RoPE settings among the model's."""
    runner = engine.runner
    scales = runner.scales and [np.asarray(scale).tolist() for scale in jax.tree.leaves(runner.whole_scales())]
    model = {k: v for k, v in dataclasses.asdict(runner.config).items() if k not in NOT_IN_KV}
    settings = {"weights": runner.fingerprint, "dtype": jax.numpy.dtype(runner.dtype).name, **model}
    settings |= {"kv_dtype": jax.numpy.dtype(runner.kv_dtype).name, "kv_scales": scales}
    return json.loads(json.dumps(settings))


def _check_settings(folder: Path, save: dict[str, Any], engine: Engine) -> None:
    faults = [
        f"{name} is {save.get(name)!r:.100} in the save, {value!r:.100} in the engine"
        for name, value in _settings(engine).items()
        if save.get(name) != value and not (name == "kv_scales" and _are_close(save.get(name), value))
    ]
    if faults:
        raise CheckpointError(f"{folder} does not fit the engine:\n  " + "\n  ".join(faults))


def _are_close(saved: Any, scales: Any) -> bool:
    """Another number of devices adds in another order; what half the bytes can hold is far coarser."""
    return (
        bool(saved and scales) and np.shape(saved) == np.shape(scales) and np.allclose(saved, scales, rtol=1e-4, atol=0)
    )


def _check_lengths(folder: Path, save: dict[str, Any], engine: Engine) -> None:
    longest = min(engine.max_model_len, engine.runner.num_pages * engine.config.page_size)
    for entry in save["prefixes"]:
        if (length := max(len(entry["tokens"]), len((entry["content"] or {}).get("whole", ())))) > longest:
            raise CheckpointError(f"{folder} has a prefix of {length} tokens, the engine takes {longest}")


def _check_computed(engine: Engine, prefixes: Sequence[SavedPrefix], paths: list[list[Node]]) -> None:
    missing = []
    for index, (prefix, path) in enumerate(zip(prefixes, paths, strict=True)):
        full = len(prefix.tokens) // engine.config.page_size
        if len(path) < full:
            missing.append(f"{prefix.name or f'prefixes[{index}]'} ({len(path)} of {full} pages)")
    if missing:
        raise ValueError(f"not computed, or evicted since: {', '.join(missing)}; generate from them before saving")
