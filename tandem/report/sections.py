"""The sections of a report, each from what was read of the runs. A section without data says what would make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import yaml

from tandem.report import charts
from tandem.report.flight import Flight, calibration, explained_variance
from tandem.report.html import charts as grid
from tandem.report.html import escape, figure, folded, legend, paragraph, section, short, table
from tandem.report.run import Run, differences, number, paired

T = TypeVar("T")
Charts = Mapping[str, Sequence[str]]  # title -> patterns of metrics
CURVES: Charts = {
    "Validation accuracy": ("val/accuracy", "val/*/accuracy", "val/*pass@*", "val/*mean@*"),
    "Reward of the rollouts": ("rollout/reward", "rollout/shaped_reward"),
    "KL of an update": ("actor/approx_kl",),
    "KL to the reference": ("reference/kl",),
    "Clipped tokens, share": ("actor/clip_fraction",),
    "Entropy, nats": ("actor/entropy",),
    "Gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "Ratio": ("actor/ratio_mean", "actor/ratio_min", "actor/ratio_max"),
    "Engine against trainer, error of log-probs": ("rollout/token_mult_prob_error", "rollout/seq_mult_prob_error_max"),
    "Learning rate": ("actor/lr", "critic/lr"),
}
REWARDS: Charts = {
    "Parts of the reward": ("rollout/component/*",),
    "Parts of the validation's reward": ("val/reward/*", "val/*/reward/*"),
    "Reward, rollouts and validation": ("rollout/reward", "val/reward", "val/*/reward"),
    "Groups without spread, share": ("rollout/groups_without_spread",),
    "Advantages": ("advantages/mean", "advantages/std", "advantages/abs_max"),
}
CRITIC: Charts = {
    "Explained variance": ("critic/explained_variance",),
    "Mean value and mean return": ("critic/value_mean", "critic/return_mean"),
    "Loss of the critic": ("critic/loss",),
    "Clipped values, share": ("critic/clip_fraction",),
}
STALENESS: Charts = {
    "Versions behind": ("staleness/mean", "staleness/max"),
    "Groups that were ready when a step ended": ("buffer/ready_groups",),
}
LENGTHS: Charts = {
    "Tokens of a response": ("rollout/length", "rollout/length_max", "val/length"),
    "Truncated, share": ("rollout/truncated", "val/truncated"),
}
STAGES: Charts = {
    "Seconds of a step": ("time/step_s",),
    "Tokens a second": ("speed/tokens_per_s",),
    "Model FLOPs utilisation": ("actor/mfu", "critic/mfu"),
    "TFLOP a second": ("actor/tflops", "critic/tflops"),
    "Pause for new weights, seconds": ("weights/pause_s",),
}
MEMORY: Charts = {
    "GPU memory in use, bytes": ("gpu/used_*",),
    "Data plane, bytes a step": ("plane/bytes_put", "plane/bytes_get"),
    "Weights sent, bytes a step": ("weights/bytes",),
}
DROPS: Charts = {
    "Untrained prompts": ("rollout/untrained_*",),
    "Retries": ("rollout/retries",),
    "Samples left out": ("rollout/filtered_overlong", "rollout/masked_by_logprob_error"),
    "Optimizer steps skipped": ("actor/steps_skipped", "critic/steps_skipped"),
    "Requests issued again": ("weights/reissued_requests", "weights/kept_tokens", "weights/discarded_tokens"),
}
CONTAINERS = ("time/step_s", "time/control/learn_s")  # spans around other spans


def curves_of(runs: Sequence[Run], chosen: Charts) -> list[str]:
    """A chart for each title that some run has numbers for. One run: colour tells the metric; several: the run."""
    figures = []
    for title, patterns in chosen.items():
        lines = []
        for place, run in enumerate(runs):
            for dash, name in enumerate(run.matching(patterns)):
                x, y = run.series(name)
                one = len(runs) == 1
                label = name if one else f"{run.name}: {name}"
                lines.append(charts.Line(label, x, y, dash if one else place, dash // charts.SERIES if one else dash))
        if lines:
            key = legend((line.label, line.color, line.dash) for line in lines)
            figures.append(figure(title, charts.lines(lines), key))
    return figures


def curves_section(name: str, title: str, runs: Sequence[Run], chosen: Charts, *more: str, none: str) -> str:
    """Curves, then whatever else; `none` says what is missing where there is neither."""
    figures = [*curves_of(runs, chosen), *more]
    return section(name, title, grid(figures) if figures else paragraph(none))


def overview(runs: Sequence[Run]) -> str:
    """First and last of the figures that matter, and what could not be read."""
    head = ("run", "steps", "validation accuracy", "reward", "explained variance", "tokens/s", "training", "verdicts")
    rows = []
    for run in runs:
        seconds, said = run.series("time/step_s")[1], Counter(str(v.get("severity")) for v in begun(run))
        rows.append(
            (
                run.name,
                len(seconds),
                *(arrow(run, name) for name in ("val/accuracy", "rollout/reward", "critic/explained_variance")),
                arrow(run, "speed/tokens_per_s"),
                timedelta(seconds=round(sum(seconds))),
                ", ".join(f"{count} {what}" for what, count in sorted(said.items())) or "none",
            )
        )
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    missing = folded("What could not be read", "".join(map(paragraph, notes))) if notes else ""
    colours = legend((run.name, place, 0) for place, run in enumerate(runs)) if len(runs) > 1 else ""
    return section("overview", "Overview", table(head, rows), colours, missing)


def arrow(run: Run, name: str) -> str:
    """The first and the last value of a metric."""
    values = run.series(name)[1]
    return f"{short(values[0])} → {short(values[-1])}" if len(values) > 1 else short(values[0]) if values else "-"


def begun(run: Run) -> list[Mapping[str, object]]:
    return [verdict for verdict in run.verdicts if verdict.get("change") != "ends"]


def critic(runs: Sequence[Run], flights: Sequence[Flight]) -> str:
    """Explained variance, and how values meet returns."""
    lines = []
    for label, color, (values, returns) in by_step(runs, [flight.learned for flight in flights]):
        if len(values):
            explained = short(explained_variance(values, returns))
            label = f"{label}: explained variance {explained}"
            lines.append(charts.Line(label, *calibration(values, returns), color))
    more = []
    if lines:
        drawing = charts.lines(lines, x_label="mean value, by tenths", diagonal=True)
        key = legend((line.label, line.color, 0) for line in lines)
        more = [figure("Calibration: mean return of tokens by their value (dotted: perfect)", drawing, key)]
    none = "These runs have no critic. Calibration needs one, and a flight record (logger.flight_recorder={})."
    return curves_section("critic", "Critic: explained variance and calibration", runs, CRITIC, *more, none=none)


def distribution(
    title: str, runs: Sequence[Run], of_flights: Sequence[Mapping[int, np.ndarray]], x_label: str
) -> list[str]:
    """Histograms of recorded steps."""
    sets = [(label, color, values) for label, color, values in by_step(runs, of_flights) if len(values)]
    if not sets:
        return []
    drawing = charts.histogram([(color, values) for _, color, values in sets], x_label=x_label)
    return [figure(title, drawing, legend((label, color, 0) for label, color, _ in sets))]


def by_step(runs: Sequence[Run], found: Sequence[Mapping[int, T]]) -> list[tuple[str, int, T]]:
    """Label, colour and what was found: each recorded step of one run, or the last one of each of several runs."""
    if len(runs) == 1:
        return [(f"step {step}", color, what) for color, (step, what) in enumerate(found[0].items())]
    return [
        (f"{run.name}, step {max(of_run)}", color, of_run[max(of_run)])
        for color, (run, of_run) in enumerate(zip(runs, found, strict=True))
        if of_run
    ]


def samples(runs: Sequence[Run], most: int = 12) -> str:
    """The same questions before and after, those whose reward or answer changed first."""
    parts = []
    for run in runs:
        if len(run.answers) < 2:
            parts.append(paragraph(f"{run.name}: before and after need two validations, there are {len(run.answers)}."))
            continue
        (first, before), (last, after) = run.answers
        both = paired(before, after)
        both.sort(key=lambda pair: -abs((reward(pair[1]) or 0) - (reward(pair[0]) or 0)))  # stable
        rows = [
            (
                then.get("question"),
                then.get("response"),
                reward(then),
                now.get("response"),
                reward(now),
                then.get("answer"),
            )
            for then, now in both[:most]
        ]
        head = ("question", f"before ({first})", "reward", f"after ({last})", "reward", "wanted")
        parts.append((f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "") + table(head, rows, text=(0, 1, 3, 5)))
    return section("samples", "Samples before and after", *parts)


def reward(record: Mapping[str, object]) -> float | None:
    return number(record.get("reward"))


def stages(runs: Sequence[Run]) -> str:
    """Where a step's time goes, and what share of the hardware it used."""
    spans = {name for run in runs for name in run.matching(("time/*",))} - {*CONTAINERS}
    mean = {run.name: {name: mean_of(run, name) for name in spans} for run in runs}
    order = sorted(spans, key=lambda name: -max(of_run[name] for of_run in mean.values()))[:14]
    more = []
    if order:
        names = [name.removeprefix("time/").removesuffix("_s") for name in order]
        drawing = charts.bars(names, [[mean[run.name][name] for name in order] for run in runs], x_label="seconds")
        colours = legend((run.name, place, 0) for place, run in enumerate(runs)) if len(runs) > 1 else ""
        more = [figure("Mean seconds of a step by stage", drawing, colours)]
    none = "metrics.jsonl holds no times."
    return curves_section("stages", "Stage times and use of the hardware", runs, STAGES, *more, none=none)


def mean_of(run: Run, name: str) -> float:
    """Seconds of a stage over all steps; a step without it counts as 0."""
    values, steps = run.series(name)[1], len(run.series("time/step_s")[1])
    return sum(values) / max(steps, len(values), 1)


def drops(runs: Sequence[Run], most: int = 20) -> str:
    """Prompts that no step trained on, and why; retries."""
    rows = [
        (run.name, record.get("index"), record.get("id"), record.get("why"), record.get("cause"))
        for run in runs
        for record in run.untrained[-most:]
    ]
    counts = [
        f"{run.name}: {len(run.untrained)} ({', '.join(f'{count} {why}' for why, count in reasons(run).items())})"
        for run in runs
        if run.untrained
    ]
    tables = [*map(paragraph, counts), table(("run", "index", "prompt", "why", "cause"), rows, text=(4,))]
    figures = curves_of(runs, DROPS)
    again = "" if any(run.matching(("rollout/retries",)) for run in runs) else " None was tried again."
    told = tables if rows else [paragraph(f"No prompt was left untrained.{again}")]
    return section("drops", "Drops and retries", grid(figures), *told)


def reasons(run: Run) -> Counter[str]:
    return Counter(str(record.get("why")) for record in run.untrained)


def verdicts(runs: Sequence[Run]) -> str:
    """What the health watch said."""
    head = ("step", "severity", "what", "verdict", "change", "run")  # what is said is seen on a narrow screen too
    rows = [
        (*(said.get(name) for name in ("step", "severity", "text", "verdict", "change")), run.name)
        for run in runs
        for said in run.verdicts
    ]
    quiet = [paragraph(silence(run)) for run in runs if not run.verdicts]
    return section("verdicts", "Verdicts", *([table(head, rows, text=(2,))] if rows else []), *quiet)


def silence(run: Run) -> str:
    """Why there is no verdict: nothing to say, or nobody who watched."""
    judged = {len(run.series(name)[1]) for name in run.matching(("health/*",))}
    if not judged:
        return f"{run.name}: no step was judged (logger.health.enabled=true watches a run)."
    return f"{run.name}: {max(judged)} steps were judged, and none was worth a word."


def config(runs: Sequence[Run]) -> str:
    """Keys that differ between the runs, and each run's whole config."""
    parts = []
    if len(runs) > 1:
        rows = [(name, *values) for name, values in differences(runs)]
        head = ("key", *(run.name for run in runs))
        parts.append(table(head, rows, text=range(1, len(head))) if rows else paragraph("The configs are the same."))
    for run in runs:
        text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True) if run.config else "not there"
        parts.append(folded(f"The effective config of {run.name}", f"<pre>{escape(text)}</pre>"))
    return section("config", "Config", *parts)


def every_metric(runs: Sequence[Run]) -> str:
    """A row for each metric of each run."""
    parts = []
    for run in runs:
        rows = []
        for name in run.names():
            values = run.series(name)[1]
            if name != "step":
                rows.append((name, len(values), values[0], values[-1], min(values), max(values)))
        head = ("metric", "records", "first", "last", "lowest", "highest")
        parts.append(folded(f"{len(rows)} metrics of {run.name}", table(head, rows)))
    return section("metrics", "Every metric", *parts)
