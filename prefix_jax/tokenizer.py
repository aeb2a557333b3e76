"""Text to token ids and back, from Hugging Face tokenizer.json folders and GGUF files.

Decoding is incremental and in whole characters.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from prefix_jax.chat_template import render_template
from prefix_jax.checkpoint import eos_ids_of, read_json
from prefix_jax.gguf_tokenizer import read_gguf_tokenizer

_REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet
_CONTEXT_LEN = 6  # ids that stay in the decoder's window: enough to stand on whole characters


class Tokenizer:
    """A tokenizer with the special ids and the chat template of its model.

    add_bos, add_eos: True and False overrule the tokenizer's own post-processor; None leaves it to that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.tool_template = tool_template  # for chats with tools, where that is another
        own_ids = {name: backend.token_to_id(text) for name, text in self._special_tokens.items()}
        for name in ("bos_token", "eos_token"):
            if name in own_ids and own_ids[name] is None:
                raise ValueError(f"{name} {self._special_tokens[name]!r} is not in the vocabulary of the tokenizer")
        self.bos_id: int | None = own_ids.get("bos_token", bos_id)
        self.eos_id: int | None = own_ids.get("eos_token")
        self.eos_ids = frozenset(eos_ids) | ({self.eos_id} - {None})
        ids = backend.encode("a").ids
        self._processor_adds_bos = self.bos_id is not None and ids[:1] == [self.bos_id]
        self._add_bos = self.bos_id is not None and (self._processor_adds_bos if add_bos is None else add_bos)
        self._processor_adds_eos = self.eos_id is not None and ids[-1:] == [self.eos_id]
        self._add_eos = self.eos_id is not None and (self._processor_adds_eos if add_eos is None else add_eos)
        # SentencePiece spells unknown characters in tokens of one byte; GPT-2's BPE has bytes for an alphabet.
        self._byte_ids = {backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        self._continuation_ids = {backend.token_to_id(f"<0x{byte:02X}>") for byte in range(0x80, 0xC0)} - {None}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face folder, a GGUF file, or a folder with one. ValueError says what is missing or unknown."""
        path = Path(path)
        if (path / "tokenizer.json").exists():
            return _from_folder(path)
        gguf_files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            backend, options = read_gguf_tokenizer(gguf_files[0])
            return cls(backend, **options)
        raise ValueError(
            f"no tokenizer.json in {path}; where there is a tokenizer.model, convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )

    def save(self, folder: Path) -> None:
        """As a Hugging Face folder has it, but for the EOS ids, which stand in its config.json."""
        self._backend.save(str(folder / "tokenizer.json"))
        named = {"default": self.chat_template, "tool_use": self.tool_template}
        templates = [{"name": name, "template": template} for name, template in named.items() if template is not None]
        template = templates if self.tool_template is not None else self.chat_template
        adds = {"add_bos_token": self._add_bos, "add_eos_token": self._add_eos}
        config = {**self._special_tokens, **adds, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def check_fits(self, vocab_rows: int) -> None:
        """ValueError when an id of this tokenizer has no row among the model's `vocab_rows` embeddings."""
        highest = max(self.vocab_size - 1, self.bos_id or 0, *self.eos_ids)
        if highest >= vocab_rows:
            raise ValueError(
                f"the tokenizer does not fit the model: its highest id is {highest}, "
                f"the model embeds {vocab_rows} ids (0 to {vocab_rows - 1})"
            )

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        """Ids with the special tokens the tokenizer adds; a text that begins with the BOS text gets no second one, one
        that ends with the EOS text neither. goes_on: without the EOS that it adds."""
        ids = self._backend.encode(text).ids
        if self._processor_adds_bos:
            ids = ids[1:]
        if self._processor_adds_eos:
            ids = ids[:-1]
        if self._add_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if self._add_eos and not goes_on and ids[-1:] != [self.eos_id] else ids

    def encode_word(self, text: str) -> list[list[int]]:
        """The ids that a text may have inside another: at its beginning, and behind a space, whether it has one or
        not."""
        word = text.lstrip()
        ways = [word, " " + word] if word else [text]
        encoded = [self.encode_rendered(way) for way in ways]
        return [ids for i, ids in enumerate(encoded) if ids and ids not in encoded[:i]]

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids; ids the tokenizer does not know give none."""
        if skip_special_tokens or spaces_between_special_tokens:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        pieces = []
        for is_special, group in itertools.groupby(ids, key=self._special_ids.__contains__):
            run = list(group)
            pieces += map(self._backend.id_to_token, run) if is_special else [self._backend.decode(run)]
        return "".join(pieces)

    def decode_output(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The whole text of an output: what an IncrementalDecoder gives for it piece by piece."""
        decoder = IncrementalDecoder(self, prompt_ids, skip_special_tokens, spaces_between_special_tokens)
        return decoder.finish(output_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template (None: the tokenizer's own, with `tools` the one that it has for them) over `messages`
        (role, content). continue_final_message: the text ends with the last message's content, for the model to go on.
        tools: JSON schemas of functions that the template tells the model of. chat_template_kwargs: what else it knows
        by name. ValueError without a template, or for whatever it raises."""
        own = self.tool_template if tools and self.tool_template is not None else self.chat_template
        template = own if chat_template is None else chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template; pass the prompt as text or token ids")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        asked = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        names = {"documents": None, **self._special_tokens, **(chat_template_kwargs or {})}
        return render_template(template, messages, asked, names, continues=continue_final_message)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the rendered chat; the template alone says which special tokens there are."""
        return self.encode_rendered(self.render_chat(messages, add_generation_prompt))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a chat that has been rendered already."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_beginning(self, text: str) -> list[int]:
        """The leading ids of a text that stay whatever follows it: those before its last word, sign or space, which
        tokenizers join with what comes next."""
        others = [_LAST_RUN.sub("", text), *(text + after for after in _CONTINUATIONS)]
        return _common_start(self.encode(text), map(self.encode, others))

    def encode_chat_beginning(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The leading ids of a chat that stay whatever messages follow these."""
        own = self.encode_chat(messages, add_generation_prompt=False)
        chats = []
        for role in ("user", "assistant", "system"):
            for content in ("a", "1", " b", "\n"):
                try:
                    chats.append(self.encode_chat([*messages, {"role": role, "content": content}]))
                except ValueError:
                    continue  # the template wants another order of roles
        if not chats:
            raise ValueError("the chat template takes no message behind these")
        return _common_start(own, chats)

    def leaves_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether text never shows this id."""
        is_skipped = skip_special_tokens and token_id in self._special_ids
        return is_skipped or self._backend.id_to_token(token_id) is None

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)


class IncrementalDecoder:
    """Text of a growing output, in whole characters: push ids, then flush once.

    `prompt_ids` give the context the output continues (its last few are used), so that the deltas together are the
    suffix of decode(prompt + output). One difference is kept on purpose: SentencePiece byte tokens that form a
    character keep it, where decode() turns the whole run into replacements once a later byte of it is invalid.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._options = skip_special_tokens, spaces_between_special_tokens
        self._window: list[int] = []  # recent ids; older ones no longer matter
        self._pending: list[int] = []  # its last ids, whose text has not been given in full
        self._given = ""  # text of the window that has been given
        for token_id in self._tail(prompt_ids):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The new text that is certain with this id: empty while a character is incomplete."""
        if self._tokenizer.leaves_out(token_id, skip_special_tokens=self._options[0]):
            return ""
        self._window.append(token_id)
        self._pending.append(token_id)
        # An unfinished character decodes to one replacement, or to one for each of its up to three single-byte tokens.
        return self._give(max_unfinished=3 if self._tokenizer._byte_ids else 1)

    def flush(self) -> str:
        """What is left at the end: an unfinished character as its replacement."""
        return self._give(max_unfinished=0)

    def finish(self, token_ids: Sequence[int]) -> str:
        """What pushing each id and flushing would give, by one decode() where the text has no broken characters."""
        text = self._decode([*self._window, *token_ids])
        rest = text[len(self._given) :]
        # With these two kinds of decoder, more ids only ever add text, but for the replacement of broken characters.
        only_adds = self._tokenizer._byte_ids or isinstance(self._tokenizer._backend.decoder, decoders.ByteLevel)
        if only_adds and text.startswith(self._given) and _REPLACEMENT not in rest:
            return rest
        return "".join(map(self.push, token_ids)) + self.flush()

    def _give(self, max_unfinished: int) -> str:
        text = self._decode(self._window)
        certain = _certain(text, max_unfinished)
        if not certain.startswith(self._given):
            # The tokenizer changed its mind about text already given: go on from the ids that were not.
            text = self._decode(self._pending)
            certain = _certain(text, max_unfinished)
            if not certain:
                return ""
            self._window, self._given = list(self._pending), ""
        delta = certain[len(self._given) :]
        self._given = certain
        if certain == text:
            self._pending = []
            if len(self._window) >= 4 * _CONTEXT_LEN:
                self._window = self._tail(self._window)
                self._given = self._decode(self._window)
        elif len(self._pending) >= 4 * _CONTEXT_LEN:
            # Broken characters without an end: the first four of these ids hold one for certain. They stay, since a run
            # of SentencePiece's bytes is broken all through or not at all; the last ones hold the next character.
            self._pending = self._pending[:4] + self._pending[-_CONTEXT_LEN:]
            self._window = list(self._pending)
            unfinished = len(text) - len(certain)
            text = self._decode(self._window)
            self._given = text[: len(text) - unfinished]
        return delta

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """The last ids from one with a text of its own, which no run of byte tokens before it can reach into."""
        start = max(0, len(ids) - _CONTEXT_LEN)
        while start > 0 and self._needs_those_before(ids[start]):
            start -= 1
        return list(ids[start:])

    def _needs_those_before(self, token_id: int) -> bool:
        """A byte that goes on with a character, or a token without a text of its own."""
        tokenizer = self._tokenizer
        if token_id in tokenizer._byte_ids:
            return token_id in tokenizer._continuation_ids
        return not self._decode([token_id])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, *self._options)


_LAST_RUN = re.compile(r"\s*(\w+|[^\w\s]+)?\s*\Z")
_CONTINUATIONS = (
    "a",
    " a",
    "A",
    "ing",
    "0",
    "1",
    ".",
    ",",
    "'s",
    "\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "-",
    "_",
    "/",
    "é",
    "的",
    "あ",
    "🙂",
)


def _common_start(ids: list[int], others: Iterable[list[int]]) -> list[int]:
    for other in others:
        ids = ids[: next((i for i, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), len(other))]
    return ids


def _certain(text: str, max_unfinished: int) -> str:
    """The text without the replacements at its end that more bytes could still turn into a character."""
    return text[: max(len(text.rstrip(_REPLACEMENT)), len(text) - max_unfinished)]


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
    backend.no_truncation()  # both belong to training
    backend.no_padding()
    names = ("tokenizer_config.json", "config.json", "generation_config.json")
    config, *model_configs = (read_json(folder / name) if (folder / name).exists() else {} for name in names)
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if (got := backend.token_to_id(token["content"])) != int(token_id):
            raise ValueError(f"{path} gives {token['content']!r} id {got}, tokenizer_config.json says {token_id}")
    special_tokens = {
        name: value["content"] if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, (str, Mapping))
    }
    chat_template, tool_template = config.get("chat_template"), None
    if isinstance(chat_template, list):
        named = {entry["name"]: entry["template"] for entry in chat_template}
        chat_template, tool_template = named.get("default"), named.get("tool_use")
    if (folder / "chat_template.jinja").exists():
        chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (path := folder / "additional_chat_templates" / "tool_use.jinja").exists():
        tool_template = path.read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        bos_id=model_configs[0].get("bos_token_id"),
        eos_ids={token_id for model_config in model_configs for token_id in eos_ids_of(model_config)},
        chat_template=chat_template,
        tool_template=tool_template,
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
    )
