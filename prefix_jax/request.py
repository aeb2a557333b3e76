"""What a caller asks for (frozen), one generation in progress (mutable), and what the caller gets back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from prefix_jax.output_text import OutputText
    from prefix_jax.prefix_cache import HitEnd, PageTable
    from prefix_jax.prefix_pool import Prefix
    from prefix_jax.token_rules import TokenRules

MAX_FLOAT32 = 3.4e38
MAX_LOGPROBS, MAX_BIASES = 20, 512  # as the kernels have them
CACHE_MODES = ("readwrite", "read", "write", "off")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. Names and meanings are vLLM's.

    n: answers to one prompt, which share its pages, and at temperature 0 are the same; best_of is refused.
    temperature: 0 is greedy; others are taken as they stand, also below 0.01, to which vLLM raises them. top_k: 0, -1
    or None is off. top_p: in (0, 1]; the smallest set of tokens of at least this mass. min_p: in [0, 1]; tokens at
    least so many times as likely as the likeliest. seed: None or -1 draws a fresh one for each request; the n answers
    differ. A positive presence_penalty or frequency_penalty (in [-2, 2]) lowers the scores of tokens of the output, a
    repetition_penalty over 1 those of prompt and output. logit_bias: what is added to the scores of tokens, within
    [-100, 100]. allowed_token_ids: no others. bad_words: texts whose tokens never follow one another in the output,
    with a space in front and without. Where all of these leave no token, the answer ends with "length" and says so.
    logits_processors: of those that the engine was built with, by name or themselves; they come last.

    max_tokens: None is as many as the model's context and the pool take; 0 only scores the prompt. min_tokens: no
    end token before, with ignore_eos neither, no stop string up to there; the room for the answer ends it all the
    same. stop: strings that end the output. stop_token_ids: tokens that end it, and stay in the ids. With
    include_stop_str_in_output what ends it is part of its text. ignore_eos: go on after the model's own end tokens.

    logprobs: with each token its log-probability and those of so many likeliest ones (at most 20), before all of the
    above. prompt_logprobs: the same for the prompt's tokens; the positions before them are computed for that, on top of
    the K and V that are cached. detokenize: False gives no text, of these tokens neither. skip_special_tokens: leave
    them out of it. spaces_between_special_tokens: False puts none around those that are in it.

    Raises ValueError for a value out of range, TypeError for one of the wrong kind.
    """

    n: int = 1
    best_of: None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None  # kept as pairs
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logits_processors: tuple[str | Callable, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.best_of is not None:
            raise ValueError(f"best_of is not supported, got {self.best_of!r}: ask for n answers and choose among them")
        for name in ("stop", "bad_words", "logits_processors"):
            value = getattr(self, name)
            is_one = isinstance(value, str) or callable(value)
            object.__setattr__(self, name, (value,) if is_one else _as_tuple(name, value))
            for text in getattr(self, name):
                if name == "logits_processors" and callable(text):
                    continue
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{name} must be non-empty strings, got {text!r}")
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name a token, or be None for all")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                require_number(name, token, Integral)
            if getattr(self, name):
                object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.top_k is None:
            object.__setattr__(self, "top_k", 0)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, kind, low, high, allowed in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            require_number(name, value, kind)
            value = int(value) if kind is Integral else float(value)  # NumPy's would wrap around in the first sum
            object.__setattr__(self, name, value)
            if not low <= value <= high or (value == low and allowed.startswith("in (")):
                raise ValueError(f"{name} must be {allowed}, got {value}")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens must be at least 1, got 0; 0 is for prompt_logprobs alone")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop strings need the text, got detokenize=False and stop={self.stop!r}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias must have at most {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """What a checkpoint's generation_config.json states of these; its do_sample is not read, as in vLLM."""
        stated = {_RENAMED.get(name, name): config.get(name) for name in _IN_GENERATION_CONFIG}
        return cls(**{name: value for name, value in stated.items() if value is not None})

    @property
    def has_rules(self) -> bool:
        """Whether it changes the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        others = self.logit_bias, self.allowed_token_ids, self.bad_words, self.logits_processors, self.min_tokens
        return penalties != (0, 0, 1) or any(others)


_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
_IN_GENERATION_CONFIG = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_new_tokens",
)  # fmt: skip
_RENAMED = {"max_new_tokens": "max_tokens"}
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_RANGES = (  # name, kind, least, most, in words
    ("n", Integral, 1, 2**16, "in [1, 65536]"),
    ("presence_penalty", Real, -2, 2, "in [-2, 2]"),
    ("frequency_penalty", Real, -2, 2, "in [-2, 2]"),
    ("repetition_penalty", Real, 0, MAX_FLOAT32, "in (0, 3.4e38]"),
    ("temperature", Real, 0, MAX_FLOAT32, "at least 0 and a finite float32"),
    ("top_p", Real, 0, 1, "in (0, 1]"),
    ("top_k", Integral, -1, 2**31 - 1, "-1 or 0, for off, or a positive int32"),
    ("min_p", Real, 0, 1, "in [0, 1]"),
    ("seed", Integral, 0, 2**64 - 1, "-1, for none, or in [0, 2**64)"),
    ("max_tokens", Integral, 0, 2**31 - 1, "at least 1 and below 2**31"),
    ("min_tokens", Integral, 0, 2**31 - 1, "at least 0 and below 2**31"),
    ("logprobs", Integral, 0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
    ("prompt_logprobs", Integral, 0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
)


def _as_biases(biases: Mapping | tuple | None) -> tuple[tuple[int, float], ...]:
    """Token ids may come as strings, as JSON has them; vLLM's clamp."""
    if biases is not None and not isinstance(biases, Mapping | tuple):
        raise TypeError(f"logit_bias must be a dict of token id to bias, got {biases!r}")
    clamped = {}
    for token, bias in dict(biases or ()).items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        require_number("a token in logit_bias", token, Integral)
        require_number(f"the bias of token {token}", bias, Real)
        if not abs(bias) <= MAX_FLOAT32:
            raise ValueError(f"the bias of token {token} must be finite, got {bias}")
        clamped[int(token)] = min(100.0, max(-100.0, float(bias)))
    return tuple(clamped.items())


def _as_tuple(name: str, value: Iterable | None) -> tuple:
    if value is not None and not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list or None, got {value!r}")
    return tuple(() if value is None else value)


def require_number(name: str, value: object, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        what = "an integer" if kind is Integral else "a number"
        raise TypeError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True)
class Request:
    """What a caller asked for. `max_len` bounds prompt and output together; `prefix_pos` marks the first so many tokens
    as a prefix to keep; equal `cache_salt`s share cached pages. cache_mode: whether it takes pages that are in the
    cache ("read"), leaves its own there ("write"), both or neither ("readwrite", "off"). With a higher
    `priority` it starts sooner under the policy of that name, and its pages are evicted later; `ttl` seconds after its
    end they are evicted first. The prompt's tokens from `score_from` (at least 1) on get log-probabilities. With
    `streams` there are results before the last."""

    request_id: str
    prompt_token_ids: array | tuple[int, ...]
    sampling: SamplingParams
    max_len: int
    prompt: str | None = None
    prefix_pos: int = 0
    cache_salt: str | None = None
    cache_mode: str = "readwrite"
    priority: int = 0
    ttl: float | None = None
    score_from: int | None = None
    streams: bool = False
    arrival_time: float = field(default_factory=time.monotonic)

    @property
    def reads(self) -> bool:
        return self.cache_mode in ("readwrite", "read")

    @property
    def writes(self) -> bool:
        return self.cache_mode in ("readwrite", "write")


class Sequence:
    """One generation in progress: answer `index` to its request.

    Positions [0, computed_len) have their keys and values in the store once the steps dispatched so far have run.
    `tokens` holds what the host knows; `pending` counts the tokens sampled by steps whose results the host has not
    read: 1 while a step is in flight, 2 for the moment in which the next one is planned already. The prompt's tokens
    before `scored_len` need no log-probabilities, or a step dispatched so far yields them.
    """

    __slots__ = (
        "request", "tokens", "prompt_len", "order", "seed", "index", "leader", "computed_len", "scored_len", "pending",
        "row", "table", "prefixes", "planned_step", "num_cached_tokens", "num_published_tokens", "hit_end", "rules",
        "first_token_time", "finished_time", "finish_reason", "stop_reason", "logprobs", "cumulative_logprob",
        "prompt_logprobs", "text", "num_given", "num_unfinished", "due", "turn", "prompt_list",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, seed: int, index: int = 0, leader: Sequence | None = None):
        self.request = request
        self.tokens = array("i", request.prompt_token_ids)
        self.prompt_len = len(request.prompt_token_ids)
        self.order = order  # of arrival
        self.seed = seed
        self.index = index
        self.leader = leader  # the first sequence of the request: its prompt's pages are shared
        self.computed_len = 0
        self.scored_len = self.prompt_len if request.score_from is None or leader else request.score_from
        self.pending = 0
        self.row: int | None = None  # of the device's page table, while running
        self.table: PageTable | None = None
        self.prefixes: list[Prefix] = []  # declared ones that it begins with, while running
        self.planned_step = -1  # the last step plan that holds a chunk of this sequence
        self.num_cached_tokens: int | None = None  # at the first admission
        self.num_published_tokens = 0
        self.hit_end: HitEnd | None = None  # of the first admission
        self.rules: TokenRules | None = None  # what changes its logits
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []  # of the output, where asked for
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens from score_from on
        self.text: OutputText | None = None  # with stop strings, or while it streams
        self.num_unfinished = 0  # answers to its request, where it leads them
        self.num_given = 0  # tokens of the output that a result had, while it streams
        self.due = 0  # the start, counting all sequences', that a fair policy gives it at the latest
        self.turn: int | None = None  # in the forecast of its batch
        self.prompt_list: list[int] | None = None

    def reset(self) -> None:
        """Forgets all that is on the device, as if it had just arrived with the tokens it has."""
        self.computed_len = self.pending = 0
        if self.is_scoring:
            self.scored_len = self.request.score_from + len(self.prompt_logprobs)
        self.row = self.table = None
        self.prefixes = []
        self.planned_step = -1  # steps are counted anew
        self.turn = None

    @property
    def length(self) -> int:
        """Positions that have a token, known to the host or still in flight."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions to compute next; the last token of all needs none, since nothing is sampled after it."""
        return min(len(self.tokens) + self.pending, self.request.max_len - 1) - self.computed_len

    @property
    def is_scoring(self) -> bool:
        """Whether tokens of its prompt get log-probabilities."""
        return self.request.score_from is not None and self.leader is None

    @property
    def next_read(self) -> int:
        """The first position still to be computed whose logits are read."""
        return (self.scored_len if self.scored_len < self.prompt_len else self.length) - 1

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()

    def list_prompt(self) -> list[int]:
        """The prompt's tokens, made once: to make 8,208 takes 134 µs, to copy them 11."""
        leader = self.leader or self
        if leader.prompt_list is None:
            leader.prompt_list = leader.tokens[: leader.prompt_len].tolist()
        return leader.prompt_list


class TokenLogprobs(NamedTuple):
    """Of one position: its token's log-probability and how many are likelier, plus one; the likeliest tokens' ids and
    log-probabilities."""

    token: int
    logprob: float
    rank: int
    top_tokens: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class Logprob:
    """What vLLM calls so: of one token at one position. rank: how many are likelier, plus one."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # the position's own token first, then the likeliest


@dataclass
class CompletionOutput:
    """One answer. finish_reason: "stop", "length", "abort", or "error" for a request that was refused.
    stop_reason: the stop string or token that ended it, None for the tokenizer's own EOS token; for "length", a
    sentence if it was not max_tokens.
    cumulative_logprob: the sum over its tokens, where logprobs were asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """The result of one request. `num_cached_tokens` of the prompt were found in the prefix cache, and `hit_end` says
    why no more were; `num_published_tokens` of prompt and output were put there. `prompt_logprobs`, where asked for,
    has an entry for each of the prompt's tokens, None for the first and all others that were not asked for. `seed` is
    the one that was used; `error` says why a refused request was. While a request streams, only its last result is
    `finished`, and their answers have what is new: tokens, their log-probabilities, and text that is certain."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_published_tokens: int = 0
    hit_end: HitEnd | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    error: str | None = None
    finished: bool = True
    index: int = 0  # of its prompt in the call


def refused_output(request_id: str, prompt: str | None, error: str) -> RequestOutput:
    """Of a request that did not run, or whose answer cannot be given."""
    return RequestOutput(request_id, prompt, [], [CompletionOutput(0, "", [], "error")], error=error)
