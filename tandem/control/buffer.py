"""Tickets and finished groups: the one place where generation and training meet.

A ticket is the right to have a prompt in the house: taken when its rollout starts, returned when the step that trained
on it has published its weights, or at once when the rollout gave nothing. There are (lead + 1) x groups per step, so
lead 0 is synchronous training without a second path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from tandem.control.samplers import Choice, Entry, Sampler
from tandem.types import Group


class Buffer:
    """Every wait is on one condition; each change of state wakes all who wait on it."""

    def __init__(self, sampler: Sampler, *, groups_per_step: int) -> None:
        self._sampler = sampler
        self._groups_per_step = groups_per_step
        self._entries: dict[int, Entry] = {}  # in the order of the prompts: they are admitted in that order
        self._training = 0  # tickets of groups that a step has taken and not yet returned
        self._tickets = 0  # how many may be out at one time; 0 until open() says
        self._ended = False
        self._changed = asyncio.Condition()

    @property
    def tickets_out(self) -> int:
        """Prompts in flight, finished, or being trained on."""
        return len(self._entries) + self._training

    @property
    def ready(self) -> int:
        return sum(entry.group is not None for entry in self._entries.values())

    async def open(self, tickets: int) -> None:
        """Allow this many tickets from now on. Wakes admit()."""
        async with self._changed:
            self._tickets = tickets
            self._changed.notify_all()

    async def admit(self, index: int, *, version: int, attempt: int) -> None:
        """Take a ticket for a prompt. Waits until one returns: open(), finish(index, None) or release() wake it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.tickets_out < self._tickets)
            self._entries[index] = Entry(index, version, attempt)

    async def finish(self, index: int, group: Group | None) -> None:
        """A rollout has ended. None returns its ticket: the next prompt takes its place. Wakes take() and admit()."""
        async with self._changed:
            if group is None:
                del self._entries[index]
            else:
                self._entries[index].group = group
            self._changed.notify_all()

    async def end(self) -> None:
        """No more prompts will be admitted. Wakes take(), which may now return fewer groups."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def take(self, version: int) -> Choice:
        """The groups of the next step. Waits for the sampler to choose: finish() and end() wake it.

        Fewer than groups_per_step only when the data has ended; none at all when nothing is left.
        """
        async with self._changed:
            while True:
                want = min(self._groups_per_step, len(self._entries)) if self._ended else self._groups_per_step
                choice = self._sampler(self._entries.values(), version, want)
                if choice is not None:
                    break
                await self._changed.wait()
            for group in choice.take + choice.drop:
                del self._entries[group.index]
            self._training += len(choice.take)
            self._changed.notify_all()
            return choice

    async def release(self, groups: int) -> None:
        """Return the tickets of trained groups, once their step's weights are published. Wakes admit()."""
        async with self._changed:
            self._training -= groups
            assert self._training >= 0, "more tickets released than taken"
            self._changed.notify_all()

    def finished(self) -> list[Group]:
        """Groups that wait for their step."""
        return [entry.group for entry in self._entries.values() if entry.group is not None]

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps: every prompt with a ticket in order, finished groups whole."""
        return [asdict(entry) for entry in self._entries.values()]

    def restore(self, entries: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """Take back the entries of state(). Returns those without a group: their rollouts must start again."""
        self._entries = {entry.index: entry for entry in TypeAdapter(list[Entry]).validate_python(entries)}
        return [entry for entry in self._entries.values() if entry.group is None]
