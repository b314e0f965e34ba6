"""An asyncio loop whose clock leaps to the next event instead of sleeping: a day passes at once, always the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from selectors import SelectorKey, SelectSelector
from types import CoroutineType
from typing import Any, TypeVar

Result = TypeVar("Result")


class SimulationDeadlock(RuntimeError):
    """Nothing is ready and nothing is scheduled: what still waits would wait for ever."""


class Leap(SelectSelector):
    """Where a loop would sleep, moves `now_s` on by as long. No file is ever watched: there are none."""

    def __init__(self, before_events: Callable[[], None], deadlock: Callable[[], str]) -> None:
        super().__init__()
        self.now_s = 0.0
        self._before_events = before_events
        self._deadlock = deadlock

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self._before_events()
        if timeout is None:
            raise SimulationDeadlock(self._deadlock())
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0. `watch` is called whenever all that was ready has run; what it raises ends the run there."""

    def __init__(self, watch: Callable[[], None] | None = None) -> None:
        self.watch = watch
        self._leap = Leap(self._look, self._describe_deadlock)
        super().__init__(self._leap)
        self._clock_resolution = (
            1e-6  # asyncio's own field: events closer than this are of one moment. Above a float's error
        )

    def time(self) -> float:
        return self._leap.now_s

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> asyncio.Future[Any]:
        """A thread lives by the wall's clock. Refused."""
        raise RuntimeError(f"{func} asks for a thread, which a simulation does not have: simulate what calls it")

    def _look(self) -> None:
        watch, self.watch = self.watch, None  # once it has raised, the loop only tidies up
        if watch is not None:
            watch()
            self.watch = watch

    def _describe_deadlock(self) -> str:
        waits = sorted(f"{task.get_name()} at {place_of(task)}" for task in asyncio.all_tasks(self))
        return f"at {self.time():g} s nothing can happen any more; these wait for ever: " + "; ".join(waits)


def run_virtual(coroutine: Coroutine[Any, Any, Result], *, watch: Callable[[], None] | None = None) -> Result:
    """Run a coroutine to its end on a loop of its own. Raises SimulationDeadlock naming every task that waits.

    `watch` is called after each round of events; what it raises ends the run there, as if the process were killed.
    """
    loop = VirtualLoop(watch)

    async def watched() -> Result:
        try:
            return await coroutine
        finally:
            loop.watch = None

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(watched())


def place_of(task: asyncio.Task[Any]) -> str:
    """The innermost function that a task waits in, with its line."""
    *_, innermost = awaits(task.get_coro())
    frame = innermost.cr_frame
    return f"{innermost.__qualname__}:{frame.f_lineno}" if frame else innermost.__qualname__


def awaits(coroutine: object) -> Iterator[CoroutineType[Any, Any, Any]]:
    """A coroutine and what it awaits, outermost first, as far as Python's own coroutines go."""
    while isinstance(coroutine, CoroutineType):
        yield coroutine
        coroutine = coroutine.cr_await
