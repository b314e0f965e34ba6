"""A test of the test: each planted bug is found within a few hundred seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tandem.config.asynchrony import Sampler, WeightFifo, Windowed
from tandem.control.buffer import Buffer
from tandem.control.controller import Controller
from tandem.control.entries import Entry
from tandem.control.samplers import Choice, Choose, build_sampler, ready_first
from tandem.types import Group
from tests.simulation.cases import SAMPLERS, case_of
from tests.simulation.lives import Parts, run_case
from tests.simulation.world import Violation

SEEDS = 400


class ForgetsToRelease(Buffer):
    async def release(self, groups: int) -> None:
        await super().release(groups - 1)


class GivesOneTicketTooMany(Buffer):
    async def open(self, tickets: int) -> None:
        await super().open(tickets)
        self._tickets += 1

    @property
    def tickets(self) -> int:
        return self._tickets - 1


class KeepsTheTicketOfNothing(Buffer):
    async def finish(self, index: int, group: Group | None) -> bool:
        return group is not None and await super().finish(index, group)


class GivesAGroupTwice(Buffer):
    last: Group | None = None

    async def take(self, version: int, want: int, **how: bool) -> Choice:
        choice = await super().take(version, want, **how)
        if self.last is not None and len(choice.take) == want and want > 1:
            choice = Choice((self.last, *choice.take[1:]), choice.drop, choice.cancel)
        self.last = choice.take[0] if choice.take else self.last
        return choice


class ForgetsWhatIsInFlight(Buffer):
    def state(self) -> list[dict[str, Any]]:
        return [entry for entry in super().state() if entry["group"]]


class ForgetsToStartOneAgain(Buffer):
    def restore(self, entries: Any) -> list[Entry]:
        return super().restore(entries)[1:]


class TakesFewerThanAsked(Buffer):
    async def take(self, version: int, want: int, **how: bool) -> Choice:
        return await super().take(version, max(1, want - 1), **how)


class PublishesWhileFrozen(Controller):
    async def _train_on(self, first: Any, started: float) -> None:
        await super()._train_on(first, started)
        self.version += self.step == 1 and not self.plan.trains_policy(0)


class ForgetsLeftovers(Controller):
    def _leave_over(self, groups: Any) -> None: ...


class ForgetsBudgets(Controller):
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.producer.budgets.skipped = 0


class ForgetsThePlaceInTheData(Controller):
    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.producer.next_index += 1


class KeepsRows(Controller):
    async def _train_on(self, first: Any, started: float) -> None:
        drop, self.plane.drop = self.plane.drop, partial(_nothing)  # type: ignore[method-assign]
        await super()._train_on(first, started)
        self.plane.drop = drop  # type: ignore[method-assign]


async def _nothing(keys: Any) -> None: ...


def without_bound(config: Sampler) -> Choose:
    return ready_first if isinstance(config, WeightFifo | Windowed) else build_sampler(config)


def by_arrival(config: Sampler) -> Choose:
    return ready_first if config.name == "in_order" else build_sampler(config)


def one_version_too_old(config: Sampler) -> Choose:
    if not isinstance(config, WeightFifo | Windowed):
        return build_sampler(config)
    wider = config.max_staleness_versions + 1
    return build_sampler(config.model_copy(update={"max_staleness_versions": wider}))


PLANTED: dict[str, type[Parts]] = {
    bug.__name__: type(bug.__name__, (Parts,), {role: bug if role != "sampler" else staticmethod(bug)})
    for role, bugs in {
        "buffer": (
            ForgetsToRelease,
            GivesOneTicketTooMany,
            KeepsTheTicketOfNothing,
            GivesAGroupTwice,
            ForgetsWhatIsInFlight,
            ForgetsToStartOneAgain,
            TakesFewerThanAsked,
        ),
        "controller": (
            PublishesWhileFrozen,
            ForgetsLeftovers,
            ForgetsBudgets,
            ForgetsThePlaceInTheData,
            KeepsRows,
        ),
        "sampler": (without_bound, by_arrival, one_version_too_old),
    }.items()
    for bug in bugs
}


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str):
    for seed in range(SEEDS):
        try:
            run_case(case_of(seed), PLANTED[bug])
        except Violation:
            return
    pytest.fail(f"{bug} is not found in {SEEDS} seeds over {SAMPLERS}")
