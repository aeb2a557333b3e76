"""The kernels around attention against numpy, in plain XLA and as Pallas runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernel_lowering import an_h200

from pallas_kernels import gated_product as gated
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.qkv import rotate_and_write
from pallas_kernels.scoring import alibi_slopes
from pallas_kernels.tiles import Scales

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}
IMPLEMENTATIONS = ["xla", "pallas_interpret"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "offset"), [(64, 0.0), (576, 0.0), (96, 1.0)])
def test_add_rms_norm(width, offset, dtype, implementation):
    rng = np.random.default_rng(0)
    x, delta = jnp.asarray(rng.normal(0, 3, (2, 5, width)), dtype)
    weight = jnp.asarray(rng.normal(1, 1, width), dtype)
    norm = functools.partial(add_rms_norm, eps=0.1, offset=offset, implementation=implementation)
    total, normed = jax.jit(norm)(x, delta, weight)
    assert total.dtype == normed.dtype == x.dtype
    np.testing.assert_array_equal(total, x + delta)
    want = np.asarray(total, np.float64)
    want = normed64(want, np.asarray(weight, np.float64) + offset)
    np.testing.assert_allclose(np.asarray(normed, np.float64), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def normed64(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1) * weight


def gated_arrays(num_tokens, width, columns, dtype, block=gated.BLOCK):
    """x, and gate and up as [width, columns] each and in blocks."""
    rng = np.random.default_rng(3)
    x, gate, up = (rng.standard_normal(s) / 8 for s in ((num_tokens, width), (width, columns), (width, columns)))
    blocks = np.stack([gate, up], axis=1).reshape(width, 2, columns // block, block).swapaxes(1, 2)
    return jnp.asarray(x, dtype), gate, up, jnp.asarray(blocks, dtype)


@pytest.mark.parametrize(("columns", "block"), [(96, 16), (36, 4), (7, 1)])
def test_gate_and_up_lie_in_turns(columns, block):
    """SiLU and the tanh form of GELU (Hendrycks and Gimpel, 2016) by their definitions."""
    x, gate, up, blocks = gated_arrays(5, 24, columns, "float32", block)
    gate, up = np.asarray(x, np.float64) @ gate, np.asarray(x, np.float64) @ up
    silu = gate / (1 + np.exp(-gate))
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    for activation, activated in (("silu", silu), ("gelu_tanh", gelu)):
        out = gated.gated_product(x, blocks, activation, jnp.array([3]))
        assert out.shape == (5, columns) and out.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(out)[:3], (activated * up)[:3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "dtype", "said"),
    [
        ((128, 64, 128), "float32", "bfloat16 or float16, got float32"),
        ((100, 64, 128), "bfloat16", r"multiples of 128 tokens .* got \(100, 64\)"),
        ((128, 96, 128), "bfloat16", r"a width of 64, got \(128, 96\)"),
        ((128, 64, 96), "bfloat16", r"a multiple of 8 of them, got \(64, 6, 2, 16\)"),
    ],
)
def test_the_gated_kernel_says_what_it_cannot_take(sizes, dtype, said):
    x, _, _, blocks = gated_arrays(*sizes, dtype)
    with pytest.raises(NotImplementedError, match=said):
        gated.product_on_hopper(x, blocks)
    whole = gated.gated_product(x, blocks, implementation="pallas_hopper")  # takes XLA
    np.testing.assert_array_equal(whole, gated.gated_product(x, blocks))


@pytest.mark.parametrize(
    ("columns", "fills"),
    [
        (14336, {128: True, 256: True, 384: True, 512: False, 768: False, 1024: True, 1536: True, 8192: True}),
        (11008, {256: False, 512: True, 8192: True}),
    ],
)
def test_the_gated_kernel_is_taken_where_it_was_measured_to_be_faster(columns, fills):
    """MLPs of Llama-3-8B and of Llama-2-7B on 132 multiprocessors."""
    assert {num_tokens: gated.fills_device(num_tokens, columns) for num_tokens in fills} == fills


def qkv_arrays(num_kv_heads, group, head_dim, dtype):
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    angle = rng.uniform(-np.pi, np.pi, (5, head_dim // 2))
    slots = np.array([3, 40, 0, 7, 21])  # 40 is past the end
    return (
        normal(5, num_kv_heads, group + 2, head_dim),
        *(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin)),
        jnp.asarray(slots, jnp.int32),
        normal(40, num_kv_heads, head_dim),
        normal(40, num_kv_heads, head_dim),
    )


SHAPES = [(2, 4, 64), (1, 1, 16), (3, 3, 80), (2, 7, 32)]


def before_rotation(kind, num_kv_heads, group, head_dim, dtype):
    """The options of rotate_and_write that one family or another asks for."""
    rng = np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    bias = {"bias": normal(num_kv_heads, group + 2, head_dim)}
    norms = {"q_norm": normal(head_dim), "k_norm": normal(head_dim), "eps": 0.1}
    return {"plain": {}, "bias": bias, "norms": norms, "all": bias | norms | {"offset": 1.0}}[kind]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "kind", "turns"),
    [(shape, "plain", True) for shape in SHAPES]
    + [(shape, kind, True) for shape in SHAPES[::2] for kind in ("bias", "norms", "all")]
    + [(SHAPES[0], "plain", False), (SHAPES[2], "all", False)],
    ids=str,
)
def test_rotate_and_write(shape, kind, turns, dtype, implementation):
    """Bias and norms come before the rotation, which models with ALiBi lack: sglang#16868 (C74)."""
    qkv, cos, sin, *rest = arrays = qkv_arrays(*shape, dtype)
    options = before_rotation(kind, *shape, dtype)
    run = jax.jit(lambda *arrays: rotate_and_write(*arrays, **options, implementation=implementation))
    q, k, v = run(qkv, *((cos, sin) if turns else (None, None)), *rest)
    qkv, cos, sin, slots, k_before, v_before = (np.asarray(a, np.float64) for a in arrays)
    wide = {name: np.asarray(value, np.float64) for name, value in options.items()}
    if "bias" in wide:
        qkv = np.asarray((arrays[0] + options["bias"]).astype(dtype), np.float64)
    value = qkv[:, :, -1]
    if "q_norm" in wide:
        weights = [wide[name] + wide.get("offset", 0) for name in ("q_norm", "k_norm")]
        qkv = np.concatenate([normed64(qkv[:, :, :-2], weights[0]), normed64(qkv[:, :, -2:], weights[1])], axis=2)
    if not turns:
        cos, sin = np.ones_like(cos), np.zeros_like(sin)
    turn = qkv[..., : shape[2] // 2] + 1j * qkv[..., shape[2] // 2 :]  # pairs as complex numbers
    turn = turn * (cos + 1j * sin)[:, None, None]
    turned = np.concatenate([turn.real, turn.imag], axis=-1)
    close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    close(np.asarray(q, np.float64), turned[:, :, :-2].reshape(5, -1, shape[2]))
    written = slots < 40
    want_k, want_v = k_before.copy(), v_before.copy()
    want_k[slots[written].astype(int)] = turned[written][:, :, -2]
    want_v[slots[written].astype(int)] = value[written]
    close(np.asarray(k, np.float64), want_k)
    np.testing.assert_array_equal(np.asarray(v, np.float64), want_v)
    assert q.dtype == k.dtype == v.dtype == arrays[0].dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_lower_for_cuda_in_place(shape, dtype):
    qkv, *rest, k_slots, v_slots = qkv_arrays(*shape, dtype)
    x = jnp.zeros((5, 576), dtype)
    with an_h200():
        norm = jax.jit(functools.partial(add_rms_norm, eps=1e-5, implementation="pallas"), donate_argnums=0)
        rotate = jax.jit(functools.partial(rotate_and_write, implementation="pallas"), donate_argnums=(4, 5))
        full = before_rotation("all", *shape, dtype)
        with_all = jax.jit(lambda *a: rotate_and_write(*a, **full, implementation="pallas"), donate_argnums=(4, 5))
        unturned = (qkv, None, None, *rest[2:], k_slots, v_slots)
        for traced, aliased in (
            (norm.trace(x, x, x[0]), 1),
            (rotate.trace(qkv, *rest, k_slots, v_slots), 2),
            (with_all.trace(qkv, *rest, k_slots, v_slots), 2),
            (with_all.trace(*unturned), 2),
        ):
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            (call,) = (s for s in text.splitlines() if "triton_kernel_call" in s or "__gpu$xla.gpu.triton" in s)
            assert call.count("output_operand_alias<") == aliased or call.count("operand_index") == aliased


def test_alibi_slopes_are_those_of_its_paper():
    """Heads that are no power of two take every other slope of the next one: sglang#16868, vllm#1009 (C74)."""
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    below, above = alibi_slopes(32), alibi_slopes(64)
    np.testing.assert_array_equal(alibi_slopes(40), [*below, *above[0:16:2]])
    np.testing.assert_array_equal(alibi_slopes(1), np.float32([2.0**-8]))
    assert alibi_slopes(40).dtype == np.float32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_and_values_in_one_byte_are_clipped_and_not_nan(implementation):
    qkv, *rest, k_slots, v_slots = qkv_arrays(2, 4, 64, "float32")
    k_slots, v_slots = k_slots.astype(jnp.float8_e4m3fn), v_slots.astype(jnp.float8_e4m3fn)
    scales = Scales(jnp.array([0.01, 1e-4]), jnp.array([1e-4, 0.02]))  # the small ones are too small
    q, k, v = rotate_and_write(qkv, *rest, k_slots, v_slots, scales, implementation=implementation)
    plain_q, plain_k, plain_v = rotate_and_write(qkv, *rest, jnp.zeros(k.shape), jnp.zeros(v.shape))
    np.testing.assert_allclose(q, plain_q, atol=1e-6)
    written = np.array([3, 0, 7, 21])
    for got, want, scale, fits in ((k, plain_k, scales.k, 0), (v, plain_v, scales.v, 1)):
        got = np.asarray(got, np.float32)[written]
        want = np.asarray(want)[written] / np.asarray(scale)[:, None]
        assert np.abs(got).max() == 448
        np.testing.assert_allclose(got, np.clip(want, -448, 448), rtol=2**-4, atol=2**-9)
        assert np.abs(got[:, fits]).max() < 448
