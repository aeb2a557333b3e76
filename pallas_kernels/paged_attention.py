"""The operation: attention of query tokens to K and V that lie in pages, done tile by tile."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper_attention as hopper
from pallas_kernels import tile_attention as pallas
from pallas_kernels import triton
from pallas_kernels import xla_attention as xla
from pallas_kernels.hopper_attention import HopperConfig
from pallas_kernels.merge import merge_pallas, merge_xla
from pallas_kernels.scoring import Scoring
from pallas_kernels.tile_attention import Config, default_config
from pallas_kernels.tiles import Merge, Scales, Tiles

Implementation = Literal["xla", "pallas", "pallas_hopper", "pallas_interpret"]

# For the compiler: in one CUDA graph, a list that may run beside another does.
BESIDE_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def paged_attention(
    q: Float[Array, "T Hq D"],
    k_slots: Float[Array, "num_slots Hkv D"],
    v_slots: Float[Array, "num_slots Hkv D"],
    positions: Int[Array, "T"],
    page_table: Int[Array, "B P"],
    tile_lists: Sequence[Tiles],
    merge: Merge | None = None,
    *,
    page_size: int,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    alibi_slopes: Float[Array, " Hq"] | None = None,
    scales: Scales | None = None,
    implementation: Implementation | None = None,
    configs: Sequence[Config | HopperConfig | None] | None = None,
) -> Float[Array, "T Hq D"]:
    """Attention of the query tokens in the tiles; tokens in no tile keep their q, or beside a list with `only_cut` hold
    anything.

    Position p of row b of the page table lies in slot `page_table[b, p // page_size] * page_size + p % page_size`. With
    Pallas the result takes the place of q, in the same memory, where q has no other reader.

    Args:
        scale: of the scores; 1 / sqrt(D) unless given. softcap, window, alibi_slopes: see Scoring.
        scales: for slots of float8_e4m3fn, None for slots of q's dtype.
        implementation: None chooses, by backend and shapes; a named one runs or raises. "pallas_hopper" runs the lists
            that suit it with a kernel for Hopper, and the others as "pallas" does.
        configs: one for each tile list, as `tuning_for` gives them; None for the default.

    Raises ValueError for shapes, dtypes and sizes that do not fit; the indices themselves are not checked.
    """
    _check_arrays(q, k_slots, v_slots, positions, page_table, page_size, scales)
    _check_tiles(tile_lists, merge, configs)
    implementation = _choose(implementation, q, k_slots)
    scoring = Scoring(1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, window, alibi_slopes)
    _check_scoring(scoring, q)
    interpret = implementation == "pallas_interpret"
    group = q.shape[1] // k_slots.shape[1]
    # A list of cut tokens alone leaves q to the others and does not wait for them; else results take the place of q.
    beside = any(tiles.only_cut for tiles in tile_lists)
    x, partials = lax.empty(q.shape, q.dtype) if beside else q, [None] * len(tile_lists)
    for i in sorted(range(len(tile_lists)), key=lambda i: not tile_lists[i].only_cut):
        tiles, config = tile_lists[i], configs[i] if configs else None
        num_tiles, rows = tiles.token.shape
        if num_tiles == 0:
            continue
        arrays = (q if beside else x, None if tiles.only_cut else x, tiles, positions, page_table, k_slots, v_slots)
        options = {"page_size": page_size, "scoring": scoring, "scales": scales}
        if implementation == "xla":
            out, partials[i] = xla.tile_attention(*arrays, **options)
        else:
            if config is None:
                refusal = hopper.refusal(rows, group, q.shape[2], q.dtype, page_size, scoring)
                suits = refusal is None and tiles.only_cut == beside and k_slots.dtype == q.dtype
                on_hopper = suits and implementation == "pallas_hopper"
                config = HopperConfig() if on_hopper else default_config(rows, group, q.shape[2], q.dtype)
            run = hopper if isinstance(config, HopperConfig) else pallas
            out, partials[i] = run.tile_attention(*arrays, **options, config=config, interpret=interpret)
        if tiles.only_cut:  # it begins before the others, so that it finds room; they do not wait for its end
            x, partials[i] = lax.optimization_barrier((x, partials[i]))
            positions = positions if implementation == "xla" else _later(positions, q, interpret=interpret)
        else:
            x = out
    if merge is None:
        return x
    return (
        merge_xla(x, partials, merge)
        if implementation == "xla"
        else merge_pallas(x, partials, merge, interpret=interpret)
    )


def _later(positions: Int[Array, "T"], q: Float[Array, "T Hq D"], *, interpret: bool) -> Int[Array, "T"]:
    """Positions, a launch after q. A program of the kernel for Hopper takes a multiprocessor, and where both lists
    wait for q alone, narrow tiles fill the device first and the wide ones run behind them: 90 µs instead of 65."""

    def copy(_, positions_ref, out_ref):
        at = lax.iota(jnp.int32, pl.next_power_of_2(len(positions)))
        there = at < len(positions)
        triton.store(out_ref.at[at], triton.load(positions_ref.at[at], mask=there, other=0), mask=there)

    shape = jax.ShapeDtypeStruct(positions.shape, positions.dtype)
    options = {"num_warps": 4, "num_stages": 1, "interpret": interpret}
    return triton.launch(copy, out_shape=shape, grid=(1,), aliases={}, name="later", **options)(q, positions)


def default_implementation() -> Implementation:
    """Pallas where the default device is a CUDA GPU of compute capability 8.0 or newer, for 9.0 with the kernel for
    Hopper; else XLA."""
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    is_cuda = device.platform in ("gpu", "cuda") and "cuda" in device.client.platform_version.lower()
    if not is_cuda or float(device.compute_capability) < 8.0:
        return "xla"
    return "pallas_hopper" if device.compute_capability == "9.0" else "pallas"


def is_compiled(implementation: str) -> bool:
    """Whether its kernels run on a GPU, and not in an interpreter."""
    return implementation in ("pallas", "pallas_hopper")


def _choose(implementation: str | None, q: Array, k_slots: Array) -> Implementation:
    if implementation is None:
        default = default_implementation()
        return default if default == "xla" or _pallas_refusal(q, k_slots) is None else "xla"
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be None or one of {get_args(Implementation)}, got {implementation!r}")
    if implementation != "xla" and (refusal := _pallas_refusal(q, k_slots)):
        raise ValueError(f"implementation={implementation!r} {refusal}; use implementation='xla'")
    return implementation


def _pallas_refusal(q: Array, k_slots: Array) -> str | None:
    """Why the kernel cannot take these arrays."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes float32, bfloat16 and float16, got {q.dtype}"
    if q.shape[-1] > 256:
        return f"takes head sizes up to 256, got {q.shape[-1]}"
    size, limit = math.prod(k_slots.shape) * k_slots.dtype.itemsize, 4 if k_slots.dtype.itemsize > 1 else 2
    if size > limit * 2**30:
        return (
            f"takes K and V arrays of up to {limit} GiB each (32-bit offsets), got {size / 2**30:.2f} GiB: fewer pages"
        )
    return None


def _check_arrays(q, k_slots, v_slots, positions, page_table, page_size, scales):
    if q.ndim != 3 or k_slots.ndim != 3:
        raise ValueError(f"q must be [T, Hq, D] and k_slots [num_slots, Hkv, D], got {q.shape} and {k_slots.shape}")
    if k_slots.shape != v_slots.shape:
        raise ValueError(f"k_slots and v_slots must have one shape, got {k_slots.shape} and {v_slots.shape}")
    if q.shape[2] != k_slots.shape[2]:
        raise ValueError(f"q and k_slots must have one head size, got {q.shape[2]} and {k_slots.shape[2]}")
    if q.shape[1] % k_slots.shape[1]:
        raise ValueError(f"query heads must be a multiple of KV heads, got {q.shape[1]} and {k_slots.shape[1]}")
    kv_dtype = q.dtype if scales is None else jnp.dtype(jnp.float8_e4m3fn)
    if not kv_dtype == k_slots.dtype == v_slots.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q, k_slots and v_slots must have one float dtype, or with scales k_slots and v_slots float8_e4m3fn, "
            f"got {q.dtype}, {k_slots.dtype}, {v_slots.dtype}"
        )
    if scales is not None and not scales.k.shape == scales.v.shape == k_slots.shape[1:2]:
        raise ValueError(f"scales must be [Hkv] = {k_slots.shape[1:2]} each, got {scales.k.shape}, {scales.v.shape}")
    if positions.shape != q.shape[:1]:
        raise ValueError(f"positions must be [T] = [{q.shape[0]}], got {positions.shape}")
    if page_table.ndim != 2:
        raise ValueError(f"page_table must be [B, P], got {page_table.shape}")
    if page_size < 1 or k_slots.shape[0] % page_size:
        raise ValueError(f"num_slots must be a multiple of page_size, got {k_slots.shape[0]} and {page_size}")
    for name, a in (("positions", positions), ("page_table", page_table)):
        if a.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {a.dtype}")


def _check_scoring(scoring, q):
    for name in ("scale", "softcap", "window"):
        value = getattr(scoring, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    slopes = scoring.alibi_slopes
    if slopes is not None and (slopes.shape != q.shape[1:2] or slopes.dtype != jnp.float32):
        raise ValueError(f"alibi_slopes must be float32 [Hq] = [{q.shape[1]}], got {slopes.dtype} {slopes.shape}")


def _check_tiles(tile_lists, merge, configs):
    for i, tiles in enumerate(tile_lists):
        if tiles.token.ndim != 2:
            raise ValueError(f"tile_lists[{i}].token must be [N, R], got {tiles.token.shape}")
        for name in ("token", "partial", "row", "start", "end"):
            want = tiles.token.shape if name in ("token", "partial") else tiles.token.shape[:1]
            a = getattr(tiles, name)
            if a is not None and (a.shape != want or a.dtype != jnp.int32):
                raise ValueError(f"tile_lists[{i}].{name} must be int32 {want}, got {a.dtype} {a.shape}")
    cut = [i for i, tiles in enumerate(tile_lists) if tiles.partial is not None]
    if cut and merge is None:
        raise ValueError(f"tile_lists {cut} have cut tokens (partial is not None), but merge is None")
    if merge is not None and not cut:
        raise ValueError("merge was given, but no tile list has cut tokens (partial is None everywhere)")
    for i, tiles in enumerate(tile_lists):
        if tiles.num_partials < (i in cut) or (tiles.only_cut and i not in cut):
            raise ValueError(f"tile_lists[{i}] has cut tokens, but room for {tiles.num_partials} partials")
    if merge is not None and not merge.first.shape == merge.count.shape == (len(tile_lists), *merge.token.shape):
        raise ValueError(
            f"merge.first and merge.count must be [L, M] = {(len(tile_lists), *merge.token.shape)}, "
            f"got {merge.first.shape} and {merge.count.shape}"
        )
    if configs is not None and len(configs) != len(tile_lists):
        raise ValueError(f"configs must have one entry for each of {len(tile_lists)} tile lists, got {len(configs)}")
