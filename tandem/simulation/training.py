"""The training side as time: an algorithm that reads its chunks as the real one does, and the sync of weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tandem.control.watchdog import now
from tandem.roles import DataPlane, Pause
from tandem.simulation.engines import SimulatedEngines
from tandem.types import Batch, Max, Metrics


@dataclass(frozen=True)
class TrainTimes:
    """What a step costs on all trainers together. `streamed_share` of it can be done chunk by chunk as groups come."""

    tokens_per_s: float
    step_s: float = 0.0
    streamed_share: float = 0.0


class SimulatedAlgorithm:
    """Takes as long as the tokens of a step need. Reads every row, so that a lost one is noticed."""

    def __init__(self, times: TrainTimes, *, plane: DataPlane) -> None:
        self.busy_s = 0.0
        self._times = times
        self._plane = plane
        self._steps = 0

    async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
        seen: list[Batch] = []
        async for chunk in chunks:
            await self._read(chunk)
            await self._compute(self._times.streamed_share * sum(chunk.lengths) / self._times.tokens_per_s)
            seen.append(chunk)
        whole = Batch.join(seen)
        await self._compute((1 - self._times.streamed_share) * sum(whole.lengths) / self._times.tokens_per_s)
        await self._compute(self._times.step_s)
        self._steps += 1
        return {}

    async def _read(self, batch: Batch) -> None:
        rows = await self._plane.get(batch.keys, ["key"])
        read = [int(row) for row in rows["key"]]
        assert read == list(batch.keys), f"asked for rows {batch.keys}, got {read}"

    async def _compute(self, seconds: float) -> None:
        self.busy_s += seconds
        await asyncio.sleep(seconds)

    def state(self) -> dict[str, float]:
        return {"steps": float(self._steps)}

    def restore(self, state: Mapping[str, float]) -> None:
        self._steps = int(state["steps"])


class SimulatedSync:
    """Pauses the engines, takes `seconds`, resumes them with the new version."""

    def __init__(self, engines: SimulatedEngines, *, seconds: float, pause: Pause) -> None:
        self._engines = engines
        self._seconds = seconds
        self._pause: Pause = pause

    async def publish(self, version: int) -> Metrics:
        began = now()
        await self._engines.pause(self._pause)
        await asyncio.sleep(self._seconds)
        self._engines.resume(version)
        return {"weights/pause_s": Max(now() - began)}


class OwnDevices:
    """Trainers and engines are on different devices: both may run at any time."""

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncGenerator[None]:
        yield

    def drain(self) -> Metrics:
        """Nothing moves."""
        return {}


class Records:
    """Keeps what a run reports; `heard` is told too."""

    def __init__(self, heard: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
        self.steps: list[tuple[int, Mapping[str, float]]] = []
        self._heard = heard

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self.steps.append((step, record))
        if self._heard:
            self._heard(step, record)

    def close(self) -> None: ...


def column(records: Sequence[tuple[int, Mapping[str, float]]], name: str) -> list[float]:
    """One metric over the steps that report it."""
    return [record[name] for _, record in records if name in record]
