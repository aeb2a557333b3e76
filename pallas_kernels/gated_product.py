"""Gate and up of an MLP and what becomes of them, activation(x @ gate) * (x @ up), as one product.

Columns of gate and of up lie in turns, a block of one and a block of the other, so that a tile of the product has both:
on Hopper a kernel then needs no second pass over what the product yields.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

Activation = Literal["silu", "gelu_tanh"]

BLOCK = 16  # columns of gate, then as many of up
ROWS, HALF = 128, 64  # of a tile, and of each of the two warpgroups that compute
COLUMNS = 128  # of gate, and of up, in a tile
ROWS_TOGETHER = 8  # of tiles, one below the other, before the next columns: so long these stay in the cache
BLOCK_K, NUM_STAGES = 64, 4
SWIZZLE = 128  # bytes
NUM_MULTIPROCESSORS = 132
# Before JAX 0.12 XLA leaves Mosaic's kernels out of the CUDA graph.
IN_GRAPH = jax.__version_info__ >= (0, 12)


def gated_product(
    x: Float[Array, "T E"],
    weight: Float[Array, "E blocks 2 block"],
    activation: Activation = "silu",
    num_tokens: Int[Array, "1"] | None = None,
    *,
    implementation: str = "xla",
) -> Float[Array, "T F"]:
    """activation(x @ gate) * (x @ up), with F = blocks * block: weight[:, i // block, 0, i % block] is column i of
    gate, and weight[:, i // block, 1, i % block] that of up.

    num_tokens: that are to be computed, the first ones; None: all. Of the others the result may be anything.
    "pallas_hopper" takes a kernel for Hopper where that is faster than XLA; it rounds once, XLA also what lies between.
    """
    suits = implementation == "pallas_hopper" and IN_GRAPH and refusal(x, weight) is None
    if suits and fills_device(len(x), weight.shape[1] * BLOCK):
        return product_on_hopper(x, weight, activation, num_tokens)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    both = jnp.einsum("te,ebcf->tbcf", x, weight, precision=precision)
    return (_activate(activation, both[:, :, 0]) * both[:, :, 1]).reshape(len(x), -1)


def _activate(name: Activation, gate: Array) -> Array:
    return jax.nn.silu(gate) if name == "silu" else jax.nn.gelu(gate, approximate=True)


def refusal(x: Float[Array, "T E"], weight: Float[Array, "E blocks 2 block"]) -> str | None:
    """Why the kernel cannot take these arrays."""
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return f"takes bfloat16 or float16, got {x.dtype} and {weight.dtype}"
    if len(x) % ROWS or x.shape[1] % BLOCK_K:
        return f"takes multiples of {ROWS} tokens and of a width of {BLOCK_K}, got {x.shape}"
    if weight.shape[3] != BLOCK or weight.shape[1] % (COLUMNS // BLOCK):
        return f"takes blocks of {BLOCK} columns, a multiple of {COLUMNS // BLOCK} of them, got {weight.shape}"
    return None


def fills_device(num_tokens: int, num_columns: int) -> bool:
    """Whether nearly all multiprocessors have a tile in every round; of few tokens the library leaves more unused."""
    num_tiles = num_tokens // ROWS * (num_columns // COLUMNS)
    places = -(-num_tiles // NUM_MULTIPROCESSORS) * NUM_MULTIPROCESSORS
    return num_tiles >= places * (0.84 if num_tokens <= 384 else 0.86)


# Lowering takes a second: once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def product_on_hopper(
    x: Float[Array, "T E"],
    weight: Float[Array, "E blocks 2 block"],
    activation: Activation = "silu",
    num_tokens: Int[Array, "1"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """A Pallas Mosaic GPU kernel. One program on each multiprocessor takes one tile after the other; of its three
    warpgroups one copies what the others multiply, also of the next tile while they finish one. Two tiles of the same
    columns, if there are two, are computed beside each other and read them once. NotImplementedError: see refusal."""
    if why := refusal(x, weight):
        raise NotImplementedError(f"this kernel {why}")
    (capacity, width), num_columns = x.shape, weight.shape[1] * BLOCK
    pair = 2 if capacity % (2 * ROWS) == 0 else 1
    across, programs = num_columns // COLUMNS, NUM_MULTIPROCESSORS // pair
    swizzled = plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)
    by_block = plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK)  # results are stored block by block

    def pipeline(step, around):
        spec = functools.partial(plgpu.BlockSpec, transforms=swizzled, memory_space=plgpu.SMEM)
        shared = {"collective_axes": ("pair",)} if pair > 1 else {}
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(width // BLOCK_K,),
            in_specs=[
                spec((ROWS, BLOCK_K), lambda k: (0, k)),
                spec((BLOCK_K, 2 * COLUMNS), lambda k: (k, 0), **shared),
            ],
            memory_registers=40,
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=NUM_STAGES,
            compute_context=around,
        )

    def kernel(x_ref, weight_ref, num_tokens_ref, out_ref):
        def program(ring, stage):
            me, first = lax.axis_index("warpgroup"), lax.axis_index("program")
            mine = pl.ds(me * HALF, HALF)
            down = pl.cdiv(num_tokens_ref[0], ROWS * pair)

            @pl.loop(0, pl.cdiv(jnp.maximum(down * across - first, 0), programs))
            def _(i):
                # Band by band, in each column by column.
                tile, band = first + i * programs, ROWS_TOGETHER * across
                top, place = lax.div(tile, band) * ROWS_TOGETHER, lax.rem(tile, band)
                height = jnp.minimum(down - top, ROWS_TOGETHER)
                row, column = top + lax.rem(place, height), lax.div(place, height)
                rows = pl.ds((row * pair + lax.axis_index("pair")) * ROWS, ROWS)

                def step(_, x_block, weight_block, both):
                    plgpu.wgmma(both, x_block.at[mine], weight_block)
                    plgpu.wgmma_wait(0)
                    return both

                def around(multiply):
                    def tile(both):
                        multiply(both)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                        for c in range(0, COLUMNS, BLOCK):
                            gate, up = (both[:, pl.ds(2 * c + j, BLOCK)] for j in (0, BLOCK))
                            stage[me, :, pl.ds(c, BLOCK)] = (_activate(activation, gate) * up).astype(x.dtype)
                        plgpu.commit_smem()
                        of_tile = out_ref.at[rows, pl.ds(column * COLUMNS, COLUMNS)]
                        plgpu.copy_smem_to_gmem(stage.at[me], of_tile.at[mine])

                    pl.run_scoped(tile, plgpu.ACC((HALF, 2 * COLUMNS), jnp.float32))

                of_columns = weight_ref.at[:, pl.ds(column * 2 * COLUMNS, 2 * COLUMNS)]
                pipeline(step, around)(x_ref.at[rows, :], of_columns, allocations=ring)

            plgpu.wait_smem_to_gmem(0)

        nothing = lambda *_: None  # noqa: E731
        ring = pipeline(nothing, nothing).get_allocations(x_ref, weight_ref)
        stage = plgpu.SMEM((2, HALF, COLUMNS), x.dtype, transforms=by_block)
        pl.run_scoped(program, ring, stage, collective_axes="warpgroup")

    return pl.kernel(
        kernel,
        jax.ShapeDtypeStruct((capacity, num_columns), x.dtype),
        mesh=plgpu.Mesh(
            grid=(programs,),
            grid_names=("program",),
            cluster=(pair,),
            cluster_names=("pair",),
            num_threads=3,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
        name="gated_product",
    )(x, weight.reshape(width, -1), jnp.array([capacity], jnp.int32) if num_tokens is None else num_tokens)
