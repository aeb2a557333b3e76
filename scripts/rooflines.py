"""The least time that a workload can take on a device, from its token ids and two limits measured in the same run.

    seconds = prefill operations / product rate
            + max(decode steps x bytes of the weights / copy bandwidth, decode operations / product rate)
            + bytes of K and V that decoding reads / copy bandwidth

Prefill operations: 2 for each parameter of the layers and each prompt token that is computed, and 4 L Hq D for each
pair of such a token and one it sees. With a cache a token is computed once for all prompts that begin with it.

Decode steps: as many as it takes with `max_running` sequences always running; the first token of each comes from its
prefill. A step reads the weights (of the embedding no more than a few rows), or multiplies with them (2 operations for
each parameter and sequence) where that takes longer, which is so from some 200 sequences on. And it reads the K and V
of all running sequences; where shared ones are read once, a range counts once a step for all that begin with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workloads import Item, novel_lens, num_distinct

from prefix_jax.models.llama import LlamaConfig


def layer_params(config: LlamaConfig) -> int:
    """Parameters of all layers, the last norm included."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size) + c.hidden_size


def head_params(config: LlamaConfig) -> int:
    return config.vocab_size * config.hidden_size


def weight_bytes(config: LlamaConfig, itemsize: int) -> int:
    """What a step reads of the weights: layers and head."""
    return (layer_params(config) + head_params(config)) * itemsize


def kv_bytes(config: LlamaConfig, itemsize: int) -> int:
    """K and V of one position in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def prefill_operations(config: LlamaConfig, new: int, cached: int = 0) -> float:
    """Of `new` positions behind `cached` ones; without the head, which a prompt needs for one token."""
    pairs = new * cached + new * (new + 1) / 2
    return 2 * layer_params(config) * new + 4 * config.num_layers * config.num_heads * config.head_dim * pairs


def decode_bytes(config: LlamaConfig, itemsize: int, positions: float, kv_itemsize: int | None = None) -> float:
    """Of one step over so many positions of K and V, all sequences together; kv_itemsize None: that of the weights."""
    return weight_bytes(config, itemsize) + positions * kv_bytes(config, kv_itemsize or itemsize)


@dataclass(frozen=True)
class Roofline:
    """What a workload needs: operations of its prefill, steps of decoding, sequences in all of them together, and
    positions of K and V that they read."""

    config: LlamaConfig
    itemsize: int
    prefill: float
    num_steps: int
    num_decoded: int
    positions: int

    def seconds(self, ceilings: Mapping[str, float]) -> float:
        """ceilings: copy_bytes_per_s and product_flop_per_s."""
        copy, product = ceilings["copy_bytes_per_s"], ceilings["product_flop_per_s"]
        reading = self.num_steps * weight_bytes(self.config, self.itemsize) / copy
        multiplying = 2 * (layer_params(self.config) + head_params(self.config)) * self.num_decoded / product
        kv = self.positions * kv_bytes(self.config, self.itemsize) / copy
        return self.prefill / product + max(reading, multiplying) + kv


def roofline(
    items: Sequence[Item], config: LlamaConfig, itemsize: int, max_running: int, *, caches: bool, reads_once: bool
) -> Roofline:
    """caches: what a prompt begins with is computed once for all. reads_once: and read once a step for all."""
    if reads_once:  # whoever shares most runs together
        items = sorted(items, key=lambda item: item.tokens.tobytes())
    lengths = [len(item.tokens) for item in items]
    novel = [max(1, n) for n in novel_lens(item.tokens for item in items)] if caches else lengths
    prefill = sum(prefill_operations(config, n, length - n) for n, length in zip(novel, lengths, strict=True))
    steps = [item.output_len - 1 for item in items]
    num_steps = max(math.ceil(sum(steps) / max_running), max(steps, default=0))
    # A step reads a prompt and what it has yielded before, the token that it computes included.
    positions = sum(n * (n + 1) // 2 for n in steps)
    for start in range(0, len(items), max_running):
        wave = items[start : start + max_running]
        if reads_once:  # a range is read for as long as the longest of those that begin with it runs
            wave = sorted(wave, key=lambda item: -item.output_len)
            shares = novel_lens(item.tokens for item in wave)
        else:
            shares = [len(item.tokens) for item in wave]
        positions += sum(n * (item.output_len - 1) for n, item in zip(shares, wave, strict=True))
    return Roofline(config, itemsize, prefill, num_steps, sum(steps), positions)


def max_running(items: Sequence[Item], rows: int, pool_tokens: int, *, caches: bool) -> int:
    """Sequences that run at once: `rows`, or as many as the pool has room for, each with its part of what is shared."""
    prompts = [item.tokens for item in items]
    held = num_distinct(prompts) if caches else sum(map(len, prompts))
    each = (held + sum(item.output_len for item in items)) / len(items)
    return max(1, min(rows, len(items), int(pool_tokens / each)))
