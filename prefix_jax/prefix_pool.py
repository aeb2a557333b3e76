"""Declared prefixes: the upper levels of the trie that somebody named or marked, kept in the cache within a budget.

One that was added has a handle, a name and a place of its own in the budget, whether its pages are computed or not.
One that `prefix_pos` marked takes what is left, and lapses when others need it: it is never a reason to fail. Only full
pages are pinned, as they get published; a shorter tail is copied or recomputed. The pool knows tokens and pages.
Whoever owns it gives it a tokenizer (`encode`), an engine (`compute`) and a way to act between two steps (`call`).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from prefix_jax.prefix_cache import PrefixCache
from prefix_jax.prefix_trie import Node, common_len

log = logging.getLogger(__name__)

Content = Any  # text, token ids, or chat messages
MOST_GONE = 10_000  # names of deleted prefixes that are still known as such, and not taken for text


class PinBudgetError(ValueError):
    """No room to pin a prefix; says who holds what."""


@dataclass(frozen=True)
class PrefixStats:
    """A prefix so far. Its full pages are pinned, published but open to eviction, or missing (not computed yet, or
    evicted). uses: requests that began with it, where it has a full page; hits: those that found some of it,
    `tokens_saved` in all. ms_saved: estimated from the steps measured so far, None before any. page_seconds: pinned
    pages, over time. last_use: seconds ago, None for never."""

    name: str | None
    num_tokens: int
    pinned: int
    published: int
    missing: int
    readers: int
    uses: int
    hits: int
    tokens_saved: int
    ms_saved: float | None
    page_seconds: float
    last_use: float | None


@dataclass(frozen=True)
class Encoded:
    """What a content becomes. tokens: its ids as far as nothing that may follow changes them; whole: all of them. text
    and messages: what it was, if not token ids."""

    tokens: list[int]
    whole: list[int]
    text: str | None = None
    messages: list[Any] | None = None


@dataclass(eq=False)
class Prefix:
    """A handle to a declared prefix: its first `num_tokens` tokens count, those that nothing behind them can change."""

    pool: PrefixPool
    tokens: array
    salt: Hashable
    name: str | None = None
    parent: Prefix | None = None
    content: Encoded | None = None  # of one that was added
    is_pinned: bool = True
    expires: float | None = None  # on the monotonic clock
    is_deleted: bool = False
    nodes: list[Node] = field(default_factory=list, repr=False)  # pinned, from the root down
    uses: int = 0
    hits: int = 0
    tokens_saved: int = 0
    last_use: float | None = None
    _page_seconds: float = field(default=0.0, repr=False)
    _counted: float = field(default_factory=time.monotonic, repr=False)  # until when page_seconds are

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        """Its full pages."""
        return len(self.tokens) // self.pool.cache.page_size

    def warm(self) -> Prefix:
        """Computes what the cache does not hold of it, now."""
        self._check()
        self.pool.compute([self])
        return self

    def pin(self) -> Prefix:
        """Keeps its pages from eviction. PinBudgetError if the budget has no room for it."""
        self.pool.call(lambda: self.pool._pin(self))
        return self

    def unpin(self) -> Prefix:
        """Leaves its pages to eviction; it stays declared."""
        self.pool.call(lambda: self.pool._unpin(self))
        return self

    def refresh(self, ttl: float | None) -> Prefix:
        """It deletes itself in `ttl` seconds; None: never."""
        self._check()
        expires = _expiry(ttl)
        self.pool.call(lambda: self.pool._set_expiry(self, expires))
        return self

    def stats(self) -> PrefixStats:
        return self.pool.call(lambda: self.pool._stats(self))

    def delete(self) -> None:
        """Forgets it. Its pages are ordinary ones from now on: evicted when their turn comes and nobody reads them."""
        self.pool.call(lambda: self.pool._lapse(self))

    def _check(self) -> None:
        self.pool.call(self.pool.drop_expired)
        if self.is_deleted:
            raise ValueError(f"{_label(self)} is deleted or has expired")


class PrefixPool:
    """Finds declared prefixes by name or tokens and keeps at most `max_pinned` pages pinned for all of them.

    Of those that `prefix_pos` declares, the least recently used lapses over budget, and there are at most `max_pinned`
    of them (and always room for one), so that callers who never repeat one do not fill the memory. Any thread may call
    the public methods.
    """

    def __init__(self, cache: PrefixCache, max_pinned: int):
        self.cache = cache
        self.max_pinned = max_pinned
        self.prefixes: dict[tuple[Hashable, bytes], Prefix] = {}  # by prefix_pos, the least recently used first
        self.added: dict[Prefix, None] = {}  # handles, in order
        self.names: dict[str, Prefix] = {}
        self.gone: dict[str, None] = {}  # names of prefixes that there were, the last MOST_GONE in order
        self.by_first_page: dict[tuple[Hashable, bytes], list[Prefix]] = {}  # the added ones of a page and more
        self.next_expiry = float("inf")
        self.encode: Callable[[Content, Encoded | None], Encoded] = encode_tokens
        self.compute: Callable[[Iterable[Prefix]], None] = _cannot_compute
        self.write: Callable[[str | Path, list[Prefix]], None] = _cannot_compute
        self.read: Callable[[str | Path], list[Prefix]] = _cannot_compute
        self.call: Callable[[Callable[[], Any]], Any] = lambda do: do()
        self.seconds: Callable[[int], float | None] = lambda num_tokens: None  # to compute so many of a prompt

    # What callers do ----------------------------------------------------------------------------------------------

    def add(
        self,
        content: Content,
        *,
        name: str | None = None,
        parent: Prefix | str | None = None,
        salt: str | None = None,
        ttl: float | None = None,
        pin: bool = True,
    ) -> Prefix:
        """Declares a prefix: text, token ids, or chat messages, behind those of `parent` if there is one.

        Of text and messages only those tokens count which nothing that follows can change. The prefix is not computed
        before `warm()` or the first request that begins with it. salt: only requests with this `cache_salt` share it.
        ttl: seconds after which it deletes itself. Raises ValueError for what is empty, too long, or a name in use, and
        PinBudgetError if `pin` finds no room.
        """
        expires = _expiry(ttl)
        for what, value in (("name", name), ("salt", salt)):
            if not isinstance(value, str | None):
                raise TypeError(f"{what} must be a string or None, got {value!r}")
        above = self[parent] if isinstance(parent, str) else parent
        if above is not None:
            self.check_own(above)
            above._check()
            if salt not in (None, above.salt):
                raise ValueError(f"{_label(above)} has salt {above.salt!r}, got {salt!r}")
        encoded = self.encode(content, above and above.content)
        if not encoded.tokens:
            raise ValueError(f"a prefix needs at least one token that nothing behind it changes, got {content!r:.80}")
        salt = above.salt if above else salt
        prefix = Prefix(self, array("i", encoded.tokens), salt, name, above, encoded, pin, expires)
        self.call(lambda: self._add(prefix))
        return prefix

    def save(self, path: str | Path, prefixes: Prefix | str | Iterable[Prefix | str] | None = None) -> None:
        """Writes these prefixes, or all that have handles, with their K and V, in place of what was saved at `path`;
        what is not computed yet is first. OSError if the disk does not take it; the old save is whole then."""
        asked = [prefixes] if isinstance(prefixes, Prefix | str) else self if prefixes is None else prefixes
        chosen = list(dict.fromkeys(self[p] if isinstance(p, str) else p for p in asked))
        for prefix in chosen:
            self.check_own(prefix)
            prefix._check()
        self.compute([prefix for prefix in chosen if prefix.stats().missing])
        self.write(path, chosen)

    def load(self, path: str | Path) -> list[Prefix]:
        """Brings saved prefixes back, as handles with their pages in the cache, as many as there is room for. Pins them
        as far as the budget goes; a name that another prefix has by now stays with that one. Raises a ValueError for a
        save that is damaged, or of another model, dtype or RoPE; nothing is loaded then."""
        return self.read(path)

    def __getitem__(self, name: str) -> Prefix:
        """KeyError shows the names there are."""
        self.call(self.drop_expired)
        if name not in self.names:
            raise KeyError(f"no prefix {name!r}; there are: {', '.join(map(repr, self.names)) or 'none'}")
        return self.names[name]

    def get(self, name: str) -> Prefix | None:
        self.call(self.drop_expired)
        if name in self.gone and name not in self.names:
            raise ValueError(f"prefix {name!r} is deleted or has expired")
        return self.names.get(name)

    def __contains__(self, name: str) -> bool:
        self.call(self.drop_expired)
        return name in self.names

    def __iter__(self) -> Iterator[Prefix]:
        """The handles, in the order they were added."""
        self.call(self.drop_expired)
        return iter(list(self.added))

    def __len__(self) -> int:
        self.call(self.drop_expired)
        return len(self.added)

    def check_own(self, prefix: Prefix) -> None:
        """TypeError for what is no handle, ValueError for one of another pool."""
        if not isinstance(prefix, Prefix):
            raise TypeError(f"a prefix is a handle or the name of one, got {prefix!r:.80}")
        if prefix.pool is not self:
            raise ValueError(f"{_label(prefix)} belongs to another LLM")

    # What the scheduler does --------------------------------------------------------------------------------------

    def declare(self, tokens: array, salt: Hashable = None) -> Prefix:
        """The prefix that `prefix_pos` marks, made now or found again."""
        key = (salt, tokens.tobytes())
        prefix = self.prefixes.pop(key, None) or Prefix(self, tokens, salt)
        self.prefixes[key] = prefix
        if len(self.prefixes) > max(1, self.max_pinned):
            self._lapse(next(iter(self.prefixes.values())))
        return prefix

    def find(self, tokens: array, salt: Hashable = None) -> list[Prefix]:
        """The added prefixes of a page and more that these tokens begin with."""
        size = self.cache.page_size
        mine = self.by_first_page.get((salt, tokens[:size].tobytes()), ())
        return [prefix for prefix in mine if tokens[: len(prefix.tokens)] == prefix.tokens]

    def count(self, prefixes: Iterable[Prefix], cached_len: int) -> None:
        """A request begins with these prefixes, and found so many of its positions cached."""
        now = time.monotonic()
        for prefix in prefixes:
            saved = min(cached_len, len(prefix.tokens))
            prefix.uses += 1
            prefix.hits += saved > 0
            prefix.tokens_saved += saved
            prefix.last_use = now

    def pin_published(self, prefix: Prefix, nodes: list[Node]) -> None:
        """Pins those of its pages that are among these nodes, the published ones of a sequence that begins with it."""
        full = min(prefix.num_pages, len(nodes))
        if len(prefix.nodes) >= full and (not prefix.nodes or prefix.nodes[-1].parent is not None):
            return  # nothing new, nothing evicted
        if prefix.is_deleted or not prefix.is_pinned:
            return
        self._drop_evicted(prefix)
        self._count_time(prefix)
        for node in nodes[len(prefix.nodes) : full]:
            if not node.pins and not self._make_room(prefix):
                return
            self.cache.pin(node)
            prefix.nodes.append(node)

    def drop_expired(self) -> None:
        if (now := time.monotonic()) < self.next_expiry:
            return
        for prefix in [p for p in self.added if p.expires is not None and p.expires <= now]:
            self._lapse(prefix)
        self.next_expiry = min((p.expires for p in self.added if p.expires is not None), default=float("inf"))

    def restore(self, prefix: Prefix, nodes: list[Node]) -> Prefix:
        """A handle for a prefix that was saved, whose pages are these nodes; or the one that there is."""
        mine = prefix.salt, prefix.tokens, prefix.name
        found = next((other for other in self.added if (other.salt, other.tokens, other.name) == mine), None)
        if found is None:
            if prefix.name in self.names:
                log.warning("the name %r is taken by another prefix, the loaded one has none", prefix.name)
                prefix.name = None
            try:
                self._add(prefix)
            except PinBudgetError as error:
                log.warning("loaded, but not pinned: %s", error)
                prefix.is_pinned = False
                self._add(prefix)
        self.pin_published(found or prefix, nodes)
        return found or prefix

    def attach(self, cache: PrefixCache) -> None:
        """Goes on over an empty cache: what was declared stays, and is pinned as it gets computed again."""
        for prefix in [*self.added, *self.prefixes.values()]:
            self._count_time(prefix)
            prefix.nodes.clear()
        self.cache = cache

    # ------------------------------------------------------------------------------------------------------------------

    def delete(self, which: Prefix | str | array, salt: Hashable = None) -> bool:
        """Forgets a handle's declaration, a name's, or all of exactly these tokens. False if there was none."""
        self.drop_expired()
        if isinstance(which, array):
            found = [p for p in (*self.added, *self.prefixes.values()) if (p.salt, p.tokens) == (salt, which)]
        else:
            known = self.names.get(which) if isinstance(which, str) else which
            found = [known] if known is not None and not known.is_deleted else []
        for prefix in found:
            self._lapse(prefix)
        return bool(found)

    def clear(self) -> None:
        """Forgets all declarations, and that there were any."""
        for prefix in [*self.prefixes.values(), *self.added]:
            self._lapse(prefix)
        self.gone.clear()

    def _add(self, prefix: Prefix) -> None:
        self.drop_expired()
        if prefix.name is not None and (other := self.names.get(prefix.name)):
            raise ValueError(f"a prefix named {prefix.name!r} exists already, of {other.num_tokens} tokens")
        if (needed := -(-prefix.num_tokens // self.cache.page_size)) > (num_pages := self.cache.pool.num_pages):
            raise ValueError(f"{prefix.num_tokens} tokens need {needed} pages, the pool has {num_pages}")
        if prefix.is_pinned:
            self._check_budget(prefix)
        self.added[prefix] = None
        if prefix.name is not None:
            self.names[prefix.name] = prefix
        if prefix.num_pages:
            self.by_first_page.setdefault(self._first_page(prefix), []).append(prefix)
        self._set_expiry(prefix, prefix.expires)
        if prefix.is_pinned:
            self._pin_found(prefix)

    def _pin(self, prefix: Prefix) -> None:
        prefix._check()
        if not prefix.is_pinned:
            self._check_budget(prefix)
            prefix.is_pinned = True
            self._pin_found(prefix)

    def _pin_found(self, prefix: Prefix) -> None:
        self.pin_published(prefix, self.cache.find(prefix.tokens, prefix.salt))

    def _unpin(self, prefix: Prefix) -> None:
        self._release(prefix)
        prefix.is_pinned = False

    def _set_expiry(self, prefix: Prefix, expires: float | None) -> None:
        prefix._check()
        prefix.expires = expires
        self.next_expiry = min(self.next_expiry, float("inf") if expires is None else expires)

    def _check_budget(self, prefix: Prefix) -> None:
        held = [other for other in self.added if other.is_pinned and other is not prefix]
        if self._num_distinct([*held, prefix]) <= self.max_pinned:
            return
        holders = ", ".join(f"{_label(other)} {other.num_pages} pages" for other in held) or "nobody"
        raise PinBudgetError(
            f"{_label(prefix)} needs {prefix.num_pages} pages; at most {self.max_pinned} may be pinned, of which "
            f"{self._num_distinct(held)} are taken: {holders}"
        )

    def _num_distinct(self, prefixes: list[Prefix]) -> int:
        """Pages of these prefixes, a shared one counted once: in the order of their bytes, neighbours share most."""
        size, spaces = self.cache.page_size, dict[Hashable, list[bytes]]()
        for prefix in prefixes:
            spaces.setdefault(prefix.salt, []).append(prefix.tokens.tobytes())
        total = sum(prefix.num_pages for prefix in prefixes)
        return total - sum(common_len(*pair) // size for space in spaces.values() for pair in pairwise(sorted(space)))

    def _make_room(self, keep: Prefix) -> bool:
        while self.cache.num_pinned >= self.max_pinned:
            oldest = next((prefix for prefix in self.prefixes.values() if prefix is not keep and prefix.nodes), None)
            if oldest is None:
                return False
            self._lapse(oldest)
        return True

    def _lapse(self, prefix: Prefix) -> None:
        if prefix.is_deleted:
            return
        prefix.is_deleted = True
        if prefix in self.added:
            del self.added[prefix]
            if prefix.name is not None:
                del self.names[prefix.name]
                self.gone.pop(prefix.name, None)
                self.gone[prefix.name] = None
                if len(self.gone) > MOST_GONE:
                    del self.gone[next(iter(self.gone))]
            if prefix.num_pages:
                key = self._first_page(prefix)
                self.by_first_page[key].remove(prefix)
                if not self.by_first_page[key]:
                    del self.by_first_page[key]
        else:
            del self.prefixes[prefix.salt, prefix.tokens.tobytes()]
        self._release(prefix)

    def _release(self, prefix: Prefix) -> None:
        self._count_time(prefix)
        self._drop_evicted(prefix)
        while prefix.nodes:
            self.cache.unpin(prefix.nodes.pop())

    def _drop_evicted(self, prefix: Prefix) -> None:
        while prefix.nodes and prefix.nodes[-1].parent is None:
            prefix.nodes.pop()

    def _count_time(self, prefix: Prefix) -> None:
        now = time.monotonic()
        prefix._page_seconds += len(prefix.nodes) * (now - prefix._counted)
        prefix._counted = now

    def _stats(self, prefix: Prefix) -> PrefixStats:
        self.drop_expired()
        self._count_time(prefix)
        found = self.cache.find(prefix.tokens, prefix.salt)
        pinned = sum(node.pins > 0 for node in found)
        seconds = self.seconds(prefix.tokens_saved // max(1, prefix.hits))
        return PrefixStats(
            prefix.name,
            prefix.num_tokens,
            pinned=pinned,
            published=len(found) - pinned,
            missing=prefix.num_pages - len(found),
            readers=found[-1].readers if found else 0,
            uses=prefix.uses,
            hits=prefix.hits,
            tokens_saved=prefix.tokens_saved,
            ms_saved=None if seconds is None else seconds * prefix.hits * 1e3,
            page_seconds=prefix._page_seconds,
            last_use=None if prefix.last_use is None else time.monotonic() - prefix.last_use,
        )

    def _first_page(self, prefix: Prefix) -> tuple[Hashable, bytes]:
        return prefix.salt, prefix.tokens[: self.cache.page_size].tobytes()


def encode_tokens(content: Content, above: Encoded | None) -> Encoded:
    """The encoder of a pool without a tokenizer."""
    if isinstance(content, str) or any(not isinstance(token, int) for token in content):
        raise ValueError(f"text needs a tokenizer; give token ids, got {content!r:.80}")
    tokens = [*(above.whole if above else ()), *content]
    return Encoded(tokens, tokens)


def _cannot_compute(*arguments: Any) -> Any:
    raise RuntimeError("this pool has no engine to compute with")


def _expiry(ttl: float | None) -> float | None:
    if ttl is None:
        return None
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 1e12:
        raise ValueError(f"ttl must be a positive number of seconds or None, got {ttl!r}")
    return time.monotonic() + ttl


def _label(prefix: Prefix) -> str:
    return f"prefix {prefix.name!r}" if prefix.name is not None else f"a prefix of {prefix.num_tokens} tokens"
