"""Draw reward curves as a small SVG: what seeds.py --out kept, or the metrics.jsonl of one run.

Of seeds: reward and explained variance over steps, median and range. Of a run: reward of rollouts, validation accuracy.

uv run python benchmarks/seeds.py --seeds 6 --out curves.json critic= 'none=ppo.adv_estimator={name: raw_reward, ...'
uv run --with matplotlib python benchmarks/plot_curves.py curves.json docs/critic.svg
uv run --with matplotlib python benchmarks/plot_curves.py RUN/metrics.jsonl docs/smollm2.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curves = list[list[float | None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, help="what seeds.py --out or a run wrote")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--steps", type=int, help="draw only the first steps")
    arguments = parser.parse_args()
    plt.rcParams.update({"svg.hashsalt": "tandem", "svg.fonttype": "none", "font.size": 9})  # same data, same bytes
    if arguments.curves.suffix == ".jsonl":
        figure = draw_run([json.loads(line) for line in arguments.curves.read_text().splitlines()], arguments.steps)
    else:
        figure = draw_seeds(json.loads(arguments.curves.read_text()), arguments.steps)
    figure.savefig(arguments.svg, metadata={"Date": None})


def draw_run(records: list[dict[str, float]], steps: int | None) -> Figure:
    """One panel: what was sampled while training, and greedy answers to held-out questions."""
    figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
    for key, label, style in (
        ("rollout/reward", "reward, sampled", "-"),
        ("val/accuracy", "held-out accuracy, greedy", "o-"),
    ):
        points = [(record["step"], record[key]) for record in records if key in record]
        panel.plot(
            *zip(*[point for point in points if steps is None or point[0] <= steps], strict=True), style, label=label
        )
    panel.set(xlabel="step", ylim=(0, 1))
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    return figure


def draw_seeds(variants: dict[str, list[dict[str, list[float | None]]]], steps: int | None) -> Figure:
    """Two panels with a line a variant."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for panel, key, title in zip(panels, ("rewards", "explained"), ("reward", "explained variance"), strict=True):
        for number, (name, runs) in enumerate(variants.items()):
            draw(panel, [run[key][:steps] for run in runs], f"{name} ({len(runs)} seeds)", f"C{number}")
        panel.set(xlabel="step", title=title)
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower right")
    return figure


def draw(panel: Axes, runs: Curves, label: str, colour: str) -> None:
    """Median as a line, smallest to largest as a band. A step at which a run has no value leaves that run out."""
    at_step = [[value for value in values if value is not None] for values in zip(*runs, strict=True)]
    steps = [step for step, values in enumerate(at_step, start=1) if values]
    known = [values for values in at_step if values]
    if not known:
        return
    panel.plot(steps, [statistics.median(values) for values in known], color=colour, label=label)
    panel.fill_between(steps, [min(v) for v in known], [max(v) for v in known], color=colour, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
