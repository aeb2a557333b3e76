"""Sequences -> what a caller gets back: tokens as text, log-probabilities as vLLM spells them."""

from __future__ import annotations

from dataclasses import replace

from prefix_jax.prefix_cache import HitEnd
from prefix_jax.request import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    TokenLogprobs,
)
from prefix_jax.tokenizer import Tokenizer


class OutputMaker:
    """Knows how tokens read; without a tokenizer there is no text."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    def make(self, request: Request, answers: list[Sequence], *, finished: bool) -> RequestOutput:
        """Of all answers to a request, or of what is new in one of them."""
        leader = answers[0].leader or answers[0]
        scored = None
        if leader.is_scoring and finished:
            scored = [None] * leader.prompt_len
            for position, found in enumerate(leader.prompt_logprobs, start=request.score_from):
                scored[position] = self._spell_logprobs(found, request.sampling.detokenize)
        ended = [answer.finished_time for answer in answers if answer.finished_time is not None]
        return RequestOutput(
            request.request_id,
            request.prompt,
            [*leader.list_prompt()],  # each result's own
            [self._completion(answer) for answer in answers],
            num_cached_tokens=leader.num_cached_tokens or 0,
            num_published_tokens=sum(answer.num_published_tokens for answer in answers),
            hit_end=self.spell(leader.hit_end),
            prompt_logprobs=scored,
            metrics=RequestMetrics(request.arrival_time, leader.first_token_time, max(ended, default=None)),
            seed=leader.seed,
            finished=finished,
        )

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        """An answer, or where it streams what is new in it."""
        first = sequence.num_given
        token_ids = sequence.output_token_ids[first:]
        if sequence.request.streams:
            sequence.num_given += len(token_ids)
        sampling = sequence.request.sampling
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self._spell_logprobs(found, sampling.detokenize) for found in sequence.logprobs[first:]]
        return CompletionOutput(
            sequence.index,
            self._text(sequence),
            token_ids,
            sequence.finish_reason,
            sequence.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=sequence.cumulative_logprob if logprobs is not None else None,
        )

    def spell(self, end: HitEnd | None) -> HitEnd | None:
        """With its tokens as text."""
        if end is None or self.tokenizer is None or end.token is None:
            return end
        return replace(end, text=self._spell_token(end.token), cached_text=self._spell_token(end.cached_token))

    def _spell_token(self, token: int | None) -> str | None:
        if token is None or self.tokenizer is None:
            return None
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _spell_logprobs(self, found: TokenLogprobs, with_text: bool) -> PositionLogprobs:
        spell = self._spell_token if with_text else lambda token: None
        spelled = {found.token: Logprob(found.logprob, found.rank, spell(found.token))}
        likeliest = zip(found.top_tokens, found.top_logprobs, strict=True)
        for rank, (token, logprob) in enumerate(likeliest, start=1):
            if token not in spelled:
                spelled[token] = Logprob(logprob, rank, spell(token))
        return spelled

    def _text(self, sequence: Sequence) -> str:
        """All of it, or where it streams what is new and certain."""
        sampling = sequence.request.sampling
        if sequence.text is not None:
            if sequence.finish_reason is not None:
                sequence.text.finish()
            return sequence.text.take()
        token_ids = sequence.output_token_ids
        if sequence.finish_reason == "stop" and not sampling.include_stop_str_in_output:
            token_ids.pop()  # the token that ended it is no text
        if self.tokenizer is None or not token_ids or not sampling.detokenize:
            return ""
        return self.tokenizer.decode_output(
            sequence.request.prompt_token_ids,
            token_ids,
            sampling.skip_special_tokens,
            sampling.spaces_between_special_tokens,
        )
