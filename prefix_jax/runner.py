"""The device half of the engine: the step, compiled for each bucket, and the arrays that stay on the device."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Shaped
from tqdm import tqdm

from pallas_kernels import BESIDE_OPTIONS, Scales, is_compiled
from pallas_kernels.logit_rules import LogitRules
from pallas_kernels.logprobs import Logprobs
from prefix_jax import kv_store
from prefix_jax.buckets import Bucket
from prefix_jax.executables import keep, keep_size
from prefix_jax.models.llama import KVStore, Llama
from prefix_jax.models.split import AXIS, EVERYWHERE, HEADS, KV, NCCL_ALONE, on_each
from prefix_jax.sampler import LogitsProcessor
from prefix_jax.scheduler import StepPlan
from prefix_jax.step import change_pages, set_bans, set_rules, step
from prefix_jax.step_batch import Batcher, StepBatch
from prefix_jax.tiling import tile_configs
from prefix_jax.token_rules import RuleRow, no_rules
from prefix_jax.weights import fingerprint

COPY_GROUPS = (16, 128)  # page copies in one launch: those of a step or, when many prompts start at once, many;
COPY_BYTES = 2**29  # but never more than this, which a launch holds meanwhile, beyond the smallest group
PAGE_GROUP = 16  # pages to or from host memory in one launch
SLOT_GROUP = 512  # positions of saved prefixes in one launch
CHANGE_GROUP = 4096  # page table changes in one launch, before the step
RULE_GROUP = 16  # rows of rules in one launch, where there are several
# For the compiler: no trials of two kernels for one fusion, on arrays as large as those that fill the memory already.
COMPILER_OPTIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False} | NCCL_ALONE
PAGE = jax.sharding.PartitionSpec(None, None, None, AXIS)  # of K and V [S, L, 2, Hkv, D]


class Runner:
    """Runs step batches of the given buckets, in order, without ever waiting for the device.

    The model's parameters are split off once; the store and the page table are donated through every step. `num_pages`
    None sizes the store by what `memory_fraction` of the device leaves free after the largest bucket has run. On a
    mesh, each device has the K and V of its heads, and all else of the state.
    """

    def __init__(
        self,
        model: Llama,
        batcher: Batcher,
        *,
        page_size: int,
        num_pages: int | None,
        memory_fraction: float,
        attention: str,
        scales: tuple[Scales, ...] | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
        use_tqdm: bool = False,
    ):
        self.graph, state = nnx.split(model)
        self.params, self.param_tree = jax.tree.flatten(state)
        self.layout = [
            (p.kind, p.axis, p.whole) for p in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Param))
        ]
        self.config = model.config
        self.split, self.mesh = model.split, model.mesh
        self.dtype = model.dtype
        self.scales = scales
        self.kv_dtype = self.dtype if scales is None else jnp.dtype(jnp.float8_e4m3fn)
        self.processors = processors
        self.batcher = batcher
        self.page_size = page_size
        self.attention = attention
        self.num_pages = num_pages or self._measure_num_pages(memory_fraction)
        self.reset()
        self.steps: dict[str, Any] = {}
        # These are compiled when first used: saving is no part of a step, and `warm_page_moves` comes before the first.
        jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self._gather = jit(self.split.gather, static_argnums=(1, 2, 3))
        into_store = functools.partial(jit, donate_argnums=0, out_shardings=self._placed(KV))
        self._read_slots, self._write_slots = jit(self._gather_slots), into_store(self._spread_slots)
        self._read_pages = jit(kv_store.read_pages, out_shardings=self._placed(PAGE))
        self._write_pages = into_store(kv_store.write_pages)
        self._warm_up(use_tqdm)

    def set_params(self, model: Llama) -> None:
        """Runs on with this model's parameters. ValueError if their shapes or dtypes are others."""
        params, tree = jax.tree.flatten(nnx.split(model)[1])
        kinds, new = ([(p.shape, p.dtype) for p in these] for these in (self.params, params))
        if tree != self.param_tree or kinds != new:
            raise ValueError("the parameters of another model: shapes or dtypes differ")
        self.params = params
        vars(self).pop("fingerprint", None)  # of the former ones

    def reset(self) -> None:
        """Fresh device state, forgetting every page: at start, and after a step that failed."""
        self.store = None  # there is no room for two
        self.store = self._make_store(self.num_pages, self._placed(KV))
        rows, everywhere = self.batcher.max_num_seqs + 1, self._placed(EVERYWHERE)
        self.page_table = jnp.zeros((rows, self.batcher.max_pages), jnp.int32, device=everywhere)
        self.last_tokens = jnp.zeros(rows, jnp.int32, device=everywhere)
        self.rules = LogitRules.empty(rows, self.config.vocab_size)
        if self.mesh is not None:
            self.rules = jax.device_put(self.rules, everywhere)

    def _make_store(self, num_pages: int, sharding: jax.sharding.Sharding | None = None) -> KVStore:
        return kv_store.make_kv_store(self.split.padded, num_pages, self.page_size, self.kv_dtype, sharding)

    def _placed(self, spec: jax.sharding.PartitionSpec, **memory: str) -> jax.sharding.NamedSharding | None:
        """Where arrays of this kind are; None for where JAX puts them on one device."""
        return None if self.mesh is None else jax.sharding.NamedSharding(self.mesh, spec, **memory)

    def dispatch(self, batch: StepBatch) -> tuple[Int[Array, " rows"], Logprobs | None]:
        """Starts one step; returns each row's last sampled token, or NOT_FINITE, and log-probabilities if any are
        wanted, which are still being computed."""
        if self.store is None:
            self.reset()
        for changes in _groups(batch.early_changes.T, CHANGE_GROUP):
            padding = np.zeros((CHANGE_GROUP - len(changes), 2), np.int32)
            padding[:, 0] = self.batcher.max_num_seqs * self.batcher.max_pages
            self.page_table = self._change_pages(self.page_table, *np.concatenate([changes, padding]).T)
        size = next((size for size in self._copy_pages if size >= len(batch.copies)), max(self._copy_pages))
        for copies in _groups(np.array(batch.copies, np.int32).reshape(-1, 2), size):
            padding = np.zeros((size - len(copies), 2), np.int32)
            self.store = self._copy_pages[size](self.store, *np.concatenate([copies, padding]).T)
        self.write_pages(batch.arrivals)  # a copy may have read what a page held before
        rows, rules = np.array(list(batch.rules), np.int32), list(batch.rules.values())
        for start in range(0, len(rows), RULE_GROUP):
            group = slice(start, start + RULE_GROUP)
            self._write_rules(rows[group], rules[group])
        for row, banned in batch.bans.items():
            self.rules = self._set_bans(self.rules, np.int32(row), banned)
        found = self._run(self.steps[batch.bucket.name], batch.packed)
        self.last_tokens.copy_to_host_async()
        if not batch.wants_logprobs:
            return self.last_tokens, None
        for array in found:
            array.copy_to_host_async()
        return self.last_tokens, found

    def _write_rules(self, rows: Int[np.ndarray, " n"], rules: list[RuleRow]) -> None:
        """A row alone, or as many as a group has, in one transfer and one launch."""
        size = 1 if len(rows) == 1 else RULE_GROUP
        packed = np.zeros((size, rules[0].packed_len), np.int32)
        for i, of_row in enumerate(rules):
            of_row.pack_into(packed[i])
        rows = np.pad(rows, (0, size - len(rows)), constant_values=self.batcher.max_num_seqs)  # that row asks nothing
        self.rules = self._set_rules[size](self.rules, rows, packed)

    def _run(self, run: Any, packed: Int[np.ndarray, " n"]) -> Logprobs:
        self.store, self.page_table, self.rules, self.last_tokens, found = run(
            self.params, self.scales, self.store, self.page_table, self.last_tokens, self.rules, packed
        )
        return found

    # K and V off the device and back ---------------------------------------------------------------------------------

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the weights, on however many devices they are."""
        return fingerprint(self.params, lambda index, array: self._gather(array, *self.layout[index]))

    def whole_scales(self) -> tuple[Scales, ...]:
        """Those of the model's KV heads."""
        shape = (self.config.num_kv_heads,)
        return jax.tree.map(lambda scale: self._gather(scale, "kv", 0, shape), self.scales)

    @functools.cached_property
    def host_memory(self) -> jax.sharding.Sharding | None:
        """Pinned memory of the host, from and to which the device copies by itself; None where there is none."""
        device = self.devices[0]
        kinds = {memory.kind for memory in device.addressable_memories()}
        if device.platform == "cpu" or "pinned_host" not in kinds:
            return None
        placed = self._placed(PAGE, memory_kind="pinned_host")
        return placed or jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    @functools.cached_property
    def devices(self) -> list[jax.Device]:
        """Those that have the weights and the store."""
        return list(self.mesh.devices.flat) if self.mesh is not None else list(self.params[0].devices())

    def put(self, values: Any, spec: jax.sharding.PartitionSpec = EVERYWHERE) -> Any:
        """Starts to copy arrays to the devices, all of it to each, or as the spec says."""
        # A bare device would mean: in any memory.
        return jax.device_put(values, self._placed(spec) or jax.sharding.SingleDeviceSharding(self.devices[0]))

    def read_slots(self, slots: Int[np.ndarray, " n"]) -> Shaped[Array, "n L 2 Hkv D"]:
        """K and V of the model's KV heads, on however many devices they are."""
        return self._read_slots(self.store, slots)

    def write_slots(self, slots: Int[np.ndarray, " n"], values: Shaped[Array, "n L 2 Hkv D"]) -> None:
        """What `read_slots` read, on the devices."""
        self.store = self._write_slots(self.store, slots, values)

    def _gather_slots(self, store: KVStore, slots: Int[Array, " n"]) -> Shaped[Array, "n L 2 heads D"]:
        values = kv_store.read_slots(store, slots)
        return self.split.gather(values, "kv", 3, (*values.shape[:3], self.config.num_kv_heads, values.shape[4]))

    def _spread_slots(self, store: KVStore, slots: Int[Array, " n"], values: Shaped[Array, "n L 2 heads D"]) -> KVStore:
        shape = (*values.shape[:3], self.split.padded.num_kv_heads, values.shape[4])
        return kv_store.write_slots(store, slots, self.split.spread(values, "kv", 3, shape))

    def read_pages(self, pages: list[int]) -> list[Shaped[Array, "S L 2 Hkv D"]]:
        """Starts to copy pages, as they are before the next step, to host memory: from each device its heads."""
        copies: list[Array] = []
        for group in _groups(np.array(pages, np.int32), PAGE_GROUP):
            copies += self._read_pages(self.store, self._slots_of(group))[: len(group)]
        if self.host_memory is not None:
            return jax.device_put(copies, self.host_memory)
        for copy in copies:
            copy.copy_to_host_async()
        return copies

    def to_host(self, page: Array) -> Array | np.ndarray:
        """One of `read_pages`, once a later step has run: out of the device's memory."""
        return page if self.host_memory is not None else np.asarray(page)

    def to_device(self, pages: list[Array | np.ndarray]) -> list[Array]:
        """Starts to copy them, from host memory."""
        return self.put(pages, PAGE)

    def write_pages(self, arrivals: Mapping[int, Array]) -> None:
        """Puts what `to_device` returned into the pages that are its keys."""
        pages, values = np.array(list(arrivals), np.int32), list(arrivals.values())
        for start in range(0, len(pages), PAGE_GROUP):
            group = values[start : start + PAGE_GROUP]
            group += group[-1:] * (PAGE_GROUP - len(group))
            self.store = self._write_pages(self.store, self._slots_of(pages[start : start + PAGE_GROUP]), group)

    def warm_page_moves(self) -> None:
        """Compiles what moves pages to host memory and back."""
        self.write_pages({0: self.to_device([self.to_host(self.read_pages([0])[0])])[0]})

    def _slots_of(self, pages: Int[np.ndarray, " n"]) -> Int[np.ndarray, "group S"]:
        """The slots of up to a group of pages; padding is page 0."""
        padded = np.zeros(PAGE_GROUP, np.int32)
        padded[: len(pages)] = pages
        return padded[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)

    # ------------------------------------------------------------------------------------------------------------------

    def lower(self, bucket: Bucket, num_pages: int, platforms: tuple[str, ...] | None = None) -> Any:
        """The step of one bucket over a store of `num_pages`, lowered but not compiled; for these devices, or
        platforms."""
        rows = self.batcher.max_num_seqs + 1
        int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        arrays = (
            self.params,
            self.scales,
            jax.eval_shape(functools.partial(self._make_store, num_pages)),
            int32((rows, self.batcher.max_pages)),
            int32((rows,)),
            jax.eval_shape(functools.partial(LogitRules.empty, rows, self.config.vocab_size)),
            int32((bucket.packed_len,)),
        )
        of_params = [EVERYWHERE if self.mesh is None else array.sharding.spec for array in self.params]
        specs = (of_params, HEADS, KV, *[EVERYWHERE] * 4)
        arguments = jax.tree.map(
            lambda spec, tree: jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._placed(spec)), tree
            ),
            specs,
            arrays,
        )
        step_of_bucket = functools.partial(
            step,
            graph=self.graph,
            param_tree=self.param_tree,
            bucket=bucket,
            page_size=self.page_size,
            attention=self.attention,
            configs=tile_configs(bucket, self.split.local, self.dtype, self.attention, self.page_size),
            processors=self.processors,
        )
        run = on_each(step_of_bucket, self.mesh, specs, (KV, *[EVERYWHERE] * 4))
        jitted = jax.jit(run, donate_argnums=(2, 3, 5))
        return jitted.trace(*arguments).lower(lowering_platforms=platforms)

    def compile(self, bucket: Bucket, num_pages: int) -> Any:
        """The step of one bucket over a store of `num_pages`, for these devices; from disk if it is kept there."""
        options = self.compiler_options(bucket)

        def compile() -> Any:
            return self.lower(bucket, num_pages).compile(compiler_options=options)

        if self.processors:  # nothing tells one function from another
            return compile()
        configs = tile_configs(bucket, self.split.local, self.dtype, self.attention, self.page_size)
        key = bucket, num_pages, self._sizes(), self.attention, configs, sorted(options.items())
        return keep(key, self.devices, compile)

    def _sizes(self) -> tuple[Any, ...]:
        """Of everything that steps take, but for the pages of the store and the batch."""
        sizes = self.page_size, self.batcher.max_num_seqs, self.batcher.max_pages
        return self.config, sizes, self.dtype, self.kv_dtype, [(p.shape, p.dtype) for p in self.params]

    def compiler_options(self, bucket: Bucket) -> dict[str, Any]:
        if not is_compiled(self.attention):
            return COMPILER_OPTIONS
        # XLA's own matrix products beat the library's for a few tokens, and lose against it from some 32 on.
        products = {"xla_gpu_enable_triton_gemm": False} if bucket.num_tokens >= 32 else {}
        return COMPILER_OPTIONS | products | (BESIDE_OPTIONS if bucket.kind == "shared" else {})

    def _measure_num_pages(self, memory_fraction: float) -> int:
        """Pages for what is free on each device: on one that reports its memory, after the largest bucket ran over a
        store of one page; on a host, a tenth of its memory, or as much as all rows can use if that is less."""
        sizes = self.split.local, self.page_size, self.kv_dtype
        page, limit = kv_store.page_bytes(*sizes), kv_store.max_pages(*sizes) - 1
        if not _memory_stats(self.mesh):
            host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / self.split.num_devices
            free = host * memory_fraction / 10
            limit = min(limit, self.batcher.max_num_seqs * self.batcher.max_pages)
        else:
            largest = self.batcher.largest
            self.num_pages = 1
            self.reset()
            batch = self.batcher.build(StepPlan(), largest)
            run = self.compile(largest, 1)
            jax.block_until_ready(self._run(run, batch.packed))
            # Not the peak of the process: that counts what an earlier engine had, too.
            temporary = run.memory_analysis().temp_size_in_bytes
            free = min(
                stats["bytes_limit"] * memory_fraction - stats["bytes_in_use"] - temporary
                for stats in _memory_stats(self.mesh)
            )
        if free < page:
            raise MemoryError(f"no memory for one page: a page takes {page:,} bytes, {int(free):,} are free")
        most = min(limit, int(free // page))
        # The last pages are no loss, and those of an earlier start, if hardly fewer, spare the compilation.
        coarse = max(0, most.bit_length() - 6)
        key = self.batcher.buckets, self._sizes(), self.attention, memory_fraction
        return keep_size(key, self.devices, most - most // 16, most >> coarse << coarse)

    def _warm_up(self, use_tqdm: bool) -> None:
        """Compiles every bucket, in parallel, and runs each once over padding. Nothing is compiled afterwards."""
        jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=self._placed(EVERYWHERE))
        copy = functools.partial(kv_store.copy_pages, page_size=self.page_size)
        copy = jax.jit(copy, donate_argnums=0, out_shardings=self._placed(KV))
        self._copy_pages: dict[int, Any] = {}
        page = kv_store.page_bytes(self.split.local, self.page_size, self.kv_dtype)
        for size in (size for size in COPY_GROUPS if size == COPY_GROUPS[0] or size * page <= COPY_BYTES):
            pair = (jax.ShapeDtypeStruct((size,), jnp.int32),) * 2
            self._copy_pages[size] = copy.lower(self.store, *pair).compile(compiler_options=COMPILER_OPTIONS)
        pair = (jax.ShapeDtypeStruct((CHANGE_GROUP,), jnp.int32),) * 2
        self._change_pages = jit(change_pages).lower(self.page_table, *pair).compile()
        rules = no_rules(self.config.vocab_size)
        self._set_rules = {}
        for size in (1, RULE_GROUP):
            arrays = np.zeros(size, np.int32), np.zeros((size, rules.packed_len), np.int32)
            self._set_rules[size] = jit(set_rules).lower(self.rules, *arrays).compile(compiler_options=COMPILER_OPTIONS)
        self._set_bans = (
            jit(set_bans).lower(self.rules, np.int32(0), rules.banned).compile(compiler_options=COMPILER_OPTIONS)
        )
        buckets, device = self.batcher.buckets, jax.config.jax_default_device

        def compile(bucket: Bucket) -> Any:
            with jax.default_device(device):  # what is set for this thread is not for others
                return self.compile(bucket, self.num_pages)

        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            compiled = {pool.submit(compile, bucket): bucket for bucket in buckets}
            for future in tqdm(as_completed(compiled), "compiling", len(buckets), unit="bucket", disable=not use_tqdm):
                self.steps[compiled[future].name] = future.result()
        for bucket in buckets:
            self.dispatch(self.batcher.build(StepPlan(), bucket))
        jax.block_until_ready(self.last_tokens)


def _groups(rows: np.ndarray, size: int) -> Iterable[np.ndarray]:
    return (rows[i : i + size] for i in range(0, len(rows), size))


def _memory_stats(mesh: jax.sharding.Mesh | None) -> list[dict[str, int]]:
    """Of each device that tells."""
    devices = jnp.zeros(()).devices() if mesh is None else mesh.devices.flat
    return [stats for device in devices if (stats := device.memory_stats())]
