"""Bugs of the controller that the simulator has found, each as the smallest run that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.config.asynchrony import Windowed
from tandem.control.controller import Controller
from tandem.roles import RollOut
from tandem.simulation.loop import run_virtual
from tandem.types import Batch, Group, Metrics, Prompt, RolloutFailed
from tests.control.house import House, plan


def test_a_rollout_that_a_checkpoint_had_in_flight_begins_again_before_it_can_be_too_old():
    """As saved it is older than the window, by the step that was saved with it; its new tokens are not."""
    sampler = Windowed(name="windowed", buffer_capacity_groups=6, max_staleness_versions=0)
    the_plan = plan(async_rl={"sampler": sampler}, max_num_steps=4, policy_training_start_step=1)
    states = {}

    async def save(controller: Controller) -> None:
        states[controller.step] = controller.state()

    first, second = House(delay=lambda index: 0 if index < 4 else 50), House()
    asyncio.run(first.controller(the_plan, save=save).run())
    in_flight = {entry["index"] for entry in states[2]["buffer"] if entry["group"] is None}
    assert in_flight == {4, 5, 6, 7}
    resumed = second.controller(the_plan)
    resumed.restore(states[2])
    asyncio.run(resumed.run())
    assert resumed.step == 4
    assert set(second.trained()[0]) <= in_flight


def test_groups_that_are_taken_as_the_run_is_asked_to_stop_are_trained():
    """They have left the buffer, so the last checkpoint does not hold them."""
    house = House(delay=lambda index: 0 if index < 2 else 30 + index)
    saved = {}

    async def save(controller: Controller) -> None:
        saved["state"] = controller.state()

    controller = house.controller(plan(lead=1, save_period=100), save=save)
    roll_out = controller.producer._roll_out

    async def stop_with_the_last_group(prompt: Prompt, *, attempt: int) -> Group | None:
        group = await roll_out(prompt, attempt=attempt)
        if prompt.index == 3:
            asyncio.get_running_loop().call_soon(controller.stop, "asked to")  # between finish() and who waits for it
        return group

    controller.producer._roll_out = stop_with_the_last_group
    asyncio.run(controller.run())
    kept = [entry["index"] for entry in saved["state"]["buffer"]]
    trained = [index for keys in house.trained() for index in keys]
    assert sorted(kept + trained) == list(range(saved["state"]["producer"]["next_index"]))


def test_a_run_may_be_asked_to_stop_when_it_has_ended():
    """As a signal may that comes while the house is closed."""

    async def run_and_stop() -> None:
        controller = House().controller(plan())
        await controller.run()
        controller.stop("too late")
        await asyncio.sleep(0)

    asyncio.run(run_and_stop())


def fails_when_cancelled(house: House, broken: int) -> RollOut:
    """A TaskGroup raises its child's failure and forgets that it was cancelled (Python 3.11)."""

    async def roll_out(prompt: Prompt, *, attempt: int) -> Group | None:
        if prompt.index == broken:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as cancelled:
                raise RolloutFailed("its engine died", "infrastructure") from cancelled
        return await house.roll_out(prompt, attempt=attempt)

    return roll_out


def test_a_rollout_that_fails_as_it_is_cancelled_is_accounted_for_once():
    sampler = Windowed(name="windowed", buffer_capacity_groups=3, max_staleness_versions=0)
    the_plan = plan(async_rl={"sampler": sampler}, failures={"max_infra_attempts_per_prompt": 2})
    house = House(delay=lambda index: 0)
    controller = house.controller(the_plan, roll_out=fails_when_cancelled(house, 2))
    asyncio.run(asyncio.wait_for(controller.run(), timeout=20))
    assert [record["why"] for record in house.untrained if record["id"] == "p2"] == ["stale"]
    assert all(record.get("rollout/retries", 0) == 0 for _, record in house.records)


def test_a_rollout_that_fails_as_the_run_ends_is_not_tried_again():
    """It would hold up the end, for ever if it hangs."""

    class Dying(House):
        async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
            raise RuntimeError("the trainer died")

    house = Dying(delay=lambda index: 0)
    the_plan = plan(lead=1, failures={"max_infra_attempts_per_prompt": 99})
    controller = house.controller(the_plan, roll_out=fails_when_cancelled(house, 3))
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(controller.run())
    assert caught.group_contains(RuntimeError, match="the trainer died")
