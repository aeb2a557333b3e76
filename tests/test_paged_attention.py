"""Every implementation of paged attention gives the reference's values, on every named case."""

import dataclasses
import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Merge, paged_attention
from pallas_kernels import merge as merge_module
from pallas_kernels.cases import CASES, build
from pallas_kernels.merge import merge_pallas, merge_xla
from pallas_kernels.reference import reference
from pallas_kernels.tiles import Partials
from pallas_kernels.tuning import wide_rows

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
CHECKED = [(case, "float32") for case in CASES] + [(case, "bfloat16") for case in CASES[::8]]
BY_NAME = {case.name: case for case in CASES}


# Compiling is most of the time of these tests; the code it makes runs for milliseconds.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


@functools.cache
def arrays_of(case, dtype):
    a = build(case, jnp.dtype(dtype))
    meaning = jit(functools.partial(reference, page_size=case.page_size, **a.options))
    return a, np.asarray(meaning(a.q, a.k_slots, a.v_slots, a.positions, a.row, a.page_table))


def compiled(case, implementation):
    options = arrays_of(case, "float32")[0].options
    return jit(functools.partial(paged_attention, page_size=case.page_size, implementation=implementation, **options))


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize(("case", "dtype"), CHECKED, ids=str)
def test_equals_the_reference_and_itself(case, dtype, implementation, nobodys_memory_is_nan):
    """Rows past a tile's end are loaded unmasked, and values vary with the length or the run: jax#23819 (C38)."""
    a, want = arrays_of(case, dtype)
    attend = compiled(case, implementation)
    out = np.asarray(attend(*a.arguments))
    assert out.dtype == a.q.dtype
    tolerance = TOLERANCE[dtype]
    # As float32, which loses nothing: NaN equals itself there.
    out, again, q = (np.asarray(x, np.float32) for x in (out, attend(*a.arguments), a.q))
    np.testing.assert_allclose(out[~a.idle], want[~a.idle], rtol=tolerance, atol=tolerance)
    idle = np.full_like(q, np.nan) if case.beside else q
    np.testing.assert_array_equal(out[a.idle], idle[a.idle], "tokens in no tile keep their q, or what was there")
    np.testing.assert_array_equal(out, again, "a second run gives the same bits")


def test_the_cases_poison_what_nobody_owns():
    for case in CASES:
        a, _ = arrays_of(case, "float32")
        slots = np.isnan(np.asarray(a.k_slots)).any(axis=(1, 2))
        assert slots[: case.page_size].all(), "page 0 is scratch"
        assert 0 < slots.sum() < len(slots)
        assert all((tiles.end[-2:] == 0).all() for tiles in a.tile_lists)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_rows_of_a_batch_do_not_depend_on_their_neighbours(implementation):
    """C35: every row of the page table is read with its own pages only, wherever it stands."""
    case = BY_NAME["decode"]
    a, _ = arrays_of(case, "float32")
    (tiles,) = a.tile_lists
    attend = compiled(case, implementation)
    out = np.asarray(attend(*a.arguments))
    for i in (0, 3, 7):
        alone = jnp.where(jnp.arange(tiles.row.size) == i, tiles.end, 0)
        solo = attend(*dataclasses.replace(a, tile_lists=(dataclasses.replace(tiles, end=alone),)).arguments)
        np.testing.assert_array_equal(solo[i], out[i])
        np.testing.assert_array_equal(np.delete(solo, i, 0), np.delete(a.q, i, 0), "empty tiles write nothing")


def test_stacked_indices_of_any_padding_run_the_same_executable():
    case = BY_NAME["mixed_cut"]
    a, want = arrays_of(case, "float32")
    attend = compiled(case, "xla")
    attend(*a.arguments)
    shuffled = tuple(jax.tree.map(lambda field: field[::-1], tiles) for tiles in a.tile_lists)  # padding first
    out = attend(*dataclasses.replace(a, tile_lists=shuffled).arguments)
    np.testing.assert_allclose(out[~a.idle], want[~a.idle], rtol=1e-5, atol=1e-5)
    assert attend._cache_size() == 1


@pytest.mark.parametrize("programs", [2048, 3])
def test_merge_takes_partials_in_order_and_leaves_the_rest_alone(programs, monkeypatch):
    """Log-sum-exp of up to 9 partials against numpy; partials of nobody hold NaN, some of a token's are empty. Of three
    programs the first has three tokens, the last of them padding, the others two."""
    monkeypatch.setattr(merge_module, "MAX_PROGRAMS", programs)
    rng = np.random.default_rng(0)
    counts = np.array([1, 2, 4, 5, 9, 3, 0])
    firsts = np.cumsum(counts) - counts
    token = np.array([6, 0, 2, 5, 1, 3, 7])
    x = rng.standard_normal((7, 9, 24)).astype(np.float32)
    value = rng.standard_normal((counts.sum() + 2, 9, 24)).astype(np.float32)
    lse = 30 * rng.standard_normal(value.shape[:2]).astype(np.float32)
    value[-2:], lse[-2:] = np.nan, np.nan
    lse[[1, 4]], value[[1, 4]] = -np.inf, 0
    want = x.copy()
    for t, first, count in zip(token[:-1], firsts, counts, strict=False):
        weight = np.exp2(lse[first : first + count] - lse[first : first + count].max(axis=0)).astype(np.float64)
        want[t] = np.einsum("ch,chd->hd", weight / weight.sum(axis=0), value[first : first + count])
    # The second list has the last partials of the tokens that have more than two; the third cuts none.
    second = np.maximum(counts - 2, 0)
    first = np.stack([firsts, firsts + counts - second, firsts])
    merge = Merge(*(jnp.asarray(i, jnp.int32) for i in (token, first, np.stack([counts - second, second, 0 * counts]))))
    part = Partials(jnp.asarray(value), jnp.asarray(lse))
    partials = [part, part, None]
    for merged in (
        merge_xla(jnp.asarray(x), partials, merge),
        merge_pallas(jnp.asarray(x), partials, merge, interpret=True),
    ):
        np.testing.assert_allclose(merged, want, rtol=1e-5, atol=1e-5)


def test_tokens_that_see_nothing_give_zeros_not_nan():
    case = BY_NAME["decode"]
    a, _ = arrays_of(case, "float32")
    for implementation in ("xla", "pallas_interpret"):
        out = compiled(case, implementation)(*dataclasses.replace(a, positions=a.positions * 0 - 1).arguments)
        np.testing.assert_array_equal(out[~a.idle], 0)


def test_wide_rows_fill_the_matrix_units():
    assert [wide_rows("pallas", group, jnp.bfloat16) for group in (1, 3, 4, 8, 100, 200)] == [128, 32, 32, 16, 1, 1]
    assert wide_rows("xla", 3, jnp.float32) == 64


def with_tiles(a, **fields):
    """Tiles that the run-time type checks of the tests would not let pass."""
    return {"tile_lists": [types.SimpleNamespace(**vars(a.tile_lists[0]) | fields)]}


REFUSED = {
    "must have one head size, got 64 and 32": lambda a: {
        "k_slots": a.k_slots[..., :32],
        "v_slots": a.v_slots[..., :32],
    },
    r"k_slots and v_slots must have one shape": lambda a: {"v_slots": a.v_slots[:-16]},
    r"query heads must be a multiple of KV heads, got 7 and 2": lambda a: {"q": a.q[:, :7]},
    r"one float dtype, .*, got bfloat16, float32": lambda a: {"q": a.q.astype(jnp.bfloat16)},
    r"q must be \[T, Hq, D\]": lambda a: {"q": a.q[0]},
    r"positions must be \[T\] = \[10\], got \(9,\)": lambda a: {"positions": a.positions[1:]},
    r"positions must be int32, got float32": lambda a: {"positions": a.positions.astype(jnp.float32)},
    r"page_table must be \[B, P\]": lambda a: {"page_table": a.page_table[0]},
    r"num_slots must be a multiple of page_size, got \d+ and 7": lambda a: {"page_size": 7},
    r"lists\[0\].end must be int32 \(10,\), got int32 \(9,\)": lambda a: with_tiles(a, end=a.tile_lists[0].end[1:]),
    r"lists\[0\].token must be \[N, R\]": lambda a: with_tiles(a, token=a.tile_lists[0].row),
    r"lists \[0\] have cut tokens": lambda a: with_tiles(a, partial=a.tile_lists[0].token),
    r"one of .*'xla'.*, got 'triton'": lambda a: {"implementation": "triton"},
    r"merge was given, but no tile list has cut": lambda a: {
        "merge": Merge(a.positions[:1], *[a.positions[None, :1]] * 2)
    },
    r"window must be a positive number, got 0": lambda a: {"window": 0},
    r"softcap must be a positive number, got inf": lambda a: {"softcap": float("inf")},
    r"scale must be a positive number, got -1": lambda a: {"scale": -1.0},
    r"alibi_slopes must be float32 \[Hq\] = \[8\], got float32 \(3,\)": lambda a: {"alibi_slopes": jnp.zeros(3)},
    r"configs must have one entry for each of 1 tile lists, got 2": lambda a: {"configs": [None, None]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_what_does_not_fit_and_shows_it(message):
    case = BY_NAME["decode"]
    a, _ = arrays_of(case, "float32")
    names = ("q", "k_slots", "v_slots", "positions", "page_table", "tile_lists", "merge")
    wrong = dict(zip(names, a.arguments, strict=True), page_size=16) | REFUSED[message](a)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(paged_attention)(**wrong)  # without the run-time type checks, as users have it


@pytest.mark.parametrize(
    ("head_dim", "num_slots", "dtype", "message"),
    [
        (64, 2**23 + 16, jnp.float32, r"up to 4 GiB each \(32-bit offsets\), got 4.00 GiB"),
        (512, 16, jnp.float32, "head sizes up to 256, got 512"),
        (64, 16, jnp.float8_e4m3fn, "got float8_e4m3fn"),
    ],
)
def test_the_kernel_refuses_what_only_xla_can(head_dim, num_slots, dtype, message):
    a, _ = arrays_of(BY_NAME["decode"], "float32")
    store = jax.ShapeDtypeStruct((num_slots, 2, head_dim), dtype)
    q = jax.ShapeDtypeStruct((10, 8, head_dim), dtype)

    def attend(q, k, v, implementation):
        return paged_attention(
            q, k, v, a.positions, a.page_table, a.tile_lists, page_size=16, implementation=implementation
        )

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(attend, implementation="pallas"), q, store, store)
    assert jax.eval_shape(functools.partial(attend, implementation=None), q, store, store).shape == q.shape
