"""Where the threads of this process stand, written to its stderr while they go on."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading

STDERR = 2
PIPE_BYTES = 1 << 16  # that a pipe holds on Linux
HEAD = b"Stack (most recent call first)"  # faulthandler's first line of a thread, which it writes in one piece


def write() -> None:
    """The stacks of all threads. Whoever calls it holds the interpreter's lock: no other thread changes its frames."""
    faulthandler.dump_traceback(STDERR)


@functools.cache
def write_on_signal() -> None:
    """From now on SIGUSR1 does it, whatever the main thread waits for. Nothing happens where there is no such signal.

    faulthandler's handler holds no lock: it dies of the frames of a thread that computes. So it gets the interrupted
    thread's only, and what it writes of them wakes a thread that takes the lock.
    """
    if not hasattr(faulthandler, "register"):  # Windows
        return
    woken, wake = os.pipe()
    os.set_blocking(wake, False)  # a handler never waits
    faulthandler.register(signal.SIGUSR1, wake, all_threads=False)
    threading.Thread(target=_answer, args=(woken,), name="stacks", daemon=True).start()


def write_after(seconds: float) -> None:
    """Once, unless the process has ended by then."""
    timer = threading.Timer(seconds, write)
    timer.daemon = True
    timer.start()


def _answer(woken: int) -> None:
    while written := os.read(woken, PIPE_BYTES):
        if HEAD in written:  # a signal; else the rest of what one wrote
            write()
