"""What every test gets: run-time checks of shapes and types, strict dtype promotion, the CPU, paths to real data."""

import gc
import os
import signal
from pathlib import Path

import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
# Not these: they judge what callers pass, and tests pass them nonsense on purpose.
OUTER_MODULES = ("request", "llm", "beam_search", "sglang")
INNER_MODULES = {
    f"prefix_jax.{path.stem}" for path in (ROOT / "prefix_jax").iterdir() if path.stem not in OUTER_MODULES
}

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background and xdist's workers ignore Ctrl-C
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is first imported
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float
install_import_hook([*INNER_MODULES, "pallas_kernels"], f"{__name__}.check_types")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from engines import forget_engines  # noqa: E402

from prefix_jax.default_model import default_model_path  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def compiled_code_of_one_file():
    """A compiled function holds several memory maps, and past 65,530 (vm.max_map_count) Linux gives a process no
    more: no executable outlives the file whose tests asked for it."""
    yield
    forget_engines()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def nobodys_memory_is_nan(monkeypatch):
    """Memory that a kernel is given before anybody has written it."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real models, tokenizers and traces that lies beside a development checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data is not at hand: no folder {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    try:
        return default_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
