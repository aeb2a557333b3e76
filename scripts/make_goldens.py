"""Writes tests/goldens/*.json from transformers: an outside truth, kept so that the tests need no torch.

Usage: python scripts/make_goldens.py [SMOLLM2.gguf]   (without the file only the tiny models)
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

from tiny_models import write_tiny_model  # noqa: E402

NUM_TOKENS = 24
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
TINY_MODELS = {
    "tiny_tied": {"seed": 1, "group": 3, "head_dim": 64, "num_kv_heads": 1, "hidden_size": 48, "tied": True},
    "tiny_llama3_rope": {"seed": 2, "group": 4, "head_dim": 16, "rope_theta": None, "rope_parameters": LLAMA3_ROPE},
}
SMOLLM2_PROMPTS = [
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    # "Once upon a time, there was a little"
    [6403, 1980, 253, 655, 28, 665, 436, 253, 1838],
    # "In 2024, 17 + 25 ="
    [788, 216, 34, 32, 34, 36, 28, 216, 33, 39, 1232, 216, 34, 37, 446],
]


def golden(model, prompt: list[int]) -> dict:
    """Greedy tokens with their lead over the second best, and some logits at the first, middle and last position."""
    ids, gaps = list(prompt), []
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
        for _ in range(NUM_TOKENS):
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


def write(name: str, model, prompts: list[list[int]], settings: dict) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    content = {"versions": versions, "settings": settings, "goldens": [golden(model, prompt) for prompt in prompts]}
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
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        model = load(str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
        write("smollm2", model, SMOLLM2_PROMPTS, {})


if __name__ == "__main__":
    main()
