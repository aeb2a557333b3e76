"""Writes tests/goldens/*.json from transformers: an outside truth, kept so that the tests need no torch.

Usage: python scripts/make_goldens.py [SMOLLM2.gguf]   (without the file only the tiny models)
Of a family the config.json that transformers writes is kept, and the names and shapes of its tensors; their values
follow from a seed.
Needs the extra `oracle`, and accelerate for the GGUF file.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from tiny_models import tensors_of, write_tiny_model  # noqa: E402

NUM_TOKENS = 24
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
TINY_MODELS = {
    "tiny_tied": {"seed": 1, "group": 3, "head_dim": 64, "num_kv_heads": 1, "hidden_size": 48, "tied": True},
    "tiny_llama3_rope": {"seed": 2, "group": 4, "head_dim": 16, "rope_theta": None, "rope_parameters": LLAMA3_ROPE},
}
SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "bos_token_id": None,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 0}  # fmt: skip
WINDOW = {"sliding_window": 24}
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "head_dim": 32, "query_pre_attn_scalar": 20, **WINDOW}
DIVISORS = {
    "short_factor": [1.0, 1.0, 1.1, 1.3, 1.4, 1.6, 1.7, 1.9],
    "long_factor": [1.0, 1.2, 1.7, 2.5, 3.1, 3.5, 3.9, 4.0],
}


def rope(kind: str, **keys) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}


FAMILIES = {  # by name of the golden: model_type, and what makes it small or special
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_linear": ("llama", rope("linear", factor=4.0)),
    "llama_yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_dynamic": ("llama", {"max_position_embeddings": 64} | rope("dynamic", factor=4.0)),
    "mistral": ("mistral", {"head_dim": 16, **WINDOW}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1, **WINDOW}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "phi3": ("phi3", {"num_key_value_heads": 4, "sliding_window": 100}),
    "phi3_longrope": (
        "phi3",
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64} | rope("longrope", **DIVISORS),
    ),
}
SMOLLM2_PROMPTS = [
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    # "Once upon a time, there was a little"
    [6403, 1980, 253, 655, 28, 665, 436, 253, 1838],
    # "In 2024, 17 + 25 ="
    [788, 216, 34, 32, 34, 36, 28, 216, 33, 39, 1232, 216, 34, 37, 446],
]


def golden(model, prompt: list[int], num_tokens: int = NUM_TOKENS) -> dict:
    """Greedy tokens with their lead over the second best, and some logits at the first, middle and last position."""
    ids, gaps = list(prompt), []
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        for _ in range(num_tokens):
            last = model(torch.tensor([ids])).logits[0, -1].numpy()
            second, best = np.argsort(last)[-2:]
            gaps.append(round(float(last[best] - last[second]), 6))
            ids.append(int(best))
    vocab_ids = np.linspace(0, logits.shape[1] - 1, 16).astype(int)
    positions = [0, len(prompt) // 2, len(prompt) - 1]
    return {
        "prompt": prompt,
        "tokens": ids[len(prompt) :],
        "gaps": gaps,
        "vocab_ids": vocab_ids.tolist(),
        "positions": positions,
        "logits": [[round(float(value), 6) for value in logits[position, vocab_ids]] for position in positions],
    }


def write_family(name: str, kind: str, changes: dict, seed: int) -> None:
    """Logits alone: a family's greedy tokens are the oracle's business."""
    config = transformers.AutoConfig.for_model(kind, **SMALL | changes)
    prompts, goldens = np.random.default_rng(seed), []
    for length in (9, 150):
        # A new model for each: RoPE of type dynamic remembers the longest prompt.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
        weights = tensors_of(shapes, seed, zero_centred=kind.startswith("gemma"))
        missing, unknown = model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
        assert set(missing) == tied and not unknown, (missing, unknown)
        goldens.append(golden(model.eval(), prompts.integers(4, 272, length).tolist(), 0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = json.loads((Path(folder) / "config.json").read_text())
    stored.pop("transformers_version", None)
    save(name, {"config": stored, "tensors": shapes, "seed": seed}, goldens)


def write(name: str, model, prompts: list[list[int]], settings: dict) -> None:
    save(name, {"settings": settings}, [golden(model, prompt) for prompt in prompts])


def save(name: str, described: dict, goldens: list[dict]) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    content = {"versions": versions, **described, "goldens": goldens}
    path = ROOT / "tests" / "goldens" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content) + "\n")
    print(path.relative_to(ROOT), path.stat().st_size, "bytes")


def main() -> None:
    load = transformers.AutoModelForCausalLM.from_pretrained
    for name, settings in TINY_MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(folder, **settings)
            model = load(folder, dtype=torch.float32, attn_implementation="eager")
        rng = np.random.default_rng(settings["seed"])
        prompts = [rng.integers(4, 272, length).tolist() for length in (1, 9, 150)]
        write(name, model, prompts, settings)
    for seed, (name, (kind, changes)) in enumerate(FAMILIES.items()):
        write_family(name, kind, changes, seed)
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        model = load(str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
        write("smollm2", model, SMOLLM2_PROMPTS, {})


if __name__ == "__main__":
    main()
