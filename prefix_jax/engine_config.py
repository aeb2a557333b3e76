"""How an engine runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from prefix_jax import eviction, policies
from prefix_jax.sampler import LogitsProcessor


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs, apart from what model it runs. None is chosen for the device.

    page_size: positions in a page. num_pages: in the pool; None: what `memory_fraction` of the device leaves free.
    max_model_len: positions of prompt and output together; None: the model's. max_num_seqs: sequences running at once;
    None: 1,024 on a GPU of some 70 GB or more, 256 on another, 32 on a CPU; each takes 4 bytes for each token of the
    vocabulary. max_num_batched_tokens: positions computed in one step; None: 8,192 on a GPU, 512 on a CPU.
    schedule_policy: who waits less, by name (fifo, greedy, lpm, dfs, priority), or a policies.Policy. eviction_policy:
    which unread page goes first (lru, lfu, fifo, cost, belady); None: belady with dfs, else lru. pin_fraction: of the
    pool, for declared prefixes. salt_quota, salt_floor: pages; what a cache_salt has beyond its quota is evicted first,
    what is within its floor last. attention: the implementation, by name. host_memory_gib: of the host's memory, where
    evicted pages go and come back from. kv_dtype: "float8_e4m3fn" halves the bytes of K and V, at a loss. forest: read
    pages that running sequences share once for all of them. bitwise: attention whose bits depend on the sequence alone,
    however it is chunked and whatever it shares; slower. logits_processors: by name, functions of one row's logits
    (sampler.LogitsProcessor) that JAX can trace, for requests that name them. check: recount the cache after every
    step, for debugging.
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    schedule_policy: str | policies.Policy = "fifo"
    eviction_policy: str | None = None
    pin_fraction: float = 0.5
    salt_quota: int | None = None
    salt_floor: int = 0
    attention: str | None = None
    host_memory_gib: float = 0.0
    kv_dtype: str | None = None
    forest: bool | None = None
    bitwise: bool = False
    logits_processors: Mapping[str, LogitsProcessor] = field(default_factory=dict)
    seed: int | None = 0
    check: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is None and name != "page_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("memory_fraction", "pin_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)!r}")
        for name, default in (("salt_quota", None), ("salt_floor", 0)):
            value = getattr(self, name)
            if value != default and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of pages, got {value!r}")
        if self.salt_quota is not None and self.salt_floor > self.salt_quota:
            raise ValueError(f"salt_floor must be at most salt_quota, got {self.salt_floor} and {self.salt_quota}")
        gib = self.host_memory_gib
        if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 <= gib < math.inf:
            raise ValueError(f"host_memory_gib must be a number, 0 or more, got {gib!r}")
        if self.kv_dtype not in (None, "float8_e4m3fn"):
            raise ValueError(f'kv_dtype must be None, for the model\'s own, or "float8_e4m3fn", got {self.kv_dtype!r}')
        if not callable(self.schedule_policy) and self.schedule_policy not in policies.POLICIES:
            names = ", ".join(policies.POLICIES)
            raise ValueError(f"schedule_policy must be one of {names}, or a Policy, got {self.schedule_policy!r}")
        processors = self.logits_processors
        if not isinstance(processors, Mapping) or not all(map(callable, processors.values())) or len(processors) > 30:
            raise ValueError(f"logits_processors must be a dict of name to function, at most 30, got {processors!r}")
        if self.eviction_policy not in (None, *eviction.POLICIES):
            names = ", ".join(eviction.POLICIES)
            raise ValueError(f"eviction_policy must be one of {names}, got {self.eviction_policy!r}")
