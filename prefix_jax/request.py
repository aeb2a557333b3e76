"""What a caller asks for (frozen), one generation in progress (mutable), and what the caller gets back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefix_jax.prefix_cache import HitEnd, PageTable
    from prefix_jax.prefix_pool import Prefix

MAX_FLOAT32 = 3.4e38
CACHE_MODES = ("readwrite", "read", "write", "off")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. Names and meanings are vLLM's.

    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: in (0, 1]; the smallest set of tokens of at least this mass.
    seed: None draws a fresh one for each request. max_tokens: None is as many as the model's context and the pool take.
    stop: strings that end the output and are not part of it. stop_token_ids: tokens that end it, and stay in the ids.
    ignore_eos: go on after the model's own end tokens. skip_special_tokens: leave them out of the text.

    Raises ValueError for a value out of range, TypeError for one of the wrong kind.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        _require_number("temperature", self.temperature, Real)
        _require_number("top_p", self.top_p, Real)
        _require_number("top_k", self.top_k, Integral)
        if not 0 <= self.temperature <= MAX_FLOAT32:
            raise ValueError(f"temperature must be at least 0 and a finite float32, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not -1 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be -1 or 0 (off), or a positive int32, got {self.top_k}")
        if self.max_tokens is not None:
            _require_number("max_tokens", self.max_tokens, Integral)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None:
            _require_number("seed", self.seed, Integral)
            if not 0 <= self.seed < 2**64:
                raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be non-empty strings, got {text!r}")
        for token in self.stop_token_ids:
            _require_number("stop_token_ids", token, Integral)


def _as_tuple(name: str, value: Iterable | None) -> tuple:
    if value is not None and not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list or None, got {value!r}")
    return tuple(() if value is None else value)


def _require_number(name: str, value: object, kind: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        what = "an integer" if kind is Integral else "a number"
        raise TypeError(f"{name} must be {what}, got {value!r}")


@dataclass(frozen=True)
class Request:
    """What a caller asked for. `max_len` bounds prompt and output together; `prefix_pos` marks the first so many tokens
    as a prefix to keep; equal `cache_salt`s share cached pages. cache_mode: whether it takes pages that are in the
    cache ("read"), leaves its own there ("write"), both or neither ("readwrite", "off"). With a higher
    `priority` it starts sooner under the policy of that name, and its pages are evicted later; `ttl` seconds after its
    end they are evicted first."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_len: int
    prompt: str | None = None
    prefix_pos: int = 0
    cache_salt: str | None = None
    cache_mode: str = "readwrite"
    priority: int = 0
    ttl: float | None = None
    arrival_time: float = field(default_factory=time.monotonic)

    @property
    def reads(self) -> bool:
        return self.cache_mode in ("readwrite", "read")

    @property
    def writes(self) -> bool:
        return self.cache_mode in ("readwrite", "write")


class Sequence:
    """One generation in progress.

    Positions [0, computed_len) have their keys and values in the store once the steps dispatched so far have run.
    `tokens` holds what the host knows; `pending` counts the tokens sampled by steps whose results the host has not
    read: 1 while a step is in flight, 2 for the moment in which the next one is planned already.
    """

    __slots__ = (
        "request", "tokens", "order", "seed", "computed_len", "pending", "row", "table", "prefixes", "planned_step",
        "num_cached_tokens", "num_published_tokens", "hit_end",
        "first_token_time", "finished_time", "finish_reason", "stop_reason", "text", "due", "turn",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, seed: int):
        self.request = request
        self.tokens = array("i", request.prompt_token_ids)
        self.order = order  # of arrival
        self.seed = seed
        self.computed_len = 0
        self.pending = 0
        self.row: int | None = None  # of the device's page table, while running
        self.table: PageTable | None = None
        self.prefixes: list[Prefix] = []  # declared ones that it begins with, while running
        self.planned_step = -1  # the last step plan that holds a chunk of this sequence
        self.num_cached_tokens: int | None = None  # at the first admission
        self.num_published_tokens = 0
        self.hit_end: HitEnd | None = None  # of the first admission
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.text: str | None = None  # set early by a stop string
        self.due = 0  # the start, counting all sequences', that a fair policy gives it at the latest
        self.turn: int | None = None  # in the forecast of its batch

    def reset(self) -> None:
        """Forgets all that is on the device, as if it had just arrived with the tokens it has."""
        self.computed_len = self.pending = 0
        self.row = self.table = None
        self.prefixes = []
        self.planned_step = -1  # steps are counted anew
        self.turn = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def length(self) -> int:
        """Positions that have a token, known to the host or still in flight."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Positions to compute next; the last token of all needs none, since nothing is sampled after it."""
        return min(len(self.tokens) + self.pending, self.request.max_len - 1) - self.computed_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()


@dataclass
class CompletionOutput:
    """One answer. finish_reason: "stop", "length", "abort", or "error" for a request that was refused.
    stop_reason: the stop string or token that ended it; for "length", a sentence if it was not max_tokens."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """The result of one request. `num_cached_tokens` of the prompt were found in the prefix cache, and `hit_end` says
    why no more were; `num_published_tokens` of prompt and output were put there. `seed` is the one that was used;
    `error` says why a refused request was."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_published_tokens: int = 0
    hit_end: HitEnd | None = None
    metrics: RequestMetrics | None = None
    seed: int | None = None
    error: str | None = None
    finished: bool = True


def refused_output(request_id: str, prompt: str | None, error: str) -> RequestOutput:
    """Of a request that did not run, or whose answer cannot be given."""
    return RequestOutput(request_id, prompt, [], [CompletionOutput(0, "", [], "error")], error=error)
