"""What would come between, put off: Python's full garbage collections while steps are planned, and Ctrl-C.

A collection goes through every object of the process, of which JAX alone brings a quarter of a million: 0.1 to 0.2
seconds, in which no step is planned and the device waits.
"""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 60.0  # seconds after which one may begin all the same
NEVER = 2**31 - 1
_lock = threading.Lock()
_entered = 0
_before = gc.get_threshold()
_allowed = time.monotonic()  # when one might have begun


@contextmanager
def no_full_collections() -> Iterator[None]:
    """None begins in any thread until the last that has entered leaves, but once a minute; young garbage is collected
    as ever. To be entered for the time of a step: whatever waits for its caller must not hold up the whole process."""
    global _entered, _before, _allowed
    with _lock:
        _entered += 1
        if _entered == 1:
            _before = gc.get_threshold()
            if time.monotonic() - _allowed < EVERY:
                gc.set_threshold(*_before[:2], NEVER)
            else:
                _allowed = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                gc.set_threshold(*_before)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes at the end, where nothing is left half done; a second one does not wait."""
    handle = signal.getsignal(signal.SIGINT)
    if not callable(handle) or threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    came = []

    def put_off(*args) -> None:
        came.append(args)
        if len(came) > 1:
            handle(*args)

    signal.signal(signal.SIGINT, put_off)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handle)
        if came:
            handle(*came[0])
