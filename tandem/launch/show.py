"""`tandem show`: what a run directory or a checkpoint holds, and what can be done with it. Free of torch."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.config import Config
from tandem.config.load import load
from tandem.control import vault
from tandem.launch.run_dir import CONFIG
from tandem.metrics.figures import ACCURACY, REWARD

CHECKPOINTS, METRICS, UNTRAINED = "checkpoints", "metrics.jsonl", "untrained.jsonl"


@dataclass(frozen=True)
class Finding:
    """One checkpoint as it lies there. `fault` says what is wrong with it, "" when nothing is."""

    path: Path
    score: float | None
    bytes: int
    fault: str


def show(target: str) -> None:
    """Print what is there. ValueError when it is neither a run directory, an empty one, nor a checkpoint."""
    console = Console(markup=False, emoji=False, highlight=False)  # names and paths are printed as they are
    path = Path(target).expanduser()
    if not path.is_dir():
        raise ValueError(f"{target} is no directory; give a run directory, or one of its checkpoints")
    names = {entry.name for entry in path.iterdir()}
    if not is_checkpoint(path) and names and not names & {CONFIG, CHECKPOINTS, METRICS}:
        raise ValueError(f"{target} is neither a run directory (with {CONFIG}) nor a checkpoint of one")
    with console.status(f"reading {size(size_of(path))}"):  # every byte of a checkpoint is hashed
        parts = list(checkpoint_parts(path) if is_checkpoint(path) else run_parts(path))
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))  # a command is one line, to be copied


def is_checkpoint(folder: Path) -> bool:
    """Whether this is a folder of one step, whole or not."""
    marked = (folder / vault.MARKER).is_file() or (folder / vault.MANIFEST).is_file()
    return marked or (folder.name.startswith("step_") and folder.resolve().parent.name == CHECKPOINTS)


def run_parts(run_dir: Path) -> Iterator[RenderableType]:
    """The story of a run, its checkpoints, its files, and what can be done with it."""
    config, why_not = config_of(run_dir)
    findings = [find(folder) for folder in sorted((run_dir / CHECKPOINTS).glob("step_*")) if folder.is_dir()]
    if config is None and not findings and why_not:
        yield Text(f"{run_dir}: no run has begun here yet ({why_not})")
    else:
        yield Text(str(run_dir), style="bold")
        yield summary(run_dir, config, why_not)
    if findings:
        yield checkpoint_table(run_dir / CHECKPOINTS, findings)
    if any(run_dir.iterdir()):
        yield file_table(run_dir)
    sound = [finding for finding in findings if not finding.fault]
    yield commands(ways_on(run_dir, config, sound))


def checkpoint_parts(folder: Path) -> Iterator[RenderableType]:
    """One checkpoint: whose, how good, whether it is as it was written, its files, and what can be done with it."""
    config, why_not = config_of(folder)
    finding = find(folder)
    table = figures()
    table.add_row("recipe", recipe_line(config) if config else f"unknown: {why_not}")
    table.add_row("score", score(finding) + (f" ({config.checkpointing.metric_name})" if config else ""))
    table.add_row("state", state(finding))
    yield Text(str(folder), style="bold")
    yield table
    yield file_table(folder)
    if not finding.fault:
        here = shlex.quote(str(folder))
        ways = {
            "evaluate": f"tandem eval {here}",
            "export": f"tandem export {here} OUT",
            "branch": f"tandem train {here}/{CONFIG} checkpointing.resume={here} run_dir=NEW",
        }
        if (folder / "critic").is_dir():
            ways["its critic"] = f"tandem train RECIPE value.warm_start={here}/critic"
        yield commands(ways)


def config_of(folder: Path) -> tuple[Config | None, str]:
    """The effective config kept in a folder, or None and why there is none."""
    if not (folder / CONFIG).is_file():
        return None, f"it has no {CONFIG}"
    try:
        return load(str(folder / CONFIG)).config, ""
    except (ValueError, OSError) as error:
        return None, f"{CONFIG} cannot be read: {str(error).splitlines()[0]}"


def find(folder: Path) -> Finding:
    """Hash a checkpoint. What is wrong is found, not raised; so is what vanishes meanwhile."""
    bytes_there = size_of(folder)
    if folder.name.endswith(vault.PARTIAL):
        return Finding(folder, None, bytes_there, "half-written: a run is at it, or was killed at it")
    if not (folder / vault.MARKER).is_file():
        return Finding(folder, None, bytes_there, f"not whole, without {vault.MARKER}: it does not count")
    try:
        manifest = vault.verified(folder)
    except (ValueError, OSError) as error:
        return Finding(folder, None, bytes_there, "damaged: " + str(error).replace(f"{folder}/", ""))
    return Finding(folder, manifest.score, bytes_there, "")


def summary(run_dir: Path, config: Config | None, why_not: str) -> Table:
    """Recipe, steps, accuracy, reward, and the prompts that no step has trained on."""
    records = list(json_lines(run_dir / METRICS))
    rewards, accuracies = values(records, REWARD), values(records, ACCURACY)
    table = figures()
    table.add_row("recipe", recipe_line(config) if config else f"unknown: {why_not}")
    asked = f" of {config.algorithm.max_num_steps}" if config else ""
    table.add_row("steps", f"{rewards[-1][0] if rewards else 0}{asked}")
    if accuracies:
        better = max(accuracies, key=lambda pair: pair[1])
        table.add_row("accuracy", f"{at(accuracies[0])} -> best {at(better)} -> latest {at(accuracies[-1])}")
    if rewards:
        table.add_row("reward", f"{at(rewards[0])} -> {at(rewards[-1])}")
    reasons = untrained(run_dir / UNTRAINED)
    counted = ", ".join(f"{count} {why}" for why, count in reasons.most_common())
    table.add_row("untrained", f"{reasons.total()} prompts" + (f": {counted}" if counted else ""))
    return table


def recipe_line(config: Config) -> str:
    """`quickstart: ppo, gae, from model quickstart`"""
    section = "ppo" if config.ppo else "grpo"
    return f"{config.name}: {section}, {config.algorithm.adv_estimator.name}, from model {config.policy.model_name}"


def values(records: list[dict], name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric wherever it was written and finite."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None and "step" in record]


def at(value: tuple[int, float]) -> str:
    return f"{value[1]:.3f} (step {value[0]})"


def untrained(path: Path) -> Counter[str]:
    """Reasons, each prompt once: a run that was killed and resumed may name it again."""
    latest = {record.get("index"): str(record.get("why")) for record in json_lines(path)}
    return Counter(latest.values())


def json_lines(path: Path) -> Iterator[dict]:
    """The objects of a file of JSON lines. What a kill cut off is passed over; no file is no lines."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def checkpoint_table(directory: Path, findings: list[Finding]) -> Table:
    """Score, size and state of each, and which are `latest` and `best`."""
    pointers = {name: pointed(directory / name) for name in (vault.LATEST, vault.BEST)}
    table = Table(title="checkpoints", title_justify="left", title_style="bold")
    for name in ("", "score", "size"):
        table.add_column(name, no_wrap=True, justify="right" if name else "left")
    table.add_column("is")
    table.add_column("state", overflow="fold")
    for finding in findings:
        marks = ", ".join(mark for mark, name in pointers.items() if name == finding.path.name)
        table.add_row(finding.path.name, score(finding), size(finding.bytes), marks, state(finding))
    return table


def pointed(pointer: Path) -> str:
    """The name that `latest` or `best` holds; "" without one."""
    return pointer.read_text(errors="replace").strip() if pointer.is_file() else ""


def score(finding: Finding) -> str:
    return "-" if finding.score is None else f"{finding.score:.4g}"


def state(finding: Finding) -> Text:
    return Text(finding.fault, style="red") if finding.fault else Text("sound", style="green")


def file_table(folder: Path) -> Table:
    """What lies in the folder, with sizes, subfolders as wholes."""
    table = Table(title="files", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for entry in sorted(folder.iterdir()):
        table.add_row(Text(entry.name + "/" * entry.is_dir()), size(size_of(entry)))
    return table


def ways_on(run_dir: Path, config: Config | None, sound: list[Finding]) -> dict[str, str]:
    """What can be done with a run -> the command."""
    here = shlex.quote(str(run_dir))
    if config is None and not sound:
        return {"begin": f"tandem train RECIPE run_dir={here}"}
    ways = {"go on": f"tandem train {here}"} if config else {}
    steps = config.algorithm.max_num_steps if config else 0
    if config and any(finding.path.name == f"step_{steps:06d}" for finding in sound):
        section = "ppo" if config.ppo else "grpo"
        ways["go on"] += f" {section}.max_num_steps={2 * steps}  (it has all {steps})"
    if sound:
        newest = shlex.quote(str(sound[-1].path))
        ways["evaluate"] = f"tandem eval {here if config else newest}"
        ways["export"] = f"tandem export {here} OUT"
        ways["look closer"] = f"tandem show {newest}"
    return ways


def commands(ways: dict[str, str]) -> Text:
    width = max(map(len, ways)) + 2
    return Text("\n".join(f" {what:<{width}}{command}" for what, command in ways.items()))


def figures() -> Table:
    """Names and values; long values fold."""
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    return table


def size_of(path: Path) -> int:
    """Bytes of a file, or of everything in a folder. What vanishes meanwhile counts nothing."""
    files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def size(count: float) -> str:
    """`17 B`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
