"""The implementations of the DataPlane role that the contract runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import torch

from tandem.plane.memory import MemoryPlane
from tandem.roles import DataPlane

SCENE_S = 60.0
DEADLINE_S = 20.0
KEYS = range(600)  # what a scene may use: the stage is cleared of them


@dataclass(frozen=True)
class Kind:
    """An implementation: how to start one that holds at most `max_bytes`, and the package that it needs, if any."""

    name: str
    start: Callable[[int | None], DataPlane]
    package: str | None


def start_memory(max_bytes: int | None) -> DataPlane:
    return MemoryPlane(max_bytes=max_bytes)


def start_ray_actor(max_bytes: int | None) -> DataPlane:
    from tandem.plane.ray_actor import RayActorPlane  # an extra: not everywhere

    return RayActorPlane(max_bytes=max_bytes, deadline_s=DEADLINE_S)


def start_transfer_queue(max_bytes: int | None) -> DataPlane:
    from tandem.plane.transfer_queue import TransferQueuePlane  # an extra: not everywhere

    return TransferQueuePlane(max_bytes=max_bytes, deadline_s=DEADLINE_S, num_storage_units=1 if max_bytes else 2)


QUEUE = Kind("transfer_queue", start_transfer_queue, package="transfer_queue")
KINDS = [Kind("memory", start_memory, package=None), Kind("ray_actor", start_ray_actor, package="ray"), QUEUE]
Started = Callable[[Kind, int | None], DataPlane]  # gives the plane of a kind and a bound, started once


def play(scene: Callable[[], Coroutine[None, None, None]], *planes: DataPlane) -> None:
    """Run a scene within a time limit, then clear the planes it played on."""

    async def body() -> None:
        try:
            await asyncio.wait_for(scene(), timeout=SCENE_S)
        finally:
            for plane in planes:
                await plane.drop(KEYS)

    asyncio.run(body())


def rows(*lengths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rows of these lengths that count up from 0."""
    return [torch.arange(n).to(dtype) for n in lengths]


def filled(key: int, length: int) -> torch.Tensor:
    """A row that says whose it is."""
    return torch.full((length,), float(key))


def lists(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [tensor.tolist() for tensor in tensors]
