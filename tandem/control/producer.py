"""The generating side of the loop: a rollout for every ticket, retries within budgets, cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.entries import Entry
from tandem.control.failures import Budgets, backoff_s
from tandem.control.plan import Plan
from tandem.control.watchdog import Watchdog, now
from tandem.roles import DataPlane, Dataset, RollOut
from tandem.types import EngineDied, Group, Metrics, Prompt, RolloutFailed

log = logging.getLogger(__name__)
IN_FLIGHT = "rollout/in_flight"  # the span of generation


class Clock(Protocol):
    """Measures named spans; gives their sums once a step."""

    def span(self, name: str) -> AbstractContextManager[None]: ...

    def drain(self) -> Metrics: ...


class Producer:
    """Owns the place in the data, the rollouts in flight and the failure budgets."""

    def __init__(
        self,
        plan: Plan,
        *,
        dataset: Dataset,
        roll_out: RollOut,
        buffer: Buffer,
        plane: DataPlane,
        accounts: Accounts,
        clock: Clock,
        on_death: Callable[[EngineDied], None],
    ) -> None:
        """`on_death` is told when no engine is left; whoever it tells must cancel run()."""
        self.next_index = 0  # the first prompt of the stream that has never had a ticket
        self.watchdog = Watchdog(
            timeout_s=plan.async_rl.stall_timeout_s, on_stall=plan.async_rl.on_stall, rollouts=self._describe
        )
        self.budgets = Budgets(plan.failures)
        self._plan = plan
        self._dataset = dataset
        self._roll_out = roll_out
        self._buffer = buffer
        self._plane = plane
        self._accounts = accounts
        self._clock = clock
        self._on_death = on_death
        self._again: list[Entry] = []  # prompts of a checkpoint that were in flight: they hold their tickets
        self._in_flight: dict[int, tuple[asyncio.Task[None], float]] = {}  # with the time they started
        self._busy = ExitStack()  # holds the span of generation while a rollout is in flight
        self._without_signal = 0  # groups with equal rewards since the last step was taken
        self._version: Callable[[], int] = lambda: 0  # run() says
        self._task: asyncio.Task[None] | None = None  # of run()

    async def run(self, version: Callable[[], int]) -> None:
        """Start a rollout for every ticket; end when the data ends. `version` tells the current one."""
        self._version, self._task = version, asyncio.current_task()
        with self._busy:  # a rollout that is cancelled before it began ends no span
            async with asyncio.TaskGroup() as rollouts:
                for entry in self._again:
                    self._buffer.restart(entry.index, version())
                    self._start(rollouts, entry)
                while self.next_index < self._plan.max_num_prompts:
                    with self.watchdog.waiting("generation", f"a ticket for prompt {self.next_index}"):
                        entry = await self._buffer.admit(self.next_index, version)
                    self._start(rollouts, entry)
                    self.next_index += 1
                await self._buffer.end()

    def _start(self, rollouts: asyncio.TaskGroup, entry: Entry) -> None:
        if not self._in_flight:
            self._busy.enter_context(self._clock.span(IN_FLIGHT))
        task = rollouts.create_task(self._finish(entry))
        self._in_flight[entry.index] = (task, now())

    def _landed(self, index: int) -> None:
        """A rollout is in flight no more; the last one ends the span of generation."""
        self._in_flight.pop(index, None)
        if not self._in_flight:
            self._busy.close()

    async def _finish(self, entry: Entry) -> None:
        """Roll a prompt out and hand the group to the buffer, or return its ticket."""
        prompt = self._dataset.prompt(entry.index)
        try:
            group = await self._attempts(prompt, entry)
            if not await self._buffer.finish(entry.index, group) and group is not None:
                await self._plane.drop(group.keys)
        finally:
            self._landed(entry.index)
        self.watchdog.progress()

    async def _attempts(self, prompt: Prompt, entry: Entry) -> Group | None:
        """The prompt's group; None when it has no signal, or when its last attempt has failed."""
        while True:
            try:
                group = await self._roll_out(prompt, attempt=entry.attempt)
            except RolloutFailed as failure:
                if self._is_cancelled(entry):
                    raise asyncio.CancelledError from failure
                if not await self._may_retry(prompt, entry, failure):
                    return None
                continue
            except EngineDied as death:
                if self._is_cancelled(entry):
                    raise asyncio.CancelledError from death
                self._on_death(death)
                await asyncio.Event().wait()  # until run() is cancelled: a checkpoint begins this prompt again
                continue
            self.budgets.finished()
            if group is None:
                self._count_without_signal()
                self._accounts.untrained(prompt.index, prompt.id, "no_signal")
            return group

    def _is_cancelled(self, entry: Entry) -> bool:
        """Alone, or with the whole run. A rollout's TaskGroup that raises an error forgets that it was cancelled."""
        return entry.index not in self._in_flight or bool(self._task and self._task.cancelling())

    async def _may_retry(self, prompt: Prompt, entry: Entry, failure: RolloutFailed) -> bool:
        """Count a failure; wait before another attempt, or give the prompt up."""
        limits = self._plan.failures
        log.info("prompt %r: %s failure: %s", prompt.id, failure.kind, failure)
        if failure.kind == "data":
            entry.attempt += 1
            again, wait_s = entry.attempt < limits.max_data_attempts_per_prompt, 0.0
        else:
            entry.infra_attempt += 1
            again = entry.infra_attempt < limits.max_infra_attempts_per_prompt
            wait_s = backoff_s(limits, entry.infra_attempt)
        if again:
            self._accounts.retried()
            await asyncio.sleep(wait_s)
            self._buffer.restart(entry.index, self._version())
            return True
        log.warning("prompt %r is given up: %s", prompt.id, failure)
        why = "data_failure" if failure.kind == "data" else "infrastructure_failure"
        self._accounts.untrained(prompt.index, prompt.id, why, str(failure))
        self.budgets.given_up(failure)
        return False

    def _count_without_signal(self) -> None:
        """Give up once even the best luck could not fill a step within the generation batches that are allowed."""
        self._without_signal += 1
        batches, groups = self._plan.dynamic_sampling_max_gen_batches, self._plan.groups_per_step
        if self._without_signal > (batches - 1) * groups:
            raise ValueError(
                f"{self._without_signal} groups had equal rewards since the last step: {batches} batches of {groups} "
                f"prompts (dynamic_sampling_max_gen_batches={batches}) cannot fill the next; are all rewards equal? "
                "Change the data or the reward, raise it, or set use_dynamic_sampling=false"
            )

    def step_taken(self) -> None:
        """A step has its groups: the count of groups without a signal begins anew, and the span of generation too."""
        self._without_signal = 0
        if self._in_flight:  # generation that never pauses is drawn and summed by steps
            self._busy.close()
            self._busy.enter_context(self._clock.span(IN_FLIGHT))

    async def discard(self, drop: tuple[Group, ...], cancel: tuple[int, ...]) -> None:
        """Forget groups and rollouts that no step may use any more. Their tickets have returned already."""
        for index in cancel:
            self._in_flight[index][0].cancel()
            self._landed(index)
            self._accounts.untrained(index, self._dataset.prompt(index).id, "stale")
        for group in drop:
            self._accounts.untrained(group.index, group.prompt_id, "stale")
        await self._plane.drop([key for group in drop for key in group.keys])

    def _describe(self) -> str:
        oldest = sorted(self._in_flight.items(), key=lambda item: item[1][1])[:3]
        names = ", ".join(
            f"{self._dataset.prompt(index).id!r} since {now() - since:.0f} s" for index, (_, since) in oldest
        )
        return f"{len(self._in_flight)} rollouts are in flight" + (f", the oldest: {names}" if names else "")

    def state(self) -> dict[str, Any]:
        return {"next_index": self.next_index, "budgets": self.budgets.state()}

    def restore(self, state: Mapping[str, Any], again: list[Entry]) -> None:
        self.next_index = state["next_index"]
        self.budgets.restore(state["budgets"])
        self._again = again
