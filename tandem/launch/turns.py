"""Trainers that share devices take turns: one computes at a time, and the one before it has left by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tandem.roles import Trainer, WriteFiles
from tandem.types import Batch, Metrics


class Turns:
    """Whose turn it is on the devices that these trainers share.

    A trainer keeps its turn until another one computes: it then parks, which moves what its recipe says (`offload`)
    and nothing by default. It comes back by itself.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # held by the trainer that computes; woken in the order of the calls
        self._present: Trainer | None = None

    @asynccontextmanager
    async def of(self, trainer: Trainer) -> AsyncGenerator[None]:
        """Waits until no other computes. The one that had the turn before is parked."""
        async with self._lock:
            if self._present is not trainer:
                await self._park()
            self._present = trainer
            yield

    async def release(self) -> None:
        """Leave the devices to someone else, such as engines: whoever is there is parked."""
        async with self._lock:
            await self._park()

    async def _park(self) -> None:
        present, self._present = self._present, None
        if present is not None:
            await present.park()


class TakesTurns:
    """A Trainer that waits for its turn before it computes."""

    def __init__(self, trainer: Trainer, turns: Turns) -> None:
        self._trainer = trainer
        self._turns = turns

    async def infer(self, batch: Batch, out: str) -> Metrics:
        """In turn."""
        async with self._turns.of(self._trainer):
            return await self._trainer.infer(batch, out)

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        """In turn. The gradient survives the turns of others until its step."""
        async with self._turns.of(self._trainer):
            return await self._trainer.forward_backward(batch, scale)

    async def optim_step(self, divisor: float) -> Metrics:
        """In turn."""
        async with self._turns.of(self._trainer):
            return await self._trainer.optim_step(divisor)

    async def park(self) -> None:
        """At once: whoever computes keeps the turn."""
        await self._trainer.park()

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        """From wherever it is: takes no turn."""
        return await self._trainer.snapshot(copy=copy)

    async def load(self, directory: Path) -> None:
        """In turn: what is loaded lies on the device."""
        async with self._turns.of(self._trainer):
            await self._trainer.load(directory)

    async def load_weights(self, directory: Path) -> None:
        """In turn: what is loaded lies on the device."""
        async with self._turns.of(self._trainer):
            await self._trainer.load_weights(directory)

    async def close(self) -> None:
        """Takes no turn."""
        await self._trainer.close()
