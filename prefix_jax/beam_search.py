"""Beam search over an engine that takes prompts: every step asks for the likeliest next tokens of all beams, which the
prefix cache makes cheap."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefix_jax.request import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from prefix_jax.llm import LLM


@dataclass(frozen=True)
class BeamSearchParams:
    """beam_width: answers kept at each step, at most 10. max_tokens: of an answer. ignore_eos: no answer ends early.
    length_penalty: answers rank by log-probability / tokens ** length_penalty; 0 favours short ones, 1 is the mean."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_LOGPROBS // 2:
            raise ValueError(f"beam_width must be in [1, {MAX_LOGPROBS // 2}], got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True)
class Beam:
    """One answer: its tokens, the sum of their log-probabilities, and once it is complete why it ended and its text."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    text: str = ""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    prompt_token_ids: list[int]
    beams: list[Beam]


def beam_search(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """For each prompt the `beam_width` best answers found."""
    width, eos_ids = params.beam_width, llm.engine.eos_ids
    # Twice as many candidates as beams: if all that end are among the best, the beams still go on.
    ask = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True, detokenize=False)
    beams = [[Beam()] for _ in prompts]
    ended: list[list[Beam]] = [[] for _ in prompts]
    longest = llm.engine.max_model_len
    for _ in range(params.max_tokens):
        asked = [
            (which, beam)
            for which, own in enumerate(beams)
            for beam in own
            if len(prompts[which]) + len(beam.token_ids) < longest
        ]
        if not asked:
            break
        outputs = llm.generate([prompts[which] + beam.token_ids for which, beam in asked], ask, use_tqdm=False)
        candidates: list[list[Beam]] = [[] for _ in prompts]
        for (which, beam), output in zip(asked, outputs, strict=True):
            (likeliest,) = output.outputs[0].logprobs
            for token, entry in likeliest.items():
                ends = token in eos_ids and not params.ignore_eos
                longer = Beam(
                    [*beam.token_ids, token], beam.cumulative_logprob + entry.logprob, "stop" if ends else None
                )
                (ended if ends else candidates)[which].append(longer)
        beams = [sorted(own, key=lambda beam: -beam.cumulative_logprob)[:width] for own in candidates]

    def rank(beam: Beam) -> float:
        num_tokens = len(beam.token_ids) - (beam.finish_reason == "stop")
        return beam.cumulative_logprob / max(num_tokens, 1) ** params.length_penalty

    return [
        BeamSearchOutput(prompt, [_spelled(llm, prompt, beam) for beam in sorted(own + others, key=rank)[::-1][:width]])
        for prompt, own, others in zip(prompts, beams, ended, strict=True)
    ]


def _spelled(llm: LLM, prompt: list[int], beam: Beam) -> Beam:
    stops = beam.finish_reason == "stop"
    token_ids = beam.token_ids[:-1] if stops else beam.token_ids
    text = llm.tokenizer.decode_output(prompt, token_ids) if llm.tokenizer is not None else ""
    return Beam(beam.token_ids, beam.cumulative_logprob, beam.finish_reason or "length", text)
