"""THE loop: rollouts are produced under tickets, steps train on what the sampler chooses, weights are published.

Synchronous and asynchronous training are this one loop: lead 0 leaves no ticket for a rollout while a step trains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.flight_recorder import FlightRecorder
from tandem.control.health_watch import HealthWatch
from tandem.control.plan import Plan
from tandem.control.producer import Clock, Producer
from tandem.control.steps import rollout_metrics, staleness_metrics
from tandem.control.watchdog import now
from tandem.metrics.reduce import flatten
from tandem.roles import Algorithm, DataPlane, Dataset, Gpus, RollOut, Sink, WeightSync
from tandem.types import Batch, EngineDied, Group, Metrics, merge

log = logging.getLogger(__name__)


# Validates after a step, and calls what it is given whenever it has come further: a long validation is no stall.
Evaluate = Callable[[int, Callable[[], None]], Awaitable[Metrics]]


class Controller:
    """Owns the counters of a run and moves handles between the roles."""

    def __init__(
        self,
        plan: Plan,
        *,
        algorithm: Algorithm,
        dataset: Dataset,
        roll_out: RollOut,
        buffer: Buffer,
        plane: DataPlane,
        sync: WeightSync,
        gpus: Gpus,
        evaluate: Evaluate | None,
        save: Callable[[Controller], Awaitable[object]] | None,
        clock: Clock,
        sinks: Sequence[Sink],
        accounts: Accounts,
        health: HealthWatch | None,
        recorder: FlightRecorder | None,
    ) -> None:
        self.plan = plan
        self.algorithm = algorithm
        self.buffer = buffer
        self.plane = plane
        self.step = 0  # steps trained
        self.health = health
        self.recorder = recorder
        self.version = 0  # how often the policy's weights have been published
        self.producer = Producer(
            plan,
            dataset=dataset,
            roll_out=roll_out,
            buffer=buffer,
            plane=plane,
            accounts=accounts,
            clock=clock,
            on_death=self._end_without_engines,
        )
        self._sync = sync
        self._gpus = gpus
        self._evaluate = evaluate
        self._save = save
        self._clock = clock
        self._sinks = sinks
        self._accounts = accounts
        self._sides: asyncio.TaskGroup | None = None  # while it runs
        self._validated_step = -1
        self._newest: dict[str, float] = {}  # the records of the last step
        self.stopped: str = ""  # why the run ends before its time
        self._death: EngineDied | None = None  # of the last engine
        self._asked_to_stop = asyncio.Event()  # set by stop(), which a signal may call at any time

    async def run(self) -> None:
        """Train until the steps or the data end. The first error of either side ends both."""
        await self._sync.publish(self.version)  # engines start with a model's file, a resumed actor is elsewhere
        if self.step == 0 and self.plan.val_at_start:
            await self._validate()
        async with asyncio.TaskGroup() as self._sides:
            sides = self._sides
            beside = [
                sides.create_task(self.producer.run(lambda: self.version)),
                sides.create_task(self.producer.watchdog.watch()),
                sides.create_task(self._stop_when_asked()),
            ]
            await asyncio.sleep(0)  # rollouts of a checkpoint begin again before a sampler judges how old they are
            await self._train()
            for task in beside:
                task.cancel()

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the loop; its error ends the run, and the run waits for its end."""
        assert self._sides is not None, "the loop runs"
        return self._sides.create_task(work)

    def stop(self, why: str) -> None:
        """End after the step that trains now, or at once if none does; the run is saved first."""
        self.stopped = self.stopped or why
        self._asked_to_stop.set()

    def _end_without_engines(self, death: EngineDied) -> None:
        """No engine is left: end as stop() does. A step that waits for more groups cannot be finished: its error."""
        if self._death is None:
            self._death = death
            log.error("the run ends: %s", death)
            self.stop(f"the death of its engines ({death})")
            self.beside(self.buffer.stop(at_once=True))

    async def _stop_when_asked(self) -> None:
        await self._asked_to_stop.wait()
        await self.buffer.stop()

    async def _train(self) -> None:
        await self.buffer.open(self.plan.tickets(self.step))
        while self.step < self.plan.max_num_steps and not self.stopped:
            started = now()
            first = await self._take(self.plan.groups_per_chunk)
            if self.stopped and not first:
                break
            if len(first) < self.plan.min_groups:
                self._leave_over(first)
                log.info("the data has ended after %d of %d steps", self.step, self.plan.max_num_steps)
                break
            await self._train_on(first, started)
        if self.stopped:
            await self._save_last()
            return
        if self.plan.val_at_end and self._validated_step != self.step:
            await self._validate()
        if self.plan.save_at_end:
            await self._save_last()

    async def _save_last(self) -> None:
        if self._save and self.step % self.plan.save_period:
            await self._save(self)

    async def _take(self, want: int, *, stoppable: bool = True) -> tuple[Group, ...]:
        """The next groups; what the sampler gives up meanwhile is forgotten. Empty: the data has ended."""
        with self._waiting(f"{want} groups for step {self.step}", "control/wait_for_groups"):
            while True:
                choice = await self.buffer.take(self.version, want, stoppable=stoppable)
                await self.producer.discard(choice.drop, choice.cancel)
                if choice.take or not (choice.drop or choice.cancel):
                    return choice.take

    def _leave_over(self, groups: Sequence[Group]) -> None:
        """Too few for a step, and no more will come."""
        for group in groups:
            self._accounts.untrained(group.index, group.prompt_id, "left_over")

    async def _chunks(self, groups: list[Group], taken: list[Sequence[Group]]) -> AsyncIterator[Batch]:
        """The step's groups as they finish, the first ones first. `groups` grows to the step, `taken` by chunks."""
        if len(groups) == self.plan.groups_per_step:
            self.producer.step_taken()
        taken.append(tuple(groups))
        yield Batch.of(groups)
        while len(groups) < self.plan.groups_per_step:
            left = self.plan.groups_per_step - len(groups)
            more = await self._take(min(self.plan.groups_per_chunk, left), stoppable=False)
            if self._death is not None and not more:
                raise self._death
            if not more:
                return
            groups.extend(more)
            taken.append(more)
            if len(groups) == self.plan.groups_per_step:
                self.producer.step_taken()
            yield Batch.of(more)

    async def _train_on(self, first: Sequence[Group], started: float) -> None:
        """One step: learn, publish, report, evaluate, save; then the tickets return."""
        groups, taken = list(first), list[Sequence[Group]]()
        train_policy, state = self.plan.trains_policy(self.step), self.algorithm.state()
        async with self._gpus.training(publishes=train_policy):
            with self._waiting(f"training of step {self.step}", "control/learn"):
                learned = await self.algorithm.step(
                    self._chunks(groups, taken), step=self.step, train_policy=train_policy
                )
        if self.recorder is not None:
            with self._waiting(f"the flight record of step {self.step + 1}", "control/record"):
                told = {"version": self.version, "train_policy": train_policy, "state": state}
                await self.recorder.record(self.step + 1, taken, learned, **told)
        metrics = merge(rollout_metrics(groups), staleness_metrics(groups, self.version), learned)
        if train_policy:
            self.version += 1
            with self._waiting(f"publishing version {self.version}", "weights/publish"):
                metrics |= await self._publish()
        await self.plane.drop([key for group in groups for key in group.keys])
        self.step += 1
        self.producer.watchdog.progress()
        self._newest = {}
        self._report(metrics, now() - started)
        ends = self.step == self.plan.max_num_steps and self.plan.val_at_end
        if self._death is None and (ends or self._validates_at(self.step)):  # before the save, which is ranked by it
            await self._validate()
        if self._save and self.step % self.plan.save_period == 0:
            with self._waiting(f"saving step {self.step}", "control/save"):
                await self._save(self)
        await self.buffer.open(self.plan.tickets(self.step))  # first: the last steps have fewer, the end has none
        await self.buffer.release(len(groups))

    async def _publish(self) -> Metrics:
        """Without an engine left the step is whole all the same: the run that goes on from it publishes first."""
        try:
            return await self._sync.publish(self.version)
        except EngineDied as death:
            self._end_without_engines(death)
            return {}

    @contextmanager
    def _waiting(self, what: str, span: str) -> Generator[None]:
        with self.producer.watchdog.waiting("training", what), self._clock.span(span):
            yield

    def _validates_at(self, step: int) -> bool:
        return self._evaluate is not None and self.plan.val_period > 0 and step % self.plan.val_period == 0

    async def _validate(self) -> None:
        if self._evaluate is None:
            return
        with self._waiting(f"validation at step {self.step}", "control/evaluate"):
            metrics = await self._evaluate(self.step, self.producer.watchdog.progress)
        self._validated_step = self.step
        self._write(flatten(metrics))

    def _report(self, metrics: Metrics, step_s: float) -> None:
        record = flatten(
            merge(metrics, self._clock.drain(), self._accounts.drain(), self.plane.drain(), self._gpus.drain())
        )
        record |= {
            "time/step_s": step_s,
            "speed/tokens_per_s": record["rollout/tokens"] / max(step_s, 1e-9),
            "run/version": float(self.version),
            "run/prompts": float(self.producer.next_index),
            "buffer/ready_groups": float(self.buffer.ready),
        }
        if self.health is not None:
            record |= self.health.observe(self.step, record)
        self._write(record)

    def score(self, metric: str) -> float | None:
        """`train:NAME` or `val:NAME` of the step that has just been trained; None in critic warm-up, or without it."""
        kind, _, name = metric.partition(":")
        in_warm_up = not self.plan.trains_policy(self.step - 1)
        return None if in_warm_up else self._newest.get(f"val/{name}" if kind == "val" else name)

    def _write(self, record: dict[str, float]) -> None:
        self._newest |= record
        for sink in self._sinks:
            sink.write(self.step, record)

    def state(self) -> dict[str, Any]:
        """The counters and the buffer, for a checkpoint."""
        return {
            "step": self.step,
            "version": self.version,
            "producer": self.producer.state(),
            "buffer": self.buffer.state(),
            "algorithm": self.algorithm.state(),
        }

    def has_settled(self, index: int) -> bool:
        """Whether this prompt has been trained on or given up: it will not be seen again."""
        return index < self.producer.next_index and not self.buffer.holds(index)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. The plane must have loaded the finished groups' rows."""
        self.step, self.version = state["step"], state["version"]
        self.producer.restore(state["producer"], self.buffer.restore(state["buffer"]))
        self.algorithm.restore(state["algorithm"])
