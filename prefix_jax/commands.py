"""What other threads want done between two steps of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from threading import RLock
from typing import Any

from prefix_jax.pauses import interrupts_wait


@contextmanager
def hold(lock: Any, timeout: float) -> Iterator[bool]:
    """Whether the RLock came within so many seconds. Ctrl-C waits until it is given back; it is given back whatever
    else interrupts, also a signal that is handled between its coming and the next line."""
    with interrupts_wait():
        before, held = lock._is_owned(), False
        try:
            held = lock.acquire(timeout=timeout)
            yield held
        finally:
            if held or (not before and lock._is_owned()):
                lock.release()


class Commands:
    """A queue that whoever holds `lock` works off, all that waits at once: the thread that steps, or the one that
    wants something while nobody steps. `interrupted` is called when an interrupt has left something half done."""

    def __init__(self, lock: RLock, interrupted: Callable[[], None] = lambda: None):
        self.lock = lock
        self.interrupted = interrupted
        self.is_busy = False
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future]] = SimpleQueue()

    def put(self, do: Callable[[], Any]) -> Future:
        future: Future = Future()
        self.queue.put((do, future))
        return future

    def call(self, do: Callable[[], Any]) -> Any:
        """What `do` returns or raises, once it was done; waits for a step at most. Part of what this thread is doing,
        if it holds the lock: nothing that others want comes between."""
        if self.lock._is_owned():
            return self._do(do)
        future = self.put(do)
        try:
            while not future.done():
                with hold(self.lock, 0.001) as held:
                    if held:  # else whoever steps does it
                        self.run()
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
                future.set_result(self._do(do))
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # an interrupt of this thread, which the one that waits has to know of too
                future.set_exception(RuntimeError(f"interrupted: {error!r}"))
                raise

    def _do(self, do: Callable[[], Any]) -> Any:
        is_part, self.is_busy = self.is_busy, True
        try:
            return do()
        except Exception:
            raise
        except BaseException:
            if not is_part:  # else whatever it is part of still has to come to its end
                self.interrupted()
            raise
        finally:
            self.is_busy = is_part
