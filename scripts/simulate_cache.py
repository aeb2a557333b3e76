"""Replays a trace against the prefix cache without a model, over schedule policy x eviction x pool size x page size.

Prints the share of prompt tokens found, beside the two optima: a cache that never evicts, and one that knows the future
(Belady); and recommends. The cache, the eviction and the policies are the engine's own. Time is counted in starts: at
most --max-num-seqs requests run, and the one that runs longest ends when another is to start. Pages of answers are held
while a request runs; what they contain is not in a trace, so nobody finds them.
"""

import argparse
import gc
import itertools
import math
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workloads import BLOCK, conversation_turns, interleave, read_lines, read_sharegpt, text_encoder

from prefix_jax import eviction, policies, request
from prefix_jax.forecast import Forecast
from prefix_jax.prefix_cache import PageTable, PrefixCache

NUM_ACTIVE = 64  # conversations that take turns
SAMPLING = request.SamplingParams()
GOOD = 0.95  # of what a cache without bound finds: the pool that is recommended reaches it
EPILOG = """\
trace FILE, .gz or not
  Mooncake     .jsonl with "hash_ids", "input_length", "output_length": an id stands for 512 tokens and all before them
  ShareGPT     .json, a list of {"conversations": [{"from", "value"}, ...]}: each turn asks with all turns before it;
               without --tokenizer a token is four bytes of text
  a run's log  .jsonl with "prompt_token_ids", as serve_offline.py --trace writes it; optionally "output_tokens"
"""


@dataclass(frozen=True)
class Ask:
    """One request of a trace: an id for each full page of its prompt, equal where all tokens up to its end are."""

    pages: array
    num_tokens: int
    num_output_tokens: int = 0


@dataclass(frozen=True)
class Result:
    page_size: int
    num_pages: int
    policy: str
    eviction: str
    hit_rate: float
    seconds: float


# ---- traces ----------------------------------------------------------------------------------------------------------


def read_trace(path: Path, page_size: int, tokenizer: Path | None = None) -> list[Ask]:
    """ValueError if the file is none of the three kinds, has no tokens, or cannot be cut into pages of this size."""
    try:
        asks = _read_trace(path, page_size, tokenizer)
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: a row is not as its first one says: {error!r}") from error
    if not any(ask.num_tokens for ask in asks):
        raise ValueError(f"{path}: no request has a token")
    return asks


def _read_trace(path: Path, page_size: int, tokenizer: Path | None) -> list[Ask]:
    if path.name.removesuffix(".gz").endswith(".json"):
        talks, _ = read_sharegpt(path)
        encode = text_encoder(tokenizer)
        return page_prompts(interleave((conversation_turns(talk, encode) for talk in talks), NUM_ACTIVE), page_size)
    rows = read_lines(path)
    if rows and "hash_ids" in rows[0]:
        return page_blocks(rows, page_size)
    if rows and "prompt_token_ids" in rows[0]:
        prompts = ((array("i", row["prompt_token_ids"]), row.get("output_tokens") or 0) for row in rows)
        return page_prompts(prompts, page_size)
    raise ValueError(f"{path}: neither a Mooncake trace, nor ShareGPT conversations, nor a run's log")


def page_blocks(rows: Iterable[dict], page_size: int) -> list[Ask]:
    if BLOCK % page_size and page_size % BLOCK:
        raise ValueError(f"page size {page_size} neither divides {BLOCK} nor is a multiple of it")
    asks, ids, groups = [], {}, {}
    for row in rows:
        blocks = [ids.setdefault(block, len(ids)) for block in row["hash_ids"]]  # theirs may have any size
        length = row["input_length"]
        if page_size <= BLOCK:
            per_block = BLOCK // page_size
            pages = array("i", (block * per_block + i for block in blocks for i in range(per_block)))
        else:
            step = page_size // BLOCK
            keys = (tuple(blocks[i : i + step]) for i in range(0, len(blocks), step))
            pages = array("i", (groups.setdefault(key, len(groups)) for key in keys))
        asks.append(Ask(pages[: length // page_size], length, row.get("output_length") or 0))
    return asks


def page_prompts(prompts: Iterable[tuple[array, int]], page_size: int) -> list[Ask]:
    asks, ids = [], {}
    for tokens, num_output_tokens in prompts:
        pages, page = array("i"), -1
        for start in range(0, len(tokens) - page_size + 1, page_size):
            page = ids.setdefault((page, tokens[start : start + page_size].tobytes()), len(ids))
            pages.append(page)
        asks.append(Ask(pages, len(tokens), num_output_tokens))
    return asks


# ---- replay ----------------------------------------------------------------------------------------------------------


class Replay:
    """One pool. A page id is a token of a cache whose pages hold one token."""

    def __init__(self, num_pages: int, page_size: int, policy: str, evicts: str, max_num_seqs: int):
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.cache = PrefixCache(num_pages, 1, evicts)
        self.cache.queue.policy = eviction.make_policy(evicts, page_size, eviction.RecomputeTime())
        self.policy = policies.make_policy(policy, 1)
        self.view = policies.View(self.cache)
        self.forecast: Forecast | None = None
        self.waiting: list[request.Sequence] = []
        self.running: list[PageTable] = []
        self.hit_tokens = 0

    def run(self, asks: Sequence[Ask], window: int) -> float:
        """The share of prompt tokens found when `window` requests wait at once."""
        self.asks = asks
        arriving = iter([self._sequence(order) for order in range(len(asks))])
        ahead = list(itertools.islice(arriving, window))
        if self.policy is policies.dfs or self.cache.queue.policy is eviction.belady:
            everyone = [*ahead, *arriving]
            self.forecast = Forecast(self.cache, everyone, depth_first=self.policy is policies.dfs)
            ahead = everyone if self.policy is policies.dfs else everyone[:window]
            arriving = iter(everyone[len(ahead) :])
        for sequence in ahead:
            self._queue(sequence)
        while self.waiting:
            self._admit(arriving)
        return self.hit_tokens / sum(ask.num_tokens for ask in asks)

    def _sequence(self, order: int) -> request.Sequence:
        made = request.Sequence(request.Request(str(order), (), SAMPLING, 0, arrival_time=0.0), order, seed=0)
        made.tokens = self.asks[order].pages + array("i", [-1])  # the last token is never looked for
        return made

    def _queue(self, sequence: request.Sequence) -> None:
        self.view.queued(sequence, len(self.waiting))
        self.waiting.append(sequence)

    def _admit(self, arriving: Iterator[request.Sequence]) -> None:
        """Starts whom the policy puts first, once those that run longest have made room; then as many arrive."""
        at_once = max(1, self.max_num_seqs // 8)
        while len(self.running) > self.max_num_seqs - at_once:
            self.cache.close(self.running.pop(0))
        self.view.num_free_rows = at_once
        chosen = list(itertools.islice(self.policy(list(self.waiting), self.view), at_once))
        for sequence in chosen or policies.fifo(self.waiting, self.view)[:1]:
            self._start(sequence)
            self.waiting.remove(sequence)
            self.view.left(sequence, len(self.waiting), started=True)
        for sequence in itertools.islice(arriving, len(chosen) or 1):
            self._queue(sequence)

    def _start(self, sequence: request.Sequence) -> None:
        ask, cache = self.asks[sequence.order], self.cache
        cache.step += 1
        table = cache.open(sequence.tokens)
        while not cache.grow(table, pages_of(ask, self.page_size)):
            cache.close(table)
            if not self.running:
                needed = pages_of(ask, self.page_size)
                raise ValueError(f"a request needs {needed} pages, the pool has {cache.pool.num_pages}")
            cache.close(self.running.pop(0))
            table = cache.open(sequence.tokens)
        if self.forecast is not None:
            self.forecast.drop(sequence)
        self.hit_tokens += min(table.cached_len * self.page_size, ask.num_tokens - 1)
        cache.publish(table, sequence.tokens, len(ask.pages), written=True)
        self.running.append(table)


def pages_of(ask: Ask, page_size: int) -> int:
    """Pages that it holds while it runs; at least one beyond the full ones, for what is not found."""
    return max(-(-(ask.num_tokens + ask.num_output_tokens) // page_size), len(ask.pages) + 1)


def replay(asks: Sequence[Ask], page_size: int, num_pages: int, policy: str, evicts: str, args) -> Result:
    gc.collect()  # the trie of the last replay
    started = time.perf_counter()
    hit_rate = Replay(num_pages, page_size, policy, evicts, args.max_num_seqs).run(asks, args.window)
    return Result(page_size, num_pages, policy, evicts, hit_rate, time.perf_counter() - started)


def num_distinct(asks: Iterable[Ask]) -> int:
    """Pages of the working set."""
    return len({page for ask in asks for page in ask.pages})


def ideal_rate(asks: Iterable[Ask], page_size: int) -> float:
    """What a cache that never evicts finds when the requests come one after the other."""
    seen: set[int] = set()
    found = total = 0
    for ask in asks:
        num_pages = next((i for i, page in enumerate(ask.pages) if page not in seen), len(ask.pages))
        found += min(num_pages * page_size, ask.num_tokens - 1)
        total += ask.num_tokens
        seen.update(ask.pages)
    return found / total


# ---- telling ---------------------------------------------------------------------------------------------------------


def table_of(results: Sequence[Result], ideals: dict[int, float]) -> str:
    lines = [f"{'page':>5} {'pages':>9} {'policy':<9}{'eviction':<9}{'found':>7}{'of unbounded':>14}{'seconds':>9}"]
    for r in results:
        share = r.hit_rate / ideals[r.page_size] if ideals[r.page_size] else 1.0
        lines.append(
            f"{r.page_size:>5} {r.num_pages:>9,} {r.policy:<9}{r.eviction:<9}"
            f"{r.hit_rate:>7.2%}{share:>14.1%}{r.seconds:>9.2f}"
        )
    lines += [f"{size:>5} {'unbounded':>9} {'':<18}{ideal:>7.2%}{1:>14.1%}" for size, ideal in ideals.items()]
    return "\n".join(lines)


def recommend(results: Sequence[Result], ideals: dict[int, float]) -> str:
    """What finds most online, by whom and where more room stops paying. Belady is no choice online; dfs neither."""
    online = [r for r in results if r.eviction != "belady" and r.policy != "dfs"]
    if not online:
        return "nothing to recommend: only plans for a known future were asked for"
    size = max(sorted(ideals, reverse=True), key=lambda size: max(r.hit_rate for r in online if r.page_size == size))
    online = [r for r in online if r.page_size == size]
    enough = [r for r in online if r.hit_rate >= GOOD * ideals[size]]
    num_pages = min(r.num_pages for r in enough) if enough else max(r.num_pages for r in online)
    best = max((r for r in online if r.num_pages == num_pages), key=lambda r: r.hit_rate)
    text = (
        f"--page-size {size} --num-pages {num_pages} --schedule-policy {best.policy} "
        f"--eviction-policy {best.eviction}: finds {best.hit_rate:.2%} of the prompt tokens, "
        f"a cache without bound {ideals[size]:.2%}"
    )
    if not enough:
        text += f"; no pool that was tried reaches {GOOD:.0%} of that, a larger one pays"
    return text


def plot(results: Sequence[Result], ideals: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(ideals), figsize=(6 * len(ideals), 4), squeeze=False)
    for axis, (size, ideal) in zip(axes[0], ideals.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for r in results:
            if r.page_size == size:
                lines.setdefault(f"{r.policy} {r.eviction}", []).append((r.num_pages * size, r.hit_rate))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.axhline(ideal, color="grey", linewidth=0.5)
        axis.set(xlabel="tokens in the pool", ylabel="prompt tokens found", title=f"page size {size}", xscale="log")
    axes[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, dpi=120, bbox_inches="tight")


# ---- the command -----------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def share(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return number


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=formatter)
    add = parser.add_argument
    add("trace", type=Path)
    add("--page-size", type=count, nargs="+", default=[512], help="default: 512, a Mooncake block")
    add("--pool", type=share, nargs="+", default=[0.05, 0.1, 0.25], help="pools, as shares of the working set")
    add("--num-pages", type=count, nargs="+", help="pools in pages, in place of --pool")
    add("--schedule-policy", nargs="+", default=["fifo"], choices=policies.POLICIES)
    add("--eviction-policy", nargs="+", default=list(eviction.POLICIES), choices=eviction.POLICIES)
    add("--max-num-seqs", type=count, default=64, help="requests that run at once, and hold their pages (default 64)")
    add("--window", type=count, default=64, help="requests that wait at once; dfs knows them all (default 64)")
    add("--limit", type=count, help="only the first so many requests")
    add("--tokenizer", type=Path, help="for text: a folder or file")
    add("--plot", type=Path, metavar="FILE", help="draw the found share over the size of the pool")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    gc.disable()  # millions of nodes stay, and none that go are in a cycle
    results, ideals = [], {}
    try:
        for page_size in args.page_size:
            asks = read_trace(args.trace, page_size, args.tokenizer)[: args.limit]
            ideals[page_size] = ideal_rate(asks, page_size)
            distinct, largest = num_distinct(asks), max(pages_of(ask, page_size) for ask in asks)
            pools = args.num_pages or [max(int(share * distinct), largest) for share in args.pool]
            print(f"{len(asks):,} requests, {distinct:,} distinct pages of {page_size} tokens")
            for num_pages, policy, evicts in itertools.product(pools, args.schedule_policy, args.eviction_policy):
                results.append(replay(asks, page_size, num_pages, policy, evicts, args))
    except (ValueError, OSError) as error:
        print(f"simulate_cache.py: error: {error}", file=sys.stderr)
        return 2
    print(table_of(results, ideals))
    print(recommend(results, ideals))
    if args.plot:
        plot(results, ideals, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
