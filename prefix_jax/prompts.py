"""What callers write -> requests: texts, token ids and chats, alone or behind a prefix, each checked before it runs."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

import numpy as np

from prefix_jax.prefix_pool import Encoded, Prefix, PrefixPool
from prefix_jax.request import CACHE_MODES, Request, SamplingParams
from prefix_jax.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CHAT_OPTIONS = (  # render_chat's
    "add_generation_prompt", "continue_final_message", "chat_template", "tools", "chat_template_kwargs",
)  # fmt: skip

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]


class PromptReader:
    """Knows what fits: `vocab_size` tokens, `max_model_len` positions, what `check_fits` and `check_rules` let pass,
    ids not taken."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prefixes: PrefixPool,
        *,
        vocab_size: int,
        max_model_len: int,
        check_fits: Callable[[int], None],
        check_rules: Callable[[SamplingParams], Any],
        is_taken: Callable[[str], bool],
        logits_processors: Mapping[str, Callable] | None = None,
    ):
        self.tokenizer = tokenizer
        self.prefixes = prefixes
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.check_fits = check_fits
        self.check_rules = check_rules
        self.is_taken = is_taken
        self.logits_processors = logits_processors or {}
        self.request_ids = itertools.count()
        self._warned_prefix_pos = False
        self._checked: SamplingParams | None = None  # the last that was found good: often one is for all

    def read(
        self, prompts, params, positions, before, modes, *, streams: bool = False
    ) -> tuple[dict[int, Request], dict[int, str]]:
        """The good requests by index, and what is wrong with the others."""
        requests: dict[int, Request] = {}
        errors: dict[int, str] = {}
        ids: set[str] = set()
        given = {str(prompt.get("request_id")) for prompt in prompts if isinstance(prompt, Mapping)}
        ids_to_draw = map(str, self.request_ids)
        fresh_ids = (drawn for drawn in ids_to_draw if drawn not in given and not self.is_taken(drawn))
        asked = zip(prompts, params, positions, before, modes, strict=True)
        for index, (prompt, sampling, position, prefix, mode) in enumerate(asked):
            try:
                request = self._read(prompt, sampling, position, prefix, mode, fresh_ids, streams)
                if request.request_id in ids or self.is_taken(request.request_id):
                    raise ValueError(f"request_id {request.request_id!r} is taken")
                ids.add(request.request_id)
                requests[index] = request
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                errors[index] = str(error)
        return requests, errors

    def new_id(self, kind: str) -> str:
        """Of a request that no caller asked for by itself."""
        return next(name for number in self.request_ids if not self.is_taken(name := f"{kind}-{number}"))

    def _read(
        self,
        prompt: Any,
        sampling: SamplingParams,
        prefix_pos: int | None,
        prefix: Prefix | str | None,
        cache_mode: str,
        fresh_ids: Iterator[str],
        streams: bool,
    ) -> Request:
        options: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        salt = options.get("cache_salt")
        if not isinstance(salt, str | None):
            raise TypeError(f"cache_salt must be a string, got {salt!r}")
        above = None
        if prefix is not None:
            above, prefix_pos, salt = self._find_prefix(prefix, prefix_pos, salt)
        text, token_ids = self._read_prompt(prompt, above)
        longest = self.max_model_len
        if not token_ids or text == "":  # a BOS token alone is nothing to continue
            raise ValueError("the prompt is empty: it has no tokens")
        tokens = self._check_tokens(token_ids, "the prompt")
        self._check_sampling(sampling)
        mode = options.get("cache_mode", cache_mode)
        if mode not in CACHE_MODES:
            raise ValueError(f"cache_mode must be one of {', '.join(CACHE_MODES)}, got {mode!r}")
        priority, ttl = _read_priority(options)
        self.check_fits(len(token_ids))
        max_len = longest if sampling.max_tokens is None else min(len(token_ids) + sampling.max_tokens, longest)
        return Request(
            request_id=next(fresh_ids) if options.get("request_id") is None else str(options["request_id"]),
            prompt_token_ids=tokens,
            sampling=sampling,
            max_len=max_len,
            prompt=text,
            prefix_pos=self._clamp_prefix_pos(prefix_pos, len(token_ids)),
            cache_salt=salt,
            cache_mode=mode,
            priority=priority,
            ttl=ttl,
            score_from=_read_score_from(options, sampling),
            streams=streams,
        )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        if sampling is self._checked:
            return
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            tokens = dict(sampling.logit_bias) if name == "logit_bias" else getattr(sampling, name) or ()
            if bad := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise ValueError(f"{name} must be in [0, {self.vocab_size}), got {bad[:3]}")
        for name, words in (("stop strings", sampling.stop), ("bad_words", sampling.bad_words)):
            if words and self.tokenizer is None:
                raise ValueError(f"{name} need a tokenizer, and this model was loaded without one")
        known = self.logits_processors
        for process in sampling.logits_processors:
            if process not in known and process not in known.values():
                names = ", ".join(known) or "none"
                raise ValueError(
                    f"logits_processors must be among those given to LLM(logits_processors={{name: function}}), which "
                    f"are compiled with the step ({names}), got {process!r}"
                )
        self.check_rules(sampling)
        self._checked = sampling

    def _check_tokens(self, token_ids: Sequence[int], what: str) -> array:
        """The tokens, as sequences keep them."""
        vocab, longest = self.vocab_size, self.max_model_len
        if len(token_ids) > longest:
            raise ValueError(f"{what} has {len(token_ids)} tokens, max_model_len is {longest}")
        with suppress(struct.error):
            tokens = _packed(token_ids)
            # As unsigned numbers the negative ones are the largest. The builtin max takes a hundred times as long.
            if not tokens or np.frombuffer(tokens, np.uint32).max() < vocab:
                return tokens
        bad = [token for token in token_ids if not 0 <= token < vocab]
        raise ValueError(f"token ids must be in [0, {vocab}), got {bad[:3]}")

    def _find_prefix(
        self, prefix: Prefix | str, prefix_pos: int | None, salt: str | None
    ) -> tuple[Encoded, int | None, str | None]:
        """What stands before a prompt, what of it is a prefix to keep, and the salt of both."""
        if isinstance(prefix, str):
            if (named := self.prefixes.get(prefix)) is None:
                above = self.encode_prefix(prefix, None)
                return above, max(prefix_pos or 0, len(above.tokens)), salt
            prefix = named
        self.prefixes.check_own(prefix)
        prefix._check()
        if salt not in (None, prefix.salt):
            raise ValueError(f"the prefix has cache_salt {prefix.salt!r}, the prompt {salt!r}")
        return prefix.content, prefix_pos, prefix.salt

    def _read_prompt(self, prompt: Any, above: Encoded | None) -> tuple[str | None, Sequence[int]]:
        """Text and token ids of a prompt behind what stands before it."""
        if isinstance(prompt, Mapping):
            known = ("prompt", "prompt_token_ids", "messages")
            given = [key for key in known if prompt.get(key) is not None]
            if len(given) != 1 and given != ["prompt", "prompt_token_ids"]:
                raise ValueError(
                    f"a prompt dict needs one of {', '.join(known)}, got {', '.join(map(str, prompt)) or 'none'}"
                )
            if given == ["messages"]:
                self._need_tokenizer()
                options = {name: prompt[name] for name in CHAT_OPTIONS if name in prompt}
                text = self.tokenizer.render_chat(self._join_messages(above, prompt["messages"]), **options)
                return text, self.tokenizer.encode_rendered(text)
            if "prompt_token_ids" in given:
                text = None if above else prompt.get("prompt") or None
                if not isinstance(text, str | None):
                    raise TypeError(f"the prompt beside prompt_token_ids must be text, got {text!r:.80}")
                return text, _behind(above, _read_tokens(prompt["prompt_token_ids"]))
            prompt = prompt["prompt"]
        if isinstance(prompt, str) and above is not None:
            behind = self._encode_text(prompt, above)
            return behind.text, behind.whole
        if isinstance(prompt, str):
            self._need_tokenizer()
            return prompt, self.tokenizer.encode(prompt)
        return None, _behind(above, _read_tokens(prompt))

    def _join_messages(self, above: Encoded | None, messages: Any) -> list[dict[str, Any]]:
        if above is not None and above.messages is None:
            raise ValueError("messages go behind messages: the prefix was not declared by any")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a list with at least one message, got {messages!r:.80}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f'a message must be a dict with a "role", got {message!r:.80}')
        return copy.deepcopy([*(above.messages if above else ()), *map(_for_template, messages)])

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this model was loaded without one: give token ids")

    def _clamp_prefix_pos(self, prefix_pos: int | None, prompt_len: int) -> int:
        if prefix_pos is None:
            return 0
        if prefix_pos < 0:
            raise ValueError(f"prefix_pos must not be negative, got {prefix_pos}")
        if prefix_pos > prompt_len and not self._warned_prefix_pos:
            self._warned_prefix_pos = True
            log.warning(
                "prefix_pos %d is beyond a prompt of %d tokens: clamped, here and later", prefix_pos, prompt_len
            )
        return min(int(prefix_pos), prompt_len)

    def encode_prefix(self, content: Any, above: Encoded | None) -> Encoded:
        """What a prefix's content becomes behind another's. ValueError if the two do not go together, or for too many
        tokens or unknown ones."""
        if isinstance(content, str):
            encoded = self._encode_text(content, above, goes_on=True)
        elif isinstance(content, Sequence) and content and all(isinstance(part, Mapping) for part in content):
            self._need_tokenizer()
            messages = self._join_messages(above, content)
            whole = self.tokenizer.encode_chat(messages, add_generation_prompt=False)
            encoded = Encoded(self.tokenizer.encode_chat_beginning(messages), whole, messages=messages)
        else:
            tokens = _behind(above, list(_read_tokens(content)))
            encoded = Encoded(tokens, tokens)
        self._check_tokens(encoded.whole, "the prefix")
        return encoded

    def _encode_text(self, text: str, above: Encoded | None, *, goes_on: bool = False) -> Encoded:
        self._need_tokenizer()
        if above is None or above.text is not None:
            text = (above.text if above else "") + text
            whole = self.tokenizer.encode(text, goes_on=goes_on)
            return Encoded(self.tokenizer.encode_beginning(text), whole, text=text)
        if above.messages is not None:
            raise ValueError("text does not go behind messages: give messages")
        beginning, whole = self.tokenizer.encode_beginning(text), self.tokenizer.encode(text, goes_on=goes_on)
        return Encoded(*(_behind(above, self._without_bos(ids)) for ids in (beginning, whole)))

    def _without_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.tokenizer.bos_id] else ids


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """What OpenAI's messages may have becomes what templates expect, as in vLLM: of content in parts each is a line of
    one text, none is an empty text, and arguments of tool calls are what their JSON says."""
    message = {**message, "content": _join_parts(message.get("content"))}
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_with_arguments(call) for call in calls] if isinstance(calls, list) else calls
    return message


def _join_parts(content: Any) -> Any:
    if not isinstance(content, list | None):
        return content
    for part in content or ():
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'a part of a message must be {{"type": "text", "text": …}}, got {part!r:.80}')
    return "\n".join(part["text"] for part in content or ())


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a tool call must be JSON, got {arguments!r:.80}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _behind(above: Encoded | None, tokens: Sequence[int]) -> Sequence[int]:
    """A list, or what was given."""
    return tokens if above is None else [*above.whole, *tokens]


def _packed(tokens: Sequence[Any]) -> array:
    """Faster than array("i", tokens). struct.error for what is no integer, or too large."""
    return tokens if isinstance(tokens, array) else array("i", struct.pack(f"{len(tokens)}i", *tokens))


def _read_tokens(tokens: Any) -> Sequence[int]:
    """Whatever integers a caller has, packed if all of them fit."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # of NumPy or JAX
    if isinstance(tokens, list | tuple):
        with suppress(Exception):  # whatever lies in it: what is wrong is said below
            packed = _packed(tokens)
            # To ask every token for its class takes longer than all else here; only these may be bools.
            small = np.flatnonzero(np.frombuffer(packed, np.uint32) < 2).tolist()
            if bool not in set(map(type, map(tokens.__getitem__, small))):
                return packed
    is_list = isinstance(tokens, Sequence) and not isinstance(tokens, bytes | bytearray)
    if not is_list or any(isinstance(t, bool) or not isinstance(t, Integral) for t in tokens):
        raise TypeError(f"a prompt must be text, a list of token ids, or a dict of these, got {tokens!r:.80}")
    return [int(token) for token in tokens]


def _read_score_from(options: Mapping[str, Any], sampling: SamplingParams) -> int | None:
    first = options.get("score_from", 1)
    if isinstance(first, bool) or not isinstance(first, Integral):
        raise TypeError(f"score_from must be an integer, got {first!r}")
    if first < 1:
        raise ValueError(f"score_from must be at least 1: nothing stands before the first token, got {first}")
    return None if sampling.prompt_logprobs is None else int(first)


def _read_priority(options: Mapping[str, Any]) -> tuple[int, float | None]:
    priority, ttl = options.get("priority", 0), options.get("ttl")
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise TypeError(f"priority must be an integer, got {priority!r}")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, Real)):
        raise TypeError(f"ttl must be a number of seconds, got {ttl!r}")
    if ttl is not None and not ttl >= 0:
        raise ValueError(f"ttl must be at least 0 seconds, got {ttl}")
    return int(priority), ttl if ttl is None else float(ttl)
