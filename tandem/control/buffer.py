"""Tickets and finished groups: the one place where generation and training meet.

A ticket is the right to have a prompt in the house: taken when its rollout starts, returned when the step that trained
on it has published its weights, or at once when the rollout gave nothing. With (lead + 1) x groups per step of them,
lead 0 is synchronous training without a second path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from tandem.control.entries import Entries, Entry
from tandem.control.samplers import Choice, Choose
from tandem.types import Group


class Buffer:
    """Every wait is on one condition; each change of state wakes all who wait on it."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._entries = Entries()
        self._training = 0  # tickets of groups that a step has taken and not yet returned
        self._tickets = 0  # how many may be out at one time; 0 until open() says
        self._ended = False
        self._stopped = False
        self._stopped_at_once = False
        self._changed = asyncio.Condition()

    @property
    def tickets(self) -> int:
        """How many tickets may be out."""
        return self._tickets

    @property
    def tickets_out(self) -> int:
        """Prompts in flight, finished, or being trained on."""
        return len(self._entries) + self._training

    @property
    def ready(self) -> int:
        return self._entries.ready_count

    async def open(self, tickets: int) -> None:
        """Allow this many tickets from now on. Wakes admit()."""
        async with self._changed:
            self._tickets = tickets
            self._changed.notify_all()

    async def admit(self, index: int, version: Callable[[], int]) -> Entry:
        """Take a ticket for a prompt. Waits until one returns: open(), finish(.., None), take() or release() wake it.

        `version` is asked when the ticket is there: the wait may span several.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.tickets_out < self._tickets)
            entry = Entry(index, version())
            self._entries.add(entry)
            return entry

    def restart(self, index: int, version: int) -> None:
        """A rollout with a ticket begins again at this version: it ages from now on."""
        if index in self._entries:
            self._entries.restart(index, version)

    async def finish(self, index: int, group: Group | None) -> bool:
        """A rollout has ended; None returns its ticket. False: its entry is gone, nobody wants the group any more."""
        async with self._changed:
            if index not in self._entries:
                return False
            if group is None:
                self._entries.remove(index)
            else:
                self._entries.finish(index, group)
            self._changed.notify_all()
            return True

    async def end(self) -> None:
        """No more prompts will be admitted. Wakes take(), which may now return fewer groups."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def stop(self, *, at_once: bool = False) -> None:
        """No step will begin any more. Wakes take(), which gives nothing from now on.

        `at_once`: not even to a step that has begun.
        """
        async with self._changed:
            self._stopped = True
            self._stopped_at_once |= at_once
            self._changed.notify_all()

    async def take(self, version: int, want: int, *, stoppable: bool = True) -> Choice:
        """The next `want` groups. Waits for the sampler to choose: finish(), end() and stop() wake it.

        A choice that only drops or cancels is given out at once: ask again. Fewer groups only when the data has ended,
        and an empty choice when nothing is left. A step that has begun is not `stoppable`: it gets its groups.
        """
        async with self._changed:
            while not (self._stopped if stoppable else self._stopped_at_once):
                wanted = min(want, len(self._entries)) if self._ended else want
                choice = self._choose(self._entries, version, wanted)
                if choice is not None:
                    break
                await self._changed.wait()
            else:
                return Choice(())
            for group in choice.take + choice.drop:
                self._entries.remove(group.index)
            for index in choice.cancel:
                self._entries.remove(index)
            self._training += len(choice.take)
            self._changed.notify_all()
            return choice

    async def release(self, groups: int) -> None:
        """Return the tickets of trained groups, once their step's weights are published. Wakes admit()."""
        async with self._changed:
            self._training -= groups
            assert self._training >= 0, "more tickets released than taken"
            self._changed.notify_all()

    def holds(self, index: int) -> bool:
        """Whether this prompt is in flight or waits for its step."""
        return index in self._entries

    def finished(self) -> list[Group]:
        """Groups that wait for their step."""
        return [entry.group for entry in self._entries.by_prompt.values() if entry.group is not None]

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint keeps: every prompt with a ticket in order, finished groups whole."""
        return [asdict(entry) for entry in self._entries.by_prompt.values()]

    def restore(self, entries: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """Take back the entries of state(). Returns those without a group: their rollouts must start again."""
        restored = TypeAdapter(list[Entry]).validate_python(entries)
        for entry in restored:
            self._entries.add(entry)
        return [entry for entry in restored if entry.group is None]
