"""The tokenizers that GGUF files hold: byte-level BPE, and SentencePiece's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from prefix_jax.checkpoint import read_gguf

# How a text is split before byte-level BPE, by tokenizer.ggml.pre: expressions, each of which splits the pieces of the
# one before. "default" is llama.cpp's (src/llama-vocab.cpp), the others are those of the models' own tokenizer.json.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GGUF_SPLITS = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # GGUF token types


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and the other arguments of `Tokenizer`. ValueError for a kind that is not known."""
    prefix = "tokenizer.ggml."
    metadata = read_gguf(path).metadata
    fields = {"pre": "default"}
    fields |= {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    if (kind := fields.get("model")) not in kinds:
        raise ValueError(f"{path}: unknown GGUF tokenizer {kind!r}; known: {', '.join(kinds)}")
    if kind == "gpt2" and fields["pre"] not in GGUF_SPLITS:
        raise ValueError(f"{path}: unknown GGUF pre-tokenizer {fields['pre']!r}; known: {', '.join(GGUF_SPLITS)}")
    tokens, backend = fields["tokens"], kinds[kind](fields)
    for add, types in ((backend.add_special_tokens, (_CONTROL, _UNKNOWN)), (backend.add_tokens, (_USER_DEFINED,))):
        chosen = [token for token, its_type in zip(tokens, fields["token_type"], strict=True) if its_type in types]
        add([AddedToken(token, normalized=False, special=_CONTROL in types) for token in chosen])
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special_ids = {name: fields.get(f"{key}_token_id") for name, key in keys.items()}
    return backend, {
        "special_tokens": {name: tokens[token_id] for name, token_id in special_ids.items() if token_id is not None},
        "eos_ids": {fields.get("eot_token_id")} - {None},
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tool_template": metadata.get("tokenizer.chat_template.tool_use"),
        "add_bos": bool(fields.get("add_bos_token", kind == "llama" or _is_llama3(fields))),
        "add_eos": bool(fields.get("add_eos_token", False)),
    }


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    """Without those that only fill up the embedding."""
    kinds = zip(fields["tokens"], fields["token_type"], strict=True)
    return {token: token_id for token_id, (token, kind) in enumerate(kinds) if kind != _UNUSED}


def _is_llama3(fields: Mapping[str, Any]) -> bool:
    return GGUF_SPLITS.get(fields["pre"]) == (_LLAMA3,)


def _byte_level(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Llama 3 takes a word that is a token as it is, whatever the merges say; Qwen composes accents first."""
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(fields), merges, ignore_merges=_is_llama3(fields)))
    if fields["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in GGUF_SPLITS[fields["pre"]]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece joins the two neighbours whose token has the highest score: any two that make up a token are a
    merge, in the order of scores. What has no token is spelled in bytes."""
    ids, types, scores = _vocabulary(fields), fields["token_type"], fields["scores"]
    merges = []
    for token in sorted(
        (token for token in ids if types[ids[token]] == _NORMAL), key=lambda token: -scores[ids[token]]
    ):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))  # as transformers converts it
    unknown = fields["tokens"][fields.get("unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_space = fields.get("add_space_prefix", True)  # in front of the text and of what follows a special token
    prepend = [normalizers.Prepend("▁")] if has_space else []
    strip = [decoders.Strip(" ", 1, 0)] if has_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
