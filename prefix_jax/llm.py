"""What a user holds: LLM(model).generate(prompts, sampling_params, prefix_pos)."""

from __future__ import annotations

import itertools
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from prefix_jax.engine import Engine, EngineConfig
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.request import CompletionOutput, Request, RequestOutput, SamplingParams
from prefix_jax.tokenizer import Tokenizer
from prefix_jax.weights import checkpoint_dtype, load_model, read_config

log = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model with its tokenizer, ready to answer many prompts that begin alike.

    model: a Hugging Face folder, a GGUF file, or with load_format="dummy" a config (random weights, for benchmarks).
    tokenizer: a folder or a GGUF file; None: the model's own, which a dummy model need not have. dtype: "auto" is
    float32 on a CPU and the checkpoint's on a GPU. device: a JAX platform ("cpu", "gpu"); None: JAX's default. All else
    is EngineConfig's. Raises ValueError for what does not fit together, before any weight is read where possible.
    """

    def __init__(
        self,
        model: str | os.PathLike | LlamaConfig | Mapping[str, Any],
        *,
        tokenizer: str | os.PathLike | None = None,
        load_format: str = "auto",
        dtype: str = "auto",
        device: str | None = None,
        tensor_parallel_size: int = 1,
        use_tqdm: bool = True,
        **engine: Any,
    ):
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size must be 1, got {tensor_parallel_size}")
        config = EngineConfig(**engine)
        self.model_config = read_config(model, load_format)
        self.tokenizer = _load_tokenizer(tokenizer, model, load_format)
        if self.tokenizer is not None:
            self.tokenizer.check_fits(self.model_config.vocab_size)
        self._device = _find_device(device)
        with self._on_device():
            self.dtype = _resolve_dtype(dtype, model, load_format)
            weights = load_model(
                model, self.model_config, dtype=self.dtype, load_format=load_format, seed=config.seed or 0
            )
            self.engine = Engine(weights, self.tokenizer, config, use_tqdm=use_tqdm)
        self._request_ids = itertools.count()
        self._warned_prefix_pos = False

    @property
    def stats(self) -> dict[str, float]:
        """Counts since the start: tokens computed, cached and adopted, pages, steps, preemptions; warm-up seconds."""
        engine = self.engine
        return {
            **engine.scheduler.counts,
            "steps": engine.num_steps,
            "evicted_pages": engine.cache.num_evicted,
            "host_hit_pages": engine.cache.num_returned,
            "host_pages": len(engine.tier or ()),
            "pinned_pages": engine.cache.num_pinned,
            "num_pages": engine.runner.num_pages,
            "num_buckets": len(engine.batcher.buckets),
            "warmup_seconds": engine.warmup_seconds,
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefix_pos: int | Sequence[int | None] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """One result for each prompt, in the order of the prompts.

        prompts: strings, lists of token ids, or dicts with `prompt`, `prompt_token_ids` or `messages` (which go through
        the chat template), and optionally `request_id` and `cache_salt`. sampling_params: one for all or one each.
        prefix_pos: the first so many tokens of a prompt (at most what it has) are a prefix to keep; one for all or one,
        or None, each. on_output is called with each result as it finishes.

        Everything is validated first. Bad prompts raise one ValueError that names each, and nothing is run; with
        on_error="return" the others run, and the bad ones have finish_reason "error" and say why in `error`.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
        prompts = _as_list(prompts)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(prompts), SamplingParams)
        positions = _one_each("prefix_pos", prefix_pos, len(prompts), (int, np.integer, type(None)))
        requests, errors = self._make_requests(prompts, params, positions)
        if errors and on_error == "raise":
            raise ValueError(_describe(errors, len(prompts)))
        results = {index: _refused(prompts[index], error) for index, error in errors.items()}
        for index in sorted(results) if on_output else ():
            on_output(results[index])
        good = {request.request_id: index for index, request in requests.items()}
        with tqdm(total=len(good), desc="generating", unit="req", disable=not use_tqdm) as progress:
            for output in self._run([requests[i] for i in good.values()]):
                results[good[output.request_id]] = output
                progress.update()
                if on_output:
                    on_output(output)
        return [results[index] for index in range(len(prompts))]

    def abort(self, request_id: str) -> None:
        """Ends a request that is running in another thread; its output so far is returned with reason "abort"."""
        self.engine.abort(request_id)

    def delete_prefix(self, tokens: Sequence[int], cache_salt: str | None = None) -> bool:
        """Takes back what `prefix_pos` declared for exactly these tokens: their pages are no longer kept. False if
        nothing was declared for them, or it has lapsed."""
        return self.engine.prefixes.delete(array("i", tokens), cache_salt)

    def reset_prefix_cache(self) -> None:
        """Forgets all declared prefixes and every cached page that no running request reads."""
        self.engine.prefixes.clear()
        self.engine.cache.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request]):
        """Yields each output as it finishes. Left early, by an error or an interrupt, it leaves no request behind."""
        open_ids = set()
        try:
            with self._on_device():
                for request in requests:
                    self.engine.add(request)
                    open_ids.add(request.request_id)
                while open_ids:
                    for output in self.engine.step():
                        open_ids.discard(output.request_id)
                        yield output
        finally:
            for request_id in open_ids:
                self.engine.abort(request_id)
            with self._on_device():
                while open_ids and self.engine.has_work:
                    self.engine.step()

    def _on_device(self):
        return jax.default_device(self._device) if self._device else nullcontext()

    def _make_requests(self, prompts, params, positions) -> tuple[dict[int, Request], dict[int, str]]:
        """The good requests by index, and what is wrong with the others."""
        requests: dict[int, Request] = {}
        errors: dict[int, str] = {}
        ids: set[str] = set()
        given = {str(prompt.get("request_id")) for prompt in prompts if isinstance(prompt, Mapping)}
        fresh_ids = (request_id for request_id in map(str, self._request_ids) if request_id not in given)
        for index, (prompt, sampling, position) in enumerate(zip(prompts, params, positions, strict=True)):
            try:
                request = self._make_request(prompt, sampling, position, fresh_ids)
                if request.request_id in ids or request.request_id in self.engine.sequences:
                    raise ValueError(f"request_id {request.request_id!r} is taken")
                ids.add(request.request_id)
                requests[index] = request
            except (ValueError, TypeError) as error:
                errors[index] = str(error)
        return requests, errors

    def _make_request(
        self, prompt: Prompt, sampling: SamplingParams, prefix_pos: int | None, fresh_ids: Iterator[str]
    ) -> Request:
        text, token_ids, options = self._read_prompt(prompt)
        vocab, longest = self.model_config.vocab_size, self.engine.max_model_len
        if not token_ids or text == "":  # a BOS token alone is nothing to continue
            raise ValueError("the prompt is empty: it has no tokens")
        if len(token_ids) > longest:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, max_model_len is {longest}")
        if bad := [token for token in token_ids if not 0 <= token < vocab]:
            raise ValueError(f"token ids must be in [0, {vocab}), got {bad[:3]}")
        if bad := [token for token in sampling.stop_token_ids if not 0 <= token < vocab]:
            raise ValueError(f"stop_token_ids must be in [0, {vocab}), got {bad[:3]}")
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model was loaded without one")
        if not isinstance(salt := options.get("cache_salt"), str | None):
            raise TypeError(f"cache_salt must be a string, got {salt!r}")
        self.engine.scheduler.check_fits(len(token_ids))
        max_len = longest if sampling.max_tokens is None else min(len(token_ids) + sampling.max_tokens, longest)
        return Request(
            request_id=str(options.get("request_id") or next(fresh_ids)),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            max_len=max_len,
            prompt=text,
            prefix_pos=self._clamp_prefix_pos(prefix_pos, len(token_ids)),
            cache_salt=salt,
        )

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], Mapping[str, Any]]:
        """(text, token ids, the dict's other entries)."""
        options: Mapping[str, Any] = {}
        if isinstance(prompt, Mapping):
            options = prompt
            known = ("prompt", "prompt_token_ids", "messages")
            given = [key for key in known if prompt.get(key) is not None]
            if len(given) != 1 and given != ["prompt", "prompt_token_ids"]:
                raise ValueError(
                    f"a prompt dict needs one of {', '.join(known)}, got {', '.join(map(str, prompt)) or 'none'}"
                )
            if given == ["messages"]:
                self._need_tokenizer()
                text = self.tokenizer.render_chat(prompt["messages"])
                return text, self.tokenizer.encode_rendered(text), options
            if "prompt_token_ids" in given:
                return prompt.get("prompt"), _token_list(prompt["prompt_token_ids"]), options
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            self._need_tokenizer()
            return prompt, self.tokenizer.encode(prompt), options
        return None, _token_list(prompt), options

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this model was loaded without one: give token ids")

    def _clamp_prefix_pos(self, prefix_pos: int | None, prompt_len: int) -> int:
        if prefix_pos is None:
            return 0
        if prefix_pos < 0:
            raise ValueError(f"prefix_pos must not be negative, got {prefix_pos}")
        if prefix_pos > prompt_len and not self._warned_prefix_pos:
            self._warned_prefix_pos = True
            log.warning(
                "prefix_pos %d is beyond a prompt of %d tokens: clamped, here and later", prefix_pos, prompt_len
            )
        return min(int(prefix_pos), prompt_len)


def _load_tokenizer(tokenizer, model, load_format: str) -> Tokenizer | None:
    if tokenizer is not None:
        return Tokenizer.load(tokenizer)
    if load_format != "dummy":
        return Tokenizer.load(model)
    return None


def _find_device(platform: str | None) -> jax.Device | None:
    try:
        return jax.devices(platform)[0] if platform else None
    except RuntimeError as error:
        raise ValueError(f"no device {platform!r}: JAX has {', '.join(map(str, jax.devices()))}") from error


def _resolve_dtype(dtype: str, model, load_format: str) -> jnp.dtype:
    if dtype == "auto":
        on_cpu = (jax.config.jax_default_device or jax.devices()[0]).platform == "cpu"
        return jnp.dtype(jnp.float32) if on_cpu else jnp.dtype(checkpoint_dtype(model, load_format))
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return jnp.dtype(DTYPES[dtype])


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a flat list of integers is a single prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def _one_each(name: str, value: Any, count: int, kind: type | tuple[type, ...]) -> list:
    """A value for all, or a list of one for each; ValueError or TypeError shows what was got."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    for index, entry in enumerate(values):
        if isinstance(entry, bool) or not isinstance(entry, kind):
            raise TypeError(f"{name}[{index}] is not usable: {entry!r}")
    return values


def _token_list(tokens: Any) -> list[int]:
    tokens = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    if isinstance(tokens, Sequence) and set(map(type, tokens)) == {int}:
        return list(tokens)  # nearly always: asking each token for its abstract class takes a second per million
    if not isinstance(tokens, Sequence) or any(isinstance(t, bool) or not isinstance(t, Integral) for t in tokens):
        raise TypeError(f"a prompt must be text, a list of token ids, or a dict of these, got {tokens!r:.80}")
    return [int(token) for token in tokens]


def _describe(errors: dict[int, str], count: int) -> str:
    lines = [f"  prompts[{index}]: {error}" for index, error in errors.items()]
    return "\n".join([f"{len(errors)} of {count} prompts cannot run; nothing was run:", *lines])


def _refused(prompt: Prompt, error: str) -> RequestOutput:
    is_dict = isinstance(prompt, Mapping)
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if is_dict else None
    request_id = str(prompt.get("request_id", "")) if is_dict else ""
    return RequestOutput(request_id, text, [], [CompletionOutput(0, "", [], "error")], error=error)
