"""What the cache holds and what it has saved, as a table that people read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_pool import PrefixPool, PrefixStats


@dataclass(frozen=True)
class CacheReport:
    """Pages of the pool by state, which sum to `num_pages`: free; private to a running sequence; published and read,
    pinned (and not read), or idle. Tokens of the prompts so far: found in the cache, and expected: what a cache without
    end would have found in full pages. `prefixes`: those with a handle; `num_marked` more stem from `prefix_pos`."""

    page_size: int
    num_pages: int
    free: int
    private: int
    read: int
    pinned: int
    idle: int
    max_pinned: int
    prompt_tokens: int
    found_tokens: int
    expected_tokens: int
    evicted_pages: int
    num_marked: int
    prefixes: tuple[PrefixStats, ...]

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens; 0 before any."""
        return self.found_tokens / max(1, self.prompt_tokens)

    @property
    def expected_hit_rate(self) -> float:
        return self.expected_tokens / max(1, self.prompt_tokens)

    def __str__(self) -> str:
        states = ("free", "private", "read", "pinned", "idle")
        lines = [
            f"{self.num_pages} pages of {self.page_size}: "
            + ", ".join(f"{getattr(self, state)} {state}" for state in states)
            + f"; at most {self.max_pinned} pinned, {self.evicted_pages} evicted so far",
            f"prompt tokens: {self.prompt_tokens}, found {self.found_tokens} ({self.hit_rate:.1%}), "
            f"a cache without end {self.expected_tokens} ({self.expected_hit_rate:.1%})",
        ]
        if self.prefixes:
            head = (
                "prefix",
                "tokens",
                "pinned",
                "other",
                "missing",
                "readers",
                "hits / uses",
                "tokens saved",
                "ms saved",
            )
            rows = [head, *(_row(stats) for stats in self.prefixes)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                cells = [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
                ]
                lines.append("  ".join(cells))
        if self.num_marked:
            lines.append(f"and {self.num_marked} marked by prefix_pos")
        return "\n".join(lines)


def _row(stats: PrefixStats) -> tuple[str, ...]:
    name = "(no name)" if stats.name is None else stats.name
    counts = (stats.num_tokens, stats.pinned, stats.published, stats.missing, stats.readers)
    saved = "" if stats.ms_saved is None else f"{stats.ms_saved:.0f}"
    return (name, *map(str, counts), f"{stats.hits} / {stats.uses}", str(stats.tokens_saved), saved)


def make_report(cache: PrefixCache, prefixes: PrefixPool, counts: Counter[str]) -> CacheReport:
    """Of this moment."""
    nodes = list(cache.trie)
    read = sum(node.readers > 0 for node in nodes)
    pinned = sum(node.pins > 0 and node.readers == 0 for node in nodes)
    free, num_pages = len(cache.pool), cache.pool.num_pages
    return CacheReport(
        page_size=cache.page_size,
        num_pages=num_pages,
        free=free,
        private=num_pages - free - len(nodes),
        read=read,
        pinned=pinned,
        idle=len(nodes) - read - pinned,
        max_pinned=prefixes.max_pinned,
        prompt_tokens=counts["prompt_tokens"],
        found_tokens=counts["found_tokens"],
        expected_tokens=counts["expected_tokens"],
        evicted_pages=cache.num_evicted,
        num_marked=len(prefixes.prefixes),
        prefixes=tuple(prefix.stats() for prefix in prefixes),
    )
