"""Who may use the accelerators, and when."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress

from tandem.launch.turns import Turns
from tandem.roles import Engine
from tandem.types import EngineDied, Metrics, merge


class SharedGpus:
    """Trainers leave the devices that engines share with them as far as their recipe says: `offload`.

    An engine that can sleep does while they compute: it is drained before, and awake again when they have left. Its
    cache comes back with the publish, behind the weights; without one at once.
    """

    def __init__(self, turns: Collection[Turns], sleeper: Engine | None = None) -> None:
        """`turns`: of trainers where engines are too; none where engines have devices of their own."""
        self._turns = turns
        self._sleeper = sleeper
        self._metrics: Metrics = {}

    @asynccontextmanager
    async def training(self, *, publishes: bool) -> AsyncGenerator[None]:
        """Trainers come by themselves, call by call; whoever is there at the end is parked."""
        is_asleep = await self._send_to_sleep(keep_weights=not publishes)
        try:
            yield
        finally:
            for turns in self._turns:
                await turns.release()
        if is_asleep:  # after an error of training it sleeps on: the run ends
            await self._wake(resume=not publishes)

    async def _send_to_sleep(self, *, keep_weights: bool) -> bool:
        """Whether there is one that sleeps now. That none is left the next call of it says, behind a whole step."""
        if self._sleeper is None:
            return False
        with suppress(EngineDied):
            await self._sleeper.pause()
            self._metrics = merge(self._metrics, await self._sleeper.sleep(keep_weights=keep_weights))
            return True
        return False

    async def _wake(self, *, resume: bool) -> None:
        assert self._sleeper is not None
        with suppress(EngineDied):
            self._metrics = merge(self._metrics, await self._sleeper.wake())
            if resume:
                await self._sleeper.resume()

    def drain(self) -> Metrics:
        """Of engines that slept since the last drain."""
        metrics, self._metrics = self._metrics, {}
        return metrics
