"""Tile attention as a Pallas Mosaic GPU kernel for Hopper: wide tiles, matrix units fed by bulk copies of pages."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.scoring import MASKED, Scoring
from pallas_kernels.tiles import Partials, Tiles

ROWS, HALF = 128, 64  # matrix rows of a tile, and of each of the two warpgroups that compute
# Rows of a tile's plan: TOKEN, PARTIAL and LIMIT have a word for each matrix row, COLUMN counts positions of a step.
HEADER, TOKEN, PARTIAL, LIMIT, COLUMN = range(5)
FIRST, STOP, TABLE_ROW, UNMASKED, START, WORK, WHOLE, CUT = range(8)  # words of the header


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """Sizes of one launch: positions in a step of the loop, steps whose K and V are in flight or in use."""

    block_kv: int = 128
    num_stages: int = 2


def refusal(
    rows: int, group: int, head_dim: int, dtype: jax.typing.DTypeLike, page_size: int, scoring: Scoring | None = None
) -> str | None:
    """Why the kernel cannot take tiles of `rows` tokens with `group` query heads for each KV head."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {jnp.dtype(dtype)}"
    if head_dim not in (64, 128):
        return f"takes head sizes 64 and 128, got {head_dim}"
    if rows * group != ROWS or group not in (1, 2, 4, 8):
        return f"takes tiles of {ROWS} matrix rows, 1, 2, 4 or 8 for each token, got {rows} tokens of {group}"
    if page_size % 8:
        return f"takes page sizes that are multiples of 8, got {page_size}"
    if scoring is not None and (scoring.softcap or scoring.window or scoring.alibi_slopes is not None):
        return "takes neither soft cap, nor window, nor ALiBi slopes"
    return None


# Lowering takes a second: once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("page_size", "scoring", "config", "interpret"))
def tile_attention(
    q: Float[Array, "T Hq D"],
    x: Float[Array, "T Hq D"] | None,
    tiles: Tiles,
    positions: Int[Array, "T"],
    page_table: Int[Array, "B P"],
    k_slots: Float[Array, "num_slots Hkv D"],
    v_slots: Float[Array, "num_slots Hkv D"],
    *,
    page_size: int,
    scoring: Scoring,
    config: HopperConfig = HopperConfig(),
    scales: None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hq D"] | None, Partials | None]:
    """Runs the tiles of one list; the results take the place of q, which x has to be, in the same memory. Returns them
    and the partials of cut tokens, uninitialised where there are none. x is None for a list with `only_cut`, which
    leaves q as it is.

    The last tile is the first to run: there the longest belong.
    """
    del scales
    num_tokens, num_heads, head_dim = q.shape
    num_tiles, rows = tiles.token.shape
    num_partials, num_kv_heads = tiles.num_partials, k_slots.shape[1]
    group = num_heads // num_kv_heads
    if why := refusal(rows, group, head_dim, q.dtype, page_size, scoring):
        raise NotImplementedError(f"this kernel {why}")
    assert config.block_kv <= ROWS, "a tile's plan counts no more columns"
    box = math.gcd(page_size, config.block_kv)  # positions of one copy
    plan = _plan(tiles, positions, num_tokens, num_partials, group, box, config.block_kv)
    boxes = (k_slots.shape[0] // box, box, num_kv_heads, head_dim)
    outs = [] if x is None else [jax.new_ref(x)]
    if tiles.partial is not None:
        shape = (tiles.num_partials, num_heads, head_dim)
        outs += [jax.new_ref(lax.empty(s, jnp.float32)) for s in (shape, shape[:-1])]

    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
    ring = plgpu.SMEM((config.num_stages, config.block_kv, head_dim), q.dtype, **swizzled)
    loose = plgpu.SMEM((ROWS, head_dim), q.dtype)  # rows as they lie in q
    ready = plgpu.Barrier(num_arrivals=config.block_kv // box, num_barriers=config.num_stages)
    used = plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages)
    stage = [loose] if tiles.partial is None else [loose, plgpu.SMEM((ROWS, head_dim // 2), jnp.float32)]
    memory = {
        "plan": plgpu.SMEM(plan.shape[1:], jnp.int32),
        "stage": plgpu.RefUnion(*stage) if len(stage) > 1 else loose,
        "q": plgpu.SMEM((2, HALF, head_dim), q.dtype, **swizzled),
        "k": ring,
        "v": ring,
        "lse": plgpu.SMEM((ROWS,), jnp.float32),
        "plan_ready": plgpu.Barrier(num_arrivals=1, num_barriers=1),
        "q_ready": plgpu.Barrier(num_arrivals=HALF // group, num_barriers=2),
        "k_ready": ready,
        "k_used": used,
        "v_ready": ready,
        "v_used": used,
        "turn": plgpu.Barrier(num_arrivals=2, num_barriers=1),
    }
    kernel = functools.partial(
        _kernel,
        num_partials=num_partials,
        only_cut=x is None,
        page_size=page_size,
        scale=scoring.scale,
        interpret=interpret,
    )
    pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(kernel, *refs), collective_axes="warpgroup", **memory),
        mesh=plgpu.Mesh(
            grid=(num_kv_heads, num_tiles),
            grid_names=("kv_head", "tile"),
            num_threads=3,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        name=f"hopper_attention_{rows}",
    )(plan, page_table, k_slots.reshape(boxes), v_slots.reshape(boxes), *([q] if x is None else []), *outs)
    x, *partials = [*([None] if x is None else []), *map(jax.freeze, outs)]
    return x, Partials(*partials) if partials else None


def _plan(tiles, positions, num_tokens, num_partials, group, box, block_kv) -> Int[Array, "N 5 128"]:
    """What the kernel has to know of each tile.

    Header: first position to load, end of what any token sees, row of the page table, steps that need no mask, first
    visible position, whether the tile does anything, whether some token goes to x, and to the partials.
    """
    real = tiles.token < num_tokens
    seen = jnp.minimum(positions[jnp.minimum(tiles.token, num_tokens - 1)] + 1, tiles.end[:, None])
    limit = jnp.where(real, seen, 0)  # of the positions that a token sees
    lowest = jnp.where(real, seen, tiles.end[:, None]).min(axis=1)
    stop = jnp.maximum(limit.max(axis=1), tiles.start + 1)  # one step at least
    first = tiles.start // box * box
    unmasked = jnp.where(first == tiles.start, jnp.maximum(lowest - first, 0) // block_kv, 0)
    partial = jnp.full_like(tiles.token, num_partials) if tiles.partial is None else tiles.partial
    whole, cut = (real & (partial >= num_partials)).any(axis=1), (real & (partial < num_partials)).any(axis=1)
    header = [first, stop, tiles.row, unmasked, tiles.start, tiles.start < tiles.end, whole, cut]
    header = jnp.pad(jnp.stack(header, axis=1, dtype=jnp.int32), ((0, 0), (0, ROWS - len(header))))
    column = jnp.broadcast_to(jnp.arange(ROWS, dtype=jnp.int32), header.shape)
    return jnp.stack([header, *(jnp.repeat(a, group, axis=1) for a in (tiles.token, partial, limit)), column], axis=1)


def _kernel(
    plan_ref,  # [N, 5, 128]
    table_ref,  # [B, P]
    k_ref,  # [num_slots / box, box, Hkv, D]
    v_ref,
    x_ref,  # [T, Hq, D], only read where all tokens are cut
    *partial_refs,  # where tokens are cut [C, Hq, D] and [C, Hq]
    num_partials,
    only_cut,
    page_size,
    scale,
    interpret,
    **memory,
):
    """Three warpgroups for a KV head and a tile: two compute 64 rows of the matrix each, the third loads K and V.

    Matrix row i is query token i // G under query head i % G of the KV head.
    """
    smem = SimpleNamespace(**memory)
    stage, *stage32 = smem.stage if partial_refs else (smem.stage,)
    me, kv_head = lax.axis_index("warpgroup"), lax.axis_index("kv_head")
    box, num_kv_heads, head_dim = k_ref.shape[1:]
    num_tokens, num_heads, _ = x_ref.shape
    group = num_heads // num_kv_heads
    heads = pl.ds(kv_head * group, group)
    num_stages, block_kv, _ = smem.k.shape

    # The header straight from memory: an empty tile ends here, and K and V are asked for before the plan has come.
    tile = plan_ref.shape[0] - 1 - lax.axis_index("tile")
    first, stop, row, unmasked, start, work, whole, cut = (plan_ref[tile, HEADER, i] for i in range(8))
    steps = pl.cdiv(stop - first, block_kv)

    @pl.when((work > 0) & (me == 2))
    def _():
        """Copies the range into the rings, box by box, as they become free."""
        plgpu.set_max_registers(40, action="decrease")
        plgpu.copy_gmem_to_smem(plan_ref.at[tile], smem.plan, smem.plan_ready.at[0])
        last = (stop - 1) // box * box  # past the end may be anybody's page
        k, v = (k_ref, smem.k, smem.k_ready, smem.k_used), (v_ref, smem.v, smem.v_ready, smem.v_used)

        @pl.loop(0, steps)
        def _(i):
            slot = lax.rem(i, num_stages)
            at = [jnp.minimum(first + i * block_kv + j * box, last) for j in range(block_kv // box)]
            boxes = [table_ref[row, p // page_size] * (page_size // box) + lax.rem(p, page_size) // box for p in at]
            for ref, ring, ready, used in (k, v):
                pl.when(i >= num_stages)(functools.partial(plgpu.barrier_wait, used.at[slot]))
                for j, b in enumerate(boxes):
                    plgpu.copy_gmem_to_smem(ref.at[b, :, kv_head], ring.at[slot, pl.ds(j * box, box)], ready.at[slot])

        for slot in range(num_stages):  # whoever waits for a barrier waits for each of its completions
            for used in (smem.k_used, smem.v_used):
                pl.when(slot < steps)(functools.partial(plgpu.barrier_wait, used.at[slot]))

    base = me * HALF
    mine = pl.ds(base, HALF)
    wgmma, by_row, by_column = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    to_log2 = scale * math.log2(math.e)

    def attend(q):
        """Weighted mean of V for each row, and log2 of the sum of its weights."""
        limit = plgpu.layout_cast(smem.plan[LIMIT, mine], by_row)

        def take_turns():
            plgpu.barrier_arrive(smem.turn.at[0])
            plgpu.barrier_wait(smem.turn.at[0])

        def step(i, carry, masked):
            """The turns are such that one warpgroup has the matrix units while the other is at its softmax."""
            acc, peak, total = carry
            slot = lax.rem(i, num_stages)
            begin = first + i * block_kv
            k, v = smem.k.at[slot], smem.v.at[slot]

            def score(out):
                plgpu.wgmma(out, q, k.transpose((1, 0)))
                take_turns()
                return out[...]

            plgpu.barrier_wait(smem.k_ready.at[slot])
            scores = pl.run_scoped(score, plgpu.ACC((HALF, block_kv), jnp.float32))
            plgpu.barrier_arrive(smem.k_used.at[slot])
            if masked:
                # Read: what is computed is kept in 64 registers through all steps, and spilled.
                column = plgpu.layout_cast(smem.plan[COLUMN, pl.ds(0, block_kv)], by_column)
                column = lax.broadcast_in_dim(column, scores.shape, [1])
                visible = column < lax.broadcast_in_dim(limit - begin, scores.shape, [0])
                visible &= column >= start - begin
                scores = jnp.where(visible, scores, MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * to_log2)
            fade = jnp.exp2(peak - new_peak)
            weights = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            acc *= lax.broadcast_in_dim(fade, acc.shape, [0])
            total = total * fade + weights.sum(axis=1)
            weights = weights.astype(x_ref.dtype)
            acc, total, new_peak, weights = lax.optimization_barrier((acc, total, new_peak, weights))
            plgpu.barrier_arrive(smem.turn.at[0])
            plgpu.barrier_wait(smem.v_ready.at[slot])
            plgpu.barrier_wait(smem.turn.at[0])
            if masked:  # 0 * NaN is NaN: nobody wrote what lies behind the end in its page

                @pl.when((begin + block_kv > stop) & (lax.rem(stop, box) > 0))
                def _():
                    for j in range(0, block_kv, HALF):
                        part = v.at[pl.ds(j, HALF)]
                        old = plgpu.layout_cast(part[...], wgmma)
                        position = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=wgmma) + (begin + j)
                        part[...] = jnp.where(position < stop, old, 0)  # the other warpgroup may write the same
                    plgpu.commit_smem()

            if interpret:  # whose wgmma takes no operand from registers
                acc += jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
            else:
                acc = pl.run_state(lambda out: plgpu.wgmma(out, weights, v))(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(smem.v_used.at[slot])
            return acc, new_peak, total

        acc = plgpu.layout_cast(jnp.zeros((HALF, head_dim), jnp.float32), wgmma)
        peak = plgpu.layout_cast(jnp.full((HALF,), MASKED, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), by_row)
        pl.when(me == 1)(take_turns)
        carry = lax.fori_loop(0, unmasked, functools.partial(step, masked=False), (acc, peak, total))
        acc, peak, total = lax.fori_loop(unmasked, steps, functools.partial(step, masked=True), carry)
        pl.when(me == 0)(take_turns)
        seen = limit > start  # a row that sees nothing has the weights of masked scores
        total = jnp.where(seen, total, 1.0)
        acc *= lax.broadcast_in_dim(jnp.where(seen, 1 / total, 0.0), acc.shape, [0])
        return acc, jnp.where(seen, peak + jnp.log2(total), -jnp.inf)

    def each_token(do, *words):
        """do(first matrix row, *its words of the plan) for the tokens of this warpgroup, eight words read at a time."""

        @pl.loop(0, HALF // group // 8)
        def _(j):
            rows = [base + (j * 8 + r) * group for r in range(8)]
            for row in [(i, *(smem.plan[word, i] for word in words)) for i in rows]:
                do(*row)

    def store(buffer, value, to_partials, put):
        """Rows of this warpgroup's tokens, through shared memory, to where they belong."""
        buffer.at[mine][...] = value
        plgpu.commit_smem()

        def one(i, token, place):
            goes = (token < num_tokens) & ((place < num_partials) == to_partials)
            rows = buffer.at[pl.ds(i, group)]
            pl.when(goes)(functools.partial(put, i, rows, place if to_partials else token))

        each_token(one, TOKEN, PARTIAL)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def put_x(i, rows, token):
        plgpu.copy_smem_to_gmem(rows, x_ref.at[token, heads])

    def put_partial(i, rows, place, half):
        lanes = pl.ds(half * (head_dim // 2), head_dim // 2)
        plgpu.copy_smem_to_gmem(rows, partial_refs[0].at[place, heads, lanes])
        for g in range(group if half == 0 else 0):
            partial_refs[1][place, heads.start + g] = smem.lse[i + g]

    @pl.when((work > 0) & (me < 2))
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(smem.plan_ready.at[0])

        def get(i, token):
            at = x_ref.at[jnp.minimum(token, num_tokens - 1), heads]
            plgpu.copy_gmem_to_smem(at, stage.at[pl.ds(i, group)], smem.q_ready.at[me])

        each_token(get, TOKEN)
        plgpu.barrier_wait(smem.q_ready.at[me])
        q = smem.q.at[me]
        q[...] = plgpu.layout_cast(stage[mine], wgmma)
        plgpu.commit_smem()
        value, lse = attend(q)
        if not only_cut:
            pl.when(whole > 0)(lambda: store(stage, value.astype(x_ref.dtype), False, put_x))
        if partial_refs:

            @pl.when(cut > 0)
            def _():
                smem.lse.at[mine][...] = lse
                for half in range(2):
                    lanes = value[:, half * (head_dim // 2) : (half + 1) * (head_dim // 2)]
                    store(stage32[0], lanes, True, functools.partial(put_partial, half=half))
