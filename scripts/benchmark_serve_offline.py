"""What the prefix cache is worth to scripts/serve_offline.py: 32 questions under one system prompt, cache on and off.

Writes benchmarks/results/serve_offline.json. `--answers` keeps the answers; `--against` a file that another device kept
says how many of them are the same here.
"""

import argparse
import json
import tempfile
from pathlib import Path

import serve_offline
from render_results import Figure, device_name, write_results
from workloads import expected_hit_rate

from prefix_jax.default_model import default_model_path
from prefix_jax.tokenizer import Tokenizer

NUM_REQUESTS = 32
MAX_TOKENS = 16


def make_questions() -> list[dict]:
    """The bundled questions, and some of them again in other words, so that nothing but the system prompt is shared."""
    lines = (serve_offline.DATA / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    again = [{"id": f"{q['id']}-again", "prompt": f"Tell me in a few words: {q['prompt']}"} for q in questions]
    return (questions + again)[:NUM_REQUESTS]


def same_answers(here: Path, there: Path) -> float:
    """The share of answers in `here` whose text, length and ending `there` has too."""

    def essence(path: Path) -> dict:
        answers = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return {answer["id"]: (answer["text"], answer["output_tokens"], answer["finish_reason"]) for answer in answers}

    ours, theirs = essence(here), essence(there)
    return sum(theirs.get(identity) == answer for identity, answer in ours.items()) / len(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--answers", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    args = parser.parse_args()
    model = args.model or default_model_path()
    system = serve_offline.DATA / "system_prompt.txt"
    questions = make_questions()
    with tempfile.TemporaryDirectory() as folder:
        prompts, summary_file = Path(folder, "prompts.jsonl"), Path(folder, "summary.json")
        answers = args.answers or Path(folder, "answers.jsonl")
        prompts.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
        command = ["--compare", "--model", str(model), "--dtype", args.dtype, "--max-tokens", str(MAX_TOKENS)]
        command += ["--prompts", str(prompts), "--system", f"@{system}", "--summary", str(summary_file)]
        command += ["--output", str(answers)] + (["--device", args.device] if args.device else [])
        if status := serve_offline.main(command):
            raise SystemExit(status)
        summary = json.loads(summary_file.read_text())
        same = same_answers(answers, args.against) if args.against else None
    tokenizer = Tokenizer.load(model)
    text = system.read_text(encoding="utf-8").strip()
    chats = [[{"role": "system", "content": text}, {"role": "user", "content": q["prompt"]}] for q in questions]
    rows = [
        Figure(
            "speedup by the cache, 32 requests, 600 shared tokens", summary["speedup"], "x", must=3, better="higher"
        ),
        Figure("answers the same with the cache on and off", float(summary["identical"]), "share", 1, better="higher"),
        Figure("hit rate", summary["hit_rate"], "share", better="higher"),
        Figure(
            "hit rate expected from the tokens", expected_hit_rate(list(map(tokenizer.encode_chat, chats))), "share"
        ),
        Figure("output tokens/s with the cache", summary["tokens_per_second"], "1/s", better="higher"),
    ]
    if same is not None:
        rows.append(Figure(f"answers the same as in {args.against.name}", same, "share", 1, better="higher"))
    write_results("serve_offline", rows, device=device_name(args.device))


if __name__ == "__main__":
    main()
