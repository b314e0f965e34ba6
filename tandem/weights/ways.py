"""Ways of a bucket's bytes: a collective between processes with memory of their own, a handle where they share one."""

from __future__ import annotations

import atexit
import io
import pickle
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.multiprocessing  # teaches ForkingPickler how tensors share memory

Meeting = str | tuple[str, int]  # a file on one machine; (host, port) of a store
LENGTH = struct.Struct("!Q")
TAKEN = b"taken"


class Collective:
    """A process group of the trainer's first rank, which sends, and every process of every engine."""

    def __init__(self, store: dist.Store, rank: int, count: int, device: torch.device, timeout_s: float) -> None:
        """Waits for the others. Independent of what else the process does with torch.distributed."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore("weights", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = dist.ProcessGroupNCCL(store, rank, count, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, count, timeout)
        self._group = cast(dist.ProcessGroup, group)  # it has all that one has
        self._device = device

    def send(self, flat: torch.Tensor) -> None:
        """To all."""
        self._broadcast(flat)

    def receive(self, size: int) -> torch.Tensor:
        """From the trainer."""
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._broadcast(flat)
        return flat

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._group.broadcast(flat, 0).wait()
        if self._device.type == "cuda":  # NCCL's wait is the stream's: memory is free when it has been there
            torch.cuda.current_stream().synchronize()

    def leave(self) -> None:
        """End the group's threads, which is its destructor's work. Nothing can be sent after it."""
        del self._group


hosted: dict[Meeting, dist.Store] = {}  # those of this process, by their address
# What this process has entered last: a new door shuts the one before.
_collectives: dict[CollectiveDoor, Collective] = {}
_handovers: dict[SharedDoor, Handover] = {}


@atexit.register
def leave_collectives() -> None:
    """A group's threads must have ended before the interpreter does: the process aborts else."""
    while _collectives:
        _collectives.popitem()[1].leave()


def host_store(host: str, timeout_s: float) -> tuple[str, int]:
    """Open a store for a meeting of several machines, here."""
    store = dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), use_libuv=True
    )
    hosted.clear()
    hosted[host, store.port] = store
    return host, store.port


def meet(meeting: Meeting, count: int, timeout_s: float) -> dist.Store:
    """The store of a meeting that another process may have opened."""
    if isinstance(meeting, str):
        return dist.FileStore(meeting, count)
    host, port = meeting
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), use_libuv=True)


@dataclass(frozen=True)
class CollectiveDoor:
    """Where a process group meets, and as which of its members an engine's first process comes."""

    meeting: Meeting
    first_rank: int
    count: int
    device: str  # cpu or cuda: the current one of each process
    timeout_s: float

    def enter(self, share: int) -> Collective:
        """Join, at first; then the same group again."""
        if self in _collectives:
            return _collectives[self]
        leave_collectives()
        store = hosted.get(self.meeting)
        if store is None:
            store = meet(self.meeting, self.count, self.timeout_s)
        device = torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        rank = self.first_rank + share
        return _collectives.setdefault(self, Collective(store, rank, self.count, device, self.timeout_s))


class Handover:
    """Two processes that share memory, one GPU's or the machine's: a handle goes over, the other copies and says so."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, flat: torch.Tensor) -> None:
        """Returns when the other side has copied. ConnectionError when it is gone."""
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the other side's streams know nothing of ours
        put(self._connection, handle_of(flat))
        get(self._connection)
        if flat.is_cuda:
            torch.cuda.ipc_collect()

    def receive(self, size: int) -> torch.Tensor:
        """A copy of the sender's bytes."""
        shared = pickle.loads(get(self._connection))
        if shared.numel() != size:
            raise ValueError(f"a bucket of {shared.numel()} bytes came, wanted {size}")
        flat = shared.clone()
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        del shared
        put(self._connection, TAKEN)
        return flat


def handle_of(flat: torch.Tensor) -> bytes:
    """What another process of this machine opens the tensor's memory with. On a CPU its memory becomes shared."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one needs more than the parent's descriptors
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(flat)
        return buffer.getvalue()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def put(connection: socket.socket, message: bytes) -> None:
    """One message."""
    connection.sendall(LENGTH.pack(len(message)) + message)


def get(connection: socket.socket) -> bytes:
    """The next message. ConnectionError when the other side is gone."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        chunk = connection.recv(size - len(read))
        if not chunk:
            raise ConnectionError("the process at the other end of the weights' way is gone")
        read += chunk
    return bytes(read)


@dataclass(frozen=True)
class SharedDoor:
    """A socket of this machine, over which handles come."""

    path: str
    timeout_s: float

    def enter(self, share: int) -> Handover:
        """Connect, at first."""
        if share:
            raise ValueError("an engine of several processes takes no handles: cluster.ray.weight_transfer=collective")
        if self in _handovers:
            return _handovers[self]
        _handovers.clear()
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self.timeout_s)
        connection.connect(self.path)
        return _handovers.setdefault(self, Handover(connection))


class Gate:
    """The trainer's end of a shared door: a socket in a directory that only this user enters."""

    def __init__(self, timeout_s: float) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tandem-"))  # a short path: a socket's may have 100 characters
        self.door = SharedDoor(str(self._directory / "weights"), timeout_s)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.door.path)
        self._socket.listen(1)
        self._socket.settimeout(timeout_s)
        self._connection: socket.socket | None = None

    def outlet(self) -> Handover:
        """Waits for the engine, at first; then nobody else comes in."""
        if self._connection is None:
            self._connection, _ = self._socket.accept()
            self._connection.settimeout(self.door.timeout_s)
            self._leave()
        return Handover(self._connection)

    def close(self) -> None:
        """The engine's end fails from now on."""
        if self._connection is not None:
            self._connection.close()
        self._leave()

    def _leave(self) -> None:
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)
