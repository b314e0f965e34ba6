"""Tickets: taken when a rollout starts, returned when it failed or when its step is published."""

from __future__ import annotations

import asyncio

import pytest

from tandem.control.buffer import Buffer
from tandem.control.samplers import Entry, in_order
from tandem.types import Group


def group(index: int) -> Group:
    return Group(index, f"p{index}", (index,), (4,), (3,), (1.0,), (False,), {"a": (1.0,)}, 0, 0)


@pytest.mark.parametrize(
    ("finished", "in_flight", "want", "taken"),
    [
        ([0, 1], [], 2, [0, 1]),
        ([0, 1, 2], [], 2, [0, 1]),
        ([1, 2], [0], 2, None),
        ([0, 2], [1], 2, None),
        ([0, 1], [2], 2, [0, 1]),
        ([2, 5], [], 2, [2, 5]),
        ([0], [], 2, None),
        ([], [], 0, []),
    ],
)
def test_in_order_takes_the_next_prompts_or_waits(finished, in_flight, want, taken):
    entries = [Entry(i, 0, 0, group(i) if i in finished else None) for i in sorted(finished + in_flight)]
    choice = in_order(entries, 0, want)
    assert (None if choice is None else [g.index for g in choice.take]) == taken


def test_in_order_looks_at_no_more_entries_than_it_wants():
    def entries():
        yield from (Entry(i, 0, 0, group(i)) for i in range(2))
        raise AssertionError("looked at a third entry")

    assert in_order(entries(), 0, 2) is not None


def test_tickets_bound_what_is_in_the_house():
    async def scene():
        buffer = Buffer(in_order, groups_per_step=2)
        await buffer.open(2)
        await buffer.admit(0, version=0, attempt=0)
        await buffer.admit(1, version=0, attempt=0)
        third = asyncio.create_task(buffer.admit(2, version=0, attempt=0))
        await asyncio.sleep(0)
        assert not third.done()
        await buffer.finish(0, None)  # a failure returns its ticket at once
        await third
        await buffer.finish(1, group(1))
        await buffer.finish(2, group(2))
        choice = await buffer.take(0)
        assert [g.index for g in choice.take] == [1, 2]
        fourth = asyncio.create_task(buffer.admit(3, version=0, attempt=0))
        await asyncio.sleep(0)
        assert not fourth.done(), "tickets of a step return when it is released, not when it is taken"
        await buffer.release(2)
        await fourth
        assert buffer.tickets_out == 1

    asyncio.run(scene())


def test_take_waits_for_the_sampler_and_is_short_only_after_the_end():
    async def scene():
        buffer = Buffer(in_order, groups_per_step=2)
        await buffer.open(2)
        await buffer.admit(0, version=0, attempt=0)
        taking = asyncio.create_task(buffer.take(0))
        await buffer.finish(0, group(0))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.end()
        assert [g.index for g in (await taking).take] == [0]
        assert (await buffer.take(0)).take == ()

    asyncio.run(scene())


def test_state_restores_finished_groups_and_names_what_was_in_flight():
    import json

    async def scene():
        buffer = Buffer(in_order, groups_per_step=2)
        await buffer.open(3)
        for index in range(3):
            await buffer.admit(index, version=4, attempt=1)
        await buffer.finish(1, group(1))
        saved = json.loads(json.dumps(buffer.state()))
        other = Buffer(in_order, groups_per_step=2)
        again = other.restore(saved)
        assert [(e.index, e.attempt, e.admitted_version) for e in again] == [(0, 1, 4), (2, 1, 4)]
        assert other.finished() == [group(1)]
        assert other.tickets_out == 3

    asyncio.run(scene())
