"""The two files of an offline run: rows of prompts that come in, rows of answers that go out.

Every complaint carries file and line. Nothing here knows the engine beyond its SamplingParams and RequestOutput.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from prefix_jax import RequestOutput, SamplingParams

SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
CACHE_FIELDS = frozenset(("cache_salt", "cache_mode", "priority", "ttl"))  # LLM.generate checks them
KNOWN_FIELDS = SAMPLING_FIELDS | CACHE_FIELDS | {"id", "prompt", "messages", "prefix_pos"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a prompts file. `content` is text or a list of chat messages; `sampling` and `cache` what the line
    sets."""

    id: str | int
    line: int
    content: str | list[dict]
    sampling: dict
    prefix_pos: int | None = None
    cache: dict = dataclasses.field(default_factory=dict)


def read_rows(path: Path, complain: Callable[[str], None]) -> tuple[list[Row], int]:
    """The rows of a .jsonl or text file, and how many lines could not be read: `complain` is told file, line and why.

    Raises ValueError naming the lines when an id occurs twice.
    """
    parse = parse_json_line if path.suffix.lower() in (".jsonl", ".json") else parse_text_line
    rows, num_unreadable, ignored = [], 0, set()
    for line, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            row, unknown = parse(raw.decode().removesuffix("\r"), line)
        except (ValueError, TypeError, RecursionError) as error:
            num_unreadable += 1
            complain(f"{path}:{line}: {error}")
            continue
        rows.append(row)
        for name in sorted(unknown - ignored):
            complain(f"{path}:{line}: field {name!r} is not used, here and below")
        ignored |= unknown
    refuse_duplicates(path, rows)
    return rows, num_unreadable


def parse_text_line(text: str, line: int) -> tuple[Row, set[str]]:
    return Row(line, line, text, {}), set()


def parse_json_line(text: str, line: int) -> tuple[Row, set[str]]:
    """The row on a jsonl line, and the names of unknown fields. ValueError or TypeError say what is wrong with it."""
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"want a JSON object, got {shorten(text, 60)}")
    if ("prompt" in data) == ("messages" in data):
        raise ValueError('want exactly one of "prompt" and "messages"')
    content = check_text("prompt", data["prompt"]) if "prompt" in data else check_messages(data["messages"])
    identity = line if data.get("id") is None else data["id"]
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise ValueError(f'"id" must be text or an integer, got {identity!r}')
    prefix_pos = data.get("prefix_pos")
    if isinstance(prefix_pos, bool) or not isinstance(prefix_pos, int | None):
        raise ValueError(f'"prefix_pos" must be an integer, got {prefix_pos!r}')
    sampling = {name: value for name, value in data.items() if name in SAMPLING_FIELDS}
    SamplingParams(**sampling)  # complains now, with the line at hand
    cache = {name: data[name] for name in CACHE_FIELDS if data.get(name) is not None}
    return Row(identity, line, content, sampling, prefix_pos, cache), data.keys() - KNOWN_FIELDS


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be text, got {shorten(repr(value), 60)}')
    value.encode()  # JSON may hold half of a surrogate pair, which no tokenizer takes
    return value


def check_messages(messages: object) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" must be a list with at least one message, got {shorten(repr(messages), 60)}')
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"a message must be an object, got {shorten(repr(message), 60)}")
        check_text("role", message.get("role"))
        check_text("content", message.get("content"))
    return messages


def refuse_duplicates(path: Path, rows: Iterable[Row]) -> None:
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(str(row.id), []).append(row.line)
    twice = [f"{identity!r} on lines {', '.join(map(str, at))}" for identity, at in lines.items() if len(at) > 1]
    if twice:
        raise ValueError(f"{path}: ids must be unique (the default is the line number), got {'; '.join(twice)}")


def answer_row(identity: str | int, output: RequestOutput) -> dict:
    answer = output.outputs[0] if output.outputs else None
    return {
        "id": identity,
        "text": answer.text if answer else "",
        "prompt_tokens": len(output.prompt_token_ids or ()),
        "cached_tokens": output.num_cached_tokens or 0,
        "output_tokens": len(answer.token_ids) if answer else 0,
        "finish_reason": answer.finish_reason if answer else "error",
        "error": output.error,
    }


def append_line(path: Path, data: dict) -> None:
    """One unbuffered write, so that Ctrl-C and kill fall before or after a line (but for a full disk)."""
    append(path, json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def append(path: Path, raw: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(raw)


def done_ids(path: Path, complain: Callable[[str], None]) -> set[str]:
    """Ids that an answers file already holds; none if there is no file. Mends its last line after a kill: a whole
    answer without its newline gets it, a torn one is cut off, so that the next answer starts a line of its own."""
    if not path.exists():
        return set()
    *lines, last = path.read_bytes().split(b"\n")
    done = set()
    for line, raw in enumerate(lines, 1):
        if (identity := answered_id(raw)) is not None:
            done.add(identity)
        else:
            complain(f"{path}:{line}: not an answer, left as it is: {shorten(repr(raw), 60)}")
    if last and (identity := answered_id(last)) is not None:
        done.add(identity)
        append(path, b"\n")
    elif last:
        complain(f"{path}:{len(lines) + 1}: cut short by a kill, removed: {shorten(repr(last), 60)}")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - len(last))
    return done


def answered_id(raw: bytes) -> str | None:
    try:
        return str(json.loads(raw)["id"])
    except (ValueError, TypeError, KeyError):
        return None


def shorten(text: str, width: int) -> str:
    line = text.split("\n", 1)[0]
    return line if len(line) <= width else line[: width - 1] + "…"
