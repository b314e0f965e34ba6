"""The ways of weights between processes: through Ray's object store, by a collective, by handles of shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from tandem.launch.ray.cluster import GRACE_S, Cluster
from tandem.launch.ray.handles import Announced, RankGroup, RemoteEngine
from tandem.launch.ray.parcels import Stored
from tandem.roles import Delivery, Engine
from tandem.rollout.router import Router
from tandem.types import EngineDied
from tandem.weights.buckets import Announcement, Door, Spec
from tandem.weights.ways import CollectiveDoor, Meeting


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


class Doorman(Protocol):
    """Leads engines and ranks of the actor to each other."""

    async def open(
        self, engines: Sequence[RemoteEngine]
    ) -> tuple[Mapping[int, CollectiveDoor | None], Mapping[RemoteEngine, Door]]:
        """The ranks that send, and each engine's door."""
        ...


class Collectives:
    """One process group: the actor's first rank, and every process of every engine."""

    def __init__(self, actor: RankGroup, *, size: int, device: str, directory: Path | None, timeout_s: float) -> None:
        """`size`: processes of an engine. They meet in a file in `directory`, or where None at the first rank."""
        self._actor = actor
        self._size = size
        self._device = device
        self._directory = directory
        self._timeout_s = timeout_s

    async def open(
        self, engines: Sequence[RemoteEngine]
    ) -> tuple[Mapping[int, CollectiveDoor | None], Mapping[RemoteEngine, Door]]:
        """A new group: who was in one before leaves it."""
        meeting: Meeting
        if self._directory:
            meeting = str(self._directory / f"{uuid4().hex}.meeting")
        else:
            meeting = await self._actor.call_first("host_store")
        count = 1 + self._size * len(engines)

        def door(rank: int) -> CollectiveDoor:
            return CollectiveDoor(meeting, rank, count, self._device, self._timeout_s)

        return {0: door(0)}, {engine: door(1 + i * self._size) for i, engine in enumerate(engines)}


class Gates:
    """Each engine takes handles from the actor's rank in its own slot: they have one number."""

    def __init__(self, actor: RankGroup) -> None:
        self._actor = actor

    async def open(
        self, engines: Sequence[RemoteEngine]
    ) -> tuple[Mapping[int, CollectiveDoor | None], Mapping[RemoteEngine, Door]]:
        """Sockets of the machine that an engine and its rank are on."""
        doors = await self._actor.call("open_gate")
        return {engine.number: None for engine in engines}, {engine: doors[engine.number] for engine in engines}


class BucketCarrier:
    """Bucket by bucket: neither a rank nor an engine holds more than one beside its model."""

    def __init__(self, cluster: Cluster, actor: RankGroup, router: Router, doorman: Doorman, bucket_bytes: int) -> None:
        """The engines of the router are RemoteEngines."""
        self._cluster = cluster
        self._actor = actor
        self._router = router
        self._doorman = doorman
        self._bucket_bytes = bucket_bytes
        self._specs: list[Spec] = []
        self._delivery = Delivery({}, 0)
        self._engines: tuple[Engine, ...] = ()  # those that the doors are for
        self._ranks: Mapping[int, CollectiveDoor | None] = {}
        self._doors: Mapping[RemoteEngine, Door] = {}

    async def prepare(self) -> None:
        """The ranks put the weights together once: what they are, and the fingerprint. Nothing is kept."""
        (self._specs, self._delivery), *_ = await self._actor.call("survey")

    async def deliver(self, version: int) -> Delivery:
        """The ranks put them together again, for the engines. RuntimeError when an engine dies meanwhile."""
        engines = self._router.taking
        if engines != self._engines:
            self._ranks, self._doors = await self._doorman.open(
                [engine for engine in engines if isinstance(engine, RemoteEngine)]
            )
            self._engines = engines
        specs = tuple(self._specs)
        announced = Announced(
            {engine: Announcement(specs, self._bucket_bytes, door) for engine, door in self._doors.items()}
        )
        both = asyncio.gather(
            self._actor.call("send", specs, self._ranks), self._router.load_weights(version, announced)
        )
        deaths = [asyncio.ensure_future(self._cluster.end_of(engine.process)) for engine in self._doors]
        try:
            await asyncio.wait({both, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if both.done() and both.exception() is not None:  # often seen before Ray tells of the death behind it
                await asyncio.wait(deaths, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for death in deaths:
                if death.done() and isinstance(error := death.exception(), EngineDied):
                    raise RuntimeError(
                        f"an engine died while weights went over, so that others hold a part of them: {error}"
                    ) from error
            await both
        finally:
            for task in (both, *deaths):
                task.cancel()
            await asyncio.gather(both, *deaths, return_exceptions=True)
        return self._delivery
