"""Everything in one process: CPU, or one GPU. No Ray."""

from __future__ import annotations

import asyncio
from functools import partial

from tandem import cores
from tandem.config import Config
from tandem.launch.engines import build_engine, engine_sleeps
from tandem.launch.gpus import SharedGpus
from tandem.launch.planes import build_plane
from tandem.launch.trainers import build_trainer, names_of
from tandem.launch.turns import TakesTurns, Turns
from tandem.roles import DataPlane, Engine, Trainer
from tandem.train.worker import Worker
from tandem.weights.memory import MemoryCarrier


class LocalMachinery:
    """Engine and trainers side by side in this process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._plane: DataPlane | None = None
        self._engine: Engine | None = None
        self._turns = Turns()
        self._thread = cores.thread_with_all("train")  # trainers take turns: one thread is enough for all
        cores.leave()
        self.workers: dict[str, Worker] = {}

    async def start_plane(self) -> DataPlane:
        """The one that the recipe names."""
        self._plane = build_plane(self._config.chosen_data_plane)
        return self._plane

    async def start_engine(self, pad_token_id: int) -> Engine:
        """With weights as the model's files have them."""
        self._engine = build_engine(self._config, pad_token_id)
        cores.leave()  # its thread may have taken some
        return self._engine

    async def start_trainers(self, plane: DataPlane) -> dict[str, Trainer]:
        """All that the recipe asks for. They share the device, so they take turns."""
        return {name: TakesTurns(await self.start_trainer(name, plane), self._turns) for name in names_of(self._config)}

    async def start_trainer(self, name: str, plane: DataPlane) -> Worker:
        """One of them."""
        build = partial(build_trainer, name, self._config, plane, thread=self._thread)
        self.workers[name] = await asyncio.get_running_loop().run_in_executor(self._thread, build)
        return self.workers[name]

    def carrier(self) -> MemoryCarrier:
        """By reference."""
        assert self._engine is not None, "start_engine comes first"
        return MemoryCarrier(self.workers["actor"], [self._engine])

    def gpus(self) -> SharedGpus:
        """One device for all."""
        return SharedGpus([self._turns], self._engine if engine_sleeps(self._config) else None)

    async def guard(self) -> None:
        """There is no other process: waits for ever."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Ends threads and processes."""
        for trainer in self.workers.values():
            await trainer.close()
        self._thread.shutdown()
        cores.take_back()
        if self._engine is not None:
            await self._engine.close()
        if self._plane is not None:
            await self._plane.close()
