"""The transformer of Llama and its relatives in Flax NNX: one step over tokens of many sequences, with K and V in slots
it is handed. What the families differ in are switches of its config; `families.py` sets them.

It knows nothing of pages, sequences or batches: where K and V go is `slots`, who reads what is `attend`.
Queries, keys and values come from one product, gate and up from another; both are laid out by KV head and by MLP
column, which a mesh deals out (split.py): then each device runs the model over what it has, and what they found behind
attention and behind the MLP is added up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_product import Activation, gated_product
from pallas_kernels.norm import add_rms_norm, rms_norm
from pallas_kernels.qkv import rotate_and_write
from pallas_kernels.tiles import Scales
from prefix_jax.models import families
from prefix_jax.models.rope import RopeByLength, plain_frequencies
from prefix_jax.models.split import NCCL_ALONE, Split, spec

Slots = Float[Array, "num_slots Hkv D"]
KVStore = tuple[tuple[Slots, Slots], ...]
Attend = Callable[..., Float[Array, "T Hq D"]]


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
    rope_amplitude: float = 1.0  # of cos and sin
    rope_by_length: RopeByLength | None = None  # until `for_length` has settled it
    alibi: bool = False  # instead of RoPE
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head's query and key, before RoPE
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    window: int | None = None  # positions that a token of a local layer sees
    local_layers: tuple[bool, ...] = ()  # which layers have the window; empty: none
    local_rope_theta: float | None = None  # of local layers, where theirs is another
    activation: Activation = "silu"
    norm_offset: float = 0.0  # norms multiply by their weight and this
    post_norms: bool = False  # behind attention and behind the MLP as well as before them
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    norm_head: bool = False  # the head's rows have length one

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position", "window"):  # fmt: skip
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (value is None and name == "window"):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta", "attention_scale", "attention_softcap", "logit_softcap",
                     "local_rope_theta", "embed_scale", "rope_amplitude"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs: head_dim must be even, got {self.head_dim}")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ValueError(f"{len(self.rope_divisors)} RoPE divisors for {self.head_dim // 2} frequencies")
        if len(self.local_layers) not in (0, self.num_layers):
            raise ValueError(f"local_layers says something of {len(self.local_layers)} layers of {self.num_layers}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the contents of a Hugging Face config.json, of any family in models/families.py. ValueError names
        whatever this model does not compute."""
        return cls(**families.settings(config))

    def for_length(self, max_model_len: int | None) -> "LlamaConfig":
        """This model where no sequence has more than so many positions (None: than `max_position`): RoPE that depends
        on the length is settled, and a window that no sequence outgrows is none."""
        length = max_model_len or self.max_position
        config = self
        if self.rope_by_length is not None:
            config = replace(config, **self.rope_by_length.settled(length, self.rope_theta, self.head_dim))
        if self.window is not None and self.window >= min(length, config.max_position):
            config = replace(config, window=None, local_layers=self.local_layers if self.local_rope_theta else ())
        return config

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def scoring(self, local: bool) -> dict[str, Any]:
        """What `attend` is to know of the scores of a local or a global layer: options of paged_attention, as far as
        they are not its defaults, but for the slopes of ALiBi."""
        options = {
            "scale": self.attention_scale,
            "softcap": self.attention_softcap,
            "window": self.window if local else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def has_plain_scores(self) -> bool:
        """Whether the scores of all layers are products, and every token sees all before it."""
        return not self.attention_softcap and not self.alibi and (self.window is None or not any(self.local_layers))

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head (G)."""
        return self.num_heads // self.num_kv_heads


def rope_frequencies(config: LlamaConfig, local: bool = False) -> np.ndarray:
    """Radians per position of each pair: float32 [D/2], computed in float64."""
    if local and config.local_rope_theta:
        return plain_frequencies(config.local_rope_theta, config.head_dim).astype(np.float32)
    frequencies = plain_frequencies(config.rope_theta, config.head_dim)
    return (frequencies / np.asarray(config.rope_divisors or 1.0)).astype(np.float32)


def rope_phases(
    config: LlamaConfig, positions: Int[Array, "T"], local: bool = False
) -> tuple[Array, Array] | tuple[None, None]:
    """cos and sin, float32 [T, D/2], of global or local layers; None where nothing is turned."""
    if config.alibi:
        return None, None
    phases = positions.astype(jnp.float32)[:, None] * rope_frequencies(config, local)
    amplitude = 1.0 if local and config.local_rope_theta else config.rope_amplitude
    return jnp.cos(phases) * amplitude, jnp.sin(phases) * amplitude


def _product(equation: str, x: Array, weight: Array, out_dtype: Any = None) -> Array:
    """float32 products are exact ones also on a GPU, whose default would round their operands to TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=out_dtype)


def _initial(key: Array, shape: tuple[int, ...], dtype: Any, start: float | None) -> Array:
    initial = nnx.initializers.normal(0.02) if start is None else nnx.initializers.constant(start)
    return initial(key, shape, dtype)


@partial(jax.jit, static_argnums=range(1, 9), compiler_options=NCCL_ALONE)
def _initial_parts(key, shape, dtype, start, split, kind, axis, padded, sharding):
    whole = _initial(key, shape, dtype, start)
    return jax.lax.with_sharding_constraint(split.spread(whole, kind, axis, padded), sharding)


def _parameter(
    shape: Callable[[LlamaConfig], tuple[int, ...]],
    kind: str | None = None,
    axis: int = 0,
    *,
    split: Split,
    mesh: Mesh | None,
    dtype: Any,
    rngs: nnx.Rngs | None,
    start: float | None = None,
) -> nnx.Param:
    """Random values, or `start` everywhere; without `rngs` there is a shape to be filled. With a mesh each device has
    its units of the kind along the axis, and the values are those of one device."""
    whole, padded = shape(split.config), split.placed_shape(shape(split.padded), kind)
    sharding = None if mesh is None else NamedSharding(mesh, spec(kind, axis))
    if rngs is None:
        value = jax.ShapeDtypeStruct(padded, dtype, sharding=sharding)
    elif mesh is None:
        value = split.spread(_initial(rngs.params(), whole, dtype, start), kind, axis, padded)
    else:
        value = _initial_parts(rngs.params(), whole, dtype, start, split, kind, axis, padded, sharding)
    return nnx.Param(value, kind=kind, axis=axis, whole=whole)


def _width(config: LlamaConfig) -> tuple[int]:
    return (config.hidden_size,)


class LlamaLayer(nnx.Module):
    """Attention and MLP of one layer, with the residual stream through both. local: it has the config's window. new:
    makes a parameter."""

    def __init__(self, split: Split, new: Callable[..., nnx.Param], *, local: bool = False):
        config = split.config
        new_norm = partial(new, start=1 - config.norm_offset)
        self.config = split.local
        self.split = split
        self.local = local
        self.input_norm = new_norm(_width)
        # Per KV head: its G query heads, its key, its value.
        self.qkv = new(lambda c: (c.hidden_size, c.num_kv_heads, c.group_size + 2, c.head_dim), "qkv", 1)
        if config.qkv_bias:
            self.qkv_bias = new(lambda c: (c.num_kv_heads, c.group_size + 2, c.head_dim), "qkv")
        if config.qk_norm:
            self.q_norm, self.k_norm = new_norm(lambda c: (c.head_dim,)), new_norm(lambda c: (c.head_dim,))
        self.o = new(lambda c: (c.num_heads * c.head_dim, c.hidden_size), "q")
        self.mlp_norm = new_norm(_width)
        self.gate_up = new(lambda c: (c.hidden_size, 2, c.intermediate_size), "gate_up", 1)
        self.down = new(lambda c: (c.intermediate_size, c.hidden_size), "mlp")
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = new_norm(_width), new_norm(_width)

    def __call__(self, x, delta, phases, slots, k_slots, v_slots, scales, attend: Attend, implementation, num_tokens):
        """Takes and returns the residual stream in two parts, x and what is still to be added to it [T, E], and
        k_slots, v_slots; this step's K and V are written before `attend` reads."""
        config = self.config
        norm_options = {"eps": config.rms_norm_eps, "offset": config.norm_offset}
        norm = partial(add_rms_norm, **norm_options, implementation=implementation)
        with jax.named_scope("attention"):
            x, normed = norm(x, delta, self.input_norm[...])
            qkv = _product("te,ehgd->thgd", normed, self.qkv[...])  # [T, Hkv, G + 2, D]
            before = {"bias": self.qkv_bias[...]} if config.qkv_bias else {}
            if config.qk_norm:
                before |= {"q_norm": self.q_norm[...], "k_norm": self.k_norm[...], **norm_options}
            q, k_slots, v_slots = rotate_and_write(
                qkv, *phases, slots, k_slots, v_slots, scales, **before, implementation=implementation
            )
            options = config.scoring(self.local) | ({} if scales is None else {"scales": scales})
            if config.alibi:
                options["alibi_slopes"] = self.split.alibi_slopes()
            attended = attend(q, k_slots, v_slots, **options).reshape(x.shape[0], -1)
            delta = self.split.sum(_product("th,he->te", attended, self.o[...]))
            if config.post_norms:
                delta = rms_norm(delta, self.attention_post_norm[...], **norm_options)
        with jax.named_scope("mlp"):
            x, normed = norm(x, delta, self.mlp_norm[...])
            activated = gated_product(
                normed, self.gate_up[...], config.activation, num_tokens, implementation=implementation
            )
            delta = self.split.sum(_product("tf,fe->te", activated, self.down[...]))
            if config.post_norms:
                delta = rms_norm(delta, self.mlp_post_norm[...], **norm_options)
        return x, delta, k_slots, v_slots


class Llama(nnx.Module):
    """A decoder with random weights (normal, 0.02), or without `rngs` as shapes that a checkpoint fills. mesh: of the
    devices that share it, along the axis split.AXIS; calls are then to be made inside split.on_each.

    RoPE that depends on the length of sequences is that for `max_position` unless `config.for_length` has settled it.
    ValueError where it cannot be split among so many devices.
    """

    def __init__(
        self, config: LlamaConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None, mesh: Mesh | None = None
    ):
        config = config if config.rope_by_length is None else config.for_length(None)
        self.config = config
        self.split = split = Split(config, 1 if mesh is None else mesh.size)
        new = partial(_parameter, split=split, mesh=mesh, dtype=dtype, rngs=rngs)
        self.embed = new(lambda c: (c.vocab_size, c.hidden_size), "vocab")
        self.layers = nnx.List(
            [LlamaLayer(split, new, local=config.is_local(index)) for index in range(config.num_layers)]
        )
        self.norm = new(_width, start=1 - config.norm_offset)
        if not config.tie_word_embeddings:
            self.lm_head = new(lambda c: (c.hidden_size, c.vocab_size), "vocab", 1)

    def __call__(
        self,
        tokens: Int[Array, "T"],
        positions: Int[Array, "T"],
        slots: Int[Array, "T"],
        kv_store: KVStore,
        attend: Attend,
        implementation: str = "xla",
        scales: Sequence[Scales | None] | None = None,
        num_tokens: Int[Array, "1"] | None = None,
    ) -> tuple[Float[Array, "T E"], KVStore]:
        """One step. Token t stands at `positions[t]`, its K and V go to `slots[t]` (one past the end: nowhere).

        `attend(q [T, Hq, D], k_slots, v_slots) -> [T, Hq, D]` reads the slots of one layer, with `scales=` those of the
        layer where there are any, and scale=, softcap=, window=, alibi_slopes= as paged_attention has them where they
        are not its defaults. implementation: of the small kernels, as of attention. num_tokens: how many there are,
        behind which all is padding; None: T. Returns the final-normed hidden states, of padding anything, and the store
        with this step written.
        """
        config = self.config
        x = self.split.rows(self.embed[...], tokens)
        if config.embed_scale != 1.0:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        delta = jnp.zeros_like(x)
        phases = {local: rope_phases(config, positions, local) for local in {layer.local for layer in self.layers}}

        @partial(jax.jit, static_argnums=0)  # traced once for all layers of one kind, which have one graphdef
        def run_layer(graphdef, state, x, delta, k_slots, v_slots, scales):
            layer = nnx.merge(graphdef, state)
            arrays = x, delta, phases[layer.local], slots, k_slots, v_slots, scales
            return layer(*arrays, attend, implementation, num_tokens)

        written = []
        for layer, (k_slots, v_slots), scale in zip(
            self.layers, kv_store, scales or [None] * len(kv_store), strict=True
        ):
            x, delta, k_slots, v_slots = run_layer(*nnx.split(layer), x, delta, k_slots, v_slots, scale)
            written.append((k_slots, v_slots))
        norm = partial(add_rms_norm, eps=config.rms_norm_eps, offset=config.norm_offset, implementation=implementation)
        return norm(x, delta, self.norm[...])[1], tuple(written)

    @property
    def dtype(self) -> Any:
        """Of the parameters, the hidden states and the KV store."""
        return self.embed.get_value().dtype

    @property
    def mesh(self) -> Mesh | None:
        """Of the devices that have the parameters, or None."""
        sharding = self.embed.get_value().sharding
        return sharding.mesh if isinstance(sharding, NamedSharding) else None

    def logits(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """float32 scores of the next token."""
        if self.config.tie_word_embeddings:
            logits = _product("be,ve->bv", hidden, self.embed[...], jnp.float32)
        else:
            logits = _product("be,ev->bv", hidden, self.lm_head[...], jnp.float32)
        logits = self.split.join(logits)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
