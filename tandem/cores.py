"""Which threads of a process compute on its CPU cores.

libgomp gives every thread that computes a team of its own. Once the teams have more members than there are cores, they
no longer wait for each other but sleep between two operations, which for small models takes longer than the operations
(an update of the quickstart's actor on two cores: 103 ms so, 66 ms with one team). So one thread has the cores, and
the others compute alone: also where models compute on GPUs or in other processes, and nobody has the cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

_given: list[int] = []  # how many this process may use, as it was told first


def give(count: int) -> None:
    """So many cores are this process's, for whichever thread takes them."""
    _given[:] = [count]


def given() -> int:
    """As many as `give` said, or torch's own choice."""
    return _given[0] if _given else torch.get_num_threads()


def take(count: int) -> None:
    """Let the calling thread compute on so many cores. Threads that ask for none get what was taken last."""
    torch.set_num_threads(count)
    torch.zeros(1 << 16).add_(1)  # a new thread adopts a number at its first parallel operation: this one, now


def leave() -> None:
    """Leave them to the threads that have taken some: the calling one computes alone, as those that ask for none do.

    A loop that answers others has no use for a team. Where other processes compute it must wait for each of its members
    at each operation: advantages of 64 x 1,088 tokens took 1,088 ms on two cores beside two busy processes, alone 15.
    """
    torch.set_num_threads(1)


def take_back() -> None:
    """After `leave`: all that this process was given."""
    torch.set_num_threads(given())


def thread_with_all(name: str) -> ThreadPoolExecutor:
    """A thread that computes on all cores that were given, one call after the other."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=take, initargs=(given(),))
    thread.submit(int).result()  # before anybody else takes some
    return thread
