"""Engines for tests: tiny models that listen to every token of their prompt, each engine built once a file of tests."""

import atexit
import contextlib
import functools
import random
import shutil
import tempfile
from array import array
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from oracle import OracleLlama
from tiny_models import tiny_config, tiny_weights, write_checkpoint

from prefix_jax import LLM, RequestOutput, SamplingParams
from prefix_jax.request import Request

SMALL = {"num_pages": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TINY = {"num_pages": 64, "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 16}
SLIM = {**TINY, "max_num_batched_tokens": 8, "num_pages": 24}
TIGHT = {"num_pages": 16, "page_size": 4, "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
WIDE = {"num_pages": 192, "max_model_len": 256, "max_num_seqs": 64, "max_num_batched_tokens": 512}
POISON = 1e4
SURE = 1e-3  # two logits closer than this may change places in float32


@functools.cache
def home() -> Path:
    """A folder for checkpoints and executables, removed at the end."""
    folder = tempfile.mkdtemp(prefix="prefix-jax-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


USUAL = {"model": {}, "engine": {}}  # of all models and engines here that say nothing else; a test may change it


def tiny_folder(**model) -> Path:
    """A checkpoint whose answers hang on every token of the prompt: attention is sharp, and heavy in the sum."""
    return _written(**{**USUAL["model"], **model})


@functools.cache
def _written(**model) -> Path:
    config = tiny_config(**model)
    weights = tiny_weights(config)
    for name in weights:
        if name.endswith("q_proj.weight"):
            weights[name] *= 4
        if name.endswith("o_proj.weight"):
            weights[name] *= 10
    if config["tie_word_embeddings"]:  # else every token would ask for itself again
        weights["model.embed_tokens.weight"] *= 0.05
        weights["model.norm.weight"] *= 10
    folder = home() / "-".join(["model", *(f"{key}_{value}" for key, value in model.items())])
    return write_checkpoint(folder, config, weights)


@functools.cache
def oracle_of(folder: Path) -> OracleLlama:
    return OracleLlama.from_folder(folder)


@contextlib.contextmanager
def compiling_once():
    """Engines that differ in their host half alone have the same executables: the second takes those of the first."""
    settings = {
        "jax_compilation_cache_dir": str(home() / "executables"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    _update(settings)
    try:
        yield
    finally:
        _update(before)


def _update(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.lru_cache(maxsize=24)  # some 900 memory maps each, see conftest.py
def _built(folder: Path, **options) -> LLM:
    with compiling_once():
        return LLM(folder, use_tqdm=False, **options)


def forget_engines() -> None:
    """The next engines are built anew, from the executables on disk."""
    _built.cache_clear()


def make_llm(folder: Path | None = None, **options) -> LLM:
    """An engine with an empty cache, counting from zero; built when first asked for."""
    llm = _built(folder or tiny_folder(), **{**SMALL, "check": True, **USUAL["engine"], **options})
    llm.engine.scheduler.max_num_batched_tokens = llm.engine.max_num_batched_tokens
    forget(llm)
    assert not llm.engine.sequences, "an earlier test left requests behind"
    return llm


def forget(llm: LLM) -> None:
    """Empties the cache and sets the counters to zero."""
    llm.reset_prefix_cache()
    assert len(llm.engine.cache.pool) == llm.engine.runner.num_pages, "at rest an empty cache holds no page"
    llm.engine.scheduler.counts.update({name: -count for name, count in llm.engine.scheduler.counts.items()})
    llm.engine.cache.num_evicted = 0


def greedy(max_tokens: int = 8, **params) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def generate(llm: LLM, prompts, params=None, **options) -> list[RequestOutput]:
    return llm.generate(prompts, params or greedy(), use_tqdm=False, **options)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def cached_of(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def check_greedy(outputs: list[RequestOutput], folder: Path | None = None, oracle: OracleLlama | None = None) -> None:
    """Every token is the oracle's choice after the tokens before it, or within `SURE` of it."""
    oracle = oracle or oracle_of(folder or tiny_folder())
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert answer
        logits = oracle.logits([*prompt, *answer][:-1])[len(prompt) - 1 :]
        short = logits.max(axis=-1) - logits[np.arange(len(answer)), answer]
        assert short.max() < SURE, (
            f"{output.request_id}: token {int(short.argmax())} of {answer} is {short.max()} short"
        )


def random_prompts(seed: int, *lengths: int, vocab_size: int = 300) -> list[list[int]]:
    """Prompts of these lengths without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab_size, length).tolist() for length in lengths]


def branches(rng: random.Random, seed: int, count: int, repeats: float) -> list[list[int]]:
    """Prompts that leave one of three stems somewhere; some repeat an earlier one."""
    stems, prompts = random_prompts(seed, 16, 33, 40), []
    for tail in random_prompts(100 + seed, *(rng.randrange(1, 9) for _ in range(count))):
        again = prompts and rng.random() < repeats
        stem = rng.choice(stems)
        prompts.append(list(rng.choice(prompts)) if again else stem[: rng.randrange(4, len(stem) + 1)] + tail)
    return prompts


def other_than(token: int) -> int:
    """An ordinary token that is not this one."""
    return 4 + (token + 1) % 290


class IdealCache:
    """What a cache that never evicts must find: tokens computed before, in full pages, exact to the token, all but the
    prompt's last."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.known: list[list[int]] = []

    def hits(self, prompt: list[int]) -> int:
        return max((min(_common(prompt, tokens), len(prompt) - 1) for tokens in self.known), default=0)

    def learn(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            computed = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
            self.known.append(computed[: len(computed) // self.page_size * self.page_size])


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def family(seed: int) -> list[list[int]]:
    """Prompts that branch off one of 40 tokens: inside its pages, at their edges, beyond its end."""
    (stem,) = random_prompts(seed, 40)
    tails = random_prompts(seed + 1, *([9] * 6))
    cuts = (5, 16, 31, 32, 33, 40)
    branches = [[*stem[:cut], other_than([*stem, 0][cut]), *tail] for cut, tail in zip(cuts, tails, strict=True)]
    return [stem, *branches, stem]


def check_alone(llm, prompts, params=None, folder=None) -> list[list[int]]:
    """Runs the prompts one after the other: the oracle's tokens, and exactly the ideal hits. Returns the tokens."""
    ideal, tokens = IdealCache(llm.engine.config.page_size), []
    for prompt in prompts:
        outputs = generate(llm, [prompt], params)
        expected = ideal.hits(prompt) if llm.engine.config.enable_prefix_caching else 0
        assert cached_of(outputs) == [expected]
        check_greedy(outputs, folder)
        ideal.learn(outputs)
        tokens += tokens_of(outputs)
    return tokens


def poison(llm, spare_pages=(), spare_slots=()) -> None:
    """Overwrites every slot of the store but these."""
    size = llm.engine.config.page_size
    slots = (llm.engine.runner.num_pages + 1) * size
    bad = np.ones(slots, bool)
    for page in spare_pages:
        bad[page * size : (page + 1) * size] = False
    bad[list(spare_slots)] = False
    overwrite = jax.jit(
        lambda store: jax.tree.map(lambda x: jnp.where(bad[:, None, None], jnp.full_like(x, POISON), x), store)
    )
    llm.engine.runner.store = overwrite(llm.engine.runner.store)


def pages_of(llm, tokens: list[int]) -> list[int]:
    """The pages that the cache has for the full pages of these tokens, but for the last token."""
    table = llm.engine.cache.open(array("i", tokens), publishes=False)
    pages = [node.page for node in table.nodes]
    llm.engine.cache.close(table)
    return pages


def add(llm, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    llm.engine.add(Request(request_id, tuple(prompt), params, len(prompt) + params.max_tokens))


def drain(llm, between=lambda: None, limit: int = 5000) -> dict[str, object]:
    """Steps until nothing is left, calling `between` before each; outputs by request id."""
    outputs = {}
    for _ in range(limit):
        if not llm.engine.has_work:
            return outputs
        between()
        llm.engine.step()
        outputs |= {output.request_id: output for output in llm.engine.ready}
        llm.engine.ready.clear()
    raise AssertionError(f"not done after {limit} steps: {llm.engine.scheduler.__dict__}")
