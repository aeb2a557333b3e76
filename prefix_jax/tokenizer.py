"""Text to token ids and back: Hugging Face tokenizer.json folders, and the byte-level BPE inside GGUF files.

Chat templates are rendered as transformers renders them. Decoding is incremental and in whole characters.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from prefix_jax.gguf_file import read_gguf

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GGUF_MODELS = ("gpt2",)
GGUF_PRE_TOKENIZERS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")

_REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet
_CONTEXT_LEN = 6  # ids that stay in the decoder's window: enough to stand on whole characters


class Tokenizer:
    """A tokenizer with the special ids and the chat template of its model.

    add_bos: True and False overrule the tokenizer's own post-processor; None leaves it to that.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._add_bos = add_bos
        self.chat_template = chat_template
        bos_text = self._special_tokens.get("bos_token")
        self.bos_id = bos_id if bos_text is None else self._id_of("bos_token", bos_text)
        eos_text = self._special_tokens.get("eos_token")
        own_eos = () if eos_text is None else (self._id_of("eos_token", eos_text),)
        self.eos_ids = frozenset((*eos_ids, *own_eos))
        # SentencePiece spells unknown characters in tokens of one byte; GPT-2's BPE has bytes for an alphabet.
        byte_ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_ids = frozenset(token_id for token_id in byte_ids if token_id is not None)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face folder, a tokenizer.json, a GGUF file, or a folder with one GGUF file.

        ValueError says what is missing, or which kind of tokenizer is unknown.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            return _from_gguf(path)
        if path.is_file():
            return cls(_read_backend(path))
        if (path / "tokenizer.json").exists():
            return _from_folder(path)
        if len(gguf_files := sorted(path.glob("*.gguf"))) == 1:
            return _from_gguf(gguf_files[0])
        if (path / "tokenizer.model").exists():
            raise ValueError(
                f"{path} has tokenizer.model but no tokenizer.json; convert it once with transformers: "
                f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            )
        raise ValueError(f"no tokenizer.json in {path}")

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return self._highest_id + 1

    @cached_property
    def _highest_id(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    def check_fits(self, vocab_rows: int) -> None:
        """ValueError when an id of this tokenizer has no row among the model's `vocab_rows` embeddings."""
        highest = max(self._highest_id, self.bos_id or 0, *self.eos_ids, 0)
        if highest >= vocab_rows:
            raise ValueError(
                f"the tokenizer does not fit the model: its highest id is {highest}, "
                f"the model embeds {vocab_rows} ids (0 to {vocab_rows - 1})"
            )

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens the tokenizer adds; a text that begins with the BOS text gets no second one."""
        ids = self._backend.encode(text).ids
        if self.bos_id is None or (self._add_bos is None and ids[:2] != [self.bos_id] * 2):
            return ids
        plain = self._backend.encode(text, add_special_tokens=False).ids
        in_text = plain[:1] == [self.bos_id]
        added = ids[:1] == [self.bos_id] and (not in_text or ids[: len(plain)] != plain)
        want = not in_text and (added if self._add_bos is None else self._add_bos)
        if added and not want:
            return ids[1:]
        return [self.bos_id, *ids] if want and not added else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids the tokenizer does not know give none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat template over `messages` (role, content). ValueError without a template, or when it refuses."""
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template; pass the prompt as text or token ids")
        try:
            return self._compiled_template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the rendered chat; the template alone says which special tokens there are."""
        text = self.render_chat(messages, add_generation_prompt)
        return self._backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
        return environment.from_string(self.chat_template)

    def _id_of(self, name: str, text: str) -> int:
        if (token_id := self._backend.token_to_id(text)) is None:
            raise ValueError(f"{name} {text!r} is not in the vocabulary of the tokenizer")
        return token_id


class IncrementalDecoder:
    """Text of a growing output, in whole characters: push ids, then flush once.

    `prompt_ids` give the context the output continues (its last few are used), so that the deltas together are the
    suffix of decode(prompt + output). One difference is kept on purpose: SentencePiece byte tokens that form a
    character keep it, where decode() turns the whole run into replacements once a later byte of it is invalid.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # recent ids; older ones no longer matter
        self._pending: list[int] = []  # its last ids, whose text has not been given in full
        self._given = ""  # text of the window that has been given
        for token_id in self._tail(list(prompt_ids)):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The new text that is certain with this id: empty while a character is incomplete."""
        self._window.append(token_id)
        self._pending.append(token_id)
        # An unfinished character decodes to one replacement, or to one for each of its up to three single-byte tokens.
        return self._give(3 if self._tokenizer._byte_ids else 1)

    def flush(self) -> str:
        """What is left at the end: an unfinished character as its replacement."""
        return self._give(0)

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
            self._shorten_window()
        return delta

    def _shorten_window(self) -> None:
        if len(self._window) >= 4 * _CONTEXT_LEN:
            self._window = self._tail(self._window)
            self._given = self._decode(self._window)

    def _tail(self, ids: list[int]) -> list[int]:
        """The shortest useful context: not from inside a run of byte tokens, and not empty as text."""
        start = max(0, len(ids) - _CONTEXT_LEN)
        while start > 0 and (ids[start] in self._tokenizer._byte_ids or not self._decode(ids[start:])):
            start -= 1 if ids[start] in self._tokenizer._byte_ids else min(start, _CONTEXT_LEN)
        return ids[start:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)


def _certain(text: str, max_unfinished: int) -> str:
    """The text without the replacements at its end that more bytes could still turn into a character."""
    end = len(text)
    while end > max(0, len(text) - max_unfinished) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
    backend.no_truncation()  # both belong to training
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _from_folder(folder: Path) -> Tokenizer:
    backend = _read_backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    model_configs = [_read_json(folder / name) for name in ("config.json", "generation_config.json")]
    _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})
    special_tokens = {
        name: value["content"] if isinstance(value, Mapping) else value
        for name in SPECIAL_NAMES
        if (value := config.get(name)) is not None
    }
    eos_ids: list[int] = []
    for model_config in model_configs:
        eos = model_config.get("eos_token_id")
        eos_ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        bos_id=model_configs[0].get("bos_token_id"),
        eos_ids=eos_ids,
        chat_template=_chat_template(folder, config.get("chat_template")),
        add_bos=config.get("add_bos_token"),
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Mapping[str, Any]]) -> None:
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])):
        flags = {name: token[name] for name in ("lstrip", "rstrip", "normalized", "single_word") if name in token}
        if backend.token_to_id(token["content"]) is None:
            special = token.get("special", False)
            add = backend.add_special_tokens if special else backend.add_tokens
            add([AddedToken(token["content"], special=special, **flags)])
        if (got := backend.token_to_id(token["content"])) != int(token_id):
            raise ValueError(f"added token {token['content']!r} has id {got}, tokenizer_config.json says {token_id}")


def _chat_template(folder: Path, stated: str | list[Mapping[str, str]] | None) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    if isinstance(stated, list):
        return next((entry["template"] for entry in stated if entry["name"] == "default"), None)
    return stated


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf(path).metadata

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    kind, pre = field("ggml.model"), field("ggml.pre", "default")
    if kind not in GGUF_MODELS:
        raise ValueError(f"{path}: unknown GGUF tokenizer {kind!r}; known: {', '.join(GGUF_MODELS)}")
    if pre not in GGUF_PRE_TOKENIZERS:
        raise ValueError(f"{path}: unknown GGUF pre-tokenizer {pre!r}; known: {', '.join(GGUF_PRE_TOKENIZERS)}")
    tokens, types = field("ggml.tokens"), field("ggml.token_type")
    backend = _byte_level_bpe(tokens, [tuple(merge.split(" ")) for merge in field("ggml.merges")], pre)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    added = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    ids = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: field(f"ggml.{key}_token_id") for name, key in ids.items()}
    eot = field("ggml.eot_token_id")
    return Tokenizer(
        backend,
        special_tokens={name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
        eos_ids=() if eot is None else (eot,),
        chat_template=field("chat_template"),
        add_bos=bool(field("ggml.add_bos_token", pre == "llama-bpe")),
    )


def _byte_level_bpe(tokens: list[str], merges: list[tuple[str, str]], pre: str) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    split = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(pre)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend
