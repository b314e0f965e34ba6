"""Processes as the fault tests see them."""

from __future__ import annotations

import os
import select

from tandem.plane.ray_processes import RayProcesses


def pid_of(processes: RayProcesses, name: str) -> int:
    return processes.call(name, "__ray_call__", lambda actor: os.getpid())


def ends(pid: int) -> bool:
    """Whether the process ends within seconds; a killed one takes a moment."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([ended], [], [], 10)[0])
    finally:
        os.close(ended)
