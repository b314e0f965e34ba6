"""THE loop: rollouts are produced under tickets, steps train on what the sampler chooses, weights are published.

Synchronous and asynchronous training are this one loop: lead 0 leaves no ticket for a rollout while a step trains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tandem.control.buffer import Buffer
from tandem.control.plan import Plan
from tandem.control.samplers import Choice, Entry
from tandem.control.steps import rollout_metrics, staleness_metrics
from tandem.metrics.reduce import flatten
from tandem.roles import Algorithm, DataPlane, Dataset, Gpus, RollOut, Sink, WeightSync
from tandem.types import Batch, Metrics, RolloutFailed, merge

log = logging.getLogger(__name__)


class Clock(Protocol):
    """Measures named spans; gives their sums once a step."""

    def span(self, name: str) -> AbstractContextManager[None]: ...

    def drain(self) -> Metrics: ...


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
        evaluate: Callable[[int], Any] | None,
        save: Callable[[Controller], Any] | None,
        clock: Clock,
        sinks: Sequence[Sink],
    ) -> None:
        self.plan = plan
        self.algorithm = algorithm
        self.buffer = buffer
        self.plane = plane
        self.step = 0  # steps trained
        self.version = 0  # how often the policy's weights have been published
        self.next_index = 0  # the first prompt of the stream that has never had a ticket
        self.failures = 0
        self._dataset = dataset
        self._roll_out = roll_out
        self._sync = sync
        self._gpus = gpus
        self._evaluate = evaluate
        self._save = save
        self._clock = clock
        self._sinks = sinks
        self._without_signal = 0  # groups with equal rewards since the last step was taken
        self._again: list[Entry] = []  # prompts of a checkpoint that were in flight: they hold their tickets

    async def run(self) -> None:
        """Train until the steps or the data end. The first error of either side ends both."""
        await self._sync.publish(self.version)  # engines start with a model's file, a resumed actor is elsewhere
        if self.step == 0 and self.plan.val_at_start:
            await self._validate()
        async with asyncio.TaskGroup() as sides:
            producer = sides.create_task(self._produce())
            await self._train()
            producer.cancel()

    async def _produce(self) -> None:
        """Start a rollout for every ticket; end when the data ends."""
        async with asyncio.TaskGroup() as rollouts:
            for entry in self._again:
                rollouts.create_task(self._finish(entry.index, entry.attempt))
            while self.next_index < self.plan.max_num_prompts:
                await self.buffer.admit(self.next_index, version=self.version, attempt=0)
                rollouts.create_task(self._finish(self.next_index, 0))
                self.next_index += 1
            await self.buffer.end()

    async def _finish(self, index: int, attempt: int) -> None:
        """Roll a prompt out and hand the group to the buffer. A failure is counted, and returns the ticket."""
        prompt = self._dataset.prompt(index)
        group = None
        try:
            with self._clock.span("rollout/group"):
                group = await self._roll_out(prompt, attempt=attempt)
        except RolloutFailed as failure:
            self.failures += 1
            log.warning("rollout failed (%d of %d allowed): %s", self.failures, self.plan.max_rollout_failures, failure)
            if self.failures > self.plan.max_rollout_failures:
                raise ValueError(
                    f"{self.failures} rollouts failed, env.max_rollout_failures={self.plan.max_rollout_failures} "
                    f"are allowed; the last: {failure}. Mend the cause, or allow more"
                ) from failure
        else:
            if group is None:
                self._count_without_signal()
        await self.buffer.finish(index, group)

    def _count_without_signal(self) -> None:
        """Give up once even the best luck could not fill a step within the generation batches that are allowed."""
        self._without_signal += 1
        batches = self.plan.dynamic_sampling_max_gen_batches
        if self._without_signal > (batches - 1) * self.plan.groups_per_step:
            raise ValueError(
                f"step {self.step}: {self._without_signal} groups had equal rewards, so {batches} batches of "
                f"{self.plan.groups_per_step} prompts (dynamic_sampling_max_gen_batches={batches}) cannot fill a step; "
                "are all rewards equal? Change the data or the reward, raise it, or set use_dynamic_sampling=false"
            )

    async def _train(self) -> None:
        while self.step < self.plan.max_num_steps:
            started = time.perf_counter()
            await self.buffer.open(self.plan.tickets(self.step))
            with self._clock.span("control/wait_for_groups"):
                choice = await self.buffer.take(self.version)
            self._without_signal = 0
            if not choice.take:
                log.info("the data has ended after %d of %d steps", self.step, self.plan.max_num_steps)
                break
            await self._train_on(choice, started)
        if self._evaluate and self.plan.val_at_end and not self._validates_at(self.step):
            await self._validate()
        if self._save and self.plan.save_at_end and self.step % self.plan.save_period:
            await self._save(self)

    async def _train_on(self, choice: Choice, started: float) -> None:
        """One step: learn, publish, report, evaluate, save; then the tickets return."""
        batch = Batch.of(choice.take)
        train_policy = self.plan.trains_policy(self.step)
        metrics = merge(rollout_metrics(choice.take), staleness_metrics(choice.take, self.version))
        async with self._gpus.training():
            with self._clock.span("control/learn"):
                learned = await self.algorithm.step(batch, step=self.step, train_policy=train_policy)
        if train_policy:
            self.version += 1
            with self._clock.span("weights/publish"):
                metrics |= await self._sync.publish(self.version)
        dropped = [key for group in choice.take + choice.drop for key in group.keys]
        await self.plane.drop(dropped)
        self.step += 1
        self._report(merge(metrics, learned), time.perf_counter() - started)
        if self._validates_at(self.step):
            await self._validate()
        if self._save and self.step % self.plan.save_period == 0:
            with self._clock.span("control/save"):
                await self._save(self)
        await self.buffer.release(len(choice.take))

    def _validates_at(self, step: int) -> bool:
        return self._evaluate is not None and self.plan.val_period > 0 and step % self.plan.val_period == 0

    async def _validate(self) -> None:
        if self._evaluate is None:
            return
        with self._clock.span("control/evaluate"):
            metrics = await self._evaluate(self.step)
        self._write(flatten(metrics))

    def _report(self, metrics: Metrics, step_s: float) -> None:
        record = flatten(merge(metrics, self._clock.drain()))
        record |= {
            "time/step_s": step_s,
            "speed/tokens_per_s": record["rollout/tokens"] / step_s,
            "run/version": float(self.version),
            "run/prompts": float(self.next_index),
            "rollout/failed": float(self.failures),
            "buffer/ready_groups": float(self.buffer.ready),
        }
        self._write(record)

    def _write(self, record: dict[str, float]) -> None:
        for sink in self._sinks:
            sink.write(self.step, record)

    def state(self) -> dict[str, Any]:
        """The counters and the buffer, for a checkpoint."""
        return {
            "step": self.step,
            "version": self.version,
            "next_index": self.next_index,
            "failures": self.failures,
            "buffer": self.buffer.state(),
            "algorithm": self.algorithm.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. The plane must have loaded the finished groups' rows."""
        self.step, self.version = state["step"], state["version"]
        self.next_index, self.failures = state["next_index"], state["failures"]
        self._again = self.buffer.restore(state["buffer"])
        self.algorithm.restore(state["algorithm"])
