"""Ends processes when the one that started this has died: a script of its own, which has to outlive its parent.

`python ray_watcher.py PID...`, with a pipe as standard input that nobody writes to: it ends when the parent does.
"""

import os
import select
import signal
import sys


def watch(pids: list[int]) -> None:
    """Return when all have ended. A number that comes to belong to another process is not mistaken for it."""
    alive = {os.pidfd_open(pid) for pid in pids}
    while alive:
        readable = set(select.select([0, *alive], [], [])[0])
        if 0 in readable:
            for process in alive - readable:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            return
        alive -= readable


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal
    watch([int(pid) for pid in sys.argv[1:]])
