"""A Llama in numpy that recomputes everything for every token: what the engine must agree with.

Written from the mathematics and with Hugging Face weight names; it shares no code with prefix_jax, reads safetensors
and GGUF by itself, and is as slow as it is plain.
"""

import json
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

    def logits(self, ids) -> np.ndarray:
        """[len(ids), vocab] scores of the token after each."""
        x = self._weight("model.embed_tokens")[np.asarray(ids)]
        cos, sin = self.rope_tables(np.arange(len(ids)))
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn", cos, sin)
            x = x + self._mlp(self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        x = self._norm(x, "model.norm")
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self._weight("model.embed_tokens" if tied else "lm_head").T

    def generate(self, ids, num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy continuation, and by how much each of its tokens beat the second best."""
        ids, prompt_len, gaps = list(ids), len(ids), []
        for _ in range(num_tokens):
            last = self.logits(ids)[-1]
            second, best = np.argsort(last)[-2:]
            gaps.append(float(last[best] - last[second]))
            ids.append(int(best))
        return ids[prompt_len:], gaps

    def rope_tables(self, positions) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin [len(positions), head_dim / 2]."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or self.config.get("rope_theta", 10000.0)
        frequencies = np.array([theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)])
        if rope.get("rope_type", rope.get("type", "default")) == "llama3":
            frequencies = np.array([_llama3_frequency(frequency, rope) for frequency in frequencies])
        phases = np.outer(positions, frequencies)
        return np.cos(phases).astype(self.dtype), np.sin(phases).astype(self.dtype)

    def _attention(self, x, name, cos, sin):
        length, dim = len(x), self.head_dim
        query, key, value = ((x @ self._weight(f"{name}.{kind}_proj").T).reshape(length, -1, dim) for kind in "qkv")
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        group = query.shape[1] // key.shape[1]
        causal = np.tril(np.ones((length, length), bool))
        heads = []
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // group].T / np.sqrt(dim).astype(self.dtype)
            scores = np.where(causal, scores, -np.inf)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares = shares / shares.sum(axis=-1, keepdims=True)
            heads.append(shares @ value[:, head // group])
        return np.concatenate(heads, axis=-1) @ self._weight(f"{name}.o_proj").T

    def _mlp(self, x, name):
        gate = x @ self._weight(f"{name}.gate_proj").T
        silu = gate / (1 + np.exp(-gate))
        return (silu * (x @ self._weight(f"{name}.up_proj").T)) @ self._weight(f"{name}.down_proj").T

    def _norm(self, x, name):
        size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype(self.config["rms_norm_eps"]))
        return x / size * self._weight(name)

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


def _rotated(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _halves_from_neighbours(weight, heads):
    """llama.cpp stores the rows of a head as 0, D/2, 1, D/2 + 1, …; here they go back to 0, 1, …, D/2, …"""
    rows = weight.reshape(heads, -1, weight.shape[1])
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(weight.shape)
