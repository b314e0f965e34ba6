"""Who may use the accelerators, and when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager

from tandem.launch.turns import Turns


class SharedGpus:
    """Trainers leave the devices that engines share with them as far as their recipe says: `offload`."""

    def __init__(self, turns: Collection[Turns]) -> None:
        """Those of the trainers where engines are too; none where engines have devices of their own."""
        self._turns = turns

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Trainers come by themselves, call by call; whoever is there at the end is parked."""
        try:
            yield
        finally:
            for turns in self._turns:
                await turns.release()
