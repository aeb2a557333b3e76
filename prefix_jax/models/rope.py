"""Rotary positions (RoPE, Su et al., 2021) and their scalings: from the keys of a Hugging Face config to one divisor of
each frequency."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Divisors = tuple[float, ...]


@dataclass(frozen=True)
class RopeByLength:
    """A scaling that depends on how long sequences may become. It is settled once, before the first key is cached:
    all keys must be turned alike.

    Up to `original` positions the frequencies are divided by `short`, beyond by `long`, or with `factor` theta grows;
    `longest` positions are the limit.
    """

    original: int
    longest: int
    factor: float | None = None  # type dynamic
    short: Divisors | None = None  # type longrope
    long: Divisors | None = None

    def settled(self, length: int, theta: float, head_dim: int) -> dict[str, Any]:
        """`max_position`, `rope_theta` and `rope_divisors` where no sequence has more than `length` positions."""
        length = min(length, self.longest)
        if self.factor is None:
            divisors = self.short if length <= self.original else self.long
        else:
            growth = self.factor * max(length, self.original) / self.original - (self.factor - 1)
            theta, divisors = theta * growth ** (head_dim / (head_dim - 2)), None
        return {"max_position": length, "rope_theta": theta, "rope_divisors": divisors, "rope_by_length": None}


def rope_settings(rope: Mapping[str, Any], theta: float, head_dim: int, max_position: int) -> dict[str, Any]:
    """What a model's config takes from the RoPE part of a config.json: rope_theta, rope_divisors, rope_amplitude,
    rope_by_length and max_position, as far as they are not the defaults. ValueError names an unknown type or a key
    that is missing."""
    by_layer_type = any(isinstance(value, Mapping) for value in rope.values())
    kind = "by layer type" if by_layer_type else rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"unknown RoPE type {kind!r}; known: {', '.join(_KINDS)}")
    if kind == "default" and (factor := rope.get("factor")) not in (None, 1):
        raise ValueError(f"RoPE has the factor {factor!r}, but no type; known: {', '.join(_KINDS)}")
    keys, settings_of = _KINDS[kind]
    if missing := [key for key in keys if not rope.get(key)]:
        raise ValueError(f"RoPE type {kind} lacks {', '.join(missing)}")
    for key, value in rope.items():
        if key in _POSITIVE and value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise ValueError(f"RoPE type {kind} wants a positive {key}, got {value!r}")
    return {"rope_theta": theta, "max_position": max_position} | settings_of(rope, theta, head_dim, max_position)


def plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, float64 [D/2]."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def _default(rope, theta, head_dim, max_position):
    return {}


def _linear(rope, theta, head_dim, max_position):
    """All frequencies are slowed alike."""
    factor = rope["factor"]
    return {"rope_divisors": (float(factor),) * (head_dim // 2), "max_position": int(max_position * factor)}


def _llama3(rope, theta, head_dim, max_position):
    """Long wavelengths are slowed by `factor`, short ones kept, a ramp in between."""
    factor, low, high, original = (rope[key] for key in _KINDS["llama3"][0])
    if low >= high:
        raise ValueError(f"RoPE type llama3 wants low < high frequency factor, got {dict(rope)}")
    turns = original * plain_frequencies(theta, head_dim) / (2 * np.pi)  # in the original context
    return {"rope_divisors": _blend(np.clip((turns - low) / (high - low), 0.0, 1.0), factor)}


def _yarn(rope, theta, head_dim, max_position):
    """YaRN (Peng et al., 2023): a ramp over the index of the frequency, and a sharper softmax."""
    factor = rope["factor"]
    original = rope.get("original_max_position_embeddings") or max_position

    def index(turns):  # of the frequency that turns so often in the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(rope.get("beta_fast") or 32), index(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / (last - first or 0.001), 0.0, 1.0)

    def sharpness(weight=1.0):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    amplitude = rope.get("attention_factor")
    if amplitude is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        amplitude = sharpness(over) / sharpness(under) if over and under else sharpness()
    longest = max(max_position, int(original * factor))
    return {"rope_divisors": _blend(1 - ramp, factor), "rope_amplitude": amplitude, "max_position": longest}


def _dynamic(rope, theta, head_dim, max_position):
    """Theta grows with the length, beyond the original one."""
    factor = float(rope["factor"])
    return {"rope_by_length": RopeByLength(max_position, int(max_position * factor), factor)}


def _longrope(rope, theta, head_dim, max_position):
    """LongRoPE (Ding et al., 2024): two lists of divisors, for short and for long contexts."""
    short, long = _divisors(rope, "short_factor", head_dim), _divisors(rope, "long_factor", head_dim)
    original = rope.get("original_max_position_embeddings") or max_position
    factor = rope.get("factor") or max_position / original
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if short == long:
        return {"rope_divisors": short, "rope_amplitude": amplitude}
    by_length = RopeByLength(original, max(max_position, original), short=short, long=long)
    return {"rope_by_length": by_length, "rope_amplitude": amplitude}


def _blend(kept: np.ndarray, factor: float) -> Divisors:
    """Divisors of frequencies of which a share is kept, and the rest slowed by `factor`."""
    return tuple((1 / (kept + (1 - kept) / factor)).tolist())


def _divisors(rope: Mapping[str, Any], key: str, head_dim: int) -> Divisors:
    values = rope[key]
    if not isinstance(values, Sequence) or len(values) != head_dim // 2 or not all(value > 0 for value in values):
        raise ValueError(f"RoPE type longrope wants {head_dim // 2} positive numbers as {key}, got {values!r:.100}")
    return tuple(float(value) for value in values)


_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast",
             "beta_slow", "attention_factor")  # fmt: skip
_LONGROPE = ("short_factor", "long_factor"), _longrope
_KINDS: dict[str, tuple[tuple[str, ...], Callable[..., dict[str, Any]]]] = {  # by name: what must be given, the rule
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), _llama3),
    "yarn": (("factor",), _yarn),
    "dynamic": (("factor",), _dynamic),
    "longrope": _LONGROPE,
    "su": _LONGROPE,  # its first name
}
