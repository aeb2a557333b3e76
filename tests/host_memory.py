"""Loads a model in a process of its own, which prints the most memory that it needed meanwhile beside the model."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from prefix_jax.models.split import AXIS
from prefix_jax.weights import load_model, read_config

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name + ":"))

def load(folder):
    return load_model(folder, read_config(folder), dtype=jnp.bfloat16, mesh=mesh)

warm, folder, num_devices = sys.argv[1:]
devices = np.array(jax.devices()[: int(num_devices)])
mesh = jax.sharding.Mesh(devices, (AXIS,)) if len(devices) > 1 else None
load(warm)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew: a process begins with its parent's
before = memory("VmRSS")
model = load(folder)
held = sum(shard.data.nbytes for leaf in jax.tree.leaves(nnx.state(model)) for shard in leaf.addressable_shards)
print(memory("VmHWM") - before - held)
"""


def peak_of_loading(warm: Path, folder: Path, num_devices: int = 1) -> int:
    """Bytes, in bfloat16 on so many devices of the host; `warm` is loaded before, so that nothing is new. Skips the
    test where Linux does not say it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs here")
    command = [sys.executable, "-c", SCRIPT, str(warm), str(folder), str(num_devices)]
    root = Path(__file__).parents[1]
    return int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()[-1])
