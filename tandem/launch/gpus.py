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
        engine = self._sleeper
        if engine is not None:
            with suppress(EngineDied):  # the next call of an engine says so, behind a step that can be kept
                await engine.pause()
                self._metrics = merge(self._metrics, await engine.sleep(keep_weights=not publishes))
        try:
            yield
        finally:
            for turns in self._turns:
                await turns.release()
        if engine is not None:  # after an error of training it sleeps on: the run ends
            with suppress(EngineDied):
                self._metrics = merge(self._metrics, await engine.wake())
                if not publishes:
                    await engine.resume()

    def drain(self) -> Metrics:
        """Of engines that slept since the last drain."""
        metrics, self._metrics = self._metrics, {}
        return metrics
