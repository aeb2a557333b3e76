"""What cannot run here still lowers: the kernels for CUDA, the XLA implementation for every platform."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import merge, paged_attention
from pallas_kernels.cases import CASES, build


@contextlib.contextmanager
def an_h200():
    """JAX from 0.11 on wants to know the card it lowers a kernel for."""
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def traced(case, dtype, implementation):
    a = build(case, dtype)
    q, *arguments = a.arguments
    leaves, tree = jax.tree.flatten(arguments)  # `lower` puts into pytrees what the run-time type checks refuse

    def attend(q, leaves):
        return paged_attention(
            q, *tree.unflatten(leaves), page_size=case.page_size, implementation=implementation, **a.options
        )

    return jax.jit(attend, donate_argnums=0).trace(q, leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_lowers_for_cuda_in_place(case, dtype):
    with an_h200():
        text = traced(case, jnp.dtype(dtype), "pallas").lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "triton_kernel_call" in line or "__gpu$xla.gpu.triton" in line]
    in_place = ["output_operand_alias" in call for call in calls]
    assert len(calls) >= 1
    others = 2 * case.beside  # a list of cut tokens alone, and what those beside it wait for
    assert in_place.count(False) == others, "every launch writes in place but these"


def test_a_merge_of_more_tokens_than_programs_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr(merge, "MAX_PROGRAMS", 2)
    case = next(case for case in CASES if case.name == "decode_cut_far")
    with an_h200():
        text = traced(case, jnp.bfloat16, "pallas").lower(lowering_platforms=("cuda",)).as_text()
    assert "merge" in text


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
def test_the_xla_implementation_lowers_everywhere(platform):
    case = next(case for case in CASES if case.name == "mixed_cut")
    for dtype in (jnp.float32, jnp.bfloat16):
        assert traced(case, dtype, "xla").lower(lowering_platforms=(platform,)).as_text()
