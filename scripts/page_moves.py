"""Times what is instead of computing a prefix again: loading it from disk, and bringing it back from host memory, from
which length on that is faster.

Bytes of K and V over a rate of copying, against floating-point operations over a rate of products; below the break-even
both are hidden in the time of a step that does next to nothing.
"""

import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from render_results import Figure

from prefix_jax import LLM, SamplingParams
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.saved_prefixes import SavedPrefix, load_prefixes, save_prefixes

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def seconds(run: Callable[[], object], prepare: Callable[[], object], repeats: int = 5) -> list[float]:
    """Of `run` alone, until the device is done; the first, which may compile, is not counted."""
    times = []
    for _ in range(repeats + 1):
        prepare()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times[1:]


def page_move_figures(config: LlamaConfig, length: int, folder: str | None) -> list[Figure]:
    """For random weights of these shapes, and a prefix of `length` that is saved below `folder`."""
    llm = LLM(
        config, load_format="dummy", num_pages=length // 8 + 64, max_model_len=length + 64, max_num_seqs=1,
        max_num_batched_tokens=length, host_memory_gib=4, use_tqdm=False,
    )  # fmt: skip
    engine = llm.engine
    tokens = np.random.default_rng(0).integers(4, llm.model_config.vocab_size, length + 1).tolist()
    one = SamplingParams(temperature=0, max_tokens=1)

    def answer(count: int) -> None:
        llm.generate([tokens[: count + 1]], one, use_tqdm=False)

    def to_host() -> None:
        while node := engine.cache.queue.pop():
            engine.cache._evict(node)
        engine.spill()
        jax.block_until_ready([entry.values for entry in engine.tier.entries])

    computed, returned = {}, {}
    for count in (count for count in LENGTHS if count <= length):
        computed[count] = seconds(lambda count=count: answer(count), llm.reset_prefix_cache)
        answer(count)
        returned[count] = seconds(lambda count=count: answer(count), to_host)
    folder = tempfile.mkdtemp(dir=folder)
    prefixes = [SavedPrefix("prefix", array("i", tokens[:length]))]

    def load() -> None:
        load_prefixes(folder, engine)
        jax.block_until_ready(engine.runner.store)

    whole = np.asarray(engine.runner.read_slots(np.arange(length, dtype=np.int32)))
    alone = Path(folder) / "alone"
    plain = seconds(lambda: (alone.write_bytes(whole.view(np.uint8).data), np.fromfile(alone, np.uint8)), lambda: None)
    alone.unlink()
    answer(length)
    saves = seconds(lambda: save_prefixes(folder, engine, prefixes), lambda: None)
    loads = seconds(load, llm.reset_prefix_cache)
    shutil.rmtree(folder)

    again = statistics.median(computed[length])
    both = statistics.median(saves) + statistics.median(loads)
    even = next(
        (count for count in computed if statistics.median(returned[count]) < statistics.median(computed[count])), 0
    )
    rows = [
        Figure(f"computing {length} positions ÷ saving and loading them", again / both, "x", 1, 5, "higher"),
        Figure.median(f"computing {length} positions", computed[length], "s"),
        Figure.median(f"saving {length} positions", saves, "s"),
        Figure.median(f"loading {length} positions", loads, "s"),
        Figure.median(f"{whole.nbytes:,} bytes into a file on the same disk and back, and nothing else", plain, "s"),
        Figure("positions from which host memory beats computing, 0: none measured", even, ""),
    ]
    for count in computed:
        ratio = statistics.median(computed[count]) / statistics.median(returned[count])
        rows.append(Figure(f"computing {count} positions ÷ from host memory", ratio, "x", better="higher"))
    return rows
