"""Tokenizers: special tokens, chat templates, whole characters, and texts that continue their prompts."""

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CHAT_TEMPLATE, tiny_config, tiny_tokenizer, tiny_weights, write_checkpoint, write_tiny_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from prefix_jax.tokenizer import IncrementalDecoder, Tokenizer

REAL = ("llama2", "llama3", "mistral-v1", "mistral-v3", "qwen3", "baichuan-7b", "smollm2")
REPLACEMENT = "\ufffd"
TEXT = "Hello  world, 你好 👩‍👩‍👧‍👦 한국어 ก็ดี žluťoučký é\n\t12 345 "
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2024 + 17?"}]


def real_backend(shared_data: Path, name: str) -> tokenizers.Tokenizer:
    with gzip.open(shared_data / "tokenizers" / f"{name}.tokenizer.json.gz", "rt") as file:
        return tokenizers.Tokenizer.from_str(file.read())


def byte_fallback_backend(post_processor: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece-like: <s>, </s>, 256 byte tokens, some pieces; BOS in front, one space stripped at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "a", "b"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def deltas(tokenizer: Tokenizer, prompt: list[int], output: list[int], **options) -> list[str]:
    """Also checks everywhere that the text at one go is the same."""
    decoder = IncrementalDecoder(tokenizer, prompt, **options)
    parts = [*(decoder.push(token_id) for token_id in output), decoder.flush()]
    assert tokenizer.decode_output(prompt, output, **options) == "".join(parts)
    return parts


def check_every_cut(tokenizer: Tokenizer, text: str) -> None:
    """Prompt and output cut anywhere: the deltas are whole characters, together what decode() adds to the prompt."""
    ids = tokenizer.encode(text)
    prefixes = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    for cut in range(len(ids) + 1):
        before = max((prefix.rstrip(REPLACEMENT) for prefix in prefixes[: cut + 1]), key=len)
        parts = deltas(tokenizer, ids[:cut], ids[cut:])
        assert before + "".join(parts) == tokenizer.decode(ids)
        assert REPLACEMENT not in "".join(parts)
        parts = deltas(tokenizer, [], ids[:cut])
        assert REPLACEMENT not in "".join(parts[:-1])
        assert "".join(parts).rstrip(REPLACEMENT) == before


def test_no_character_is_cut_at_any_point_of_a_byte_level_text():
    """Per-token decoding turns halves of emoji and accents into U+FFFD: exo#1691, ferrox#124, dynamo#12630 (C57)."""
    check_every_cut(Tokenizer(tiny_tokenizer()), TEXT)


def test_no_character_is_cut_at_any_point_of_a_byte_fallback_text():
    """C57: exo#1691, ferrox#124, dynamo#12630."""
    tokenizer = Tokenizer(byte_fallback_backend(), bos_id=1)
    check_every_cut(tokenizer, "a你b👩‍👩‍👧‍👦é")


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_no_character_is_cut_at_any_point_of_a_unigram_text(byte_fallback):
    """C57, C59: of SentencePiece's other kind. Without bytes what it does not know is <unk>, in every text alike."""
    pieces = ["▁", "▁Hello", "▁world", "Hello", "world", "a", "b", ",", "é", "你", "好", "▁12", "3", "🙂"]
    vocab = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256 * byte_fallback))]
    vocab += [(piece, -1.0 - index / 10) for index, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend)
    text = "Hello world, a你好 b🙂 123 é  world"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    check_every_cut(tokenizer, text)
    check_every_cut(tokenizer, TEXT if byte_fallback else "Hello xyz world 👩‍👩‍👧‍👦, a")


@pytest.mark.parametrize("name", REAL)
def test_no_character_is_cut_with_real_tokenizers(shared_data, name):
    """C57: exo#1691, ferrox#124, dynamo#12630."""
    check_every_cut(Tokenizer(real_backend(shared_data, name)), TEXT)


def test_an_output_that_ends_inside_a_character_flushes_one_replacement():
    """C57: max_tokens ends inside a character; bytes that are genuinely no text stay replacements."""
    tokenizer = Tokenizer(tiny_tokenizer())
    smile = tokenizer.encode("😀")
    assert deltas(tokenizer, [], smile[:2]) == ["", "", REPLACEMENT]
    assert "".join(deltas(tokenizer, [], smile[:2] + tokenizer.encode("x"))) == REPLACEMENT + "x"
    assert "".join(deltas(tokenizer, [], smile[-1:] * 9)) == REPLACEMENT * 9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 271), max_size=12), st.lists(st.integers(0, 271), max_size=40))
def test_any_byte_level_ids_continue_their_prompt(prompt, output):
    """A decoder that raises in the middle of a batch: vllm#17448, vllm#24159 (C58)."""
    tokenizer = Tokenizer(tiny_tokenizer())
    before = tokenizer.decode(prompt).removesuffix(REPLACEMENT)  # the last may be a character the prompt began
    assert before + "".join(deltas(tokenizer, prompt, output)) == tokenizer.decode(prompt + output)


NO_ASCII_BYTES = st.sampled_from([0, 1, 2, *range(3 + 128, 264)])


@settings(max_examples=200, deadline=None)
@given(st.lists(NO_ASCII_BYTES, max_size=12), st.lists(NO_ASCII_BYTES, max_size=40))
def test_any_byte_fallback_ids_decode_without_an_exception(prompt, output):
    """C58: vllm#17448, vllm#24159. Text outside broken runs of bytes is that of decode()."""
    tokenizer = Tokenizer(byte_fallback_backend(), bos_id=1)
    parts = "".join(deltas(tokenizer, prompt, output))
    whole = tokenizer.decode(prompt + output)
    if REPLACEMENT not in whole:
        assert whole.endswith(parts)
    kept = {"a", "b", "H", "w"}
    assert [c for c in parts if c in kept] == [c for c in tokenizer.decode([1, 261, *output]) if c in kept][1:]


@pytest.mark.parametrize("name", REAL)
def test_random_ids_over_a_real_vocabulary_never_raise(shared_data, name):
    """C58: vllm#17448, vllm#24159."""
    tokenizer, rng = Tokenizer(real_backend(shared_data, name)), random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size + 100) for _ in range(5000)]
    assert len("".join(deltas(tokenizer, [], ids))) > 5000
    for start in range(0, 5000, 50):  # in most of these there is no broken character
        deltas(tokenizer, ids[start : start + 10], ids[start + 10 : start + 50], skip_special_tokens=start % 100 == 0)


class CountingTokenizer(Tokenizer):
    calls = 0

    def decode(self, ids, *options):
        self.calls += 1
        return super().decode(ids, *options)


@pytest.mark.parametrize("backend", [tiny_tokenizer(), byte_fallback_backend()], ids=["byte_level", "byte_fallback"])
def test_a_whole_output_takes_few_decode_calls_however_long_it_is(backend):
    tokenizer = CountingTokenizer(backend)
    ids = [263, 262, 262, 260, 263, 261, 260] * 300
    text = tokenizer.decode_output(ids[:100], ids[100:])
    assert tokenizer.calls <= 16
    assert text == "".join(deltas(tokenizer, ids[:100], ids[100:]))


@pytest.mark.parametrize(
    "tokens",
    [["<|user|>"], [299], ["</s>"], ["<0xC3>", "<0xA9>"], ["Ģ"], ["ð"], ["<0xFF>"], ["<0x80>"], ["<0xFF>", "<0xC3>"]],
    ids=str,
)
def test_ids_without_text_and_bytes_cost_no_more_than_others(tokens, monkeypatch):
    """Ends of text that go on under ignore_eos, ids that the tokenizer lacks, a script spelled in bytes, bytes that are
    no text: a decoder that looks back over all of them takes minutes, and everybody waits."""
    of_bytes = any(str(token).startswith(("</s>", "<0x")) for token in tokens)
    tokenizer = Tokenizer(byte_fallback_backend() if of_bytes else tiny_tokenizer())
    ids = [tokenizer._backend.token_to_id(token) if isinstance(token, str) else token for token in tokens] * 500
    decode, lengths = IncrementalDecoder._decode, []
    monkeypatch.setattr(IncrementalDecoder, "_decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    decoder = IncrementalDecoder(tokenizer, ids)
    for token_id in ids:
        decoder.push(token_id)
    decoder.flush()
    assert sum(lengths) < 60_000, "of windows decoded"


@pytest.mark.parametrize("seed", range(8))
def test_broken_characters_without_an_end_read_as_if_all_were_remembered(seed, monkeypatch):
    """C57, C58: where the decoder forgets those far back, each delta is what it would be."""
    rng = random.Random(seed)
    for backend, smile, byte_ids in [
        (tiny_tokenizer(), tiny_tokenizer().encode("😀你é a").ids, range(4 + 94, 260)),
        (byte_fallback_backend(), [*(3 + byte for byte in "😀你é".encode()), 262], range(3 + 128, 259)),
    ]:
        tokenizer, ids = Tokenizer(backend), []
        while len(ids) < 400:
            ids += [rng.choice(byte_ids)] * rng.randrange(60) + smile[: rng.randrange(len(smile) + 1)]
            ids += rng.choices(byte_ids, k=rng.randrange(40)) + smile * rng.randrange(6)
        parts = deltas(tokenizer, [], ids)
        if isinstance(backend.decoder, decoders.ByteLevel):
            assert tokenizer.decode(ids) == "".join(parts)
        with monkeypatch.context() as patch:
            patch.setattr("prefix_jax.tokenizer._CONTEXT_LEN", 10**6)
            assert deltas(tokenizer, [], ids) == parts


def test_the_leading_space_of_an_output_is_kept_and_none_is_added():
    """The first piece's space is stripped, or chunks join without one: transformers#22710, vllm#29953 (C59)."""
    tokenizer = Tokenizer(byte_fallback_backend(), bos_id=1)
    space, hello, world, a = 259, 260, 261, 262
    assert "".join(deltas(tokenizer, [1, hello], [world, a])) == " worlda"
    assert "".join(deltas(tokenizer, [1], [hello, world])) == "Hello world"
    assert "".join(deltas(tokenizer, [1, hello, space], [world])) == " world"
    assert "".join(deltas(tokenizer, [1, hello] + [2] * 10, [world])) == " world"
    assert "".join(deltas(tokenizer, [1, hello], [2] * 30 + [world])) == " world"


def test_special_tokens_are_shown_when_asked():
    tokenizer = Tokenizer(tiny_tokenizer())
    ids = tokenizer.encode("a<|user|>b")
    assert "".join(deltas(tokenizer, [], ids)) == tokenizer.decode(ids) == "ab"
    assert "".join(deltas(tokenizer, [], ids, skip_special_tokens=False)) == "a<|user|>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|user|>b"


def test_ids_without_text_give_none():
    """Ids between the tokenizer's and the model's vocabulary: mirage#751, pegainfer#676, vllm#340 (C70)."""
    tokenizer = Tokenizer(tiny_tokenizer())
    ids = [*tokenizer.encode("ab"), 299, *tokenizer.encode("c")]
    assert tokenizer.decode(ids) == "".join(deltas(tokenizer, [], ids)) == "abc"


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_bos_stands_once_however_the_prompt_is_written(post_processor, add_bos):
    """A template that emits BOS and a tokenizer that adds one: vllm#27486, vllm#15695, tpu-inference#936 (C60)."""
    template = "{{ bos_token }}" + "{% for m in messages %}{{ m.content }}{% endfor %}"
    backend, special_tokens = byte_fallback_backend(post_processor), {"bos_token": "<s>"}
    tokenizer = Tokenizer(backend, special_tokens=special_tokens, chat_template=template, add_bos=add_bos)
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.bos_id == 1
    assert tokenizer.encode_chat(messages) == [1, 262, 263]
    assert tokenizer.encode(tokenizer.render_chat(messages)) == [1, 262, 263]
    adds = post_processor if add_bos is None else add_bos
    assert tokenizer.encode("ab") == ([1] if adds else []) + [262, 263]
    assert tokenizer.encode("") == ([1] if adds else [])
    assert tokenizer.encode("<s><s>a") == [1, 1, 262]  # two that were written are two


def test_a_tokenizer_that_adds_eos_adds_bos_once():
    """C60: vllm#27486."""
    backend = byte_fallback_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.encode("a") == tokenizer.encode("<s>a") == tokenizer.encode("a</s>") == [1, 262, 2]
    assert tokenizer.encode("a", goes_on=True) == [1, 262] and tokenizer.encode("") == [1, 2]
    assert tokenizer.encode_beginning("a b") == [1, 262], "nobody knows where the end will be"


@pytest.mark.parametrize("adds_bos", [True, False, None])
@pytest.mark.parametrize("adds_eos", [True, False, None])
@pytest.mark.parametrize("processor", ["<s> $A", "$A </s>", "<s> $A </s>", None])
def test_a_folder_says_whether_bos_and_eos_are_added(processor, adds_bos, adds_eos, tmp_path):
    """C60: what tokenizer_config.json says overrules the post-processor, as in transformers, and outlives a copy."""
    backend = byte_fallback_backend(post_processor=False)
    if processor is not None:
        ids = [(text, backend.token_to_id(text)) for text in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=processor, special_tokens=ids)
    folder = write_tiny_model(tmp_path / "from", num_layers=1)
    backend.save(str(folder / "tokenizer.json"))
    stated = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": adds_bos, "add_eos_token": adds_eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    tokenizer = Tokenizer.load(folder)
    begins = "<s>" in (processor or "") if adds_bos is None else adds_bos
    ends = "</s>" in (processor or "") if adds_eos is None else adds_eos
    assert tokenizer.encode("ab") == [1] * begins + [262, 263] + [2] * ends
    assert tokenizer.encode_rendered("ab") == [262, 263] and tokenizer.encode("ab", goes_on=True)[-1] == 263
    (tmp_path / "to").mkdir()
    tokenizer.save(tmp_path / "to")
    assert Tokenizer.load(tmp_path / "to").encode("ab</s>") == [1] * begins + [262, 263, 2]
    assert Tokenizer.load(tmp_path / "to").encode("ab") == tokenizer.encode("ab")


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "want"),
    [
        (5, [6, 7], "<|end|>", {0, 5, 6, 7}),
        ([5, 6], 7, None, {5, 6, 7}),
        (None, None, "<|user|>", {1}),
        (None, None, None, set()),
        (3, None, {"content": "<|system|>", "special": True}, {3}),
    ],
)
def test_all_places_that_state_an_eos_count(tmp_path, config, generation, eos_token, want):
    """One EOS id replacing another lets generation run on: vllm#4180, vllm#4182, mlx-vlm#2112 (C62)."""
    folder = write_tiny_model(tmp_path, num_layers=1)
    rewrite(folder / "config.json", eos_token_id=config)
    rewrite(folder / "generation_config.json", eos_token_id=generation)
    rewrite(folder / "tokenizer_config.json", eos_token=eos_token)
    assert Tokenizer.load(folder).eos_ids == want


def test_a_folder_gives_its_chat_template_from_any_of_its_places(tmp_path):
    folder = write_tiny_model(tmp_path, num_layers=1)
    tokenizer = Tokenizer.load(folder)
    want = "<|system|>Be brief.<|end|><|user|>What is 2024 + 17?<|end|>"
    assert tokenizer.render_chat(CHAT) == want + "<|assistant|>"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == want
    assert tokenizer.encode_chat(CHAT) == tokenizer.encode(want + "<|assistant|>")
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    rewrite(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.load(folder)
    for _ in range(2):
        assert tokenizer.render_chat(CHAT) == want + "<|assistant|>" == tokenizer.render_chat(CHAT, tools=[])
        assert tokenizer.render_chat(CHAT, tools=[{"name": "f"}]) == "x"
        assert tokenizer.render_chat(CHAT, tools=[{"name": "f"}], chat_template="y") == "y"
        tokenizer.save(folder)
        tokenizer = Tokenizer.load(folder)
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).render_chat(CHAT) == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("for tools, from a file")
    assert Tokenizer.load(folder).render_chat(CHAT, tools=[{"name": "f"}]) == "for tools, from a file"
    assert Tokenizer.load(folder).render_chat(CHAT) == "from the file"
    rewrite(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(folder).render_chat(CHAT)


def test_templates_render_as_transformers_renders_them():
    template = (
        "{% for m in messages %}\n"
        "    {% if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "    {{- m | tojson -}}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer(tiny_tokenizer(), chat_template=template)
    text = tokenizer.render_chat([{"role": "user", "content": "é<'"}, {"role": "user", "content": "no"}])
    assert text == """{"role": "user", "content": "é<'"}4"""


def test_a_template_may_mark_what_the_assistant_says():
    """transformers' tag for masks, which is no Jinja."""
    tokenizer = Tokenizer(tiny_tokenizer())
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}[{{ m.content }}]{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render_chat(chat, chat_template=template) == "a[b]"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_that_refuses_or_attacks_raises_a_value_error(template):
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        Tokenizer(tiny_tokenizer(), chat_template=template).render_chat(CHAT)


@pytest.mark.parametrize("content", ["end", "|", "the |> e", "  <|end|>  ", "é\n"])
@pytest.mark.parametrize("strips", [False, True])
def test_a_chat_goes_on_behind_its_last_content_whatever_the_end_tag_says(content, strips):
    """The content is found in the tag behind it."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>\n{% endfor %}the end"
    tokenizer = Tokenizer(
        tiny_tokenizer(), chat_template=template.replace("m.content", "m.content | trim" if strips else "m.content")
    )
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    text = tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    shown = content.strip() if strips else content
    assert text == f"[user]{shown}<|end|>\n[assistant]{shown}"
    assert chat[-1]["content"] == content
    tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(ValueError, match="no content to continue"):
        tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    """Ids past the embedding, silently wrong stops: trl#3425, vllm#9634, vllm#22471 (C79)."""
    backend = tiny_tokenizer()
    Tokenizer(backend).check_fits(272)
    backend.add_tokens(["<extra1>", "<extra2>", "<extra3>", "<extra4>", "<extra5>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 277
    tokenizer.check_fits(277)
    with pytest.raises(ValueError, match=r"its highest id is 276, the model embeds 272 ids \(0 to 271\)"):
        tokenizer.check_fits(272)
    with pytest.raises(ValueError, match="its highest id is 999"):
        Tokenizer(tiny_tokenizer(), eos_ids=[999]).check_fits(272)


def test_added_tokens_that_the_tokenizer_lacks_are_refused(tmp_path):
    """Added tokens that are missing make another tokenizer of it: trl#3425 (C79)."""
    folder = write_tiny_model(tmp_path, num_layers=1)
    rewrite(folder / "tokenizer_config.json", added_tokens_decoder={"1": {"content": "<|user|>"}})
    assert Tokenizer.load(folder).encode("a<|user|>")[-1] == 1
    for token, got in (("<new>", None), ("<|user|>", 1)):
        rewrite(folder / "tokenizer_config.json", added_tokens_decoder={"272": {"content": token}})
        with pytest.raises(ValueError, match=f"gives '{re.escape(token)}' id {got}, tokenizer_config.json says 272"):
            Tokenizer.load(folder)


def test_folders_without_a_readable_tokenizer_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json in .*convert it once .*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable"):
        Tokenizer.load(tmp_path)
    write_tiny_model(tmp_path, num_layers=1)
    rewrite(tmp_path / "tokenizer_config.json", eos_token="<nowhere>")
    with pytest.raises(ValueError, match="eos_token '<nowhere>' is not in the vocabulary"):
        Tokenizer.load(tmp_path)


def test_the_real_tiny_model_has_one_bos(shared_data):
    """C60: vllm#27486."""
    tokenizer = Tokenizer.load(shared_data / "models" / "stories260K-hf")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 512)
    ids = tokenizer.encode("Once upon a time")
    assert ids.count(1) == 1
    assert tokenizer.encode("<s>Once upon a time") == ids
    assert tokenizer.decode(ids) == "Once upon a time"


def write_gguf_tokenizer(
    path: Path,
    backend: tokenizers.Tokenizer,
    model: str = "gpt2",
    pre: str = "smollm",
    *,
    bos: str | None = None,
    **fields: bool,
) -> Path:
    """As llama.cpp's converter writes it, with 3 tokens that only fill up the embedding."""
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    kinds = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    if model == "llama":
        kinds |= {"<unk>": 2, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "[PAD0]", "[PAD1]", "[PAD2]"])
    writer.add_token_types([*(kinds.get(token, 1) for token in tokens), 5, 5, 5])
    if model == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([*(-float(ranks.get(token, 1e9)) for token in tokens), 0.0, 0.0, 0.0])
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if bos is not None:
        writer.add_bos_token_id(vocab[bos])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    templates = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "x"}]
    writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tokenizer_in_a_gguf_file_encodes_like_its_tokenizer_json(tmp_path):
    own = Tokenizer(tiny_tokenizer())
    for pre in ("default", "gpt-2"):
        tokenizer = Tokenizer.load(write_gguf_tokenizer(tmp_path / f"{pre}.gguf", tiny_tokenizer(), pre=pre))
        assert tokenizer.encode(TEXT + "<|user|>") == own.encode(TEXT + "<|user|>")
        assert tokenizer.eos_ids == {0, 1}
        assert tokenizer.vocab_size == 272 and tokenizer.decode([272]) == ""
    assert tokenizer.render_chat(CHAT).endswith("<|end|><|assistant|>")
    assert tokenizer.render_chat(CHAT, tools=[{"name": "f"}]) == "x"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    plain = tokenizer.encode(TEXT)
    for adds, want in ((True, [2, *plain, 0]), (False, plain)):
        fields = {"bos": tiny_tokenizer().id_to_token(2), "add_bos_token": adds, "add_eos_token": adds}
        tokenizer = Tokenizer.load(write_gguf_tokenizer(tmp_path / f"{adds}.gguf", tiny_tokenizer(), **fields))
        assert tokenizer.encode(TEXT) == want


SCRIPTS = (
    TEXT,
    "I'LL don't e\u0301té, Ångström ﬁ ½ ² Ⅷ ١٢٣  \u00a0\u3000x",
    "def f(x):\n\treturn x ** 2  # 1234567890\r\n\r\n    if a!=b:  \n",
    "हिन्दी العربية עברית Ελληνικά русский 漢字かな交じり文 ไทย 🏳️‍🌈🇩🇪",
    "https://example.org/a_b?c=1&d=%20  ...!!! «x» “y” <s> [INST] <|im_start|><think>",
    "Tiếng Việt: nhiều việc điều",  # tokens of Llama 3 that its merges do not make
    "   leading and trailing   ",
    "x",
    " ",
    "",
)


@pytest.mark.parametrize(
    ("name", "model", "pre", "bos"),
    [
        pytest.param("llama3", "gpt2", "llama-bpe", "<|begin_of_text|>", marks=pytest.mark.slow),
        pytest.param("qwen3", "gpt2", "qwen2", None, marks=pytest.mark.slow),
        ("smollm2", "gpt2", "smollm", None),
        ("llama2", "llama", "default", "<s>"),
        ("mistral-v1", "llama", "default", "<s>"),
        ("mistral-v3", "llama", "default", "<s>"),
        ("baichuan-7b", "llama", "default", None),
    ],
)
def test_real_tokenizers_in_gguf_files_encode_like_their_tokenizer_json(name, model, pre, bos, tmp_path, shared_data):
    """Also as they are saved beside a converted checkpoint. A BOS is added by default where llama.cpp adds one."""
    backend = real_backend(shared_data, name)
    bos_fields = {"add_bos_token": False, "add_space_prefix": False} if name == "baichuan-7b" else {}
    path = write_gguf_tokenizer(tmp_path / "model.gguf", backend, model, pre, bos=bos, **bos_fields)
    tokenizer = Tokenizer.load(path)
    tokenizer.save(tmp_path)
    for loaded in (tokenizer, Tokenizer.load(tmp_path)):
        for text in SCRIPTS:
            ids = backend.encode(text, add_special_tokens=False).ids
            want = ids if bos is None or text.startswith(bos) else [backend.token_to_id(bos), *ids]
            assert loaded.encode(text) == want, text
            assert loaded.decode(want) == backend.decode(want)
            assert loaded.decode(want, skip_special_tokens=False) == backend.decode(want, skip_special_tokens=False)
        assert loaded.vocab_size == backend.get_vocab_size()


def test_pieces_of_sentencepiece_are_joined_in_the_order_of_their_scores(tmp_path):
    """Whatever the order of their ids; what has no token is spelled in bytes."""
    pieces = [("▁", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -3.0), ("aa", -2.0), ("▁a", -4.0), ("▁aab", -5.0)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [score for _, score in pieces])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    for add, token_id in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0)):
        add(token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "model.gguf")
    space, _, b, ab, aa, space_a, _ = range(259, 266)
    for text, want in (
        ("ab", [space, ab]),
        ("aab", [space, aa, b]),
        ("a a", [space_a, space_a]),
        ("é</s>a", [space, 3 + 0xC3, 3 + 0xA9, 2, space_a]),
    ):
        assert tokenizer.encode(text) == [1, *want]
        assert tokenizer.decode(want) == text.replace("</s>", " ")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 266)


def test_other_gguf_tokenizers_are_refused_by_name(tmp_path):
    path = write_gguf_tokenizer(tmp_path / "pre.gguf", tiny_tokenizer(), pre="tekken")
    known = "default, gpt-2, smollm, llama-bpe, llama-v3, llama3, qwen2"
    with pytest.raises(ValueError, match=f"unknown GGUF pre-tokenizer 'tekken'; known: {known}"):
        Tokenizer.load(path)
    path = write_gguf_tokenizer(tmp_path / "model.gguf", tiny_tokenizer(), model="bert")
    with pytest.raises(ValueError, match="unknown GGUF tokenizer 'bert'; known: gpt2, llama"):
        Tokenizer.load(path)


@pytest.mark.slow
def test_the_default_models_tokenizer_is_that_of_its_tokenizer_json(default_model, shared_data):
    tokenizer, backend = Tokenizer.load(default_model), real_backend(shared_data, "smollm2")
    chat = tokenizer.render_chat(CHAT)
    for text in (
        TEXT,
        chat,
        "def f(x):\n    return x ** 2  # 1234567890",
        "a 12345  67,8\n\n x",
        "I'll don't e\u0301té   ",
    ):
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode_chat(CHAT) == tokenizer.encode(chat)
    assert chat.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 49152)


def test_the_tokenizer_needs_no_jax(tmp_path):
    folder = write_checkpoint(tmp_path, tiny_config(num_layers=1), tiny_weights(tiny_config(num_layers=1)))
    script = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('t', sys.argv[1]); "
        "sys.modules['prefix_jax'] = p = type(sys)('prefix_jax'); p.__path__ = [sys.argv[1].rpartition('/')[0]]; "
        "t = u.module_from_spec(s); s.loader.exec_module(t); t.Tokenizer.load(sys.argv[2]); "
        "assert 'jax' not in sys.modules"
    )
    source = Path(__file__).parents[1] / "prefix_jax" / "tokenizer.py"
    subprocess.run([sys.executable, "-c", script, str(source), str(folder)], check=True)


def test_special_tokens_stand_alone_where_no_spaces_are_wanted():
    """spaces_between_special_tokens; a decoder without a rule of its own puts spaces between all tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "<t>": 3}, unk_token="a"))
    backend.add_special_tokens(["<s>", "<t>"])
    tokenizer = Tokenizer(backend)
    ids = [2, 3, 0, 1, 2]
    assert tokenizer.decode(ids, False) == "<s> <t> a b <s>"
    assert tokenizer.decode(ids, False, False) == "<s><t>a b<s>"
    assert tokenizer.decode(ids, True, False) == tokenizer.decode(ids) == "a b"
