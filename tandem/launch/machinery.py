"""What a run computes with, wherever that is: the one thing that differs between `cluster.launch` local and ray."""

from __future__ import annotations

from typing import Protocol

from tandem.roles import Carrier, DataPlane, Engine, Gpus, Trainer


class Machinery(Protocol):
    """Starts engines and trainers, in this process or in others. Each is started once."""

    async def start_plane(self) -> DataPlane: ...

    async def start_engine(self, pad_token_id: int) -> Engine:
        """One Engine, however many it stands for."""
        ...

    async def start_trainers(self, plane: DataPlane) -> dict[str, Trainer]:
        """actor, and what else the recipe asks for, by name; critic first."""
        ...

    def carrier(self) -> Carrier:
        """From the actor to the engine, both started here."""
        ...

    def gpus(self) -> Gpus:
        """Who computes when on devices that engines and trainers share."""
        ...

    async def guard(self) -> None:
        """Waits for what would end the run from outside: RuntimeError when a process dies that it cannot do without."""
        ...

    async def close(self) -> None:
        """End all that was started, plane included. Nothing of it is left."""
        ...
