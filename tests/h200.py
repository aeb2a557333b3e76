"""Compiles a step for H200s on a machine without one; a process of its own, which prints what it found as JSON.

Arguments: the number of devices, the model and the names of buckets. Wants the wheels jax-cuda13-plugin and
jax-cuda13-pjrt, and XLA_FLAGS that dump thunks.
"""

import json
import math
import os
import sys
from dataclasses import replace

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_step import MODELS
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels import tuning
from prefix_jax.models.llama import Llama, LlamaConfig
from prefix_jax.models.split import AXIS
from prefix_jax.runner import Runner
from prefix_jax.tiling import make_batcher

H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" runtime_version { major: 13 minor: 0 } dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
TINY = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8, head_dim=128,
    max_position=2048,
)  # fmt: skip


def config_of(name: str) -> LlamaConfig:
    """ "tiny", or so many layers of Llama 2 70B."""
    return TINY if name == "tiny" else replace(MODELS["llama-2-70b"], num_layers=int(name))


def unstarted_runner(config: LlamaConfig, mesh: Mesh) -> Runner:
    """Of a model that is nowhere, with nothing compiled."""
    Runner.reset = Runner._warm_up = lambda *_: None
    model, attention = Llama(config, dtype=jnp.bfloat16, mesh=mesh), "pallas_hopper"
    sizes = {"page_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 2048}
    batcher = make_batcher(model.split.local, model.dtype, attention, **sizes)
    return Runner(model, batcher, page_size=16, num_pages=1, memory_fraction=0.9, attention=attention)


def main(num_devices: str, model: str, *buckets: str) -> None:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=H200
    )
    tuning.device_kind = lambda: "NVIDIA H200"
    mesh = Mesh(np.array(topology.devices), (AXIS,))
    runner = unstarted_runner(config_of(model), mesh)
    found = {}
    with jax.set_mesh(mesh):
        for bucket in runner.batcher.buckets:
            if bucket.name in buckets:
                lowered = [runner.lower(bucket, pages) for pages in (500, 5000)]
                compiled = [x.compile(compiler_options=runner.compiler_options(bucket)) for x in lowered]
                memory = [c.memory_analysis() for c in compiled]
                parts = [a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in runner.params]
                found[bucket.name] = {
                    "weights": sum(parts),
                    "arguments": [m.argument_size_in_bytes for m in memory],
                    "temporary": [m.temp_size_in_bytes for m in memory],
                    "in_place": [m.alias_size_in_bytes for m in memory],
                }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
