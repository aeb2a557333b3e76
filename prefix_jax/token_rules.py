"""What a request's parameters do to its logits: bans, biases, penalties, as one row of the rules on the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt32

from prefix_jax.request import MAX_BIASES, SamplingParams


class RuleRow(NamedTuple):
    """One row of pallas_kernels.logit_rules.LogitRules, field by field."""

    asks: np.int32
    prompt_len: np.int32
    until: np.int32
    num_biases: np.int32
    penalties: Float[np.ndarray, " 3"]
    bias_token: Int[np.ndarray, " biases"]
    bias: Float[np.ndarray, " biases"]
    banned: UInt32[np.ndarray, " words"]
    banned_early: UInt32[np.ndarray, " words"]
    counts: Int[np.ndarray, " V"]

    @property
    def packed_len(self) -> int:
        return sum(np.size(field) for field in self)

    def pack_into(self, words: Int[np.ndarray, " n"]) -> None:
        """The bits of all fields, one behind the other."""
        end = 0
        for field in map(np.atleast_1d, self):
            start, end = end, end + field.size
            words[start:end] = field.view(np.int32)


class TokenRules:
    """The rules of one request. bad_words: token ids that never follow one another in its output. end_ids: that may not
    come before min_tokens. processors: which of the engine's logits processors it wants, by number. ValueError where
    they leave no token to begin with."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_len: int,
        vocab_size: int,
        *,
        end_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        processors: Iterable[int] = (),
    ):
        self.sampling = sampling
        self.prompt_len = prompt_len
        self.vocab_size = vocab_size
        self.asks = 1 + sum(2 << number for number in processors)
        bad_words = [list(word) for word in bad_words]
        self.phrases = [word for word in bad_words if len(word) > 1]
        banned = np.zeros(vocab_size, bool)
        if sampling.allowed_token_ids is not None:
            banned[:] = True
            banned[list(sampling.allowed_token_ids)] = False
        banned[[word[0] for word in bad_words if len(word) == 1]] = True
        early = np.zeros(vocab_size, bool)
        if sampling.min_tokens:
            early[list(end_ids)] = True
        if banned.all():
            raise ValueError("allowed_token_ids and bad_words leave no token")
        if (banned | early).all():
            raise ValueError(
                f"allowed_token_ids and bad_words leave only tokens that end the answer, min_tokens is "
                f"{sampling.min_tokens}"
            )
        self.banned, self.banned_early = _pack(banned), _pack(early)

    @property
    def needs_tokens(self) -> bool:
        """Whether they hang on which tokens came last, so that none may be in flight."""
        return bool(self.phrases)

    def ends_of_phrases(self, tokens: array) -> list[int]:
        """The tokens that would complete a bad word behind these."""
        output_len = len(tokens) - self.prompt_len
        return [
            phrase[-1]
            for phrase in self.phrases
            if output_len >= len(phrase) - 1 and tokens[1 - len(phrase) :].tolist() == phrase[:-1]
        ]

    def bans(self, ends: Iterable[int]) -> UInt32[np.ndarray, " words"]:
        """The banned tokens, with these ends of phrases."""
        banned = self.banned.copy()
        for token in ends:
            banned[token // 32] |= np.uint32(1 << token % 32)
        return banned

    def leave_none(self, tokens: array) -> bool:
        """Whether the phrases that these tokens begin leave no token to follow them."""
        if not (ends := self.ends_of_phrases(tokens)):
            return False
        banned = self.bans(ends)
        if len(tokens) < self.prompt_len + self.sampling.min_tokens:
            banned |= self.banned_early
        return int(np.bitwise_count(banned).sum()) == self.vocab_size

    def row(self, tokens: array) -> RuleRow:
        """For what is drawn behind these tokens, all that there are; the device counts the last one itself."""
        counts = np.zeros(self.vocab_size, np.int32)
        known = np.asarray(tokens)
        np.add.at(counts, known[self.prompt_len : -1], 2)
        counts[known[: self.prompt_len]] += 1  # each once, however often it occurs
        sampling = self.sampling
        biases = np.zeros((2, MAX_BIASES), np.float32)
        if sampling.logit_bias:
            biases[:, : len(sampling.logit_bias)] = np.array(sampling.logit_bias).T
        return RuleRow(
            asks=np.int32(self.asks),
            prompt_len=np.int32(self.prompt_len),
            until=np.int32(min(self.prompt_len + sampling.min_tokens, np.iinfo(np.int32).max)),
            num_biases=np.int32(len(sampling.logit_bias)),
            penalties=np.array(
                (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty), np.float32
            ),
            bias_token=biases[0].astype(np.int32),
            bias=biases[1],
            banned=self.bans(self.ends_of_phrases(tokens)),
            banned_early=self.banned_early,
            counts=counts,
        )


def no_rules(vocab_size: int) -> RuleRow:
    """Of a row that asks for nothing."""
    row = TokenRules(SamplingParams(), 0, vocab_size).row(array("i"))
    return row._replace(asks=np.int32(0))


def _pack(tokens: np.ndarray) -> UInt32[np.ndarray, " words"]:
    """Bit t % 32 of word t // 32 for each token of a mask."""
    padded = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
    padded[: len(tokens)] = tokens
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)
