"""Llama and its relatives in numpy, recomputing everything for every token: what the engine must agree with.

Written from the mathematics and with Hugging Face weight names; it shares no code with prefix_jax, reads safetensors
and GGUF by itself, and is as slow as it is plain.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class OracleLlama:
    """Weights by Hugging Face name, and the contents of config.json. Everything is computed in `dtype`."""

    config: dict
    weights: dict[str, np.ndarray]
    dtype: type = np.float64

    @classmethod
    def from_folder(cls, folder, dtype=np.float64) -> "OracleLlama":
        folder = Path(folder)
        weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {name: tensor.astype(dtype) for name, tensor in load_file(file).items()}
        return cls(json.loads((folder / "config.json").read_text()), weights, dtype)

    @classmethod
    def from_gguf(cls, path, dtype=np.float64) -> "OracleLlama":
        reader = gguf.GGUFReader(path)

        def field(key):
            return reader.fields[f"llama.{key}"].contents()

        heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
        weights = {}
        for tensor in reader.tensors:
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(dtype)
            if tensor.name.endswith("attn_q.weight"):
                weight = _halves_from_neighbours(weight, heads)
            if tensor.name.endswith("attn_k.weight"):
                weight = _halves_from_neighbours(weight, kv_heads)
            block, _, kind = tensor.name.removeprefix("blk.").rpartition(".")[0].partition(".")
            name = f"model.layers.{block}.{GGUF_NAMES[kind]}" if kind else GGUF_NAMES[block]
            weights[f"{name}.weight"] = weight
        config = {
            "num_hidden_layers": field("block_count"),
            "hidden_size": field("embedding_length"),
            "intermediate_size": field("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
            "head_dim": field("attention.key_length") if "llama.attention.key_length" in reader.fields else None,
            "rope_theta": field("rope.freq_base"),
            "max_position_embeddings": field("context_length"),
            "vocab_size": len(weights["model.embed_tokens.weight"]),
            "tie_word_embeddings": "lm_head.weight" not in weights,
        }
        return cls(config, weights, dtype)

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def family(self) -> str:
        return self.config.get("architectures", ["LlamaForCausalLM"])[0].removesuffix("ForCausalLM").lower()

    def logits(self, ids, longest: int | None = None) -> np.ndarray:
        """[len(ids), vocab] scores of the token after each. longest: what RoPE is scaled for, where that matters;
        None: the sequence itself."""
        x = self._weight("model.embed_tokens")[np.asarray(ids)]
        if self._is_gemma:
            x = x * self.dtype(math.sqrt(self.config["hidden_size"]))
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            tables = self.rope_tables(np.arange(len(ids)), index, longest)
            attended = self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", index, tables)
            if self._is_gemma:
                x = x + self._norm(attended, f"{layer}.post_attention_layernorm")
                added = self._mlp(self._norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
                x = x + self._norm(added, f"{layer}.post_feedforward_layernorm")
            else:
                x = x + attended
                x = x + self._mlp(self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        x = self._norm(x, "model.norm")
        tied = self.config.get("tie_word_embeddings", self._is_gemma)
        head = self._weight("model.embed_tokens" if tied else "lm_head")
        if self.family == "baichuan" and "z_loss_weight" in self.config:
            head = head / np.sqrt((head * head).sum(axis=1, keepdims=True))
        logits = x @ head.T
        cap = self.config.get("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits

    def generate(self, ids, num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy continuation, and by how much each of its tokens beat the second best."""
        ids, prompt_len, gaps = list(ids), len(ids), []
        for _ in range(num_tokens):
            last = self.logits(ids)[-1]
            second, best = np.argsort(last)[-2:]
            gaps.append(float(last[best] - last[second]))
            ids.append(int(best))
        return ids[prompt_len:], gaps

    def rope_tables(self, positions, layer: int = 0, longest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [len(positions), head_dim / 2]."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if "full_attention" in rope:
            rope = rope["sliding_attention" if self._window(layer) else "full_attention"]
        theta = rope.get("rope_theta") or self.config.get("rope_theta", 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        stated = self.config.get("max_position_embeddings")
        longest = longest or len(positions)
        if kind == "dynamic" and longest > stated:
            stretch = rope["factor"] * longest / stated - (rope["factor"] - 1)
            theta = theta * stretch ** (self.head_dim / (self.head_dim - 2))
        frequencies = np.array([theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)])
        amplitude = 1.0
        if kind == "llama3":
            frequencies = np.array([_llama3_frequency(frequency, rope) for frequency in frequencies])
        if kind == "linear":
            frequencies = frequencies / rope["factor"]
        if kind == "yarn":
            share = _yarn_shares(self.head_dim, theta, rope["original_max_position_embeddings"])
            frequencies = share * frequencies + (1 - share) * frequencies / rope["factor"]
            amplitude = 1 + 0.1 * math.log(rope["factor"])
        if kind == "longrope":
            original = rope["original_max_position_embeddings"]
            frequencies = frequencies / np.array(rope["long_factor" if longest > original else "short_factor"])
            amplitude = math.sqrt(1 + math.log(stated / original) / math.log(original))
        phases = np.outer(positions, frequencies)
        return (amplitude * np.cos(phases)).astype(self.dtype), (amplitude * np.sin(phases)).astype(self.dtype)

    @property
    def _is_gemma(self) -> bool:
        return self.family.startswith("gemma")

    @property
    def _slopes(self) -> np.ndarray | None:
        """Of ALiBi, as its paper's code has them."""
        if self.family != "baichuan" or "max_position_embeddings" in self.config:
            return None

        def power_of_two(n):
            start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]

        heads = self.config["num_attention_heads"]
        if math.log2(heads).is_integer():
            return np.array(power_of_two(heads))
        closest = 2 ** math.floor(math.log2(heads))
        return np.array(power_of_two(closest) + power_of_two(2 * closest)[0::2][: heads - closest])

    def _window(self, layer: int) -> int | None:
        """Positions that a token of the layer sees, None for all."""
        window, types = self.config.get("sliding_window"), self.config.get("layer_types")
        if self.family.startswith("qwen") and not self.config.get("use_sliding_window"):
            return None
        if types is not None:
            return window if types[layer] == "sliding_attention" else None
        if self.family.startswith("qwen") and layer < self.config["max_window_layers"]:
            return None
        return window

    def _qkv(self, x, name):
        """Queries, keys and values [length, heads, head_dim]."""
        dim, heads = self.head_dim, self.config["num_attention_heads"]
        kv_heads = self.config.get("num_key_value_heads") or heads
        packed = {"phi3": "qkv_proj", "baichuan": "W_pack"}.get(self.family)
        if packed:
            parts = np.split(x @ self._weight(f"{name}.{packed}").T, [heads * dim, (heads + kv_heads) * dim], axis=1)
        else:
            parts = [x @ self._weight(f"{name}.{kind}_proj").T for kind in "qkv"]
        if self.family == "qwen2":
            parts = [part + self.weights[f"{name}.{kind}_proj.bias"] for part, kind in zip(parts, "qkv", strict=True)]
        query, key, value = (part.reshape(len(x), -1, dim) for part in parts)
        if self.family in ("qwen3", "gemma3"):
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        return query, key, value

    def _attention(self, x, name, layer, tables):
        length, slopes = len(x), self._slopes
        query, key, value = self._qkv(x, name)
        if slopes is None:
            query, key = _rotated(query, *tables), _rotated(key, *tables)
        group = query.shape[1] // key.shape[1]
        away = np.arange(length)[:, None] - np.arange(length)
        visible = (away >= 0) & (away < (self._window(layer) or length))
        scale = self.dtype(1 / math.sqrt(self.config.get("query_pre_attn_scalar") or self.head_dim))
        cap = self.config.get("attn_logit_softcapping")
        heads = []
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // group].T * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            if slopes is not None:
                scores = scores - (slopes[head] * away).astype(self.dtype)
            scores = np.where(visible, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares = shares / shares.sum(axis=-1, keepdims=True)
            heads.append(shares @ value[:, head // group])
        return np.concatenate(heads, axis=-1) @ self._weight(f"{name}.o_proj").T

    def _mlp(self, x, name):
        if self.family == "phi3":
            gate, up = np.split(x @ self._weight(f"{name}.gate_up_proj").T, 2, axis=1)
        else:
            gate, up = (x @ self._weight(f"{name}.{kind}_proj").T for kind in ("gate", "up"))
        if self._is_gemma:
            active = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            active = gate / (1 + np.exp(-gate))
        return (active * up) @ self._weight(f"{name}.down_proj").T

    def _norm(self, x, name):
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype(self.config["rms_norm_eps"]))
        return x / size * (self._weight(name) + self.dtype(self._is_gemma))

    def _weight(self, name):
        return self.weights[f"{name}.weight"]


def _llama3_frequency(frequency, rope):
    """The published rule, case by case on the wavelength."""
    original = rope["original_max_position_embeddings"]
    wavelength = 2 * np.pi / frequency
    if wavelength < original / rope["high_freq_factor"]:
        return frequency
    if wavelength > original / rope["low_freq_factor"]:
        return frequency / rope["factor"]
    ramp = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return (1 - ramp) * frequency / rope["factor"] + ramp * frequency


def _yarn_shares(dim, theta, original):
    """How much of each frequency is kept: all of those that turn 32 times in the original context, none of those that
    turn once."""
    low, high = (dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    return np.array([1 - min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)])


def _rotated(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _halves_from_neighbours(weight, heads):
    """llama.cpp stores the rows of a head as 0, D/2, 1, D/2 + 1, …; here they go back to 0, 1, …, D/2, …"""
    rows = weight.reshape(heads, -1, weight.shape[1])
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(weight.shape)
