"""The Llama transformer in Flax NNX: one step over tokens of many sequences, with K and V in slots it is handed.

It knows nothing of pages, sequences or batches: where K and V go is `slots`, who reads what is `attend`.
Queries, keys and values come from one product, gate and up from another; both are laid out by KV head and by MLP
column, the axes a mesh can shard.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.norm import add_rms_norm
from pallas_kernels.qkv import rotate_and_write
from pallas_kernels.tiles import Scales

Slots = Float[Array, "num_slots Hkv D"]
KVStore = tuple[tuple[Slots, Slots], ...]
Attend = Callable[[Float[Array, "T Hq D"], Slots, Slots], Float[Array, "T Hq D"]]

_SUPPORTED = {  # the one value of a key that this model computes
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "quantization_config": None,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model. ValueError when they contradict each other."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] | None = None  # one for each frequency, where the model scales them
    tie_word_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position"):  # fmt: skip
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not isinstance(value := getattr(self, name), (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs: head_dim must be even, got {self.head_dim}")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ValueError(f"{len(self.rope_divisors)} RoPE divisors for {self.head_dim // 2} frequencies")

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the contents of a Hugging Face config.json. ValueError names whatever this model does not compute."""
        config = {key: value for key, value in config.items() if value is not None}
        for key, known in _SUPPORTED.items():
            if (got := config.get(key, known)) != known:
                raise ValueError(f"{key} = {got!r} is not supported; known: {known!r}")
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in required if key not in config]:
            raise ValueError(f"config lacks {', '.join(missing)}")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        if "head_dim" not in config and (heads < 1 or hidden % heads):
            raise ValueError(f"hidden_size {hidden} over {heads} heads is no integer, and head_dim is not stated")
        head_dim = config["head_dim"] if "head_dim" in config else hidden // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # of transformers 5, and before it
        theta = rope.get("rope_theta") or config.get("rope_theta", cls.rope_theta)
        eos = config.get("eos_token_id", ())
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position=config.get("max_position_embeddings", cls.max_position),
            rms_norm_eps=config.get("rms_norm_eps", cls.rms_norm_eps),
            rope_theta=theta,
            rope_divisors=_rope_divisors(rope, theta, head_dim),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            bos_id=config.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        )


def _rope_divisors(rope: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...] | None:
    """Those of RoPE type `llama3`: long wavelengths slowed by `factor`, short ones kept, a ramp in between."""
    by_layer_type = any(isinstance(value, Mapping) for value in rope.values())
    kind = "by layer type" if by_layer_type else rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"unknown RoPE type {kind!r}; known: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if not rope.get(key)]:
        raise ValueError(f"RoPE type llama3 lacks {', '.join(missing)}")
    factor, low, high, original_max_position = (rope[key] for key in keys)
    if min(factor, low, original_max_position) <= 0 or low >= high:
        raise ValueError(f"RoPE type llama3 wants positive numbers and low < high frequency factor, got {rope}")
    turns = original_max_position * _plain_frequencies(theta, head_dim) / (2 * np.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple((1 / (kept + (1 - kept) / factor)).tolist())


def _plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position of each pair: float32 [D/2], computed in float64."""
    frequencies = _plain_frequencies(config.rope_theta, config.head_dim)
    return (frequencies / np.asarray(config.rope_divisors or 1.0)).astype(np.float32)


def rope_phases(config: LlamaConfig, positions: Int[Array, "T"]) -> tuple[Array, Array]:
    """cos and sin, float32 [T, D/2]."""
    phases = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)
    return jnp.cos(phases), jnp.sin(phases)


def _product(equation: str, x: Array, weight: Array, out_dtype: Any = None) -> Array:
    """float32 products are exact ones also on a GPU, whose default would round their operands to TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=out_dtype)


def _parameter(shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs | None) -> nnx.Param:
    """Norm weights start at one, matrices at random; without `rngs` there is a shape to be filled."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    start = nnx.initializers.ones if len(shape) == 1 else nnx.initializers.normal(0.02)
    return nnx.Param(start(rngs.params(), shape, dtype))


class LlamaLayer(nnx.Module):
    """Attention and MLP of one layer, with the residual stream through both."""

    def __init__(self, config: LlamaConfig, *, dtype: Any, rngs: nnx.Rngs | None):
        new = partial(_parameter, dtype=dtype, rngs=rngs)
        width, mlp_width = config.hidden_size, config.intermediate_size
        self.config = config
        self.input_norm = new((width,))
        # Per KV head: its G query heads, its key, its value.
        self.qkv = new((width, config.num_kv_heads, config.group_size + 2, config.head_dim))
        self.o = new((config.num_heads * config.head_dim, width))
        self.post_norm = new((width,))
        self.gate_up = new((width, 2, mlp_width))
        self.down = new((mlp_width, width))

    def __call__(self, x, delta, phases, slots, k_slots, v_slots, scales, attend: Attend, implementation: str):
        """Takes and returns the residual stream in two parts, x and what is still to be added to it [T, E], and
        k_slots, v_slots; this step's K and V are written before `attend` reads."""
        norm = partial(add_rms_norm, eps=self.config.rms_norm_eps, implementation=implementation)
        with jax.named_scope("attention"):
            x, normed = norm(x, delta, self.input_norm[...])
            qkv = _product("te,ehgd->thgd", normed, self.qkv[...])  # [T, Hkv, G + 2, D]
            q, k_slots, v_slots = rotate_and_write(
                qkv, *phases, slots, k_slots, v_slots, scales, implementation=implementation
            )
            scaled = {} if scales is None else {"scales": scales}
            attended = attend(q, k_slots, v_slots, **scaled).reshape(x.shape[0], -1)
            delta = _product("th,he->te", attended, self.o[...])
        with jax.named_scope("mlp"):
            x, normed = norm(x, delta, self.post_norm[...])
            gate_up = _product("te,ecf->tcf", normed, self.gate_up[...])
            delta = _product("tf,fe->te", jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.down[...])
        return x, delta, k_slots, v_slots


class Llama(nnx.Module):
    """A Llama decoder with random weights (normal, 0.02), or without `rngs` as shapes that a checkpoint fills."""

    def __init__(self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        new = partial(_parameter, dtype=dtype, rngs=rngs)
        self.config = config
        self.embed = new((config.vocab_size, config.hidden_size))
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = new((config.hidden_size,))
        if not config.tie_word_embeddings:
            self.lm_head = new((config.hidden_size, config.vocab_size))

    def __call__(
        self,
        tokens: Int[Array, "T"],
        positions: Int[Array, "T"],
        slots: Int[Array, "T"],
        kv_store: KVStore,
        attend: Attend,
        implementation: str = "xla",
        scales: Sequence[Scales | None] | None = None,
    ) -> tuple[Float[Array, "T E"], KVStore]:
        """One step. Token t stands at `positions[t]`, its K and V go to `slots[t]` (one past the end: nowhere).

        `attend(q [T, Hq, D], k_slots, v_slots) -> [T, Hq, D]` reads the slots of one layer, with `scales=` those of the
        layer where there are any. implementation: of the small kernels, as of attention. Returns the final-normed
        hidden states and the store with this step written.
        """
        x = self.embed[...][tokens]
        delta = jnp.zeros_like(x)
        phases = rope_phases(self.config, positions)
        graphdef = nnx.graphdef(self.layers[0])

        @jax.jit  # traced once for all layers, which have one graphdef
        def run_layer(state, x, delta, k_slots, v_slots, scales):
            layer = nnx.merge(graphdef, state)
            return layer(x, delta, phases, slots, k_slots, v_slots, scales, attend, implementation)

        written = []
        for layer, (k_slots, v_slots), scale in zip(
            self.layers, kv_store, scales or [None] * len(kv_store), strict=True
        ):
            x, delta, k_slots, v_slots = run_layer(nnx.state(layer), x, delta, k_slots, v_slots, scale)
            written.append((k_slots, v_slots))
        eps = self.config.rms_norm_eps
        return add_rms_norm(x, delta, self.norm[...], eps, implementation=implementation)[1], tuple(written)

    @property
    def dtype(self) -> Any:
        """Of the parameters, the hidden states and the KV store."""
        return self.embed[...].dtype

    def logits(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """float32 scores of the next token."""
        if self.config.tie_word_embeddings:
            return _product("be,ve->bv", hidden, self.embed[...], jnp.float32)
        return _product("be,ev->bv", hidden, self.lm_head[...], jnp.float32)
