"""The machinery of a run under Ray: who is started where, and how the parts are put together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from uuid import uuid4

from tandem import cores
from tandem.config import Config
from tandem.config.placement import Slot, engine_size, engines_of, placement_of
from tandem.launch.gpus import SharedGpus
from tandem.launch.planes import build_plane
from tandem.launch.ray.carriers import BucketCarrier, Collectives, Gates, ObjectStoreCarrier
from tandem.launch.ray.cluster import Cluster, Process
from tandem.launch.ray.handles import RankGroup, RemoteEngine
from tandem.launch.ray.workers import EngineProcess, Rank, TrainerRank
from tandem.launch.trainers import names_of
from tandem.launch.turns import TakesTurns, Turns
from tandem.roles import Carrier, DataPlane, Engine, Trainer
from tandem.rollout.router import Router

MAX_REISSUES = 2  # of a request whose engine died
MAX_IMBALANCE = 8  # requests that a group's engine may have more than the least loaded


class RayMachinery:
    """Engines and ranks in the slots of a cluster; the loop, buffer and samplers stay in the driver."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        """Join or start Ray, and start all processes: they import while the driver reads data."""
        self._config = config
        self._placement = placement_of(config)
        self._logs = run_dir / "logs"
        self._cluster = Cluster(config, self._logs)
        self._plane: DataPlane | None = None
        self._starting: asyncio.Task[None] | None = None
        self._engine: Router | None = None
        self._pad_token_id = 0
        self._turns: defaultdict[tuple[Slot, ...], Turns] = defaultdict(Turns)
        self.groups: dict[str, RankGroup] = {}
        self._engine_slots = engines_of(config)
        self._engines = [self._engine_process(number) for number in range(len(self._engine_slots))]
        self._ranks = {name: self._rank_processes(name) for name in names_of(config)}
        cores.leave()  # to them

    def _engine_process(self, number: int) -> Process:
        return self._cluster.start(f"engine {number}", EngineProcess, self._engine_slots[number], vital=False)

    def _rank_processes(self, name: str) -> list[Process]:
        slots = enumerate(self._placement[name])
        return [self._cluster.start(f"{name} rank {rank}", TrainerRank, (slot,), vital=True) for rank, slot in slots]

    async def start_plane(self) -> DataPlane:
        """The one that the recipe names, within reach of all processes."""
        self._plane = await asyncio.to_thread(build_plane, self._config.chosen_data_plane)
        return self._plane

    async def start_engine(self, pad_token_id: int) -> Engine:
        """An engine in each of its slots, and the router over them.

        Trainers start meanwhile, but for those on an engine's GPU: it measures what is free there.
        """
        if not (self._cluster.on_gpus and self._config.policy.generation.colocated.enabled):
            assert self._plane is not None, "start_plane comes first"
            self._starting = asyncio.create_task(self._start_groups(self._plane))
        self._pad_token_id = pad_token_id
        await self._cluster.call(self._engines, "start", self._config, pad_token_id)
        engines = [RemoteEngine(self._cluster, process, number) for number, process in enumerate(self._engines)]
        self._engine = Router(
            engines, max_reissues=MAX_REISSUES, max_imbalance=MAX_IMBALANCE, restart=self._restart_engine
        )
        return self._engine

    async def _restart_engine(self, number: int) -> Engine:
        process = self._engine_process(number)
        await self._cluster.call([process], "start", self._config, self._pad_token_id)
        return RemoteEngine(self._cluster, process, number)

    async def start_trainers(self, plane: DataPlane) -> dict[str, Trainer]:
        """All at one time. Those with the same slots take turns there."""
        await (self._starting or self._start_groups(plane))
        return {name: TakesTurns(self.groups[name], self._turns[self._placement[name]]) for name in self._ranks}

    async def _start_groups(self, plane: DataPlane) -> None:
        await asyncio.gather(*(self._start_group(name, plane) for name in self._ranks))

    async def _start_group(self, name: str, plane: DataPlane) -> None:
        processes = self._ranks[name]
        meeting = await self._meeting(processes)
        starts = [
            self._cluster.call([process], "start", name, self._config, plane, self._rank(number, name, meeting))
            for number, process in enumerate(processes)
        ]
        await asyncio.gather(*starts)
        self.groups[name] = RankGroup(self._cluster, processes)

    def _rank(self, index: int, name: str, meeting: str | tuple[str, int]) -> Rank:
        return Rank(index, len(self._ranks[name]), meeting, self._config.cluster.ray.deadline_s)

    async def _meeting(self, processes: list[Process]) -> str | tuple[str, int]:
        """Ranks of one node meet in a file: no port is opened. Those of several at the first one's node."""
        if len(set(await self._cluster.call(processes, "node"))) == 1:
            return str(self._logs / f"{uuid4().hex}.meeting")
        (address,) = await self._cluster.call(
            processes[:1], "listen", len(processes), self._config.cluster.ray.deadline_s
        )
        return address

    def carrier(self) -> Carrier:
        """By the way that the recipe names."""
        assert self._engine is not None, "start_engine comes first"
        actor, settings = self.groups["actor"], self._config.cluster.ray
        match self._way():
            case "object_store":
                return ObjectStoreCarrier(actor, self._engine)
            case "ipc":
                doorman = Gates(actor)
            case _:
                doorman = Collectives(
                    actor,
                    size=engine_size(self._config),
                    device="cuda" if self._cluster.on_gpus else "cpu",
                    directory=self._logs if self._config.cluster.num_nodes == 1 else None,
                    timeout_s=settings.deadline_s,
                )
        return BucketCarrier(self._cluster, actor, self._engine, doorman, settings.weight_bucket_bytes)

    def _way(self) -> str:
        """`auto` on GPUs: handles where engines share the trainer's, else the collective."""
        chosen = self._config.cluster.ray.weight_transfer
        if chosen != "auto":
            return chosen
        if not self._cluster.on_gpus:
            return "object_store"
        return "ipc" if self._config.policy.generation.colocated.enabled else "collective"

    def gpus(self) -> SharedGpus:
        """Trainers make room where engines are too."""
        engines = set(self._placement["engine"])
        turns = [turns for slots, turns in self._turns.items() if engines & set(slots)]
        return SharedGpus(turns, self._engine if self._config.sleeps_on_gpus and self._cluster.on_gpus else None)

    async def guard(self) -> None:
        """Ends with an error when a process dies without which the run cannot go on."""
        await self._cluster.guard()

    async def close(self) -> None:
        """All processes, and Ray where it was started for this run."""
        cores.take_back()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
        if self._plane is not None:
            await self._plane.close()
        await asyncio.to_thread(self._cluster.close)
        for meeting in self._logs.glob("*.meeting"):
            meeting.unlink()
