"""How much faster generation ahead of training is: for real, on this machine, and simulated on a larger one.

uv run python benchmarks/async_speedup.py simulated [--steps 20]
uv run python benchmarks/async_speedup.py real [--recipe NAME] [--leads 0 1 2] [--seeds 2] [--override KEY=VALUE ...]

`simulated`: 64 engines x 16 slots write 1,024 samples a step; 32 trainers are together as fast as the engines would be
if every slot were always busy. Fixed lengths show the overlap alone; the others what stragglers cost, and what each
sampler gets back.

`real`: whole runs of `tandem train`, each lead with the same seeds and steps, taking turns. The scorer is slow, as a
remote judge is (`--scorer`, see slow_scorer.py; `none` leaves the recipe's own). `--override` goes to every run,
`--ahead` to those with a lead only. What counts is the time in which the same reward is reached.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks import slow_scorer
from benchmarks.seeds import Curve, run
from tandem.config.asynchrony import AsyncRl, Failures, InOrder, ReadyFirst, Sampler, Windowed
from tandem.control.plan import Plan
from tandem.simulation.lengths import LAWS, Lengths
from tandem.simulation.run import Machines, Outcome, Work, simulate

ENGINES, SLOTS, TOKENS_PER_S = 64, 16, 50.0
TRAINERS = 32
GROUPS, SAMPLES = 128, 8
MEAN, LONGEST = 1000, 16_000
LEADS = (0, 1, 2, 4)
# Reading a text takes no time here: abort_and_reissue that keeps what was written is in_flight.
UPDATES = {
    "drain": {"weight_update": "drain"},
    "in_flight": {"weight_update": "in_flight"},
    "abort, discard": {"weight_update": "abort_and_reissue", "discard_partial_rollouts": True},
}
BALANCED_S = MEAN / TOKENS_PER_S  # every slot writes one sample of mean length
SIMULATED_GOAL, REAL_GOAL = 1.8, 1.3
WINDOW = 3  # steps whose mean reward must reach the level: those of one step are few


def plan(sampler: Sampler, update: str, steps: int) -> Plan:
    return Plan(
        groups_per_step=GROUPS,
        max_num_steps=steps,
        max_num_prompts=1000 * GROUPS * steps,
        policy_training_start_step=0,
        async_rl=AsyncRl(sampler=sampler, stall_timeout_s=1e12, **UPDATES[update]),
        failures=Failures(),
        dynamic_sampling_max_gen_batches=10,
        val_period=0,
        val_at_start=False,
        val_at_end=False,
        save_period=steps,
        save_at_end=False,
    )


def sampler_of(name: str, lead: int) -> Sampler:
    match name:
        case "in_order":
            return InOrder(max_lookahead_versions=lead)
        case "ready_first":
            return ReadyFirst(name="ready_first", max_lookahead_versions=lead)
    return Windowed(name="windowed", buffer_capacity_groups=(lead + 1) * GROUPS, max_staleness_versions=lead)


def outcome(law: str, name: str, update: str, lead: int, steps: int) -> Outcome:
    machines = Machines(
        engines=ENGINES,
        slots=SLOTS,
        tokens_per_s=TOKENS_PER_S,
        trainers=TRAINERS,
        train_tokens_per_s=GROUPS * SAMPLES * MEAN / BALANCED_S / TRAINERS,
    )
    work = Work(SAMPLES, 0, Lengths(law, MEAN, LONGEST), prompts_per_epoch=1000 * GROUPS * steps)
    return simulate(plan(sampler_of(name, lead), update, steps), machines, work)


def simulated(asked: argparse.Namespace) -> None:
    """The table of docs/simulation.md."""
    steps = asked.steps
    table = Table(title=f"seconds a step over {steps} steps; speed-up over sync; worst staleness")
    for column in ("lengths", "sampler", "weight update", "sync", "lead 1", "lead 2", "lead 4"):
        table.add_column(column, justify="right" if column.startswith(("sync", "lead")) else "left")
    began, heavy = time.process_time(), 0.0
    for law in LAWS:
        for name in ("in_order", "ready_first", "windowed"):
            for update in UPDATES:
                sync, *ahead = (outcome(law, name, update, lead, steps) for lead in LEADS)
                cells = [f"{o.step_s:.0f} s {sync.step_s / o.step_s:.2f}x ({o.staleness_max:.0f})" for o in ahead]
                table.add_row(law, name, update, f"{sync.step_s:.0f} s", *cells)
                if (law, name, update) == ("heavy", "in_order", "in_flight"):
                    heavy = sync.step_s / ahead[0].step_s
        table.add_section()
    Console(width=110).print(table)
    print(
        f"{ENGINES} engines x {SLOTS} slots, {TRAINERS} trainers; balanced: {BALANCED_S:.0f} s a step for either side"
    )
    goal = f"goal >= {SIMULATED_GOAL}: {yes(heavy >= SIMULATED_GOAL)}"
    print(f"lead 1, heavy-tailed lengths, in order, in flight: {heavy:.2f} times; {goal}")
    print(f"{time.process_time() - began:.0f} CPU seconds")


@dataclass(frozen=True)
class Real:
    """A run as this comparison reads it. `total_s`: all its steps, without start, validation and checkpoints."""

    curve: Curve
    level: float

    @property
    def total_s(self) -> float:
        return sum(self.curve.steps_s)

    @property
    def reached_step(self) -> int | None:
        """The last of the first steps in a row whose mean reward is at least the level."""
        first = self.curve.steps_to(self.level)
        return None if first is None else first + WINDOW - 1

    @property
    def reached_s(self) -> float:
        """Seconds until then; infinite if it never was."""
        step = self.reached_step
        return math.inf if step is None else sum(self.curve.steps_s[:step])


def real(asked: argparse.Namespace) -> None:
    """Each seed runs every lead; who is first changes, so that a busy moment does not always meet the same one."""
    if len(asked.leads) < 2:
        raise SystemExit(f"--leads {asked.leads}: give at least two, the first is what others are held to")
    common = [*asked.override]
    if asked.device:
        common.append(f"cluster.device={asked.device}")
    if asked.steps:
        common.append(f"ppo.max_num_steps={asked.steps}")
    if asked.scorer != "none":
        slow_scorer.seconds_of(asked.scorer)  # a law that cannot be read is an error here
        os.environ[slow_scorer.LAW] = asked.scorer
        common.append('env.verifier={name: python, target: "benchmarks.slow_scorer:score"}')
    print(f"{asked.recipe}, scorer {asked.scorer}, level {asked.level}; {' '.join(asked.override)}")
    print(
        "| lead | seed | s to the level | at step | s in all | s a step | held out | stale mean, max | wall s | CPU s |"
    )
    print("|---" * 10 + "|")
    runs: dict[int, list[Real]] = {lead: [] for lead in asked.leads}
    for turn, seed in enumerate(range(1, asked.seeds + 1)):
        for place in range(len(asked.leads)):
            lead = asked.leads[(place + turn) % len(asked.leads)]
            ahead = [f"async_rl.sampler.max_lookahead_versions={lead}", *(asked.ahead if lead else [])]
            runs[lead].append(Real(run(asked.recipe, seed, [*common, *ahead]), asked.level))
            print(f"| {lead} | {seed} | " + " | ".join(cells_of(runs[lead][-1])) + " |", flush=True)
    report(runs, asked.level)


def cells_of(one: Real) -> list[str]:
    curve = one.curve
    return [
        f"{one.reached_s:.1f}",
        str(one.reached_step or "-"),
        f"{one.total_s:.1f}",
        f"{curve.step_s:.2f}",
        f"{curve.before:.3f} -> {curve.after:.3f}",
        f"{curve.staleness_mean:.2f}, {curve.staleness_max:.0f}",
        f"{curve.wall_s:.0f}",
        f"{curve.cpu_s:.0f}",
    ]


def report(runs: Mapping[int, Sequence[Real]], level: float) -> None:
    """Speed-ups over the first lead, seed by seed, as medians; and whether all have reached the same reward."""
    base, *others = runs
    for lead in others:
        print(f"lead {lead} against lead {base}, times as fast, median over seeds (least, most):")
        for what, figure in FIGURES.items():
            ratios = ratios_of(runs[base], runs[lead], figure)
            print(f"  {what:45}{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")
    every = [one for of_lead in runs.values() for one in of_lead]
    reached = sum(one.reached_step is not None for one in every)
    same = reached == len(every)
    print(f"same reward reached (mean of {WINDOW} steps >= {level}): {reached} of {len(every)} runs: {yes(same)}")
    held_out = [f"lead {lead} {statistics.fmean(one.curve.after for one in of):.3f}" for lead, of in runs.items()]
    print(f"held-out accuracy after the last step, mean over seeds: {', '.join(held_out)}")
    best = max(statistics.median(ratios_of(runs[base], runs[lead], FIGURES[TO_LEVEL])) for lead in others)
    print(f"goal: the level at least {REAL_GOAL} times as soon with a lead: {yes(same and best >= REAL_GOAL)}")


TO_LEVEL = "to the level"
FIGURES: dict[str, Callable[[Real], float]] = {
    TO_LEVEL: lambda one: one.reached_s,
    "all steps": lambda one: one.total_s,
    "a step (its median)": lambda one: one.curve.step_s,
    "the whole process, start and validation too": lambda one: one.curve.wall_s,
}


def ratios_of(base: Sequence[Real], ahead: Sequence[Real], figure: Callable[[Real], float]) -> list[float]:
    """How many times as fast, seed by seed. 1 where neither has reached the level."""
    return [figure(a) / figure(b) if figure(a) != figure(b) else 1.0 for a, b in zip(base, ahead, strict=True)]


def yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    model = kinds.add_parser("simulated", help="the table of docs/simulation.md")
    model.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    model.set_defaults(work=simulated)
    whole = kinds.add_parser("real", help="whole runs of a recipe")
    whole.add_argument("--recipe", default="quickstart", help="a recipe of PPO (quickstart)")
    whole.add_argument("--leads", type=int, nargs="+", default=[0, 1, 2], help="the first is what others are held to")
    whole.add_argument("--seeds", type=int, default=2, help="seeds 1, 2, ...; each runs every lead (2)")
    whole.add_argument("--steps", type=int, help="ppo.max_num_steps")
    whole.add_argument("--level", type=float, default=0.9, help=f"mean reward of {WINDOW} steps to reach (0.9)")
    whole.add_argument("--scorer", default="lognormal:0.5:0.5", help="fixed:S, lognormal:MEAN_S:SPREAD, or none")
    whole.add_argument("--device", choices=("cpu", "cuda"), help="cluster.device")
    whole.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    whole.add_argument("--ahead", nargs="+", default=[], metavar="KEY=VALUE", help="of the runs with a lead")
    whole.set_defaults(work=real)
    asked = parser.parse_args()
    asked.work(asked)


if __name__ == "__main__":
    main()
