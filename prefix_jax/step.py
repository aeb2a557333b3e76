"""One step on the device, a pure function of its state and a packed batch, and the smaller changes of that state."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, UInt32

from pallas_kernels import Merge, Scales, Tiles, paged_attention
from pallas_kernels.logit_rules import LogitRules
from pallas_kernels.logprobs import Logprobs
from prefix_jax.buckets import SAMPLING_FIELDS, Bucket
from prefix_jax.models.llama import KVStore
from prefix_jax.sampler import LogitsProcessor, SamplingRows, sample
from prefix_jax.tile_plan import TILE_FIELDS

NOT_FINITE = -1  # the token of a row whose hidden state is NaN or infinite


def step(
    params: list[Array],
    scales: tuple[Scales, ...] | None,
    store: KVStore,
    page_table: Int[Array, "rows P"],
    last_tokens: Int[Array, " rows"],
    rules: LogitRules,
    packed: Int[Array, " n"],
    *,
    graph: nnx.GraphDef,
    param_tree: Any,
    bucket: Bucket,
    page_size: int,
    attention: str,
    configs: list[Any],
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[KVStore, Int[Array, "rows P"], LogitRules, Int[Array, " rows"], Logprobs]:
    """One step: writes the new K and V, attends through the tiles, samples. Pure; returns the new device state, and
    log-probabilities for the rows that asked.

    What is donated comes first: `last_tokens` is not, but has the shape of some of the rules, whose memory it would be
    given, and they would be copied."""
    model = nnx.merge(graph, jax.tree.unflatten(param_tree, params))
    batch = bucket.unpack(packed)
    page_table = change_pages(page_table, batch["change_index"], batch["change_page"])
    scratch_row = last_tokens.shape[0] - 1
    tokens = jnp.where(batch["source"] < scratch_row, last_tokens[batch["source"]], batch["token"])
    position = batch["position"]
    row = batch["row"]
    slots = page_table[row, position // page_size] * page_size + position % page_size
    slots = jnp.where(row > scratch_row, jnp.iinfo(jnp.int32).max, slots)
    attend = functools.partial(
        paged_attention,
        positions=position,
        page_table=page_table,
        tile_lists=batch_tiles(batch, bucket),
        merge=batch_merge(batch, bucket),
        page_size=page_size,
        implementation=attention,
        configs=configs,
    )
    hidden, store = model(tokens, position, slots, store, attend, attention, scales, batch["num_tokens"])
    with jax.named_scope("sample"):
        read = hidden[batch["sample_token"]]
        logits = model.logits(read)
        asked = _sampling_rows(batch, tokens)
        sampled, found, rules = sample(logits, asked, rules, processors, implementation=attention)
    sampled = jnp.where(jnp.isfinite(read).all(axis=1), sampled, NOT_FINITE)
    return store, page_table, rules, last_tokens.at[batch["sample_row"]].set(sampled), found


def set_rules(rules: LogitRules, rows: Int[Array, " n"], packed: Int[Array, "n words"]) -> LogitRules:
    """Replaces those of some rows by what `RuleRow.pack_into` wrote."""
    ends = np.cumsum([math.prod(array.shape[1:]) for array in rules])
    parts = jnp.split(packed, ends[:-1], axis=1)

    def replace(old: Array, new: Array) -> Array:
        new = jax.lax.bitcast_convert_type(new, old.dtype).reshape(-1, *old.shape[1:])
        return old.at[rows].set(new)

    return LogitRules(*map(replace, rules, parts))


def set_bans(rules: LogitRules, row: Int[Array, ""], banned: UInt32[Array, " words"]) -> LogitRules:
    """Replaces the banned tokens of one row."""
    return rules._replace(banned=rules.banned.at[row].set(banned))


def change_pages(
    page_table: Int[Array, "rows P"], index: Int[Array, " n"], pages: Int[Array, " n"]
) -> Int[Array, "rows P"]:
    """Sets single entries, by their flat index."""
    return page_table.reshape(-1).at[index].set(pages).reshape(page_table.shape)


def batch_tiles(batch: dict[str, Array], bucket: Bucket) -> list[Tiles]:
    """The tile lists in an unpacked batch."""
    lists = []
    for kind, shape in zip(bucket.lists, bucket.shapes, strict=True):
        *arrays, partial = (batch[f"{kind}.{name}"] for name in TILE_FIELDS)
        only_cut = bucket.kind == "shared" and kind == "wide"
        cut = {"partial": partial, "num_partials": shape.partials, "only_cut": only_cut} if shape.partials else {}
        lists.append(Tiles(*arrays, **cut))
    return lists


def batch_merge(batch: dict[str, Array], bucket: Bucket) -> Merge | None:
    return Merge(*(batch[f"merge.{name}"] for name in ("token", "first", "count"))) if bucket.merges else None


def _sampling_rows(batch: dict[str, Array], tokens: Int[Array, " T"]) -> SamplingRows:
    fields = {
        name: batch[name] if default.dtype == np.int32 else jax.lax.bitcast_convert_type(batch[name], default.dtype)
        for name, default in SAMPLING_FIELDS.items()
    }
    return SamplingRows(
        row=batch["sample_row"],
        seed=jax.lax.bitcast_convert_type(batch["seed"], jnp.uint32),
        last_token=tokens[batch["sample_token"]],
        position=batch["sample_position"],
        target=batch["target"],
        **fields,
    )
