"""A whole run on simulated machines: how long a plan takes, who is busy, how old the samples are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.controller import Controller
from tandem.control.plan import Plan
from tandem.control.samplers import build_sampler
from tandem.control.watchdog import now
from tandem.metrics.timing import Timeline
from tandem.plane.memory import MemoryPlane
from tandem.simulation.engines import SimulatedEngines
from tandem.simulation.lengths import Lengths
from tandem.simulation.loop import run_virtual
from tandem.simulation.rollouts import RolloutTimes, SimulatedPrompts, SimulatedRollOut
from tandem.simulation.training import OwnDevices, Records, SimulatedAlgorithm, SimulatedSync, TrainTimes, column


@dataclass(frozen=True)
class Machines:
    """Engines that write `tokens_per_s` for each sequence, trainers that share a step's tokens between them."""

    engines: int
    slots: int  # sequences that one engine writes at one time
    tokens_per_s: float  # of one sequence
    trainers: int
    train_tokens_per_s: float  # of one trainer, prompt tokens included, all passes of a step together
    step_s: float = 0.0  # what a step costs whatever its size
    publish_s: float = 0.0
    score_s: float = 0.0
    streamed_share: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            number, least = getattr(self, each.name), "0 or more" if each.default == 0.0 else "more than 0"
            if number < 0 or (number == 0 and least != "0 or more"):
                raise ValueError(f"{each.name}={number:g}: wanted {least}")
        if self.streamed_share > 1:
            raise ValueError(f"streamed_share={self.streamed_share:g}: wanted a share between 0 and 1")


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    samples: int  # of a prompt
    prompt_tokens: int
    lengths: Lengths
    prompts_per_epoch: int
    timeout_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, in seconds of its own time. Shares are of slots and of trainers, over the whole run."""

    steps: int
    total_s: float
    engines_busy: float
    trainers_busy: float
    staleness_mean: float
    staleness_max: float
    untrained: Mapping[str, int] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.total_s / max(self.steps, 1)


def simulate(plan: Plan, machines: Machines, work: Work, *, timeline: Path | None = None) -> Outcome:
    """Run a plan to its end on a virtual clock. `timeline` is written for Perfetto."""
    return run_virtual(session(plan, machines, work, timeline))


async def session(plan: Plan, machines: Machines, work: Work, path: Path | None) -> Outcome:
    loop = asyncio.get_running_loop()
    timeline = Timeline(path, clock_ns=lambda: round(loop.time() * 1e9))
    engines = SimulatedEngines(
        engines=machines.engines,
        slots=machines.slots,
        tokens_per_s=machines.tokens_per_s,
        timeline=timeline if path else None,
    )
    plane, records, untrained = MemoryPlane(), Records(), dict[str, int]()
    algorithm = SimulatedAlgorithm(train_times(machines), plane=plane)

    def note(record: Mapping[str, str | int]) -> None:
        untrained[str(record["why"])] = untrained.get(str(record["why"]), 0) + 1

    controller = Controller(
        plan,
        algorithm=algorithm,
        dataset=SimulatedPrompts(work.prompts_per_epoch),
        roll_out=SimulatedRollOut(rollout_times(machines, work), engines=engines, plane=plane),
        buffer=Buffer(build_sampler(plan.async_rl.sampler)),
        plane=plane,
        sync=SimulatedSync(engines, seconds=machines.publish_s, pause=plan.async_rl.pause),
        gpus=OwnDevices(),
        evaluate=None,
        save=None,
        clock=timeline,
        sinks=[records],
        accounts=Accounts(note),
        health=None,
        recorder=None,
    )
    try:
        await controller.run()
    finally:
        timeline.close()
    total_s, ages = max(now(), 1e-9), column(records.steps, "staleness/mean")
    return Outcome(
        steps=controller.step,
        total_s=total_s,
        engines_busy=engines.busy_slot_s / (machines.engines * machines.slots * total_s),
        trainers_busy=algorithm.busy_s / total_s,
        staleness_mean=sum(ages) / max(len(ages), 1),
        staleness_max=max(column(records.steps, "staleness/max"), default=0.0),
        untrained=untrained,
    )


def train_times(machines: Machines) -> TrainTimes:
    return TrainTimes(machines.trainers * machines.train_tokens_per_s, machines.step_s, machines.streamed_share)


def rollout_times(machines: Machines, work: Work) -> RolloutTimes:
    return RolloutTimes(work.samples, work.prompt_tokens, work.lengths.draw(), machines.score_s, work.timeout_s)
