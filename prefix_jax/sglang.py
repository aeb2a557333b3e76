"""SGLang's offline interface over the same engine: `Engine(model_path=…).generate(prompt, sampling_params={…})`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple

from prefix_jax.engine_config import EngineConfig
from prefix_jax.llm import LLM
from prefix_jax.request import CompletionOutput, PositionLogprobs, RequestOutput, SamplingParams

SAMPLING = {  # SGLang's names that are not ours
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
OPTIONS = {
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "mem_fraction_static": "memory_fraction",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "random_seed": "seed",
    "tp_size": "tensor_parallel_size",
}
POLICIES = {"fcfs": "fifo", "lpm": "lpm", "dfs-weight": "dfs"}


class _Logprobs(NamedTuple):
    """What is asked of each token: how many of the likeliest, the prompt's first (-1: none of it), and its text."""

    num_top: int
    start: int
    spell: Callable[[int], str | None]


class Engine:
    """model_path and the options that have a counterpart here, by SGLang's names; all others are LLM's. ValueError
    names those that are neither."""

    def __init__(self, model_path: Any, *, disable_radix_cache: bool = False, **options: Any):
        known = {*OPTIONS, *inspect.signature(LLM).parameters, *EngineConfig.__dataclass_fields__} - {"model", "engine"}
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"unknown options of Engine: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        options = {OPTIONS.get(name, name): value for name, value in options.items()}
        if "schedule_policy" in options:
            options["schedule_policy"] = POLICIES.get(options["schedule_policy"], options["schedule_policy"])
        self.llm = LLM(model_path, enable_prefix_caching=not disable_radix_cache, **{"use_tqdm": False, **options})

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        return_text_in_logprobs: bool = False,
        stream: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """A dict with `text`, `output_ids` and `meta_info` for a prompt, or a list of them for several or for n > 1.
        Log-probabilities are (value, token, text or None); logprob_start_len: the prompt's, too, from behind this token
        on (when it streams, in the last dict). stream: instead, dicts whose text is all so far, with the `index` of the
        answer in that list. ValueError for what cannot run, before anything does."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give prompt or input_ids, and not both")
        given, kind = (prompt, "prompt") if input_ids is None else (input_ids, "prompt_token_ids")
        many = not isinstance(given, str) and not (len(given) and isinstance(given[0], Integral))
        prompts = [{kind: one, "score_from": max(logprob_start_len, 0) + 1} for one in (given if many else [given])]
        spell = self._spell if return_text_in_logprobs else lambda token: None
        asked = _Logprobs(top_logprobs_num, logprob_start_len, spell) if return_logprob else None
        if sampling_params is None or isinstance(sampling_params, Mapping):
            params = [_read_params(sampling_params or {}, asked)] * len(prompts)
        else:
            params = [_read_params(one, asked) for one in sampling_params]
        if stream:
            return self._stream(self.llm.stream(prompts, params), params, asked)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        answers = [_answer(output, one, asked) for output in outputs for one in output.outputs]
        return answers if many or len(answers) > 1 else answers[0]

    def flush_cache(self) -> None:
        """Forgets every cached page that no running request reads."""
        self.llm.reset_prefix_cache()

    def shutdown(self) -> None:
        """Nothing to end: the engine runs in this process. Its memory goes with it."""

    def _spell(self, token: int) -> str | None:
        tokenizer = self.llm.tokenizer
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    def _stream(
        self, deltas: Iterator[RequestOutput], params: list[SamplingParams], asked: _Logprobs | None
    ) -> Iterator[dict[str, Any]]:
        firsts = [0, *accumulate(one.n for one in params)]  # the first answer's number, by prompt
        so_far: dict[int, CompletionOutput] = {}
        for output in deltas:
            (new,) = output.outputs
            index = firsts[output.index] + new.index
            whole = so_far.get(index, CompletionOutput(new.index, "", [], None))
            so_far[index] = replace(
                new,
                text=whole.text + new.text,
                token_ids=whole.token_ids + new.token_ids,
                logprobs=None if new.logprobs is None else (whole.logprobs or []) + new.logprobs,
            )
            yield {**_answer(output, so_far[index], asked), "index": index}


def _read_params(given: Mapping[str, Any], asked: _Logprobs | None) -> SamplingParams:
    """None stands for SGLang's default, but for max_new_tokens, which has no limit then."""
    named = {SAMPLING.get(name, name): value for name, value in given.items() if value is not None}
    known = SamplingParams.__dataclass_fields__
    if unknown := [name for name in named if name not in known]:
        raise ValueError(f"unknown in sampling_params: {', '.join(unknown)}; known: {', '.join([*SAMPLING, *known])}")
    values = {"max_tokens": None if "max_new_tokens" in given else 128, **named}
    if asked is not None:
        values["logprobs"] = asked.num_top
    if values["max_tokens"] == 0 or (asked is not None and asked.start >= 0):
        values["prompt_logprobs"] = asked.num_top if asked is not None else 0
    return SamplingParams(**values)


def _answer(output: RequestOutput, answer: CompletionOutput, asked: _Logprobs | None) -> dict[str, Any]:
    reason: dict[str, Any] | None = None
    if answer.finish_reason is not None:
        detail = {"length": ("length", len(answer.token_ids)), "stop": ("matched", answer.stop_reason)}
        reason = {"type": answer.finish_reason, **dict([detail.get(answer.finish_reason, ("message", output.error))])}
        if reason == {"type": "stop", "matched": None}:
            reason["matched"] = answer.token_ids[-1]
    meta: dict[str, Any] = {
        "id": f"{output.request_id}-{answer.index}" if answer.index else output.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
    if asked is not None:
        start = asked.start if asked.start >= 0 else len(output.prompt_token_ids)
        _tell(meta, "input", output.prompt_token_ids[start:], (output.prompt_logprobs or [])[start:], asked)
        _tell(meta, "output", answer.token_ids, answer.logprobs or [], asked)
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _tell(
    meta: dict[str, Any], which: str, tokens: list[int], logprobs: list[PositionLogprobs | None], asked: _Logprobs
) -> None:
    """Of each token its log-probability, None for the first of a prompt, and where asked for the likeliest ones'."""
    meta[f"{which}_token_logprobs"] = [
        (found and found[token].logprob, token, asked.spell(token))
        for token, found in zip(tokens, logprobs, strict=False)
    ]
    if asked.num_top:
        likeliest = [found and sorted(found.items(), key=lambda entry: -entry[1].logprob) for found in logprobs]
        meta[f"{which}_top_logprobs"] = [
            found and [(of.logprob, token, asked.spell(token)) for token, of in found[: asked.num_top]]
            for found in likeliest
        ]
