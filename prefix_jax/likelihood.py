"""How likely a continuation is behind a prompt: what evaluation harnesses ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefix_jax.request import RequestOutput
from prefix_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Score:
    """The log-probability of a continuation, and of each of its tokens. is_greedy: each was the likeliest."""

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]
    num_cached_tokens: int


def split_tokens(
    tokenizer: Tokenizer | None, prompt: str | Sequence[int], continuation: str | Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt and of its continuation. Two texts are encoded as one, spaces at the end of the prompt
    counting to the continuation, and cut where the prompt alone would end (the rule of lm-evaluation-harness), or
    before the last token if that takes the whole continuation in. An empty prompt is the BOS token. ValueError for what
    cannot be scored."""
    if isinstance(prompt, str) != isinstance(continuation, str):
        raise ValueError(
            f"prompt and continuation must both be text or both token ids, got {prompt!r}, {continuation!r}"
        )
    if not isinstance(prompt, str):
        head, tail = list(prompt), list(continuation)
    elif tokenizer is None:
        raise ValueError("text needs a tokenizer, and this model was loaded without one: give token ids")
    else:
        whole = tokenizer.encode(prompt + continuation, goes_on=True) if continuation else []
        cut = min(len(tokenizer.encode(prompt.rstrip(), goes_on=True)), max(len(whole) - 1, 0))
        head, tail = whole[:cut], whole[cut:]
        if not head and tokenizer.bos_id is not None:
            head = [tokenizer.bos_id]
    if not tail:
        raise ValueError(f"the continuation has no tokens, got {continuation!r}")
    if not head:
        raise ValueError("nothing stands before the continuation's first token, and there is no BOS token")
    return head, tail


def make_score(output: RequestOutput) -> Score:
    """Of a request that scored a continuation. RuntimeError if it did not come to its end."""
    (answer,) = output.outputs
    if answer.finish_reason != "length" or answer.stop_reason is not None:
        raise RuntimeError(
            f"a continuation was not scored: {output.error or answer.stop_reason or answer.finish_reason}"
        )
    begin = output.prompt_logprobs.count(None)
    token_ids = output.prompt_token_ids[begin:]
    entries = [found[token] for token, found in zip(token_ids, output.prompt_logprobs[begin:], strict=True)]
    logprobs = [entry.logprob for entry in entries]
    is_greedy = all(entry.rank == 1 for entry in entries)
    return Score(sum(logprobs), is_greedy, token_ids, logprobs, output.num_cached_tokens)
