"""The driver's side of processes: a Trainer of many ranks, an Engine elsewhere, and the way of weights between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tandem.launch.ray.cluster import Cluster, Process
from tandem.launch.ray.parcels import Stored, store
from tandem.roles import Delivery, Engine, Fingerprint, NamedTensors, WriteFiles
from tandem.types import Batch, Generation, Metrics, Sampling, merge


class RankGroup:
    """A Trainer whose every call all ranks make. They share the work; their metrics merge to those of one process."""

    def __init__(self, cluster: Cluster, ranks: Sequence[Process]) -> None:
        self._cluster = cluster
        self.ranks = ranks
        self._numbers = count()

    async def call(self, method: str, *arguments: object) -> list[Any]:
        """Each rank's answer."""
        return await self._cluster.call(self.ranks, method, *arguments)

    async def infer(self, batch: Batch, out: str) -> Metrics:
        """Each rank writes the rows of its share."""
        return merge(*await self.call("infer", batch, out))

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        """Each rank adds the gradient of its share."""
        return merge(*await self.call("forward_backward", batch, scale))

    async def optim_step(self, divisor: float) -> Metrics:
        """One step of all."""
        return merge(*await self.call("optim_step", divisor))

    async def park(self) -> None:
        """Each rank its part."""
        await self.call("park")

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        """Every rank keeps its part, and writes it itself: the directory is one that all nodes reach."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        await self.call("snapshot", copy, number)

        def write(directory: Path) -> None:
            asyncio.run_coroutine_threadsafe(self.call("write", number, directory), loop).result()

        return write

    async def load(self, directory: Path) -> None:
        await self.call("load", directory)

    async def load_weights(self, directory: Path) -> None:
        await self.call("load_weights", directory)

    async def close(self) -> None:
        """Processes end with their cluster."""


class RemoteEngine:
    """An Engine in a process of its own."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster = cluster
        self._process = process

    async def _call(self, method: str, *arguments: object) -> Any:
        (answer,) = await self._cluster.call([self._process], method, *arguments)
        return answer

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        """One call is one request: who is cancelled here is cancelled there."""
        return await self._call("generate", tokens, sampling)

    async def pause(self, *, drain: bool = True) -> None:
        await self._call("pause", drain)

    async def resume(self, *, recompute_kv: bool = False) -> None:
        await self._call("resume", recompute_kv)

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        """Stored weights are read at the engine's node, and never come here."""
        stored = weights if isinstance(weights, Stored) else store(weights)
        await self._call("load_weights", version, stored.buckets)

    async def fingerprint(self) -> Fingerprint:
        return await self._call("fingerprint")

    async def close(self) -> None:
        """End its process."""
        self._cluster.end(self._process)


class ObjectStoreCarrier:
    """From the ranks of an actor to engines, through Ray's object store: one copy on each node, by reference here."""

    def __init__(self, actor: RankGroup, engine: Engine) -> None:
        self._actor = actor
        self._engine = engine
        self._stored = Stored([])
        self._delivery = Delivery({}, 0)

    async def prepare(self) -> None:
        """The ranks put the weights together, the first one stores them."""
        (buckets, self._delivery), *_ = await self._actor.call("export")
        self._stored = Stored(buckets)

    async def deliver(self, version: int) -> Delivery:
        """Every engine reads them at its node."""
        stored, self._stored = self._stored, Stored([])
        await self._engine.load_weights(version, stored)
        return self._delivery
