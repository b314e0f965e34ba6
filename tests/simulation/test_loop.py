"""The virtual loop: time leaps, order is kept, a deadlock is named, a thread is refused."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.simulation.loop import SimulationDeadlock, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_passes_in_a_moment_and_each_sleeper_wakes_at_its_time():
    async def sleep(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return now()

    async def main() -> list[float]:
        return await asyncio.gather(*(sleep(s) for s in (3.5, 31_536_000.0, 0.0, 1e-3)))

    began = time.perf_counter()
    assert run_virtual(main()) == pytest.approx([3.5, 31_536_000.0, 0.0, 1e-3])
    assert time.perf_counter() - began < 5


def test_a_timeout_is_of_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == pytest.approx(600)


def test_a_deadlock_names_who_waits_and_where():
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(7)
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_nobody(), name="the lost one")

    with pytest.raises(SimulationDeadlock, match=r"at 7 s.*the lost one at Event\.wait"):
        run_virtual(main())


def test_a_thread_is_refused():
    with pytest.raises(RuntimeError, match="asks for a thread"):
        run_virtual(asyncio.to_thread(len, []))


def test_what_the_watcher_raises_ends_the_run_at_that_event():
    seen: list[float] = []

    class Killed(Exception):
        pass

    def watch() -> None:
        if len(seen) == 5:
            raise Killed

    async def main() -> None:
        while True:
            await asyncio.sleep(1)
            seen.append(now())

    with pytest.raises(Killed):
        run_virtual(main(), watch=watch)
    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_events_cost_microseconds():
    async def main() -> None:
        for _ in range(20_000):
            await asyncio.sleep(1)

    began = time.process_time()
    run_virtual(main())
    assert time.process_time() - began < 5
