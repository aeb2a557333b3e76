"""Random tiny checkpoints in Hugging Face form, written at test time."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")  # ids 0 to 3
HEAD_SCALE = 20.0  # wide gaps between the best tokens, so that greedy choices survive rounding


def tiny_config(
    *,
    group: int = 2,
    head_dim: int = 16,
    num_kv_heads: int = 2,
    num_layers: int = 2,
    hidden_size: int = 32,
    vocab_size: int = 300,
    tied: bool = False,
    **changes,
) -> dict:
    """A config.json; `changes` replace or add keys, None removes one."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": group * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (config | changes).items() if value is not None or key in changes}


def tiny_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors for the config: products keep their scale, the head (also a tied one) is 20 times it."""
    rng = np.random.default_rng(seed)
    width, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or width // heads

    def linear(rows, columns, scale=1.0):
        return (scale * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm():
        return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)

    tied = config.get("tie_word_embeddings", False)
    weights = {"model.embed_tokens.weight": linear(config["vocab_size"], width, HEAD_SCALE if tied else 1.0)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes = {"q": (heads * dim, width), "k": (kv_heads * dim, width), "v": (kv_heads * dim, width)}
        weights |= {f"{layer}.self_attn.{kind}_proj.weight": linear(*shape) for kind, shape in shapes.items()}
        weights[f"{layer}.self_attn.o_proj.weight"] = linear(width, heads * dim)
        weights[f"{layer}.mlp.gate_proj.weight"] = linear(mlp, width)
        weights[f"{layer}.mlp.up_proj.weight"] = linear(mlp, width)
        weights[f"{layer}.mlp.down_proj.weight"] = linear(width, mlp)
        weights[f"{layer}.input_layernorm.weight"] = norm()
        weights[f"{layer}.post_attention_layernorm.weight"] = norm()
    weights["model.norm.weight"] = norm()
    if not tied:
        weights["lm_head.weight"] = linear(config["vocab_size"], width, HEAD_SCALE)
    return weights


def tensors_of(shapes: dict[str, list[int]], seed: int, *, zero_centred: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors of these names and shapes, in the order of the names. zero_centred: norms add one to their
    weights. Attention is sharp, so that it matters who sees whom."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name in sorted(shapes):
        values = rng.standard_normal(shapes[name])
        if name.endswith("norm.weight"):
            values = 0.1 * values + (0.0 if zero_centred else 1.0)
        elif values.ndim == 2:
            kind = name.split(".")[-2]
            scale = {"q_proj": 3.0, "qkv_proj": 1.7, "W_pack": 1.7, "lm_head": 3.0}.get(kind, 1.0)
            values = scale * values / np.sqrt(values.shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def tiny_baichuan(folder, seed: int = 0, *, num_heads: int = 5, alibi: bool = True, second: bool = True) -> Path:
    """As Baichuan2-13B and its relatives are: packed queries, keys and values, ALiBi or RoPE, NormHead or not."""
    width = 16 * num_heads
    changes = {"max_position_embeddings": 2048} if not alibi else {"model_max_length": 2048}
    config = tiny_config(
        architectures=["BaichuanForCausalLM"], model_type="baichuan", group=1, num_kv_heads=num_heads, hidden_size=width
    )
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta"):
        del config[key]
    config |= changes | ({"z_loss_weight": 0} if second else {})
    shapes = {"model.embed_tokens.weight": [300, width], "model.norm.weight": [width], "lm_head.weight": [300, width]}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.self_attn.W_pack.weight": [3 * width, width],
            f"{layer}.self_attn.o_proj.weight": [width, width],
            f"{layer}.mlp.gate_proj.weight": [2 * width, width],
            f"{layer}.mlp.up_proj.weight": [2 * width, width],
            f"{layer}.mlp.down_proj.weight": [width, 2 * width],
            f"{layer}.input_layernorm.weight": [width],
            f"{layer}.post_attention_layernorm.weight": [width],
        }
    return write_checkpoint(folder, config, tensors_of(shapes, seed))


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of 4 special tokens, 256 bytes and some merges: 272 ids."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "a"), ("e", "r"),
              ("o", "n"), ("Ġ", "w"), ("Ã", "©"), ("ð", "Ł")]  # fmt: skip
    vocab = {token: index for index, token in enumerate([*tokens, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_checkpoint(folder, config: dict, weights: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """config.json, safetensors (with an index when sharded) and the tokenizer, in `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names = sorted(weights)
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        files = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
        for shard, file in enumerate(files):
            save_file({name: weights[name] for name in names[shard::num_shards]}, folder / file)
        weight_map = {name: files[position % num_shards] for position, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def write_tiny_model(folder, *, seed: int = 0, num_shards: int = 1, **config) -> Path:
    """A random checkpoint folder; `config` as for tiny_config."""
    values = tiny_config(**config)
    return write_checkpoint(folder, values, tiny_weights(values, seed), num_shards)
