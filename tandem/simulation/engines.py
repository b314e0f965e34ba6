"""Engines as time: slots that each write at one speed, queues before them, pauses in which responses end or freeze."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.control.watchdog import now
from tandem.metrics.timing import Timeline
from tandem.roles import Pause
from tandem.types import RolloutFailed


@dataclass(frozen=True)
class Written:
    """The weights that wrote the first and the last token of a response."""

    oldest_version: int
    newest_version: int


class SimulatedEngines:
    """`engines` x `slots` sequences at one time; a request goes to the engine with the fewest, and waits there.

    Decoding is bound by memory: a sequence gets `tokens_per_s` whether or not its neighbours write.
    """

    def __init__(self, *, engines: int, slots: int, tokens_per_s: float, timeline: Timeline | None = None) -> None:
        self.version = 0
        self.busy_slot_s = 0.0
        self._tokens_per_s = tokens_per_s
        self._slots = [asyncio.Semaphore(slots) for _ in range(engines)]
        self._load = [0] * engines
        self._requests: list[set[asyncio.Timeout]] = [set() for _ in range(engines)]
        self._timeline = timeline
        self._open = asyncio.Event()  # set: requests may begin. pause() clears it, resume() sets it
        self._open.set()
        self._writing = 0
        self._none_writes = asyncio.Event()  # set by the last response that ends
        self._frozen_since: float | None = None
        self._frozen_s = 0.0  # in freezes that are over
        self._discards = False  # what is written now is thrown away by resume()
        self._kept_since_s = 0.0  # of the clock that _worked_s() reads: what was written before is thrown away
        self._oldest_kept = 0  # the version that wrote first since then

    async def write(self, tokens: int) -> Written:
        """A response of this length. Waits for a slot, and for resume(). RolloutFailed when its engine crashes."""
        engine = self._load.index(min(self._load))
        self._load[engine] += 1
        try:
            async with asyncio.timeout(None) as life:
                self._requests[engine].add(life)
                return await self._write(engine, tokens)
        except TimeoutError as error:
            raise RolloutFailed(f"engine {engine} died", "infrastructure") from error
        finally:
            self._load[engine] -= 1
            self._requests[engine].discard(life)

    async def _write(self, engine: int, tokens: int) -> Written:
        async with self._slots[engine]:
            while not self._open.is_set():
                await self._open.wait()
            with self._slot_busy(engine):
                oldest = self.version
                await self._work(tokens / self._tokens_per_s)
                return Written(max(oldest, self._oldest_kept), self.version)

    def crash(self, engine: int) -> None:
        """Every request of this engine fails now. Another process takes its place at once."""
        for request in self._requests[engine]:
            request.reschedule(now())

    async def pause(self, kind: Pause) -> None:
        """Nothing begins. `drain` waits until nothing is written; else writing stands still, `rewrite` starts it over.

        Aborted requests have their slots again before others do: here they keep them. Reading a text takes no time.
        """
        self._open.clear()
        self._discards = kind == "rewrite"
        if kind != "drain":
            self._frozen_since = now()
        while kind == "drain" and self._writing:
            self._none_writes.clear()
            await self._none_writes.wait()

    def resume(self, version: int) -> None:
        """Write on, with the weights of `version`."""
        self.version = version
        if self._frozen_since is not None:
            self._frozen_s += now() - self._frozen_since
            self._frozen_since = None
        if self._discards:
            self._kept_since_s, self._oldest_kept = self._worked_s(), version
        self._open.set()

    def _worked_s(self) -> float:
        """A clock that stands still while engines are frozen."""
        return (now() if self._frozen_since is None else self._frozen_since) - self._frozen_s

    async def _work(self, seconds: float) -> None:
        began = self._worked_s()
        while (left := max(began, self._kept_since_s) + seconds - self._worked_s()) > 1e-6:
            if self._frozen_since is not None:
                await self._open.wait()
            else:
                await asyncio.sleep(left)

    @contextmanager
    def _slot_busy(self, engine: int) -> Generator[None]:
        began = self._worked_s()
        self._writing += 1
        try:
            if self._timeline is None:
                yield
            else:
                with self._timeline.span("engine/write", track=f"engine {engine}"):
                    yield
        finally:
            self._writing -= 1
            self.busy_slot_s += self._worked_s() - began
            if not self._writing:
                self._none_writes.set()
