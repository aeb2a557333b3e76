"""What a step becomes on an H200, compiled without one; and the kernel for Hopper in its interpreter."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent
ONE_GRAPH = jax.__version_info__ >= (0, 12)  # before, XLA leaves the library's products and Mosaic's kernels out
WHEELS = Path(sys.prefix) / "h200"  # jax-cuda13-plugin and jax-cuda13-pjrt, where `make test` puts them


def run_apart(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    paths = [str(HERE.parent), str(HERE), str(HERE.parent / "scripts"), str(WHEELS)]
    command = [sys.executable, str(HERE / script), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def compiled_apart(folder: Path, num_devices: int, model: str, bucket: str, more: str = "") -> tuple[dict, str]:
    """What h200.py found, and what XLA said; its dumps are in the folder."""
    if not (WHEELS / "jax_plugins").is_dir() and importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip(f"the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not at hand: no folder {WHEELS}")
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*step.* {more}"
    done = run_apart("h200.py", str(num_devices), model, bucket, XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="0")
    return json.loads(done.stdout.splitlines()[-1])[bucket], done.stderr


def top_of(sequence: str) -> list[str]:
    """What is launched from the host, graphs as one."""
    return [line for line in sequence.splitlines() if not line.startswith(" ")]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["decode_1", "decode_64", "shared_64", "mixed_256", "mixed_512"])
def test_a_step_compiled_for_an_h200(bucket, tmp_path):
    """No K or V is copied, and little else, however many layers; the step is one CUDA graph, in which wide tiles beside
    narrow ones begin first and end whenever they do, and no register is spilled, but for a few of tiles of 128 rows,
    around their loop."""
    found, said = compiled_apart(tmp_path, 1, "tiny", bucket)
    small, large = found["temporary"]
    assert small == large, "temporary memory does not grow with the number of pages"
    spilled = dict(re.findall(r"in function '(\w+)', (\d+) bytes spill stores", said))
    allowed = {"tile_attention_32": 44, "hopper_attention_32_mosaic_gpu_kernel": 16, "new_body_mosaic_gpu_kernel": 16}
    assert all(int(size) <= allowed.get(name, 0) for name, size in spilled.items()), spilled
    programs = list(tmp_path.glob("*gpu_after_optimizations.txt"))
    sequences = list(tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"))
    assert programs and sequences, "XLA says what it launches, and how"
    for (
        path
    ) in programs:  # with 256 tokens the library's products leave much of the device unused, with 512 they do not
        products = re.findall(r'custom_call_target="mosaic_gpu.*/gated_product/', path.read_text())
        assert len(products) == (2 if ONE_GRAPH and bucket == "mixed_256" else 0)
    for path in sequences:
        text = path.read_text()
        if ONE_GRAPH or bucket == "decode_1":
            top = top_of(text)
            assert len(top) == 1 and "kCommandBuffer" in top[0]
        if ONE_GRAPH:  # the last tokens, the arrays of each tile list and of the merge, and two of sampling
            assert text.count(" kCopy ") <= 6
        if bucket == "shared_64":
            named = "later |tile_attention_1 |tile_attention_32 |kCustomCall\n|merge "
            kernels = re.findall(rf"(\d+): .*prev=(\d+) .*({named})", text)
            names = ["narrow" if name == "tile_attention_1 " else name.strip() for *_, name in kernels]
            wide = names[0]
            assert names == [wide, "later", "narrow", "merge"] * 2 and wide not in names[1:4]
            (begun, _, _), (later, waits_for, _), (_, narrow_waits_for, _) = kernels[-4:-1]
            assert int(waits_for) < int(begun), "the narrow tiles wait for the wide ones"
            assert narrow_waits_for == later, "the narrow tiles may begin first"


LAYERS = 80  # all of Llama 2 70B


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize(
    ("bucket", "flags", "num_graphs"),
    [
        ("decode_64", "", LAYERS + 1),
        ("mixed_512", "", LAYERS + 2),
        ("decode_64", "--xla_gpu_enable_command_buffer=+COLLECTIVES", 1),
    ],
)
def test_a_step_of_several_h200s(num_devices, bucket, flags, num_graphs, tmp_path):
    """Llama 2 70B: each device has its part of everything that is split, no K or V is copied, and the devices exchange
    one sum for the embedding, two a layer, and logits. There graphs end, unless XLA is told otherwise."""
    found, _ = compiled_apart(tmp_path, num_devices, str(LAYERS), bucket, flags)
    layer = 8192 * (80 * 128 + 64 * 128 + 3 * 28672)  # heads and their keys and values, output, MLP
    everywhere = 8192 * (2 * LAYERS + 1)  # norms
    assert found["weights"] == 2 * (LAYERS * layer + 2 * 32000 * 8192) // num_devices + 2 * everywhere
    small, large = found["temporary"]
    assert large <= small < 2**26, "temporary memory does not grow with the number of pages"
    pages = 4500 * LAYERS * 2 * 16 * 8 // num_devices * 128 * 2  # K and V of each device's share of the 8 heads
    for sizes in (found["arguments"], found["in_place"]):
        assert sizes[1] - sizes[0] == pages, "a part of each page on each device, written in place"
    configs = list(tmp_path.glob("*.config.pbtxt"))
    assert configs
    if ONE_GRAPH:  # else the sums are XLA's own
        assert not any("COLLECTIVE_KERNEL_ALL_REDUCE" in path.read_text() for path in configs)
    programs, sums = list(tmp_path.glob("*gpu_after_optimizations.txt")), 2 * LAYERS + 1
    assert programs
    for path in programs:
        kinds = re.findall(
            r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(", path.read_text()
        )
        assert (kinds.count("all-reduce"), kinds.count("all-gather"), len(kinds)) == (sums, 1, sums + 1)
    if ONE_GRAPH:
        (top, *_) = (top_of(path.read_text()) for path in tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"))
        assert sum("kCommandBuffer" in line for line in top) == num_graphs


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Mosaic's interpreter for GPU kernels came with JAX 0.11.2"
)
def test_the_kernel_for_hopper_equals_the_reference():
    """Partly filled tiles, ranges that start anywhere and end inside pages, cut and whole tokens, slots of NaN."""
    names = ["hopper_chunk", "hopper_cut", "hopper_shared", "hopper_beside", "hopper_scatter", "hopper_page_24"]
    lines = run_apart("interpret_hopper.py", *names, NPROC="16").stdout.splitlines()
    errors = {name: float(error) for name, error in map(str.split, lines)}
    assert sorted(errors) == sorted(names)
    assert max(errors.values()) < 1e-2


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Mosaic's interpreter for GPU kernels came with JAX 0.11.2"
)
@pytest.mark.parametrize("sizes", [(128, 128), (256, 129), (384, 384), (512, 200), (2560, 2300)])
def test_the_gated_product_for_hopper_equals_the_reference(sizes):
    """Capacity and tokens: one row of tiles, two that run beside each other, three, some that have no token and are
    left out, more than stay together; fewer tiles than programs, and more."""
    lines = run_apart("interpret_hopper.py", "gated_product", *map(str, sizes), NPROC="16").stdout.splitlines()
    errors = {name: float(error) for name, error in map(str.split, lines)}
    assert sorted(errors) == ["gelu_tanh", "silu"]
    assert max(errors.values()) < 5e-3, "what rounding to bfloat16 costs"
