"""Copies a checkpoint into another format, bit for bit: safetensors, GGUF or Orbax into Orbax or safetensors.

The new folder has what a model's folder has: the weights, and config.json and the tokenizer beside them. Quantised GGUF
tensors become the float32 values they stand for. Host memory holds the whole model on the way to Orbax, and one file of
the result on the way to safetensors. A folder that was not finished has `.partial` at the end of its name.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from prefix_jax.models.llama import Llama, LlamaConfig
from prefix_jax.stored_tensors import INDEX, ORBAX, write_orbax, write_safetensors
from prefix_jax.tokenizer import Tokenizer
from prefix_jax.weights import checkpoint_dtype, hf_config, open_tensors

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def convert(source: Path, target: Path, kind: str, *, use_tqdm: bool = False) -> None:
    """ValueError when the source does not load, or there is a target already. kind: "orbax" or "safetensors"."""
    if target.exists():
        raise ValueError(f"{target} exists; name a folder that does not")
    config = hf_config(source)
    tensors = open_tensors(source, Llama(LlamaConfig.from_hf(config), dtype=jnp.float32))
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies inside {source}, which would then hold two checkpoints")
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _copy_what_is_beside(source, partial, config)
        if kind == "orbax":
            write_orbax(partial / ORBAX, tensors, use_tqdm=use_tqdm)
        else:
            write_safetensors(partial, tensors, use_tqdm=use_tqdm)
        partial.rename(target)
    except Exception:
        shutil.rmtree(partial)
        raise


def _copy_what_is_beside(source: Path, target: Path, config: dict[str, Any]) -> None:
    """All files of a folder but the weights; for a GGUF file what it says of config and tokenizer."""
    if (source / "config.json").exists():
        for path in source.iterdir():
            if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(INDEX.split(".", 1)[1]):
                shutil.copy2(path, target)
        return
    tokenizer = Tokenizer.load(source)
    tokenizer.save(target)
    config |= {"eos_token_id": sorted(tokenizer.eos_ids), "torch_dtype": checkpoint_dtype(source).name}
    (target / "config.json").write_text(json.dumps(config, indent=2))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a model's folder (safetensors or Orbax), or a GGUF file")
    parser.add_argument("target", type=Path, help="the folder to make")
    parser.add_argument("--to", choices=("orbax", "safetensors"), default="orbax")
    args = parser.parse_args(argv)
    try:
        convert(args.source, args.target, args.to, use_tqdm=True)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
