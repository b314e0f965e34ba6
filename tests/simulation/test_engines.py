"""Simulated engines against hand-worked times: slots, queues, drain, freeze, crash."""

from __future__ import annotations

import asyncio

import pytest

from tandem.simulation.engines import SimulatedEngines, Written
from tandem.simulation.loop import run_virtual
from tandem.types import RolloutFailed


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(engines: SimulatedEngines, tokens: int) -> tuple[float, Written]:
    written = await engines.write(tokens)
    return now(), written


def test_a_request_waits_for_a_slot_of_the_least_loaded_engine():
    async def main() -> list[float]:
        engines = SimulatedEngines(engines=2, slots=1, tokens_per_s=10)
        ends = await asyncio.gather(*(timed(engines, tokens) for tokens in (50, 10, 10, 10)))
        return [end for end, _ in ends]

    # the first two begin at once; the third queues behind the 50, as both are equal then; the fourth behind the 10
    assert run_virtual(main()) == pytest.approx([5, 1, 6, 2])


def test_drain_lets_responses_end_and_holds_back_new_ones():
    async def main() -> list[tuple[float, Written]]:
        engines = SimulatedEngines(engines=1, slots=2, tokens_per_s=10)

        async def publish() -> None:
            await asyncio.sleep(1)
            await engines.pause("drain")
            assert now() == pytest.approx(3)
            await asyncio.sleep(2)
            engines.resume(1)

        first, second, _ = await asyncio.gather(timed(engines, 30), late(engines, 1.5, 10), publish())
        return [first, second]

    (first_end, first), (second_end, second) = run_virtual(main())
    assert (first_end, first) == (pytest.approx(3), Written(0, 0))
    assert (second_end, second) == (pytest.approx(6), Written(1, 1))


async def late(engines: SimulatedEngines, seconds: float, tokens: int) -> tuple[float, Written]:
    await asyncio.sleep(seconds)
    return await timed(engines, tokens)


@pytest.mark.parametrize(("begin", "end"), [(1.0, 3.0), (2.9, 2.95), (0.0, 7.0)])
def test_a_freeze_adds_its_own_time_and_the_version_changes_within_a_response(begin: float, end: float):
    async def main() -> tuple[float, Written]:
        engines = SimulatedEngines(engines=1, slots=2, tokens_per_s=10)

        async def publish() -> None:
            await asyncio.sleep(begin)
            await engines.pause("stand")
            await asyncio.sleep(end - begin)
            engines.resume(1)

        result, _ = await asyncio.gather(timed(engines, 30), publish())
        assert engines.busy_slot_s == pytest.approx(3)
        return result

    finished, written = run_virtual(main())
    assert finished == pytest.approx(3 + end - begin)
    assert written == Written(0, 1)


@pytest.mark.parametrize(("begin", "end"), [(1.0, 3.0), (2.9, 2.95), (0.0, 7.0)])
def test_what_is_thrown_away_is_written_again_by_the_new_version(begin: float, end: float):
    async def main() -> list[tuple[float, Written]]:
        engines = SimulatedEngines(engines=1, slots=2, tokens_per_s=10)

        async def publish() -> None:
            await asyncio.sleep(begin)
            await engines.pause("rewrite")
            await asyncio.sleep(end - begin)
            engines.resume(1)
            await asyncio.sleep(1)
            await engines.pause("reissue")
            await asyncio.sleep(5)
            engines.resume(2)

        *results, _ = await asyncio.gather(timed(engines, 30), late(engines, end + 0.5, 20), publish())
        assert engines.busy_slot_s == pytest.approx(begin + 3 + 2)
        return results

    (first_end, first), (second_end, second) = run_virtual(main())
    assert (first_end, first) == (pytest.approx(end + 3 + 5), Written(1, 2))
    assert (second_end, second) == (pytest.approx(end + 0.5 + 2 + 5), Written(1, 2))


def test_a_crash_fails_the_requests_of_that_engine_and_only_those():
    async def main() -> list[object]:
        engines = SimulatedEngines(engines=2, slots=1, tokens_per_s=10)

        async def crash() -> None:
            await asyncio.sleep(1)
            engines.crash(0)
            assert (await engines.write(10)) == Written(0, 0)  # another process has taken its place

        return await asyncio.gather(*(engines.write(30) for _ in range(2)), crash(), return_exceptions=True)

    failed, written, _ = run_virtual(main())
    assert isinstance(failed, RolloutFailed)
    assert failed.kind == "infrastructure"
    assert written == Written(0, 0)
