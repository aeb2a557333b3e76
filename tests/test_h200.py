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
    paths = [str(HERE.parent), str(HERE), str(WHEELS)]
    command = [sys.executable, str(HERE / script), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["decode_1", "decode_64", "shared_64", "mixed_512"])
def test_a_step_compiled_for_an_h200(bucket, tmp_path):
    """No K or V is copied, the step is one CUDA graph, in which wide tiles beside narrow ones begin first and end
    whenever they do, and no register is spilled, but for a few of tiles of 128 rows, around their loop."""
    if not (WHEELS / "jax_plugins").is_dir() and importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip(f"the wheels jax-cuda13-plugin and jax-cuda13-pjrt are not at hand: no folder {WHEELS}")
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*step.*"
    done = run_apart("h200.py", bucket, XLA_FLAGS=flags, TF_CPP_MIN_LOG_LEVEL="0")
    small, large = json.loads(done.stdout.splitlines()[-1])[bucket]["temporary"]
    assert small == large, "temporary memory does not grow with the number of pages"
    spilled = dict(re.findall(r"in function '(\w+)', (\d+) bytes spill stores", done.stderr))
    allowed = {"tile_attention_32": 44, "hopper_attention_32_mosaic_gpu_kernel": 108, "new_body_mosaic_gpu_kernel": 108}
    assert all(int(size) <= allowed.get(name, 0) for name, size in spilled.items()), spilled
    sequences = list(tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"))
    assert sequences, "XLA says how it launches"
    for path in sequences:
        text = path.read_text()
        if ONE_GRAPH or bucket == "decode_1":
            top = [line for line in text.splitlines() if not line.startswith(" ")]
            assert len(top) == 1 and "kCommandBuffer" in top[0]
        if bucket == "shared_64":
            named = "tile_attention_1 |tile_attention_32 |kCustomCall\n|merge "
            kernels = re.findall(rf"(\d+): .*prev=(\d+) .*({named})", text)
            names = ["narrow" if name == "tile_attention_1 " else name.strip() for *_, name in kernels]
            wide = names[0]
            assert names == [wide, "narrow", "merge"] * 2 and wide != "narrow"
            (begun, _, _), (_, waits_for, _) = kernels[-3:-1]
            assert int(waits_for) < int(begun), "the narrow tiles wait for the wide ones"


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
