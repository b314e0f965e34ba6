"""What a case has seen so far, kept apart from the controller's own books, and checked against them at every event."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.control.controller import Controller
from tandem.roles import Algorithm, RollOut
from tandem.simulation.rollouts import Fate
from tandem.types import Batch, Group, Metrics, Prompt, RolloutFailed
from tests.simulation.cases import Case

MAX_ROUNDS = 50_000
GRACE = 30  # rounds of events in which a run that has failed may come to its end


class Violation(AssertionError):
    """An invariant does not hold."""


class Killed(Exception):
    """The process is gone."""


@dataclass
class Books:
    """What a checkpoint carries over: every prompt's end, and the budgets."""

    trained: list[list[int]] = field(default_factory=list)  # a step's prompts
    untrained: dict[int, str] = field(default_factory=dict)
    skipped: int = 0
    dropped_in_a_row: int = 0


@dataclass
class Saved:
    """A checkpoint."""

    state: str
    rows: Path
    books: Books


class World:
    """All lives of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.books = Books()
        self.saved: Saved | None = None
        self.life = -1
        self.alive = False
        self.calls: Counter[int] = Counter()  # over all lives: a trouble is overcome once
        self.lost_rows: set[int] = set()
        self.rounds_in_all = 0
        self.endings: list[str] = []  # of each life

    def begin(self, controller: Controller) -> None:
        """A life begins, from the last checkpoint if there is one."""
        self.life += 1
        self.alive = True
        self.controller = controller
        self.books = copy.deepcopy(self.saved.books) if self.saved else Books()
        self.gone = {index for step in self.books.trained for index in step} | set(self.books.untrained)
        self.at_hand: list[int] = []  # of the step in training
        self.groups: dict[int, Group] = {}
        self.hanging: set[int] = set()
        self.attempts: Counter[int] = Counter()
        self.without_signal = 0
        self.rounds = 0
        self.suspicion, self.suspected = "", 0
        self.exceeded: set[str] = set()
        self.allowed = controller.buffer.tickets_out
        self.plan = self.case.plan_of_life(self.life)

    def fate(self, index: int, attempt: int) -> Fate:
        """What becomes of this rollout."""
        self.calls[index] += 1
        self.attempts[index] += 1
        fate, times = self.case.trouble(index)
        match fate:
            case "data" | "nan":
                strikes = attempt < times
            case "infrastructure":
                strikes = self.calls[index] <= times
            case "hang" | "score_hang" | "lost_row":
                strikes = self.calls[index] == 1
            case _:
                strikes = True
        if not strikes:
            return "well"
        if fate in ("hang", "score_hang"):
            self.hanging.add(index)
        if fate == "lost_row":
            self.lost_rows.add(index)
        return fate

    def watch(self) -> None:
        """After every round of events. What is wrong may be the disorder of a run that ends: it has GRACE to do so."""
        self.rounds += 1
        self.rounds_in_all += 1
        self.demand(self.rounds < MAX_ROUNDS, "the run does not come to an end")
        if not self.suspicion and (wrong := "; ".join(self.wrongs())):
            self.suspicion, self.suspected = wrong, self.rounds
        self.demand(not self.suspicion or self.rounds < self.suspected + GRACE, f"{self.suspicion} (and it goes on)")
        if self.life < len(self.case.stops) and self.rounds == self.case.stops[self.life]:
            self.controller.stop("asked to")
        if self.life < len(self.case.kills) and self.rounds >= self.case.kills[self.life]:
            raise Killed

    def wrongs(self) -> Iterator[str]:
        """Everything that must never be seen between two events."""
        controller, buffer = self.controller, self.controller.buffer
        training = buffer.tickets_out - len(buffer._entries)
        started, waiting, ended = (
            controller.producer.next_index,
            len(buffer._entries),
            len(self.gone) + len(self.at_hand),
        )
        if started != waiting + ended:
            yield f"{started} prompts started, {waiting} wait, {ended} are trained or accounted for"
        wanted = (0, len(self.at_hand) or self.left_over or len(self.books.trained[-1] if self.books.trained else ()))
        if training not in wanted:
            yield f"{training} tickets are in training, {wanted} expected"
        self.allowed = max(buffer.tickets, min(self.allowed, buffer.tickets_out))
        if buffer.tickets and buffer.tickets_out > self.allowed:
            yield f"{buffer.tickets_out} tickets are out, {buffer.tickets} allowed"
        if self.exceeded:
            yield f"{self.exceeded} is exceeded"

    @property
    def left_over(self) -> int:
        return sum(why == "left_over" for why in self.books.untrained.values())

    def note_budgets(self) -> None:
        """Once a budget is exceeded, the run must end, whatever succeeds afterwards."""
        failures, plan = self.plan.failures, self.plan
        signal = (plan.dynamic_sampling_max_gen_batches - 1) * plan.groups_per_step
        exceeded = {
            "max_skipped_prompts": self.books.skipped > failures.max_skipped_prompts,
            "max_consecutive_dropped_prompts": self.books.dropped_in_a_row > failures.max_consecutive_dropped_prompts,
            "dynamic_sampling_max_gen_batches": self.without_signal > signal,
        }
        self.exceeded |= {name for name, over in exceeded.items() if over}

    def account(self, record: Mapping[str, str | int]) -> None:
        """A prompt's turn is over without training."""
        index, why = int(record["index"]), str(record["why"])
        self.demand(index not in self.gone and index not in self.at_hand, f"p{index} has ended before, now {why}")
        self.gone.add(index)
        self.books.untrained[index] = why
        fate, plan = self.case.trouble(index)[0], self.plan
        tries = plan.failures.max_data_attempts_per_prompt + plan.failures.max_infra_attempts_per_prompt - 1
        self.demand(self.attempts[index] <= tries, f"p{index} was tried {self.attempts[index]} times")
        match why:
            case "data_failure":
                self.books.skipped += 1
                self.demand(fate in ("data", "nan"), f"p{index} had no data failure but {fate}")
            case "infrastructure_failure":
                self.books.dropped_in_a_row += 1
            case "no_signal":
                self.demand(fate == "no_signal", f"p{index} had a signal")
            case "stale":
                self.hanging.discard(index)
                self.demand(self.case.sampler in ("weight_fifo", "windowed"), f"{self.case.sampler} dropped p{index}")
            case "left_over":
                self.demand(self.data_ended(), f"p{index} is left over before the data has ended")
        self.note_budgets()

    def rolled_out(self, index: int, group: Group | None) -> None:
        """A rollout has ended well."""
        self.books.dropped_in_a_row = 0
        if group is None:
            self.without_signal += 1
            self.note_budgets()
        else:
            self.groups[index] = group

    def hands_over(self, step: int, groups: list[Group]) -> None:
        """A step is given these groups."""
        controller, bound = self.controller, self.case.staleness_bound(self.life)
        self.demand(step == controller.step == len(self.books.trained), f"step {step} begins at {controller.step}")
        frozen = self.plan.policy_training_start_step
        self.demand(controller.version == max(0, step - frozen), f"version {controller.version} at step {step}")
        for group in groups:
            again = group.index in self.gone or group.index in self.at_hand
            self.demand(not again, f"step {step} trains p{group.index}, which has ended before")
            self.at_hand.append(group.index)
            age = controller.version - group.oldest_version
            self.demand(age >= 0, f"p{group.index} is of a version to come")
            self.demand(
                bound is None or age <= bound, f"step {step} trains p{group.index} at staleness {age} > {bound}"
            )
        if len(self.at_hand) == self.plan.groups_per_step:
            self.without_signal = 0
        training = controller.buffer._training
        self.demand(training == len(self.at_hand), f"{training} tickets in training, the step has {len(self.at_hand)}")

    def learned(self, step: int) -> None:
        """A step has its gradient."""
        want, got = self.plan.groups_per_step, len(self.at_hand)
        self.demand(
            got == want or (self.data_ended() and self.plan.min_groups <= got < want), f"{got} of {want} groups"
        )
        self.books.trained.append(self.at_hand)
        self.gone.update(self.at_hand)
        self.at_hand = []
        self.check_every_prompt()

    def check_every_prompt(self) -> None:
        """By name: each is in one place."""
        waiting = [entry["index"] for entry in self.controller.buffer.state()]
        places = Counter([*waiting, *self.gone, *self.at_hand])
        lost = [index for index in range(self.controller.producer.next_index) if index not in places]
        twice = [index for index, count in places.items() if count > 1]
        self.demand(not lost and not twice, f"prompts {lost} are lost, {twice} are in two places")

    def data_ended(self) -> bool:
        return self.controller.producer.next_index == self.plan.max_num_prompts

    def demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(f"life {self.life}, round {self.rounds}: {otherwise}")


class WatchedAlgorithm:
    """Tells the world what each step is given."""

    def __init__(self, algorithm: Algorithm, world: World, groups_by_key: Mapping[int, Group]) -> None:
        self._algorithm = algorithm
        self._world = world
        self._groups = groups_by_key

    async def step(self, chunks: AsyncIterator[Batch], *, step: int, train_policy: bool) -> Metrics:
        async def seen() -> AsyncIterator[Batch]:
            async for chunk in chunks:
                self._world.hands_over(step, [self._groups[index] for index in dict.fromkeys(chunk.groups)])
                yield chunk

        metrics = await self._algorithm.step(seen(), step=step, train_policy=train_policy)
        self._world.learned(step)
        return metrics

    def state(self) -> dict[str, float]:
        return self._algorithm.state()

    def restore(self, state: Mapping[str, float]) -> None:
        self._algorithm.restore(state)


class WatchedRollOut:
    """Tells the world how rollouts end."""

    def __init__(self, roll_out: RollOut, world: World) -> None:
        self._roll_out = roll_out
        self._world = world

    async def __call__(self, prompt: Prompt, *, attempt: int) -> Group | None:
        try:
            group = await self._roll_out(prompt, attempt=attempt)
        except RolloutFailed:
            self._world.hanging.discard(prompt.index)
            raise
        self._world.rolled_out(prompt.index, group)
        return group
