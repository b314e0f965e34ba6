"""Tickets: taken when a rollout starts, returned when it failed or when its step is published."""

from __future__ import annotations

import asyncio
import json
from functools import partial

from tandem.control.buffer import Buffer
from tandem.control.samplers import in_order, weight_fifo
from tandem.types import Group


def group(index: int, version: int = 0) -> Group:
    return Group(index, f"p{index}", (index,), (4,), (3,), (1.0,), (False,), {"a": (1.0,)}, version, version)


def zero() -> int:
    return 0


def test_tickets_bound_what_is_in_the_house():
    async def scene():
        buffer = Buffer(in_order)
        await buffer.open(2)
        await buffer.admit(0, zero)
        await buffer.admit(1, zero)
        third = asyncio.create_task(buffer.admit(2, zero))
        await asyncio.sleep(0)
        assert not third.done()
        await buffer.finish(0, None)  # a failure returns its ticket at once
        await third
        await buffer.finish(1, group(1))
        await buffer.finish(2, group(2))
        choice = await buffer.take(0, 2)
        assert [g.index for g in choice.take] == [1, 2]
        fourth = asyncio.create_task(buffer.admit(3, zero))
        await asyncio.sleep(0)
        assert not fourth.done(), "tickets of a step return when it is released, not when it is taken"
        await buffer.release(2)
        await fourth
        assert buffer.tickets_out == 1

    asyncio.run(scene())


def test_the_version_is_read_when_the_ticket_is_there():
    async def scene():
        versions = [0]
        buffer = Buffer(in_order)
        waiting = asyncio.create_task(buffer.admit(0, lambda: versions[0]))
        await asyncio.sleep(0)
        versions[0] = 7
        await buffer.open(1)
        assert (await waiting).admitted_version == 7

    asyncio.run(scene())


def test_take_waits_for_the_sampler_and_is_short_only_after_the_end():
    async def scene():
        buffer = Buffer(in_order)
        await buffer.open(2)
        await buffer.admit(0, zero)
        taking = asyncio.create_task(buffer.take(0, 2))
        await buffer.finish(0, group(0))
        await asyncio.sleep(0)
        assert not taking.done()
        await buffer.end()
        assert [g.index for g in (await taking).take] == [0]
        assert (await buffer.take(0, 2)).take == ()

    asyncio.run(scene())


def test_what_is_dropped_returns_its_ticket_at_once_and_what_is_cancelled_is_not_wanted_any_more():
    async def scene():
        buffer = Buffer(partial(weight_fifo, max_staleness_versions=1))
        await buffer.open(3)
        for index in range(3):
            await buffer.admit(index, zero)
        await buffer.finish(0, group(0))
        choice = await buffer.take(5, 2)
        assert (choice.take, [g.index for g in choice.drop], choice.cancel) == ((), [0], (1, 2))
        assert buffer.tickets_out == 0
        assert await buffer.finish(1, group(1)) is False

    asyncio.run(scene())


def test_state_restores_finished_groups_and_names_what_was_in_flight():
    async def scene():
        buffer = Buffer(in_order)
        await buffer.open(3)
        for index in range(3):
            await buffer.admit(index, lambda: 4)
        await buffer.finish(1, group(1))
        saved = json.loads(json.dumps(buffer.state()))
        other = Buffer(in_order)
        again = other.restore(saved)
        assert [(e.index, e.admitted_version) for e in again] == [(0, 4), (2, 4)]
        assert other.finished() == [group(1)]
        assert other.tickets_out == 3

    asyncio.run(scene())
