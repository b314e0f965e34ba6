"""The whole loop on every rank of a model: each draws the same rollouts, and they share what one of them writes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

import tandem.launch.trainers
import tests.train.megatron_here  # noqa: F401  the shim comes before Megatron-Core
from tandem.config import Config
from tandem.launch.local import LocalMachinery
from tandem.launch.trainers import names_of
from tandem.launch.turns import TakesTurns, Turns
from tandem.plane.memory import MemoryPlane
from tandem.roles import DataPlane, Trainer, WriteFiles
from tests.e2e.runs import Ran, run


class EchoedPlane(MemoryPlane):
    """Rank 0 tells what it puts; another rank asks for what it misses, and waits for it. No column is put twice."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._here: set[tuple[int, str]] = set()

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[Tensor]]) -> None:
        await super().put(keys, columns)
        for name, rows in columns.items():
            for key, row in zip(keys, rows, strict=True):
                self._here.add((key, name))
                if dist.get_rank() == 0:
                    self._store.set(f"{name}/{key}", pickle.dumps(row))

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[Tensor]]:
        for name in names:
            for key in keys:
                if (key, name) not in self._here and dist.get_rank() > 0:
                    await self.put([key], {name: [pickle.loads(self._store.get(f"{name}/{key}"))]})
        return await super().get(keys, names)


class WritesTogether(TakesTurns):
    """Ranks write their parts of a snapshot into the directory of rank 0, which waits for them."""

    def __init__(self, trainer: Trainer, turns: Turns, store: dist.Store, name: str) -> None:
        super().__init__(trainer, turns)
        self._store = store
        self._name = name
        self._numbers = count()

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        write = await super().snapshot(copy=copy)
        key = f"{self._name}/snapshot-{next(self._numbers)}"

        def write_together(directory: Path) -> None:
            if dist.get_rank() > 0:
                write(Path(self._store.get(f"{key}/directory").decode()))
                self._store.set(f"{key}/written-{dist.get_rank()}", "")
                return
            write(directory)
            self._store.set(f"{key}/directory", str(directory))
            self._store.wait([f"{key}/written-{rank}" for rank in range(1, dist.get_world_size())])

        return write_together


class RankMachinery(LocalMachinery):
    """Local, on an echoed plane, with one checkpoint: that of rank 0."""

    def __init__(self, config: Config, store: dist.Store) -> None:
        super().__init__(config)
        self._store = store

    async def start_plane(self) -> DataPlane:
        self._plane = EchoedPlane(self._store)
        return self._plane

    async def start_trainers(self, plane: DataPlane) -> dict[str, Trainer]:
        return {
            name: WritesTogether(await self.start_trainer(name, plane), self._turns, self._store, name)
            for name in names_of(self._config)
        }


def run_on_rank(config: Config, folder: Path, resume: bool = False) -> Ran:
    """One rank's part in a run. To `resume`, each rank has the checkpoint in its own directory."""
    tandem.launch.trainers.check_device = lambda name, config: None
    store = dist.FileStore(str(folder / "rows"), dist.get_world_size())
    return run(config, folder / f"run-{dist.get_rank()}", resume=resume, machinery=RankMachinery(config, store))
