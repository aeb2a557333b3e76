"""Beam search over an engine that takes prompts: every step asks for the likeliest next tokens of all beams, which the
prefix cache makes cheap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING

from prefix_jax.request import MAX_LOGPROBS, Request, SamplingParams, require_number

if TYPE_CHECKING:
    from prefix_jax.llm import LLM


@dataclass(frozen=True)
class BeamSearchParams:
    """beam_width: answers kept at each step, at most 10. max_tokens: of an answer. ignore_eos: no answer ends early.
    temperature: 0, since candidates are the likeliest tokens. length_penalty: answers rank by log-probability /
    tokens ** length_penalty; 0 favours short ones, 1 is the mean.

    Raises ValueError for a value out of range, TypeError for one of the wrong kind."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        require_number("beam_width", self.beam_width, Integral)
        require_number("max_tokens", self.max_tokens, Integral)
        if not 1 <= self.beam_width <= MAX_LOGPROBS // 2:
            raise ValueError(f"beam_width must be in [1, {MAX_LOGPROBS // 2}], got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        require_number("length_penalty", self.length_penalty, Real)
        if not isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty}")
        if self.temperature != 0:
            raise ValueError(f"temperature must be 0: beams draw nothing, got {self.temperature}")


@dataclass(frozen=True)
class Beam:
    """One answer: `tokens` of prompt and answer, the sum of the answer's log-probabilities, and once it is complete why
    it ended and its text."""

    tokens: list[int]
    prompt_len: int
    cum_logprob: float = 0.0
    finish_reason: str | None = None
    text: str = ""

    @property
    def token_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    prompt_token_ids: list[int]
    sequences: list[Beam]


def beam_search(llm: LLM, requests: list[Request], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """For each request's prompt the `beam_width` best answers found; all else is as the request has it."""
    width, eos_ids = params.beam_width, llm.engine.eos_ids
    # Twice as many candidates as beams: if all that end are among the best, the beams still go on.
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)
    beams = [[Beam(list(request.prompt_token_ids), len(request.prompt_token_ids))] for request in requests]
    ended: list[list[Beam]] = [[] for _ in requests]
    longest = min(llm.engine.max_model_len, llm.engine.runner.num_pages * llm.engine.config.page_size + 1)
    for _ in range(params.max_tokens):
        asked = [(which, beam) for which, own in enumerate(beams) for beam in own if len(beam.tokens) < longest]
        if not asked:
            break
        steps = {
            index: replace(
                requests[which],
                request_id=llm.reader.new_id("beam"),
                prompt_token_ids=tuple(beam.tokens),
                sampling=ask,
                max_len=len(beam.tokens) + 1,
            )
            for index, (which, beam) in enumerate(asked)
        }
        candidates: dict[int, list[Beam]] = {which: [] for which, _ in asked}  # the others have no room
        outputs = {output.index: output for output in llm._run(steps)}
        for index, (which, beam) in enumerate(asked):
            (answer,) = outputs[index].outputs
            if not answer.logprobs:
                raise RuntimeError(f"a beam was not computed: {outputs[index].error or answer.finish_reason}")
            for token, entry in answer.logprobs[0].items():
                ends = token in eos_ids and not params.ignore_eos
                tokens, logprob = [*beam.tokens, token], beam.cum_logprob + entry.logprob
                longer = Beam(tokens, beam.prompt_len, logprob, "stop" if ends else None)
                (ended if ends else candidates)[which].append(longer)
        for which, own in candidates.items():
            beams[which] = sorted(own, key=lambda beam: -beam.cum_logprob)[:width]

    def rank(beam: Beam) -> float:
        num_tokens = len(beam.token_ids) - (beam.finish_reason == "stop")
        return beam.cum_logprob / max(num_tokens, 1) ** params.length_penalty

    best = (sorted(own + others, key=rank)[::-1][:width] for own, others in zip(beams, ended, strict=True))
    return [
        BeamSearchOutput(list(request.prompt_token_ids), [_spelled(llm, beam) for beam in chosen])
        for request, chosen in zip(requests, best, strict=True)
    ]


def _spelled(llm: LLM, beam: Beam) -> Beam:
    token_ids = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    has_text = llm.tokenizer is not None and token_ids
    text = llm.tokenizer.decode_output(beam.tokens[: beam.prompt_len], token_ids) if has_text else ""
    return replace(beam, finish_reason=beam.finish_reason or "length", text=text)
