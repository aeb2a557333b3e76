"""Compiles a step for an H200 on a machine without one; a process of its own, which prints what it found as JSON.

Arguments: the names of buckets. Wants the wheels jax-cuda13-plugin and jax-cuda13-pjrt, and XLA_FLAGS that dump thunks.
"""

import json
import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import tuning
from prefix_jax import LLM
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.runner import Runner

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
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=128,
    max_position=2048,
)  # fmt: skip


def unstarted_runner() -> Runner:
    """Of a tiny model, with nothing compiled."""
    Runner._warm_up = lambda self, use_tqdm: None
    sizes = {"num_pages": 1, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 2048}
    llm = LLM(CONFIG, load_format="dummy", dtype="bfloat16", attention="pallas_hopper", use_tqdm=False, **sizes)
    return llm.engine.runner


def main() -> None:
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=H200)
    mesh = Mesh(np.array(topology.devices), ("x",))
    tuning.device_kind = lambda: "NVIDIA H200"
    runner = unstarted_runner()
    found = {}
    with jax.set_mesh(mesh):
        for bucket in runner.batcher.buckets:
            if bucket.name in sys.argv[1:]:
                sharding = NamedSharding(mesh, PartitionSpec())
                lowered = [runner.lower(bucket, pages, sharding=sharding) for pages in (500, 5000)]
                compiled = [x.compile(compiler_options=runner.compiler_options(bucket)) for x in lowered]
                memory = [c.memory_analysis().temp_size_in_bytes for c in compiled]
                found[bucket.name] = {"temporary": memory}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
