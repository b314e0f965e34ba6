"""Learning curves over seeds, variants side by side: the tables of README.md and docs/algorithms.md.

uv run python benchmarks/seeds.py --seeds 10 sync= async=async_rl.sampler.max_lookahead_versions=1
uv run python benchmarks/seeds.py --seeds 5 --recipe quickstart critic= \
    'none=ppo.adv_estimator={name: raw_reward, normalize_advantages: true};value=null;value_loss_fn=null'

A variant is NAME=override;override;... Each run is a process of its own, one after the other.
`--out curves.json` keeps every run's curves for benchmarks/plot_curves.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One run: what each step reports, validation accuracy first and last, and what it cost.

    `explained` is None at a step without a critic, or whose returns do not vary. `steps_s`: seconds of each step.
    """

    rewards: list[float]
    explained: list[float | None]
    before: float
    after: float
    wall_s: float
    cpu_s: float
    steps_s: list[float]
    staleness_mean: float
    staleness_max: float

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    def reward_around(self, step: int) -> float:
        """Mean reward of the steps step-1 .. step+1: 64 samples alone are noisy."""
        last = min(step + 1, len(self.rewards))
        return statistics.fmean(self.rewards[max(0, min(step - 2, last - 3)) : last])

    def steps_to(self, level: float) -> int | None:
        """The first step from which three in a row average at least `level`."""
        for step in range(len(self.rewards) - 2):
            if statistics.fmean(self.rewards[step : step + 3]) >= level:
                return step + 1
        return None


def run(recipe: str, seed: int, overrides: list[str]) -> Curve:
    """Train in a process of its own and read what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        started, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "tandem", "train", recipe, f"seed={seed}", f"run_dir={folder}/run"]
        quiet = [
            "logger.console=silent",
            "logger.tensorboard=false",
            "logger.timeline=false",
            "checkpointing.enabled=false",
        ]
        done = subprocess.run([*command, *quiet, *overrides], capture_output=True, text=True, env=os.environ)
        if done.returncode:
            sys.exit(done.stderr)
        wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        records = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "rollout/reward" in record]
    accuracies = [record["val/accuracy"] for record in records if "val/accuracy" in record]
    return Curve(
        rewards=[record["rollout/reward"] for record in steps],
        explained=[record.get("critic/explained_variance") for record in steps],
        before=accuracies[0],
        after=accuracies[-1],
        wall_s=wall_s,
        cpu_s=after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime,
        steps_s=[record["time/step_s"] for record in steps],
        staleness_mean=statistics.fmean(record["staleness/mean"] for record in steps),
        staleness_max=max(record["staleness/max"] for record in steps),
    )


def row(curve: Curve, marks: list[int], level: float) -> list[str]:
    reached = curve.steps_to(level)
    return [
        *(f"{curve.reward_around(mark):.2f}" for mark in marks),
        f"{curve.before:.3f}",
        f"{curve.after:.3f}",
        "-" if reached is None else str(reached),
        f"{statistics.fmean(known):.2f}" if (known := [x for x in curve.explained if x is not None]) else "-",
        f"{curve.step_s:.2f}",
        f"{curve.wall_s:.0f}",
        f"{curve.cpu_s:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--level", type=float, default=0.8, help="reward to reach")
    parser.add_argument("--marks", default="1,5,10,20,40", help="steps at which the reward is shown")
    parser.add_argument("--out", type=Path, help="a JSON file that receives the curves")
    parser.add_argument("variants", nargs="+", help="NAME=override;override")
    arguments = parser.parse_args()
    marks = [int(mark) for mark in arguments.marks.split(",")]
    head = [
        *(f"r@{mark}" for mark in marks),
        "before",
        "after",
        f"to {arguments.level}",
        "expl.var",
        "s/step",
        "s",
        "cpu s",
    ]
    print("| variant | seed | " + " | ".join(head) + " |")
    print("|---" * (len(head) + 2) + "|")
    curves: dict[str, list[Curve]] = {}
    for seed in range(1, arguments.seeds + 1):
        for variant in arguments.variants:
            name, _, overrides = variant.partition("=")
            curve = run(arguments.recipe, seed, [change for change in overrides.split(";") if change])
            curves.setdefault(name, []).append(curve)
            print(f"| {name} | {seed} | " + " | ".join(row(curve, marks, arguments.level)) + " |", flush=True)
    if arguments.out:
        kept_curves = {name: [asdict(curve) for curve in of_name] for name, of_name in curves.items()}
        arguments.out.write_text(json.dumps(kept_curves))
    for name, of_name in curves.items():
        columns = zip(*(row(curve, marks, arguments.level) for curve in of_name), strict=True)
        medians = [
            f"{statistics.median(map(float, kept)):.3g}" if (kept := [c for c in column if c != "-"]) else "-"
            for column in columns
        ]
        print(f"| **{name}** | median | " + " | ".join(medians) + " |")


if __name__ == "__main__":
    main()
