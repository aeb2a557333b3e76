"""The free pages. Page 0 is scratch: never handed out, never counted."""

from __future__ import annotations


class PagePool:
    """Hands out page ids from 1 to `num_pages`, the most recently returned first."""

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"a page pool needs at least one page, got num_pages={num_pages}")
        self.num_pages = num_pages
        self.free = list(range(num_pages, 0, -1))

    def __len__(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[int]:
        """Removes `count` pages from the pool; the caller has checked that they are there."""
        assert 0 <= count <= len(self.free), f"want {count} pages, {len(self.free)} of {self.num_pages} free"
        cut = len(self.free) - count
        taken = self.free[cut:]
        del self.free[cut:]
        taken.reverse()
        return taken

    def give(self, pages: list[int]) -> None:
        """Returns pages that nobody holds any more."""
        self.free.extend(pages)
