"""What runs inside the processes: a rank of a trainer, an engine. torch is imported when they start, not before."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import ray  # type: ignore  # only Ray imports this module

from tandem.config import Config
from tandem.launch import stacks
from tandem.roles import DataPlane, Delivery, Engine, Fingerprint, Pause, WeightStream, WriteFiles
from tandem.types import Batch, Generation, Metrics, Sampling, merge

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.train.worker import Worker
    from tandem.weights.buckets import Spec
    from tandem.weights.ways import CollectiveDoor, Gate, SharedDoor

Result = TypeVar("Result")
STDOUT, STDERR = 1, 2
Warnings = list[tuple[str, int, str]]  # logger, level, text


@dataclass(frozen=True)
class Rank:
    """A rank's place among those that hold one model, and where they meet: a file, or (host, port) across nodes."""

    index: int
    count: int
    meeting: str | tuple[str, int]
    timeout_s: float


class Member:
    """What all processes have: a log file that gets everything, a life that the driver watches."""

    def __init__(self, log_file: Path) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (STDOUT, STDERR):
            os.dup2(target, stream)
        faulthandler.enable()
        stacks.write_on_signal()
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as the command line sets it; before torch
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
        )
        logging.getLogger("ray").setLevel(logging.ERROR)  # it takes a blocking wait in a thread for one in the loop
        self._collector = Collector()
        logging.getLogger("tandem").addHandler(self._collector)

    async def stay(self) -> None:
        """Never answered."""
        await asyncio.get_running_loop().create_future()

    async def warnings(self) -> Warnings:
        """What was logged from WARNING up since the last call; waits until there is something."""
        return await self._collector.take()

    async def write_stacks(self) -> None:
        """Where every thread of this process is, into its log."""
        stacks.write()

    async def node(self) -> str:
        """Where this process is."""
        return ray.get_runtime_context().get_node_id()

    def set_up(self, config: Config) -> None:
        """This process's share of the node's CPUs, and the rest as in one process."""
        import torch

        from tandem.launch.process import prepare, quiet_libraries

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.cluster.gpus_per_node))
        if config.cluster.num_nodes == 1 and sys.platform == "linux":  # nothing listens beyond this machine
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        quiet_libraries()
        prepare(config.cluster)


class Collector(logging.Handler):
    """Keeps warnings for the driver, from whichever thread they come."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: SimpleQueue[tuple[str, int, str]] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.put((record.name, record.levelno, record.getMessage()))

    async def take(self) -> Warnings:
        """At least one."""
        taken = [await asyncio.to_thread(self._kept.get)]
        while not self._kept.empty():
            taken.append(self._kept.get())
        return taken


class Survey:
    """What a trainer's weights are, seen while they pass."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.specs: list[Spec] = []
        self.digests: dict[str, str] = {}
        self.bytes = 0

    def weighed(self) -> Iterator[tuple[str, Tensor]]:
        """The weights."""
        from tandem.fingerprint import digest
        from tandem.weights.buckets import spec_of

        for name, tensor in self._weights:
            self.specs.append(spec_of(name, tensor))
            self.digests[name] = digest(tensor)
            self.bytes += tensor.nbytes
            yield name, tensor
            del tensor

    def exhaust(self) -> None:
        """Take part in putting them together, no more."""
        for _ in self._weights:
            continue


class TrainerRank(Member):
    """One rank of actor, critic or reference: a Worker, told what to do."""

    _worker: Worker
    _plane: DataPlane

    def __init__(self, log_file: Path) -> None:
        super().__init__(log_file)
        self._leads = False
        self._shares = False  # its device with other processes: it is parked then
        self._snapshots: dict[int, WriteFiles] = {}
        self._store: Any = None
        self._gate: Gate | None = None

    async def listen(self, ranks: int, timeout_s: float) -> tuple[str, int]:
        """Open the meeting of ranks on several nodes, at this one."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False, timeout=timeout)
        return host, self._store.port

    async def start(self, name: str, config: Config, plane: DataPlane, rank: Rank) -> None:
        """Join the other ranks, and load the model."""
        self.set_up(config)
        import torch

        from tandem.launch.process import device_of
        from tandem.launch.trainers import build_trainer

        self._index, self._leads = rank.index, rank.index == 0
        self._timeout_s = rank.timeout_s
        self._bucket_bytes = config.cluster.ray.weight_bucket_bytes
        self._device = device_of(config)
        if rank.count > 1:
            self._join(rank)
        self._plane = plane
        self._worker = build_trainer(name, config, plane)
        torch.cuda.empty_cache()  # the whole model was on the device before this rank kept its part

    def _join(self, rank: Rank) -> None:
        import torch
        import torch.distributed as dist

        timeout = timedelta(seconds=rank.timeout_s)
        if isinstance(rank.meeting, str):
            self._store = dist.FileStore(rank.meeting, rank.count)
        elif self._store is None:
            host, port = rank.meeting
            self._store = dist.TCPStore(host, port, rank.count, is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=self._store, rank=rank.index, world_size=rank.count, timeout=timeout)

    async def infer(self, batch: Batch, out: str) -> Metrics:
        return merge(await self._worker.infer(batch, out), self._plane.drain())

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        return merge(await self._worker.forward_backward(batch, scale), self._plane.drain())

    async def optim_step(self, divisor: float) -> Metrics:
        return await self._worker.optim_step(divisor)

    async def park(self) -> None:
        self._shares = True
        await self._worker.park()
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        """Give back what torch keeps of freed memory for itself: other processes cannot use it."""
        import torch

        if self._shares:
            torch.cuda.empty_cache()

    def _and_leave(self, work: Callable[..., Result], *arguments: object) -> Result:
        """`work` between the turns of others."""
        try:
            return work(*arguments)
        finally:
            self._leave()

    async def export(self) -> tuple[list[Any], Delivery]:
        """All ranks put the weights together; the first one stores them, and says what it stored."""
        return await asyncio.to_thread(self._and_leave, self._export)

    def _export(self) -> tuple[list[Any], Delivery]:
        from tandem.launch.ray.parcels import store

        seen = Survey(self._worker.export_weights())
        if not self._leads:
            seen.exhaust()
            return [], Delivery({}, 0)
        buckets = store(seen.weighed(), self._bucket_bytes).buckets
        return buckets, Delivery(seen.digests, seen.bytes)

    async def survey(self) -> tuple[list[Spec], Delivery]:
        """All ranks put the weights together and forget them; the first one says what they are."""
        return await asyncio.to_thread(self._and_leave, self._survey)

    def _survey(self) -> tuple[list[Spec], Delivery]:
        seen = Survey(self._worker.export_weights())
        if not self._leads:
            seen.exhaust()
            return [], Delivery({}, 0)
        for _ in seen.weighed():
            continue
        return seen.specs, Delivery(seen.digests, seen.bytes)

    async def open_gate(self) -> SharedDoor:
        """A way for the engine that shares this rank's memory. One that was there before is closed."""
        from tandem.weights.ways import Gate

        if self._gate is not None:
            self._gate.close()
        self._gate = Gate(self._timeout_s)
        return self._gate.door

    async def host_store(self) -> tuple[str, int]:
        """A meeting of machines, at this one."""
        from tandem.weights.ways import host_store

        return host_store(ray.util.get_node_ip_address(), self._timeout_s)

    async def send(self, specs: Sequence[Spec], doors: Mapping[int, CollectiveDoor | None]) -> None:
        """All ranks put the weights together; those in `doors` send them, by a collective or (None) at their gate."""
        await asyncio.to_thread(self._and_leave, self._send, specs, doors)

    def _send(self, specs: Sequence[Spec], doors: Mapping[int, CollectiveDoor | None]) -> None:
        from tandem.weights.buckets import send

        weights = self._worker.export_weights()
        if self._index not in doors:
            Survey(weights).exhaust()
            return
        door = doors[self._index]
        if door is None:
            assert self._gate is not None, "opened before"
            outlet = self._gate.outlet()
        else:
            outlet = door.enter(0)
        send(weights, specs, self._bucket_bytes, outlet, self._device)

    async def snapshot(self, copy: bool, number: int) -> None:
        """Keep it under a number until it is written."""
        self._snapshots[number] = await self._worker.snapshot(copy=copy)

    async def write(self, number: int, directory: Path) -> None:
        """Write a kept snapshot, beside what else happens."""
        await asyncio.to_thread(self._snapshots.pop(number), directory)

    async def load(self, directory: Path) -> None:
        await self._worker.load(directory)

    async def load_weights(self, directory: Path) -> None:
        await self._worker.load_weights(directory)


class EngineProcess(Member):
    """One engine, asked from the driver."""

    _engine: Engine

    async def start(self, config: Config, pad_token_id: int) -> None:
        """Load the model."""
        self.set_up(config)
        from tandem.launch.engines import build_engine

        self._engine = build_engine(config, pad_token_id)

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        return await self._engine.generate(tokens, sampling)

    async def pause(self, kind: Pause) -> Metrics:
        return await self._engine.pause(kind)

    async def resume(self, recompute_kv: bool) -> None:
        await self._engine.resume(recompute_kv=recompute_kv)

    async def sleep(self, keep_weights: bool) -> Metrics:
        return await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self) -> Metrics:
        return await self._engine.wake()

    async def load_weights(self, version: int, buckets: list[Any]) -> None:
        """Take stored weights; on this node they are read where they lie."""
        from tandem.launch.ray.parcels import unpack

        parts = await asyncio.gather(*buckets)
        await self._engine.load_weights(version, (unpack(parcel) for part in parts for parcel in part))

    async def take_announced(self, version: int, weights: WeightStream) -> None:
        """Take weights as they come."""
        await self._engine.load_weights(version, weights)

    async def fingerprint(self) -> Fingerprint:
        return await self._engine.fingerprint()
