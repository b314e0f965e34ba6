"""The loop: lead 0 is a plain for-loop, lead n runs n ahead, failures are replaced, data may end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.control.controller import Controller
from tandem.metrics.timing import Timeline
from tandem.types import Mean
from tests.control.house import House, failing, plan


def run(controller: Controller) -> None:
    asyncio.run(asyncio.wait_for(controller.run(), timeout=20))


def test_lead_0_is_a_plain_for_loop():
    house = House()
    run(house.controller(plan()))
    for step in range(3):
        at = house.events.index(("train", step, (2 * step, 2 * step + 1)))
        started = {event[1] for event in house.events[:at] if event[0] == "start"}
        assert started == set(range(2 * step + 2)), "no rollout of a later step starts before this one is published"
    assert house.staleness() == [0.0, 0.0, 0.0]
    assert [e for e in house.events if e[0] == "publish"] == [("publish", v) for v in range(4)]


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_generation_runs_lead_versions_ahead_and_no_further(lead: int):
    house = House()
    run(house.controller(plan(lead=lead, max_num_steps=6)))
    assert house.trained() == [(2 * s, 2 * s + 1) for s in range(6)]
    assert max(house.staleness()) == lead
    first_train = next(i for i, event in enumerate(house.events) if event[0] == "train")
    starts = [event for event in house.events[:first_train] if event[0] == "start"]
    assert len(starts) <= 2 * (lead + 1)


@pytest.mark.parametrize("lead", [0, 1])
def test_no_prompt_is_started_while_the_last_step_is_saved(lead: int):
    async def save(_: Controller) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    house = House()
    run(house.controller(plan(lead=lead, save_period=2, save_at_end=True), save=save))
    assert sorted(event[1] for event in house.events if event[0] == "start") == list(range(6))


def test_no_prompt_is_started_that_no_step_can_use():
    house = House()
    run(house.controller(plan(lead=3)))
    assert sorted(event[1] for event in house.events if event[0] == "start") == list(range(6))


@pytest.mark.parametrize("lead", [0, 2])
def test_generation_is_drawn_while_a_rollout_is_in_flight(lead: int, tmp_path: Path):
    house, timeline = House(delay=lambda index: 5 + 20 * (index % 3)), Timeline(tmp_path / "timeline.json")
    run(house.controller(plan(lead=lead, max_num_steps=6), clock=timeline))
    timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    generating, learning = (
        [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]
        for name in ("rollout/in_flight", "control/learn")
    )
    both = sum(max(0, min(end, b) - max(start, a)) for start, end in generating for a, b in learning)
    assert (both > 0) == (lead > 0), "at lead 0 no rollout is in flight while a step learns"
    assert all(end <= start for (_, end), (start, _) in pairwise(generating)), "each moment is counted once"
    assert len(generating) >= 6
    assert all(record["time/rollout/in_flight_s"] > 0 for _, record in house.records[: 6 - lead])


def test_generation_that_is_cancelled_ends_its_span(tmp_path: Path):
    house, timeline = House(behave=failing(*range(100))), Timeline(tmp_path / "timeline.json")
    with pytest.raises(ExceptionGroup):
        run(house.controller(plan(), clock=timeline))
    assert timeline.drain()["time/rollout/in_flight_s"].amount > 0


@pytest.mark.parametrize("lead", [0, 2])
def test_a_failed_prompt_is_replaced_by_the_next_and_the_step_stays_whole(lead: int):
    house = House(behave=failing(1, 2))
    controller = house.controller(plan(lead=lead, failures={"max_skipped_prompts": 2}))
    run(controller)
    assert sorted(key for keys in house.trained() for key in keys) == [0, 3, 4, 5, 6, 7]
    assert all(len(keys) == 2 for keys in house.trained())
    assert controller.producer.budgets.skipped == 2
    assert [(record["id"], record["why"]) for record in house.untrained] == [
        ("p1", "data_failure"),
        ("p2", "data_failure"),
    ]


def test_a_group_without_signal_returns_its_ticket():
    house = House(behave=lambda index: index % 2 == 0)
    run(house.controller(plan()))
    assert house.trained() == [(0, 2), (4, 6), (8, 10)]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_groups_without_signal_are_bounded_exactly(batches: int):
    enough = House(behave=lambda index: index >= 2 * (batches - 1))
    run(enough.controller(plan(max_num_steps=1, dynamic_sampling_max_gen_batches=batches)))
    assert len(enough.trained()) == 1
    too_many = House(behave=lambda index: index > 2 * (batches - 1))
    with pytest.raises(ExceptionGroup) as caught:
        run(too_many.controller(plan(max_num_steps=1, dynamic_sampling_max_gen_batches=batches)))
    assert caught.group_contains(ValueError, match=f"dynamic_sampling_max_gen_batches={batches}")


def test_past_the_budget_the_run_ends_with_the_cause():
    house = House(behave=failing(*range(100)))
    with pytest.raises(ExceptionGroup) as caught:
        run(house.controller(plan(failures={"max_skipped_prompts": 3})))
    assert caught.group_contains(ValueError, match=r"4 prompts failed.*max_skipped_prompts=3.*p0 broke")


def test_the_end_of_the_data_makes_the_last_step_short_and_ends_cleanly():
    house = House()
    controller = house.controller(plan(max_num_prompts=3, max_num_steps=10))
    run(controller)
    assert house.trained() == [(0, 1), (2,)]
    assert controller.step == 2


@pytest.mark.parametrize(("warmup", "start", "lead"), [(None, 2, 0), (3, 2, 0), (4, 3, 1), (9, 2, 2)])
def test_critic_warm_up_publishes_nothing_and_the_bound_holds_afterwards(warmup: int | None, start: int, lead: int):
    house = House()
    run(house.controller(plan(lead=lead, warmup=warmup, policy_training_start_step=start, max_num_steps=8)))
    assert [e for e in house.events if e[0] == "publish"] == [("publish", v) for v in range(8 - start + 1)]
    assert house.trained() == [(2 * s, 2 * s + 1) for s in range(8)]
    assert max(house.staleness()) <= lead
    assert house.staleness()[:start] == [0.0] * start


def test_an_error_of_the_algorithm_ends_both_sides():
    house = House()

    class Broken(House):
        async def step(self, chunks, *, step, train_policy):
            raise RuntimeError("the trainer died")

    with pytest.raises(ExceptionGroup) as caught:
        run(house.controller(plan(), algorithm=Broken()))
    assert caught.group_contains(RuntimeError, match="the trainer died")


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_resumed_from_its_state_trains_what_the_whole_run_trains(lead: int, stop: int):
    whole, first, second = House(), House(), House()
    run(whole.controller(plan(lead=lead, max_num_steps=5)))
    states = {}

    async def save(controller: Controller) -> None:
        states[controller.step] = controller.state()

    run(first.controller(plan(lead=lead, max_num_steps=5), save=save))
    resumed = second.controller(plan(lead=lead, max_num_steps=5))
    resumed.restore(states[stop])
    run(resumed)
    assert second.trained() == whole.trained()[stop:]


def test_validation_happens_at_start_by_period_and_at_end():
    seen = []

    async def evaluate(step: int, moved: Callable[[], None]):
        seen.append(step)
        return {}

    house = House()
    the_plan = plan(max_num_steps=5, val_period=2, val_at_start=True, val_at_end=True)
    run(house.controller(the_plan, evaluate=evaluate))
    assert seen == [0, 2, 4, 5]


def test_the_last_step_is_validated_before_it_is_saved_and_ranked_by_it():
    scores = []

    async def evaluate(step: int, moved: Callable[[], None]):
        return {"val/accuracy": Mean(0.5 + step / 100, 1)}

    async def save(controller: Controller) -> None:
        scores.append((controller.step, controller.score("val:accuracy"), controller.score("train:rollout/reward")))

    house = House()
    the_plan = plan(max_num_steps=3, val_period=2, val_at_end=True, policy_training_start_step=1)
    run(house.controller(the_plan, evaluate=evaluate, save=save))
    assert scores == [(1, None, None), (2, 0.52, 1.0), (3, 0.53, 1.0)]
