"""The text of one growing answer: in whole characters, up to a stop string, given out as it becomes certain."""

from __future__ import annotations

from collections.abc import Sequence

from prefix_jax.request import SamplingParams
from prefix_jax.tokenizer import IncrementalDecoder, Tokenizer


class OutputText:
    """What the tokens of one answer say. Push each but one that ends it, then `finish`."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams):
        self.sampling = sampling
        self.decoder = IncrementalDecoder(
            tokenizer, prompt_token_ids, sampling.skip_special_tokens, sampling.spaces_between_special_tokens
        )
        self.text = ""
        self.given = 0  # characters that `take` has returned
        self.num_tokens = 0
        self.finished = False

    def push(self, token: int) -> str | None:
        """The stop string that this token completed, if any: the text then ends there. None up to min_tokens."""
        before = len(self.text)
        self.add(token)
        return self._cut(before) if self.num_tokens > self.sampling.min_tokens else None

    def add(self, token: int) -> None:
        """Its text, whatever stop string it may complete."""
        self.text += self.decoder.push(token)
        self.num_tokens += 1

    def finish(self) -> None:
        """No token follows. A character that is still incomplete is given as its replacement, but for the prompt's."""
        if not self.finished and self.num_tokens:
            self.text += self.decoder.flush()
        self.finished = True

    def take(self) -> str:
        """The text that is new since the last call, and certain: not what may be the beginning of a stop string."""
        end = len(self.text) if self.finished else len(self.text) - self._num_held()
        new, self.given = self.text[self.given : end], max(self.given, end)
        return new

    def _cut(self, before: int) -> str | None:
        found = []
        for stop in self.sampling.stop:
            position = self.text.find(stop, max(0, before - len(stop) + 1))
            if position >= 0:
                found.append((position, stop))
        if not found:
            return None
        position, stop = min(found)
        self.text = self.text[: position + (len(stop) if self.sampling.include_stop_str_in_output else 0)]
        self.finished = True
        return stop

    def _num_held(self) -> int:
        """Characters at the end with which a stop string begins."""
        longest = len(self.text)
        lengths = (
            n
            for stop in self.sampling.stop
            for n in range(1, min(len(stop), longest + 1))
            if self.text.endswith(stop[:n])
        )
        return max(lengths, default=0)
