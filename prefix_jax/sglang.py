"""SGLang's offline interface over the same engine: `Engine(model_path=…).generate(prompt, sampling_params={…})`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefix_jax.llm import LLM
from prefix_jax.request import CompletionOutput, RequestOutput, SamplingParams

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


class Engine:
    """model_path and the options that have a counterpart here, by SGLang's names; all others are LLM's."""

    def __init__(self, model_path: Any, *, disable_radix_cache: bool = False, **options: Any):
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
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """A dict with `text`, `output_ids` and `meta_info` for a prompt, or a list of them for several or for n > 1.
        stream: instead, dicts whose text is all so far, with the prompt's `index`."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give prompt or input_ids, and not both")
        prompts = input_ids if prompt is None else prompt
        many = not isinstance(prompts, str) and not isinstance(prompts[0], int)
        logprobs = top_logprobs_num if return_logprob else None
        asked = (
            [sampling_params] if isinstance(sampling_params, Mapping) or sampling_params is None else sampling_params
        )
        params = [_read_params(one or {}, logprobs) for one in asked]
        params = params if len(params) > 1 else params[0]
        if stream:
            return self._stream(prompts, params)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        answers = [_answer(output, one) for output in outputs for one in output.outputs]
        return answers if many or len(answers) > 1 else answers[0]

    def flush_cache(self) -> None:
        """Forgets every cached page that no running request reads."""
        self.llm.reset_prefix_cache()

    def shutdown(self) -> None:
        """Nothing to end: the engine runs in this process. Its memory goes with it."""

    def _stream(self, prompts: Any, params: Any) -> Iterator[dict[str, Any]]:
        so_far: dict[tuple[int, int], CompletionOutput] = {}
        for output in self.llm.stream(prompts, params):
            (new,) = output.outputs
            whole = so_far.setdefault((output.index, new.index), CompletionOutput(new.index, "", [], None))
            whole.text += new.text
            whole.token_ids += new.token_ids
            whole.logprobs = [*(whole.logprobs or ()), *new.logprobs] if new.logprobs is not None else None
            whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
            yield {**_answer(output, whole), "index": output.index}


def _read_params(asked: Mapping[str, Any], logprobs: int | None) -> SamplingParams:
    named = {SAMPLING.get(name, name): value for name, value in asked.items()}
    known = SamplingParams.__dataclass_fields__
    if unknown := [name for name in asked if SAMPLING.get(name, name) not in known]:
        raise ValueError(f"unknown in sampling_params: {', '.join(unknown)}; known: {', '.join([*SAMPLING, *known])}")
    return SamplingParams(**{"max_tokens": 128, "logprobs": logprobs, **named})


def _answer(output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    reason: dict[str, Any] | None = None
    if answer.finish_reason is not None:
        detail = {"length": ("length", len(answer.token_ids)), "stop": ("matched", answer.stop_reason)}
        reason = {"type": answer.finish_reason, **dict([detail.get(answer.finish_reason, ("message", output.error))])}
        if reason == {"type": "stop", "matched": None}:
            reason["matched"] = answer.token_ids[-1]
    meta: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
    if answer.logprobs is not None:
        own = [next(iter(found.items())) for found in answer.logprobs]
        meta["output_token_logprobs"] = [(entry.logprob, token, entry.decoded_token) for token, entry in own]
        meta["output_top_logprobs"] = [
            [(entry.logprob, token, entry.decoded_token) for token, entry in found.items()] for found in answer.logprobs
        ]
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}
