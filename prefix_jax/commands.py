"""What other threads want done between two steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import RLock
from typing import Any


class Commands:
    """A queue that whoever holds `lock` works off, all that waits at once: the thread that steps, or the one that
    wants something while nobody steps."""

    def __init__(self, lock: RLock):
        self.lock = lock
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()

    def put(self, do: Callable[[], Any]) -> Future:
        future: Future = Future()
        self.queue.put((do, future))
        return future

    def call(self, do: Callable[[], Any]) -> Any:
        """What `do` returns or raises, once it was done; waits for a step at most."""
        future = self.put(do)
        try:
            while not future.done():
                if self.lock.acquire(timeout=0.001):  # else whoever steps does it
                    try:
                        self.run()
                    finally:
                        self.lock.release()
        except BaseException:  # an interrupt: nobody waits for it any more
            future.cancel()
            raise
        return future.result()

    def run(self) -> None:
        """Does all that waits. Whoever calls it holds the lock."""
        while not self.queue.empty():
            do, future = self.queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # an interrupt of this thread, which the one that waits has to know of too
                future.set_exception(RuntimeError(f"interrupted: {error!r}"))
                raise
