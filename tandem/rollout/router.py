"""Several engines as one: where a request goes, and what becomes of it when its engine dies."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from tandem.fingerprint import first_difference
from tandem.roles import Engine, Fingerprint, NamedTensors, Pause
from tandem.types import EngineDied, Generation, Metrics, RolloutFailed, Sampling, merge

log = logging.getLogger(__name__)
T = TypeVar("T")
HOMES = 65536  # prompts whose engine is remembered, the latest used: 16 MB with prompts of 200 bytes


@dataclass(eq=False)
class Seat:
    """One engine's place. A `fresh` engine took a dead one's place and waits for its first weights."""

    number: int
    engine: Engine
    state: Literal["serving", "fresh", "dead"] = "serving"
    load: int = 0  # requests that wait or are written there


class Router:
    """Plays the Engine role with engines that hold the same weights.

    A request goes to the engine with the fewest, but where its prompt went before it stays while that engine has at
    most `max_imbalance` requests more than the least loaded: the samples of a group share one prefix cache.

    An engine that raises EngineDied leaves. Its requests begin anew elsewhere, each at most `max_reissues` times; then
    they are RolloutFailed (infrastructure), which the run's budgets count. With none left the caller gets EngineDied.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_reissues: int,
        max_imbalance: int,
        restart: Callable[[int], Awaitable[Engine]] | None = None,
    ) -> None:
        """`restart(number)` starts an engine in a dead one's place: it serves from the next load_weights() on."""
        if not engines:
            raise ValueError("a router needs at least one engine, got none")
        self._seats = [Seat(number, engine) for number, engine in enumerate(engines)]
        self._max_reissues = max_reissues
        self._max_imbalance = max_imbalance
        self._restart = restart
        self._starting: dict[Seat, asyncio.Task[Engine]] = {}
        self._homes: OrderedDict[bytes, Seat] = OrderedDict()
        self._last_death = EngineDied("no engine has died")
        self._is_closed = False
        self.reissued = 0  # requests begun anew since construction

    @property
    def serving(self) -> tuple[int, ...]:
        """The numbers of the engines that take requests."""
        return tuple(seat.number for seat in self._seats if seat.state == "serving")

    @property
    def taking(self) -> tuple[Engine, ...]:
        """The engines that the next load_weights() calls, once they are paused."""
        return tuple(seat.engine for seat in self._seats if seat.state != "dead")

    @property
    def loads(self) -> tuple[int, ...]:
        """Requests that each engine has, waiting ones included."""
        return tuple(seat.load for seat in self._seats)

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        """Waits for the engine that it chose. A second attempt draws the same tokens: they follow from the seed."""
        for _ in range(self._max_reissues + 1):
            seat = self._choose(array("q", tokens).tobytes())
            seat.load += 1
            try:
                return replace(await seat.engine.generate(tokens, sampling), engine=seat.number)
            except EngineDied as error:
                self._retire(seat, error)
                self.reissued += 1
            finally:
                seat.load -= 1
        raise RolloutFailed(
            f"{self._max_reissues + 1} engines died under this request; the last: {self._last_death}", "infrastructure"
        )

    async def pause(self, kind: Pause = "drain") -> Metrics:
        """Engines that have been restarted meanwhile are paused too, so that they take the weights that follow.

        Aborted requests are issued again where they were: the samples of a group still share a prefix there.
        """
        self._seat_restarted()
        return merge(*(metrics for _, metrics in await self._all(lambda engine: engine.pause(kind), fresh=True)))

    async def resume(self, *, recompute_kv: bool = False) -> None:
        await self._all(lambda engine: engine.resume(recompute_kv=recompute_kv))

    async def sleep(self, *, keep_weights: bool) -> Metrics:
        """All sleep."""
        return merge(*(metrics for _, metrics in await self._all(lambda e: e.sleep(keep_weights=keep_weights))))

    async def wake(self) -> Metrics:
        """All wake. One that was restarted meanwhile is awake."""
        return merge(*(metrics for _, metrics in await self._all(lambda e: e.wake())))

    async def load_weights(self, version: int, weights: NamedTensors) -> None:
        """Every engine reads the same tensors, all of which are held until the last has them."""
        held = list(weights) if isinstance(weights, Iterator) else weights  # what can be read once is read once
        for seat, _ in await self._all(lambda engine: engine.load_weights(version, held), fresh=True):
            seat.state = "serving"

    async def fingerprint(self) -> Fingerprint:
        """The one of all engines. Raises RuntimeError naming the first tensor in which two differ."""
        (first, ours), *others = await self._all(lambda engine: engine.fingerprint())
        for seat, theirs in others:
            different = first_difference(ours, theirs)
            if different:
                raise RuntimeError(f"engines {first.number} and {seat.number} hold other weights: {different}")
        return ours

    async def close(self) -> None:
        """Closes every engine, those that have died or are being started too."""
        self._is_closed = True
        self._last_death = EngineDied("the router was closed")
        for task in self._starting.values():
            task.cancel()
        started = await asyncio.gather(*self._starting.values(), return_exceptions=True)
        self._starting.clear()
        engines = [seat.engine for seat in self._seats]
        engines += [engine for engine in started if not isinstance(engine, BaseException)]
        await asyncio.gather(*(engine.close() for engine in engines))

    def _choose(self, prompt: bytes) -> Seat:
        """Where a request goes. EngineDied when no engine is left."""
        serving = self._serving_seats()
        least = min(serving, key=lambda seat: seat.load)
        home = self._homes.get(prompt)
        if home is None or home.state != "serving" or home.load - least.load > self._max_imbalance:
            home = self._homes[prompt] = least
        self._homes.move_to_end(prompt)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return home

    def _serving_seats(self) -> list[Seat]:
        serving = [seat for seat in self._seats if seat.state == "serving"]
        if self._is_closed or not serving:
            raise EngineDied(f"none of {len(self._seats)} engines is left: {self._last_death}") from self._last_death
        return serving

    async def _all(self, call: Callable[[Engine], Awaitable[T]], *, fresh: bool = False) -> list[tuple[Seat, T]]:
        """Call every engine that serves, and those that are `fresh` if asked. Who dies leaves; other errors go up."""
        self._serving_seats()
        seats = [seat for seat in self._seats if seat.state == "serving" or (fresh and seat.state == "fresh")]
        outcomes = await asyncio.gather(*(call(seat.engine) for seat in seats), return_exceptions=True)
        answers: list[tuple[Seat, T]] = []
        errors: list[BaseException] = []
        for seat, outcome in zip(seats, outcomes, strict=True):
            if isinstance(outcome, EngineDied):
                self._retire(seat, outcome)
            elif isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                answers.append((seat, outcome))
        if errors:
            raise errors[0]
        self._serving_seats()
        return answers

    def _retire(self, seat: Seat, death: EngineDied) -> None:
        """Take an engine out; the first who sees it dead starts another in its place."""
        if seat.state == "dead" or self._is_closed:
            return
        seat.state = "dead"
        self._last_death = death
        log.error("engine %d has died, %d are left: %s", seat.number, len(self.serving), death)
        if self._restart is not None and seat not in self._starting:
            self._starting[seat] = asyncio.ensure_future(self._replace(seat, self._restart))

    async def _replace(self, seat: Seat, restart: Callable[[int], Awaitable[Engine]]) -> Engine:
        """What the dead engine held is free before another starts."""
        await seat.engine.close()
        return await restart(seat.number)

    def _seat_restarted(self) -> None:
        """Give engines that have started meanwhile their seats. One that could not start stays out."""
        for seat, task in [(seat, task) for seat, task in self._starting.items() if task.done()]:
            del self._starting[seat]
            error = task.exception()
            if error is None:
                # A new seat: requests that still end on the old one count there.
                self._seats[seat.number] = Seat(seat.number, task.result(), "fresh")
            else:
                log.error("engine %d could not be started again: %s", seat.number, error)
