"""What benchmarks run: requests as token ids and lengths, made from a seed or read from files of real ones.

Everything here is deterministic in its arguments, and says of itself what a prefix cache can find in it.
"""

import csv
import gzip
import io
import itertools
import json
import random
import tempfile
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from prefix_jax.prefix_trie import common_len
from prefix_jax.tokenizer import Tokenizer

BLOCK = 512  # tokens that a hash id of a Mooncake trace stands for
LETTERS = "ABCD"
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048  # of a ShareGPT request that is not left out
PERSON = ("human", "user")  # as ShareGPT files call them
MADE = ("random", "prefix-repetition", "generated-shared-prefix", "tree")
READ = ("sharegpt", "conversations", "mooncake", "azure", "mmlu", "custom")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Item:
    """One request: token ids, tokens to yield, how many leading ones may be declared a prefix, and seconds from the
    start at which it comes."""

    tokens: array
    output_len: int
    shared_len: int = 0
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are asked; `skipped` counts what the file had besides, by reason."""

    name: str
    items: list[Item]
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def prompts(self) -> list[array]:
        return [item.tokens for item in self.items]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.tokens) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    def fitting(self, max_model_len: int) -> "Workload":
        """Without the requests that are longer, prompt and output together."""
        items = [item for item in self.items if len(item.tokens) + item.output_len <= max_model_len]
        left_out = Counter({f"longer than {max_model_len}": len(self.items) - len(items)})
        return replace(self, items=items, skipped=self.skipped + left_out)


# What a cache can find -----------------------------------------------------------------------------------------------


def novel_lens(prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]] | None = None) -> list[int]:
    """Of each prompt, in this order, the tokens that no earlier one begins with, nor an earlier one and its answer."""
    known: list[bytes] = []  # sorted: of all of them, a new one's neighbours share most with it
    novel = []
    for prompt, answer in zip(prompts, answers or itertools.repeat(()), strict=answers is not None):
        key = array("i", prompt).tobytes()
        at = bisect_left(known, key)
        novel.append(len(prompt) - max((common_len(key, other) for other in known[max(0, at - 1) : at + 1]), default=0))
        if answer:
            key += array("i", answer).tobytes()
            at = bisect_left(known, key)
        if at == len(known) or known[at] != key:
            known.insert(at, key)
    return novel


def num_distinct(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens of the prompts' trie."""
    return sum(novel_lens(prompts))


def expected_hit_rate(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] | None = None) -> float:
    """The share of prompt tokens that a cache finds which never evicts, when one prompt comes after the other, in pages
    of one token. The last token of a prompt is never found: its logits are needed."""
    novel = novel_lens(prompts, answers)
    found = sum(min(len(p) - new, len(p) - 1) for p, new in zip(prompts, novel, strict=True))
    return found / max(1, sum(map(len, prompts)))


# Made from a seed ----------------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, vocab_size: int, length: int) -> array:
    return array("i", rng.integers(0, vocab_size, length).astype(np.int32).tobytes())


def random_lengths(lengths: Iterable[Sequence[int]], *, vocab_size: int, seed: int, name: str = "random") -> Workload:
    """Random tokens for each (tokens in, tokens out)."""
    rng = np.random.default_rng(seed)
    return Workload(name, [Item(draw(rng, vocab_size, n), out) for n, out in lengths])


def prefix_repetition(
    *, num: int, prefix_len: int, suffix_len: int, output_len: int, vocab_size: int, seed: int, groups: int = 1
) -> Workload:
    """`num` prompts over `groups` prefixes in turn, with suffixes of their own, in random order."""
    rng = np.random.default_rng(seed)
    prefixes = [draw(rng, vocab_size, prefix_len) for _ in range(groups)]
    items = [Item(prefixes[i % groups] + draw(rng, vocab_size, suffix_len), output_len, prefix_len) for i in range(num)]
    if groups > 1:
        random.Random(seed).shuffle(items)
    return Workload("prefix-repetition", items)


def tree(
    levels: Sequence[tuple[int, int]], *, output_len: int, vocab_size: int, seed: int, name: str = "tree"
) -> Workload:
    """One prompt for each leaf of a tree: `levels` are (nodes, tokens of each) from the root down, the nodes of a level
    spread evenly over those above. ValueError where they do not divide."""
    rng = np.random.default_rng(seed)
    paths = [array("i")]
    for count, length in levels:
        if count % len(paths):
            raise ValueError(f"{count} nodes do not divide among the {len(paths)} above them")
        each = count // len(paths)
        paths = [path + draw(rng, vocab_size, length) for path in paths for _ in range(each)]
    shared = sum(length for _, length in levels[:-1])
    items = [Item(path, output_len, shared) for path in paths]
    random.Random(seed).shuffle(items)
    return Workload(name, items)


def poisson(items: Iterable[Item], rate: float, seed: int) -> list[Item]:
    """The items, arriving at random, `rate` a second on average; all at once for an infinite rate."""
    rng = np.random.default_rng(seed)
    items = list(items)
    times = np.cumsum(rng.exponential(1 / rate, len(items))) if rate != float("inf") else np.zeros(len(items))
    return [replace(item, arrival=float(time)) for item, time in zip(items, times, strict=True)]


# Read from files -----------------------------------------------------------------------------------------------------


def open_text(path: Path) -> io.TextIOBase:
    opened = gzip.open if path.suffix == ".gz" else open
    return opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="")


def read_lines(path: Path) -> list[dict]:
    with open_text(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def read_array(path: Path) -> tuple[list, int]:
    """The rows of a JSON array, or of one JSON value a line, and how many were lost: lines that are no JSON, and 1 for
    an array that breaks off. ValueError if the file is something else."""
    with open_text(path) as file:
        text = file.read().strip()
    if not text:
        return [], 0
    if text[0] == "{":
        rows = [parsed(line) for line in text.splitlines() if line.strip()]
        return [row for row in rows if row is not None], sum(row is None for row in rows)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError:
        if text[0] != "[":
            raise ValueError(f"{path}: neither a JSON array nor JSON lines: {text[:40]!r}") from None
        return rows_before_break(text), 1
    if not isinstance(rows, list):
        raise ValueError(f"{path}: want a JSON array, got {type(rows).__name__}")
    return rows, 0


def parsed(line: str) -> object | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def rows_before_break(text: str) -> list:
    rows, at, decoder = [], 1, json.JSONDecoder()
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return rows
        rows.append(row)


def read_sharegpt(path: Path) -> tuple[list[list[dict]], int]:
    """The conversations, each a list of {"from", "value"}, and how many rows are malformed and left out."""
    return find_conversations(*read_array(path))


def find_conversations(rows: list, lost: int) -> tuple[list[list[dict]], int]:
    talks = [row["conversations"] for row in rows if is_conversation(row)]
    return talks, lost + len(rows) - len(talks)


def is_conversation(row: object) -> bool:
    turns = row.get("conversations") if isinstance(row, dict) else None
    return isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)
        for turn in turns
    )


def text_encoder(tokenizer: Path | None, vocab_size: int | None = None) -> Encode:
    """Of a folder, a GGUF file, or a tokenizer.json, gzipped or not. Without one a token is four bytes of text, and
    with a vocabulary's size one of its ids, by checksum: equal texts give equal tokens."""
    if tokenizer is None:
        return lambda text: text_bytes(text, vocab_size)
    tokenizer = Path(tokenizer)
    if tokenizer.name.removesuffix(".gz").endswith(".json"):
        with tempfile.TemporaryDirectory() as folder, open_text(tokenizer) as file:
            Path(folder, "tokenizer.json").write_text(file.read(), encoding="utf-8")
            loaded = Tokenizer.load(folder)
    else:
        loaded = Tokenizer.load(tokenizer)
    return loaded.encode


def text_bytes(text: str, vocab_size: int | None) -> array:
    raw = text.encode(errors="replace")
    tokens = array("i", raw.ljust(-(-len(raw) // 4) * 4))
    if vocab_size is None:
        return tokens
    return array("i", (zlib.crc32(token.to_bytes(4, "little", signed=True)) % vocab_size for token in tokens))


def is_kept(prompt_len: int, output_len: int) -> bool:
    short = prompt_len < MIN_TOKENS or output_len < MIN_TOKENS
    return not (short or prompt_len > MAX_PROMPT or prompt_len + output_len > MAX_TOTAL)


def sharegpt(
    path: Path, *, num: int, seed: int, encode: Encode, vocab_size: int, output_len: int | None = None
) -> Workload:
    """First turns of conversations, with answers as long as the recorded ones (or `output_len`): at least 4 tokens
    each, prompts up to 1,024, both together up to 2,048; then shuffled, then the first `num`.

    From text, or from lengths alone (a .csv with `turn`, `user_tok_llama3`, `asst_tok_llama3`, or a .json of [in, out],
    which is taken in its own order); then the tokens are random.
    """
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".csv"):
        with open_text(path) as file:
            rows = [row for row in csv.DictReader(file) if row["turn"] == "0"]
        pairs = [(int(row["user_tok_llama3"]), int(row["asst_tok_llama3"])) for row in rows]
        kept = [pair for pair in pairs if is_kept(*pair)]
        random.Random(seed).shuffle(kept)
    else:
        rows, lost = read_array(path)
        pairs = [tuple(row) for row in rows if is_pair(row)]
        if len(pairs) < len(rows):
            return sharegpt_text(
                *find_conversations(rows, lost), num=num, seed=seed, encode=encode, output_len=output_len
            )
        kept = [pair for pair in pairs if is_kept(*pair)]
    kept = [(n, output_len or out) for n, out in kept]
    made = random_lengths(kept[:num], vocab_size=vocab_size, seed=seed, name="sharegpt")
    return replace(made, skipped=+Counter({"too short or too long": len(pairs) - len(kept)}))


def is_pair(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(type(n) is int for n in row)


def sharegpt_text(
    talks: list[list[dict]], malformed: int, *, num: int, seed: int, encode: Encode, output_len: int | None
) -> Workload:
    skipped = Counter({"malformed": malformed})
    kept = []
    for talk in talks:
        if len(talk) < 2:
            skipped["fewer than two turns"] += 1
        elif talk[0]["from"] not in PERSON:
            skipped["the model begins"] += 1
        else:
            tokens, length = array("i", encode(talk[0]["value"])), len(encode(talk[1]["value"]))
            if is_kept(len(tokens), length):
                kept.append(Item(tokens, output_len or length))
            else:
                skipped["too short or too long"] += 1
    random.Random(seed).shuffle(kept)
    return Workload("sharegpt", kept[:num], +skipped)


def conversations(
    path: Path, *, num: int, seed: int, encode: Encode, output_len: int | None = None, num_active: int = 64
) -> Workload:
    """Whole conversations: turn k asks with all that was said before it. `num` requests; `num_active` conversations
    take turns."""
    talks, malformed = read_sharegpt(path)
    random.Random(seed).shuffle(talks)
    turns = interleave((conversation_turns(talk, encode) for talk in talks), num_active)
    items = [Item(tokens, output_len or max(1, length)) for tokens, length in itertools.islice(turns, num)]
    return Workload("conversations", items, +Counter({"malformed": malformed}))


def interleave(sources: Iterable[Iterator], num_active: int) -> Iterator:
    """One of each of `num_active` in turn; one that ends makes room for the next."""
    waiting = iter(sources)
    active = list(itertools.islice(waiting, num_active))
    while active:
        for source in list(active):
            try:
                yield next(source)
            except StopIteration:
                active.remove(source)
                active += itertools.islice(waiting, 1)


def conversation_turns(turns: Sequence[dict], encode: Encode) -> Iterator[tuple[array, int]]:
    """(all up to a person's turn, length of the answer) for each of a person's turns."""
    history = array("i")
    for turn, answer in itertools.zip_longest(turns, turns[1:]):
        history = history + array("i", encode(turn["value"]))
        if turn["from"] in PERSON and history:
            yield history, len(encode(answer["value"])) if answer else 0


def mooncake(path: Path, *, num: int | None, seed: int, vocab_size: int) -> Workload:
    """A trace of the tokens that equal hash ids stand for, with its own times and lengths."""
    blocks: dict[int, array] = {}
    items = []
    for row in read_lines(path)[:num]:
        tokens = array("i")
        for block in row["hash_ids"]:
            if block not in blocks:
                blocks[block] = draw(np.random.default_rng((seed, block)), vocab_size, BLOCK)
            tokens += blocks[block]
        arrival = row.get("timestamp", 0) / 1000
        items.append(Item(tokens[: row["input_length"]], max(1, row.get("output_length", 1)), arrival=arrival))
    return Workload("mooncake", items)


def azure(path: Path, *, num: int | None, seed: int, vocab_size: int) -> Workload:
    """Random tokens of the lengths, and at the times, of a .csv with TIMESTAMP, ContextTokens, GeneratedTokens."""
    with open_text(path) as file:
        rows = list(itertools.islice(csv.DictReader(file), num))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    rng = np.random.default_rng(seed)
    items = [
        Item(
            draw(rng, vocab_size, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
            arrival=(time - times[0]).total_seconds(),
        )
        for row, time in zip(rows, times, strict=True)
    ]
    return Workload("azure", items)


def custom(path: Path, *, num: int | None, encode: Encode, output_len: int | None) -> Workload:
    """Lines of {"prompt_token_ids" or "prompt", "output_tokens"}, as serve_offline.py --trace writes them; the latter
    defaults to `output_len`. ValueError names a line that has neither."""
    items = []
    for line, row in enumerate(read_lines(path)[:num], 1):
        tokens = row.get("prompt_token_ids") or (encode(row["prompt"]) if row.get("prompt") else None)
        length = output_len or row.get("output_tokens")
        if not tokens or not length:
            raise ValueError(f"{path}:{line}: want prompt_token_ids or prompt, and output_tokens; got {sorted(row)}")
        items.append(Item(array("i", tokens), length, row.get("shared_tokens", 0), row.get("arrival", 0.0)))
    return Workload("custom", items)


def write_custom(workload: Workload, path: Path) -> None:
    """For `custom` to read."""
    with path.open("w", encoding="utf-8") as file:
        for item in workload.items:
            row = {"prompt_token_ids": item.tokens.tolist(), "output_tokens": item.output_len}
            row |= {"shared_tokens": item.shared_len, "arrival": item.arrival}
            file.write(json.dumps(row) + "\n")


def mmlu(folder: Path, *, num: int | None, encode: Encode, seed: int = 0, output_len: int = 1) -> Workload:
    """Five shots and a question for each test row, subject by subject. Of `num` of them: up to 8 of each subject, the
    subjects drawn at random."""
    shots: dict[str, list[str]] = {}
    for row in read_lines(folder / "dev.jsonl"):
        shots.setdefault(row["subject"], []).append(mmlu_text(row) + f" {LETTERS[row['answer']]}\n\n")
    rows = read_lines(folder / "test_half.jsonl.gz")
    if num is not None and num < len(rows):
        by_subject: dict[str, list[dict]] = {}
        for row in rows:
            by_subject.setdefault(row["subject"], []).append(row)
        subjects = random.Random(seed).sample(sorted(by_subject), len(by_subject))
        rows = [row for subject in subjects for row in by_subject[subject][:8]][:num]
    items = []
    for row in rows:
        subject = row["subject"]
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        text = head + "".join(shots[subject][:5]) + mmlu_text(row)
        items.append(Item(array("i", encode(text)), output_len))
    return Workload("mmlu", items)


def mmlu_text(row: dict) -> str:
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True))
    return f"{row['question']}{choices}\nAnswer:"


# Dialogues ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialogue:
    """What a person asks, turn by turn; and what is answered, or None where the model's own answers go on."""

    asks: tuple[str, ...]
    answers: tuple[str, ...] | None = None


def mt_bench(path: Path, *, num: int | None, seed: int = 0) -> list[Dialogue]:
    """Questions of two turns, the second about the model's own answer to the first."""
    rows = read_lines(path)
    if num is not None:
        random.Random(seed).shuffle(rows)
    return [Dialogue(tuple(row["turns"])) for row in rows[:num]]


def sharegpt_dialogues(path: Path, *, num: int | None, max_chars: int, seed: int = 0) -> list[Dialogue]:
    """Conversations of at least two turns of a person, each cut before its text is longer than `max_chars`."""
    talks, _ = read_sharegpt(path)
    random.Random(seed).shuffle(talks)
    found = []
    for talk in talks:
        asks, answers, total = [], [], 0
        for ask, answer in zip(talk[::2], talk[1::2], strict=False):
            total += len(ask["value"]) + len(answer["value"])
            if ask["from"] not in PERSON or answer["from"] in PERSON or total > max_chars:
                break
            asks.append(ask["value"])
            answers.append(answer["value"])
        if len(asks) >= 2:
            found.append(Dialogue(tuple(asks), tuple(answers)))
    return found[:num]
