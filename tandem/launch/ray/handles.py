"""The driver's side of processes: a Trainer of many ranks, an Engine elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.launch.ray.cluster import Cluster, Process
from tandem.launch.ray.parcels import Stored, store
from tandem.roles import Fingerprint, NamedTensors, Pause, WeightStream, WriteFiles
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

    async def call_first(self, method: str, *arguments: object) -> Any:
        """The first rank's answer; the others are not asked."""
        (answer,) = await self._cluster.call(self.ranks[:1], method, *arguments)
        return answer

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

    def __init__(self, cluster: Cluster, process: Process, number: int) -> None:
        """`number` is its place's."""
        self._cluster = cluster
        self.process = process
        self.number = number

    async def _call(self, method: str, *arguments: object) -> Any:
        (answer,) = await self._cluster.call([self.process], method, *arguments)
        return answer

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        """One call is one request: who is cancelled here is cancelled there."""
        return await self._call("generate", tokens, sampling)

    async def pause(self, kind: Pause = "drain") -> Metrics:
        return await self._call("pause", kind)

    async def resume(self, *, recompute_kv: bool = False) -> None:
        await self._call("resume", recompute_kv)

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        return await self._call("sleep", keep_weights)

    async def wake(self) -> Metrics:
        return await self._call("wake")

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        """Stored and announced weights are read by the engine's process, and never come here."""
        if isinstance(weights, Announced):
            await self._call("take_announced", version, weights.to[self])
            return
        stored = weights if isinstance(weights, Stored) else store(weights, self._cluster.bucket_bytes)
        await self._call("load_weights", version, stored.buckets)

    async def fingerprint(self) -> Fingerprint:
        return await self._call("fingerprint")

    async def close(self) -> None:
        """End its process."""
        self._cluster.end(self.process)


@dataclass(frozen=True)
class Announced:
    """Weights that each of these engines reads in its own process. To whoever else reads them they are none."""

    to: Mapping[RemoteEngine, WeightStream]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise RuntimeError("announced weights are read by an engine's process")
