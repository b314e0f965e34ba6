"""Bugs of the controller that the simulator has found, each as the smallest run that shows it."""

from __future__ import annotations

import asyncio

from tandem.config.asynchrony import Windowed
from tandem.control.controller import Controller
from tests.control.house import House, plan


def test_a_rollout_that_a_checkpoint_had_in_flight_begins_again_before_it_can_be_too_old():
    """As saved it is older than the window, by the step that was saved with it; its new tokens are not. Seed 748."""
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
