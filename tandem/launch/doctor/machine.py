"""What a run needs of the machine: limits, shared memory, disk, loopback."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tandem.launch.doctor.findings import Finding

MIB, GIB = 1 << 20, 1 << 30
FEWEST_FILES, FILES = 256, 4096  # below the first nothing starts, below the second Ray or many engines do not
LEAST_DISK, DISK = GIB, 20 * GIB
LEAST_SHARED, SHARED = 32 * MIB, 2 * GIB
PROBE = 8 * MIB  # bytes that are written to see whether they can be


def machine(directory: Path) -> Iterator[Finding]:
    """All of it. `directory` is where runs will be written."""
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard)
    yield address_space(resource.getrlimit(resource.RLIMIT_AS)[0])
    if Path("/dev/shm").is_dir():
        yield shared_memory(shutil.disk_usage("/dev/shm").free)
    for name, place in (("disk for runs", directory), ("disk for scratch", Path(tempfile.gettempdir()))):
        yield disk(name, place)
    yield loopback()


def open_files(soft: int, hard: int) -> Finding:
    """Sockets, logs, shared memory and safetensors files are all open files."""
    says = f"{'no limit' if soft == resource.RLIM_INFINITY else soft} at one time (ulimit -n)"
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < FILES:
        enough = hard == resource.RLIM_INFINITY or hard >= FILES
        where = f"ulimit -n {FILES if enough else most}" if enough else "raise nofile in /etc/security/limits.conf"
        state = "broken" if soft < FEWEST_FILES else "warning"
        return Finding("open files", state, says, f"{where}, in the shell that starts the run")
    return Finding("open files", "ok", says)


def address_space(limit: int) -> Finding:
    """CUDA reserves far more addresses than memory: a limit on them breaks it."""
    if limit != resource.RLIM_INFINITY:
        return Finding(
            "address space", "warning", f"limited to {limit / GIB:.1f} GiB (ulimit -v)", "ulimit -v unlimited"
        )
    return Finding("address space", "ok", "not limited (ulimit -v)")


def shared_memory(free: int) -> Finding:
    """Ray's objects and NCCL's buffers between processes of a machine lie there; one process needs next to none."""
    says = f"{free / GIB:.2f} GiB free in /dev/shm"
    fix = "give the container more: docker run --shm-size=16g, or a larger tmpfs at /dev/shm"
    if free < SHARED:
        return Finding("shared memory", "broken" if free < LEAST_SHARED else "warning", says, fix)
    return Finding("shared memory", "ok", says)


def disk(name: str, place: Path) -> Finding:
    """Free bytes, and whether some can really be written: quotas and read-only mounts show there only."""
    there = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    says = f"{free / GIB:.1f} GiB free at {there}"
    fix = "free some, or write elsewhere: run_dir=PATH (checkpoints), TMPDIR=PATH (scratch)"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(name, "broken", f"{says}, but {PROBE // MIB} MiB cannot be written: {error.strerror}", fix)
    if free < DISK:
        return Finding(name, "broken" if free < LEAST_DISK else "warning", says, fix)
    return Finding(name, "ok", says)


def loopback() -> Finding:
    """A run's processes meet on 127.0.0.1: a port there can be opened, and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        fix = "bring the interface up (ip link set lo up); allow sockets and connections to 127.0.0.1"
        return Finding("ports", "broken", f"127.0.0.1 cannot be used: {error.strerror or error}", fix)
    return Finding("ports", "ok", f"127.0.0.1 can be listened on and reached (tried {port})")
