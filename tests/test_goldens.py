"""The oracle and the model against transformers, as scripts/make_goldens.py recorded it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import OracleLlama
from paged_forward import PAGE_SIZE, PagedModel
from plain_forward import plain_logits
from tiny_models import tensors_of, write_checkpoint, write_tiny_model

from prefix_jax.weights import load_model, read_config

GOLDENS = Path(__file__).parent / "goldens"


FAMILIES = sorted(path.stem for path in GOLDENS.glob("*.json") if "tensors" in json.loads(path.read_text()))


def write_family(folder, name: str) -> Path:
    """A checkpoint of the family: config.json and names as transformers wrote them, values from the seed."""
    content = json.loads((GOLDENS / f"{name}.json").read_text())
    config, shapes = content["config"], content["tensors"]
    zero_centred = config["model_type"].startswith("gemma")
    return write_checkpoint(folder, config, tensors_of(shapes, content["seed"], zero_centred=zero_centred))


def load_goldens(name: str) -> tuple[dict, list[dict]]:
    content = json.loads((GOLDENS / f"{name}.json").read_text())
    return content.get("settings"), content["goldens"]


def check_logits(logits_of, goldens: list[dict], tolerance: float) -> None:
    for golden in goldens:
        got = logits_of(golden["prompt"])[np.ix_(golden["positions"], golden["vocab_ids"])]
        np.testing.assert_allclose(got, golden["logits"], atol=tolerance, rtol=0)


def check_greedy(logits_of, golden: dict, tolerance: float) -> None:
    """One forward over prompt and output gives every greedy choice whose lead exceeds the tolerance."""
    prompt, tokens = golden["prompt"], golden["tokens"]
    best = logits_of(prompt + tokens)[len(prompt) - 1 : -1].argmax(axis=-1)
    sure = np.array(golden["gaps"]) > 2 * tolerance
    assert sure.sum() > len(tokens) // 2
    np.testing.assert_array_equal(best[sure], np.array(tokens)[sure])


@pytest.mark.parametrize("name", ["tiny_tied", "tiny_llama3_rope"])
def test_tiny_models_agree_with_transformers(name, tmp_path):
    """RoPE scaling that is parsed but not applied shows at long positions only: mlx-vlm#1710 (C66)."""
    settings, goldens = load_goldens(name)
    folder = write_tiny_model(tmp_path, **settings)
    model = load_model(folder, read_config(folder), dtype=jnp.float32)
    for logits_of in (OracleLlama.from_folder(folder).logits, lambda ids: plain_logits(model, ids)):
        check_logits(logits_of, goldens, 2e-4)
        check_greedy(logits_of, goldens[-1], 2e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_agree_with_transformers(name, tmp_path):
    """C66, C67, C72, C75: RoPE of every kind, stated head sizes, windows that are on and off."""
    folder = write_family(tmp_path, name)
    oracle = OracleLlama.from_folder(folder)
    config, goldens = read_config(folder), load_goldens(name)[1]
    longest = max(len(golden["prompt"]) for golden in goldens)
    page_table = 1 + np.arange(-(-longest // PAGE_SIZE))[None]
    paged = {}
    for golden in goldens:
        # transformers scales RoPE for the prompt it sees
        length = longest if config.rope_by_length is None else len(golden["prompt"])
        if length not in paged:
            paged[length] = PagedModel(load_model(folder, config.for_length(length), dtype=jnp.float32), page_table)
        padded = golden["prompt"] + [0] * (longest - len(golden["prompt"]))
        check_logits(lambda ids, run=paged[length], padded=padded: run((0, 0, padded))[0], [golden], 1e-4)
        check_logits(oracle.logits, [golden], 1e-4)


def test_the_oracle_generates_what_transformers_does(tmp_path):
    settings, goldens = load_goldens("tiny_tied")
    oracle = OracleLlama.from_folder(write_tiny_model(tmp_path, **settings))
    tokens, gaps = oracle.generate(goldens[1]["prompt"], len(goldens[1]["tokens"]))
    assert tokens == goldens[1]["tokens"]
    np.testing.assert_allclose(gaps, goldens[1]["gaps"], atol=5e-4)


@pytest.mark.slow
def test_smollm2_agrees_with_transformers(default_model):
    """The rows of q and k must be permuted back exactly once: transformers#25199, gpt-fast#190 (C73)."""
    _, goldens = load_goldens("smollm2")
    model = load_model(default_model, read_config(default_model), dtype=jnp.float32)
    oracle = OracleLlama.from_gguf(default_model, np.float32)
    for logits_of in (oracle.logits, lambda ids: plain_logits(model, ids)):
        check_logits(logits_of, goldens, 1e-3)
        check_greedy(logits_of, goldens[0], 1e-3)
