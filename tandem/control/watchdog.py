"""What each part waits for and since when; and an end to a run in which nothing moves any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

log = logging.getLogger(__name__)


class Watchdog:
    """Ends the run, or warns, when no group has finished, no step trained and no validation moved for `timeout_s`."""

    def __init__(self, *, timeout_s: float, on_stall: Literal["end", "warn"], rollouts: Callable[[], str]) -> None:
        """`rollouts` describes what is in flight."""
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._rollouts = rollouts
        self._moved = 0.0
        self._waits: dict[str, tuple[str, float]] = {}

    @contextmanager
    def waiting(self, part: str, what: str) -> Generator[None]:
        """`part` waits for `what` inside this block; a block inside it names the nearer cause."""
        outer = self._waits.get(part)
        self._waits[part] = (what, now())
        try:
            yield
        finally:
            if outer is None:
                del self._waits[part]
            else:
                self._waits[part] = outer

    def progress(self) -> None:
        """A group has finished, a step has been trained, or a validation prompt answered."""
        self._moved = now()

    async def watch(self) -> None:
        """Runs beside the loop until cancelled. Sleeps until the moment at which it could be a stall."""
        self.progress()
        while True:
            await asyncio.sleep(self._moved + self._timeout_s - now())
            if now() < self._moved + self._timeout_s:
                continue
            message = (
                f"no group has finished and no step was trained for {self._timeout_s:g} s "
                f"(async_rl.stall_timeout_s): {self.describe()}"
            )
            if self._on_stall == "end":
                raise RuntimeError(message)
            log.warning(message)
            self.progress()

    def describe(self) -> str:
        """Who waits for what, since when."""
        parts = [f"{part} waits for {what} since {now() - since:.0f} s" for part, (what, since) in self._waits.items()]
        return "; ".join([*parts, self._rollouts()])


def now() -> float:
    """The loop's clock, which a simulation may run faster than the wall's."""
    return asyncio.get_running_loop().time()
