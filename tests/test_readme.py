"""The README's Python runs as it stands there."""

import gc
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def one_engine_at_a_time():
    """On a CPU each takes a tenth of the host's memory."""
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=["generate", "prefixes", "answers", "own_jit"])
def test_python_in_the_readme_runs(default_model, block):
    exec(compile(block, str(README), "exec"), {})
