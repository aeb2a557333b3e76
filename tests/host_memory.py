"""Loads a model in a process of its own, which prints the most memory that it needed meanwhile beside the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, sys
import jax, jax.numpy as jnp, numpy as np
from prefix_jax import weights
from prefix_jax.models.split import AXIS

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name + ":"))

def load(folder):
    return weights.load_model(folder, weights.read_config(folder), dtype=jnp.bfloat16, mesh=mesh)

def begin_anew():  # a process begins with its parent's peak
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

class Peak:
    def __init__(self):
        self.held = self.most = 0

    def update(self, size):  # behind each parameter, of so many bytes
        self.held += size
        self.most = max(self.most, memory("VmHWM") - before - self.held)
        begin_anew()

warm, folder, num_devices = sys.argv[1:]
devices = np.array(jax.devices()[: int(num_devices)])
mesh = jax.sharding.Mesh(devices, (AXIS,)) if len(devices) > 1 else None
load(warm)
begin_anew()
before, peak = memory("VmRSS"), Peak()
weights.tqdm = lambda **_: contextlib.nullcontext(peak)
model = load(folder)
print(peak.most)
"""
# Memory that is free goes back at once: else glibc keeps up to 64 MiB, as much as these tests are about.
ENV = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_of_loading(warm: Path, folder: Path, num_devices: int = 1) -> int:
    """Bytes beside the parameters that are there by then, which on a CPU are host memory themselves, in bfloat16 on so
    many devices of the host; `warm` is loaded before, so that nothing is new. Skips the test where Linux does not say
    it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs here")
    command = [sys.executable, "-c", SCRIPT, str(warm), str(folder), str(num_devices)]
    run = {"cwd": Path(__file__).parents[1], "env": os.environ | ENV, "capture_output": True, "text": True}
    return int(subprocess.run(command, check=True, **run).stdout.split()[-1])
