"""Failures: retried with back-off, budgeted, replaced by the next prompt, accounted for by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from tandem.config.asynchrony import Failures
from tandem.control.controller import Controller
from tandem.control.failures import Budgets, backoff_s
from tandem.simulation.loop import run_virtual
from tandem.types import EngineDied, RolloutFailed
from tests.control.house import House, failing, plan

SAMPLERS = [
    {"name": "in_order", "max_lookahead_versions": 1},
    {"name": "ready_first", "max_lookahead_versions": 1},
    {"name": "weight_fifo", "max_staleness_versions": 1},
    {"name": "windowed", "buffer_capacity_groups": 4},
    {"name": "custom", "target": "tests.control.test_samplers:take_newest_prompt"},
]


def run(controller: Controller) -> None:
    asyncio.run(asyncio.wait_for(controller.run(), timeout=20))


def breaking(index: int, times: int, kind: str) -> Callable[[int], bool]:
    """A behaviour that fails `times` times for one prompt, then works."""
    seen: Counter[int] = Counter()

    def behave(this: int) -> bool:
        seen[this] += 1
        if this == index and seen[this] <= times:
            raise RolloutFailed(f"p{this} broke, attempt {seen[this]}", kind)
        return True

    return behave


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (6, 32.0), (7, 60.0), (20, 60.0)])
def test_back_off_doubles_up_to_its_limit(attempt: int, seconds: float):
    assert backoff_s(Failures(), attempt) == seconds


@pytest.mark.parametrize(("kind", "limit"), [("infrastructure", "infra"), ("data", "data")])
def test_a_failure_is_retried_and_the_prompt_is_trained(kind: str, limit: str):
    house = House(behave=breaking(1, times=2, kind=kind))
    controller = house.controller(plan(failures={f"max_{limit}_attempts_per_prompt": 3}))
    run(controller)
    assert house.trained() == [(0, 1), (2, 3), (4, 5)]
    assert house.untrained == []
    assert house.records[0][1]["rollout/retries"] == 2


@pytest.mark.parametrize("kind", ["infrastructure", "data"])
def test_the_last_attempt_gives_the_prompt_up_and_the_next_takes_its_place(kind: str):
    house = House(behave=breaking(1, times=9, kind=kind))
    limits = {"max_infra_attempts_per_prompt": 3, "max_data_attempts_per_prompt": 3}
    run(house.controller(plan(failures=limits)))
    assert house.trained() == [(0, 2), (3, 4), (5, 6)]
    assert [(r["id"], r["why"]) for r in house.untrained] == [("p1", f"{kind}_failure")]
    assert "attempt 3" in str(house.untrained[0]["cause"])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: str(sampler["name"]))
def test_under_every_sampler_a_drop_is_replaced_and_the_step_stays_whole(sampler: dict[str, object]):
    house = House(behave=failing(1, 2, 5))
    run(house.controller(plan(async_rl={"sampler": sampler}, max_num_steps=5)))
    trained = [key for keys in house.trained() for key in keys]
    assert all(len(keys) == 2 for keys in house.trained())
    assert len(trained) == len(set(trained)) == 10
    assert not {1, 2, 5} & set(trained)


def test_data_failures_count_over_the_run_and_machinery_in_a_row():
    budgets = Budgets(Failures(max_skipped_prompts=2, max_consecutive_dropped_prompts=2))
    data, machinery = RolloutFailed("bad row"), RolloutFailed("dead engine", "infrastructure")
    for _ in range(2):
        budgets.given_up(data)
        budgets.given_up(machinery)
    budgets.finished()
    budgets.given_up(machinery)
    budgets.given_up(machinery)
    with pytest.raises(ValueError, match=r"3 prompts failed in a row.*max_consecutive_dropped_prompts=2.*dead engine"):
        budgets.given_up(machinery)
    with pytest.raises(ValueError, match=r"3 prompts failed, failures.max_skipped_prompts=2.*bad row"):
        budgets.given_up(data)


def test_budgets_survive_a_resume():
    first = Budgets(Failures(max_skipped_prompts=1))
    first.given_up(RolloutFailed("bad row"))
    second = Budgets(Failures(max_skipped_prompts=1))
    second.restore(first.state())
    with pytest.raises(ValueError, match="2 prompts failed"):
        second.given_up(RolloutFailed("another"))


def test_a_rollout_that_never_ends_stalls_the_run_and_the_watchdog_names_it():
    class Hanging(House):
        async def roll_out(self, prompt, *, attempt):
            if prompt.index == 1:
                await asyncio.Event().wait()
            return await super().roll_out(prompt, attempt=attempt)

    house = Hanging()
    with pytest.raises(ExceptionGroup) as caught:
        run(house.controller(plan(async_rl={"stall_timeout_s": 0.05})))
    said = str(caught.value.exceptions[0])
    assert "stall_timeout_s" in said
    assert "training waits for 2 groups for step 0" in said
    assert "'p1'" in said


class Mortal(House):
    """Its engines die when prompt 3 is rolled out."""

    async def roll_out(self, prompt, *, attempt):
        if prompt.index >= 3:
            for _ in range(20):  # what was begun before it ends
                await asyncio.sleep(0)
            raise EngineDied("no memory left")
        return await super().roll_out(prompt, attempt=attempt)


def test_without_an_engine_left_the_run_is_saved_and_ends():
    saved: list[tuple[int, list[int]]] = []

    async def save(controller: Controller) -> None:
        saved.append((controller.step, [entry["index"] for entry in controller.state()["buffer"]]))

    house = Mortal()
    controller = house.controller(plan(save_period=5), save=save)
    run(controller)
    assert house.trained() == [(0, 1)]
    assert controller.stopped == "the death of its engines (no memory left)"
    assert saved == [(1, [2, 3])], "finished or not, what has a ticket is in the checkpoint"


def test_a_rollout_that_sees_the_death_as_it_is_cancelled_ends_with_the_run():
    """A TaskGroup raises its child's EngineDied and forgets that it was cancelled (Python 3.11)."""

    class Late(House):
        async def roll_out(self, prompt, *, attempt):
            if prompt.index == 3:
                raise EngineDied("no memory left")
            if prompt.index != 2:
                return await super().roll_out(prompt, attempt=attempt)
            try:
                return await asyncio.Event().wait()
            except asyncio.CancelledError as cancelled:
                raise EngineDied("no memory left") from cancelled

    house = Late()
    run(house.controller(plan()))
    assert house.trained() == [(0, 1)]


def test_engines_that_are_gone_when_weights_are_published_end_the_run_after_the_step():
    saved: list[tuple[int, int]] = []

    async def save(controller: Controller) -> None:
        saved.append((controller.step, controller.version))

    class Gone(House):
        async def publish(self, version):
            if version == 2:
                raise EngineDied("no memory left")
            return await super().publish(version)

    house = Gone()
    run(house.controller(plan(save_period=5), save=save))
    assert len(house.trained()) == 2
    assert saved == [(2, 2)]


def test_a_step_that_streams_cannot_be_finished_without_engines():
    with pytest.raises(ExceptionGroup) as caught:
        run(Mortal().controller(plan(groups_per_step=5, async_rl={"min_groups_for_streaming_train": 2})))
    assert caught.group_contains(EngineDied, match="no memory left")


def test_a_stall_may_only_warn(caplog: pytest.LogCaptureFixture):
    release = asyncio.Event()

    class Slow(House):
        async def roll_out(self, prompt, *, attempt):
            if prompt.index == 1:
                await release.wait()
            return await super().roll_out(prompt, attempt=attempt)

    async def scene():
        controller = Slow().controller(plan(async_rl={"stall_timeout_s": 0.02, "on_stall": "warn"}))
        running = asyncio.create_task(controller.run())
        while "stall_timeout_s" not in caplog.text:
            await asyncio.sleep(0.001)
        release.set()
        await running
        assert controller.step == 3

    asyncio.run(asyncio.wait_for(scene(), timeout=20))


@pytest.mark.parametrize(("fraction", "trained"), [(0.0, [(0, 1), (2,)]), (0.5, [(0, 1), (2,)]), (0.6, [(0, 1)])])
def test_a_short_last_step_needs_its_fraction(fraction: float, trained: list[tuple[int, ...]]):
    house = House()
    run(house.controller(plan(max_num_prompts=3, async_rl={"min_step_batch_fraction": fraction})))
    assert house.trained() == trained
    left = [record["id"] for record in house.untrained if record["why"] == "left_over"]
    assert left == (["p2"] if len(trained) == 1 else [])


@pytest.mark.parametrize("lead", [0, 1])
def test_a_streaming_step_takes_its_groups_in_chunks(lead: int):
    house = House(delay=lambda index: 3 * (index % 4))
    run(house.controller(plan(groups_per_step=5, lead=lead, async_rl={"min_groups_for_streaming_train": 2})))
    assert house.chunks == [[2, 2, 1]] * 3
    assert house.trained() == [tuple(range(5 * s, 5 * s + 5)) for s in range(3)]


def test_stale_groups_are_dropped_and_stale_rollouts_cancelled_under_a_window():
    house = House(delay=lambda index: 200 if index == 1 else 0)
    sampler = {"name": "windowed", "buffer_capacity_groups": 6, "max_staleness_versions": 1}
    run(house.controller(plan(max_num_steps=6, async_rl={"sampler": sampler})))
    assert max(house.staleness()) <= 1
    assert "p1" in [record["id"] for record in house.untrained if record["why"] == "stale"]
    assert 1 not in [key for keys in house.trained() for key in keys]


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_validation_that_goes_on_is_no_stall_however_long_it_takes(stands_still: bool):
    async def evaluate(step: int, moved: Callable[[], None]):
        for _ in range(10):
            await asyncio.sleep(60)
            if not stands_still:
                moved()
        return {}

    controller = House().controller(plan(val_period=1, async_rl={"stall_timeout_s": 100}), evaluate=evaluate)
    if stands_still:
        with pytest.raises(ExceptionGroup) as caught:
            run_virtual(controller.run())
        assert "training waits for validation at step 1" in str(caught.value.exceptions[0])
    else:
        run_virtual(controller.run())
        assert controller.step == 3
