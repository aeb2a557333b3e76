"""How a model lies on the devices of a mesh: KV heads with their query heads, MLP columns and tokens of the vocabulary
are dealt out, equally many to each device; all else every device has."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.gated_product import BLOCK
from pallas_kernels.scoring import alibi_slopes

AXIS = "model"
# For the compiler, of what sums over devices or gathers from them: NCCL does it. JAX 0.12's own kernels want pointers
# to the memory of other devices, which NCCL does not give on every host.
NCCL_ALONE = {"xla_gpu_experimental_use_collective_kernels": ""} if jax.__version_info__ >= (0, 12) else {}
TENSORS = {  # whose rows, or those marked columns, are units of one kind or of several, one kind behind the other
    "embed_tokens": ("vocab",),
    "lm_head": ("vocab",),
    "q_proj": ("q",),
    "k_proj": ("kv",),
    "v_proj": ("kv",),
    "qkv_proj": ("q", "kv", "kv"),
    "W_pack": ("q", "kv", "kv"),
    "o_proj": ("q",),
    "gate_proj": ("mlp",),
    "up_proj": ("mlp",),
    "gate_up_proj": ("mlp", "mlp"),
    "down_proj": ("mlp",),
}
BY_COLUMN = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Split:
    """Of a model with the sizes of `config` on `num_devices`.

    Sizes are rounded up to what divides, and zeros fill the places that are left. KV heads that are fewer than the
    devices are first rounded up to a divisor of their number; then several devices have the same KV head, and share its
    query heads. ValueError where a device would have nothing but zeros for want of units.
    """

    config: Any  # a LlamaConfig
    num_devices: int = 1

    def __post_init__(self) -> None:
        config = self.config
        least = min(config.num_heads, config.intermediate_size, config.vocab_size)
        if self.num_devices > least:
            raise ValueError(
                f"a model of {config.num_heads} query heads, {config.intermediate_size} MLP columns and "
                f"{config.vocab_size} tokens cannot be split among {self.num_devices} devices, at most among {least}"
            )

    @cached_property
    def places(self) -> dict[str, tuple[int, Int[np.ndarray, " places"]]]:
        """For each kind of unit how many the model has, and which of them is in each place, device by device; -1: none
        but zeros. qkv: of each KV head its query heads, its key, its value."""
        config, group = self.config, self.config.group_size
        heads = config.num_kv_heads
        groups = next(n for n in count(heads) if n % self.num_devices == 0 or self.num_devices % n == 0)
        copies = max(1, self.num_devices // groups)
        width = -(-group // copies)
        kv = np.repeat(np.where(np.arange(groups) < heads, np.arange(groups), -1), copies)
        query = np.tile(np.arange(copies * width).reshape(copies, width), (groups, 1))
        key = np.full((len(kv), 1), group)
        rows = np.concatenate([np.where(query < group, query, -1), key, key + 1], axis=1)
        is_real = (kv[:, None] >= 0) & (rows >= 0)
        q = np.where(is_real, kv[:, None] * group + rows, -1)[:, :width]
        qkv = np.where(is_real, kv[:, None] * (group + 2) + rows, -1)
        places = {
            "kv": (heads, kv),
            "q": (config.num_heads, q.reshape(-1)),
            "qkv": (heads * (group + 2), qkv.reshape(-1)),
        }
        for kind, size in (("mlp", config.intermediate_size), ("vocab", config.vocab_size)):
            place = np.arange(-(-size // self.num_devices) * self.num_devices)
            places[kind] = (size, np.where(place < size, place, -1))
        return places

    @cached_property
    def padded(self) -> Any:
        """The config of all devices together."""
        return self._sized(1)

    @cached_property
    def local(self) -> Any:
        """The config of what one device has."""
        return self._sized(self.num_devices)

    def _sized(self, parts: int) -> Any:
        names = {"num_kv_heads": "kv", "num_heads": "q", "intermediate_size": "mlp", "vocab_size": "vocab"}
        sizes = {name: len(self.places[kind][1]) // parts for name, kind in names.items()}
        return replace(self.config, **sizes)

    @cached_property
    def mlp_block(self) -> int:
        """MLP columns of a device that stay together in `gate_up`: so many of gate, then as many of up."""
        return math.gcd(BLOCK, self.local.intermediate_size)

    def placed_shape(self, shape: tuple[int, ...], kind: str | None) -> tuple[int, ...]:
        """How `spread` lays out an array of the padded config's shape."""
        if kind != "gate_up":
            return shape
        width, both, columns = shape
        return width, columns // self.mlp_block, both, self.mlp_block

    def spread(self, whole: Shaped[Array, "..."], kind: str | None, axis: int, shape: tuple[int, ...]) -> Array:
        """The model's units of a kind along an axis, in their places, as `shape`; of no kind, as it is. gate_up: MLP
        columns of both [E, 2, F], in blocks."""
        if kind == "gate_up":
            width, blocks, both, block = shape
            columns = self.spread(whole, "mlp", 2, (width, both, blocks * block))
            return columns.reshape(width, both, blocks, block).swapaxes(1, 2)
        if kind is None or self._is_in_place(kind):
            return whole
        num, places = self.places[kind]
        units = whole.reshape(*whole.shape[:axis], num, math.prod(whole.shape[axis:]) // num)
        return jnp.take(units, np.where(places < 0, num, places), axis, mode="fill", fill_value=0).reshape(shape)

    def gather(self, spread: Shaped[Array, "..."], kind: str | None, axis: int, shape: tuple[int, ...]) -> Array:
        """What `spread` spread."""
        if kind == "gate_up":
            width, blocks, both, block = spread.shape
            return self.gather(spread.swapaxes(1, 2).reshape(width, both, blocks * block), "mlp", 2, shape)
        if kind is None or self._is_in_place(kind):
            return spread
        known, first = np.unique(self.places[kind][1], return_index=True)
        num = len(self.places[kind][1])
        units = spread.reshape(*spread.shape[:axis], num, math.prod(spread.shape[axis:]) // num)
        return jnp.take(units, first[known >= 0], axis).reshape(shape)

    def _is_in_place(self, kind: str) -> bool:
        num, places = self.places[kind]
        return np.array_equal(places, np.arange(num))

    def part(self, name: str, tensor: Shaped[np.ndarray, "..."], device: int) -> list[np.ndarray]:
        """What one device has of a stored tensor, by its Hugging Face name, apart for each kind of unit: views, unless
        there are places to be filled with zeros."""
        of = name.split(".")[-2]
        if of not in TENSORS:
            return [tensor]
        axis = int(of in BY_COLUMN)
        nums, places = zip(*(self.places[kind] for kind in TENSORS[of]), strict=True)
        units = tensor.reshape(*tensor.shape[:axis], sum(nums), -1, *tensor.shape[axis + 1 :])
        parts, before = [], (slice(None),) * axis
        for begin, num, place in zip(np.cumsum((0, *nums)), nums, places, strict=False):
            own = place.reshape(self.num_devices, -1)[device]
            of_kind = units[(*before, slice(begin, begin + num))]
            if own[0] >= 0 and np.array_equal(own, np.arange(own[0], own[0] + len(own))):
                found = of_kind[(*before, slice(own[0], own[0] + len(own)))]
            else:
                found = np.take(of_kind, own.clip(0), axis)
                found[(*before, own < 0)] = 0
            parts.append(found.reshape(*tensor.shape[:axis], -1, *tensor.shape[axis + 1 :]))
        return parts

    # On each device, inside a function of `on_each` ------------------------------------------------------------------

    def sum(self, x: Array) -> Array:
        return x if self.num_devices == 1 else jax.lax.psum(x, AXIS)

    def rows(self, table: Float[Array, "part E"], tokens: Int[Array, "T"]) -> Float[Array, "T E"]:
        """Rows of a table, of which each device has a part."""
        if self.num_devices == 1:
            return table[tokens]
        row = tokens - jax.lax.axis_index(AXIS) * len(table)
        own = (row >= 0) & (row < len(table))
        return self.sum(jnp.where(own[:, None], table[jnp.where(own, row, 0)], 0))

    def join(self, logits: Float[Array, "B part"]) -> Float[Array, "B V"]:
        """Those of all devices, without padding."""
        if self.num_devices == 1:
            return logits
        return jax.lax.all_gather(logits, AXIS, axis=1, tiled=True)[:, : self.config.vocab_size]

    def alibi_slopes(self) -> Float[Array, " Hq"]:
        """Of the device's query heads."""
        slopes = jnp.asarray(alibi_slopes(self.config.num_heads)[self.places["q"][1]].reshape(self.num_devices, -1))
        return slopes[0 if self.num_devices == 1 else jax.lax.axis_index(AXIS)]


def spec(kind: str | None, axis: int) -> PartitionSpec:
    """Of an array that has units of a kind along an axis."""
    return PartitionSpec() if kind is None else PartitionSpec(*[None] * axis, AXIS)


KV, HEADS, EVERYWHERE = spec("kv", 1), spec("kv", 0), spec(None, 0)


def on_each(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """A function of whole arrays that runs `function` on each device's parts of them."""
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
