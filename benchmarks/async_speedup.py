"""How much faster generation ahead of training is, from the simulator: sync against lead 1, 2 and 4.

uv run python benchmarks/async_speedup.py [--steps 20]

64 engines x 16 slots write 1,024 samples a step; the trainers are as fast as the engines would be if every slot were
always busy. Fixed lengths show the overlap alone; the others what stragglers cost, and what each sampler gets back.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from tandem.config.asynchrony import AsyncRl, Failures, InOrder, ReadyFirst, Sampler, Windowed
from tandem.control.plan import Plan
from tandem.simulation.lengths import LAWS, Lengths
from tandem.simulation.run import Machines, Outcome, Work, simulate

ENGINES, SLOTS, TOKENS_PER_S = 64, 16, 50.0
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
        trainers=8,
        train_tokens_per_s=GROUPS * SAMPLES * MEAN / BALANCED_S / 8,
    )
    work = Work(SAMPLES, 0, Lengths(law, MEAN, LONGEST), prompts_per_epoch=1000 * GROUPS * steps)
    return simulate(plan(sampler_of(name, lead), update, steps), machines, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    steps = parser.parse_args().steps
    table = Table(title=f"seconds a step over {steps} steps; speed-up over sync; worst staleness")
    for column in ("lengths", "sampler", "weight update", "sync", "lead 1", "lead 2", "lead 4"):
        table.add_column(column, justify="right" if column.startswith(("sync", "lead")) else "left")
    began = time.process_time()
    for law in LAWS:
        for name in ("in_order", "ready_first", "windowed"):
            for update in UPDATES:
                sync, *ahead = (outcome(law, name, update, lead, steps) for lead in LEADS)
                cells = [f"{o.step_s:.0f} s {sync.step_s / o.step_s:.2f}x ({o.staleness_max:.0f})" for o in ahead]
                table.add_row(law, name, update, f"{sync.step_s:.0f} s", *cells)
        table.add_section()
    Console(width=110).print(table)
    print(f"balanced: {BALANCED_S:.0f} s a step for either side alone; {time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
