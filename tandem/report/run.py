"""What a run directory holds, read with patience: a file that is missing or torn is said, and the rest is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

CONFIG, METRICS, TIMELINE = "config.yaml", "metrics.jsonl", "timeline.json"
HEALTH, UNTRAINED, VALIDATION, FLIGHT = "health.jsonl", "untrained.jsonl", "validation", "flight"
Record = Mapping[str, object]


@dataclass(frozen=True)
class Run:
    """One run. `notes` says what was missing or torn; `config` is {} and the lists are empty where it was."""

    name: str
    path: Path
    config: Record
    metrics: Sequence[Record]
    verdicts: Sequence[Record]
    untrained: Sequence[Record]
    events: Sequence[Record]  # of timeline.json, Chrome's trace events
    answers: Sequence[tuple[str, Sequence[Record]]]  # first and last validation: its file's stem, its lines
    notes: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Every metric that has a finite number, sorted."""
        return sorted({name for record in self.metrics for name in record if number(record[name]) is not None})

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """The metrics that match one of the patterns (`*`, `?`), in the order of the patterns."""
        names = self.names()
        found = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        return list(dict.fromkeys(found))

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric, without what was not finite."""
        points = [(number(record.get("step")), number(record.get(name))) for record in self.metrics]
        kept = [(step, value) for step, value in points if step is not None and value is not None]
        return [step for step, _ in kept], [value for _, value in kept]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Each run; two directories of one name get numbers. ValueError when one is no run directory."""
    runs: list[Run] = []
    for path in paths:
        name = path.resolve().name
        same = sum(run.path.resolve().name == name for run in runs)
        runs.append(read_run(path, f"{name} ({same + 1})" if same else name))
    return runs


def read_run(path: Path, name: str) -> Run:
    """One run directory. ValueError when it is none."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; give the directory of a run")
    if not any((path / known).exists() for known in (CONFIG, METRICS)):
        raise ValueError(
            f"{path} is no run directory: it has neither {CONFIG} nor {METRICS}; give the directory of a run"
        )
    notes: list[str] = []
    return Run(
        name=name,
        path=path,
        config=read_config(path / CONFIG, notes),
        metrics=read_lines(path / METRICS, notes),
        verdicts=read_lines(path / HEALTH, notes, expected=False),
        untrained=read_lines(path / UNTRAINED, notes, expected=False),
        events=read_lines(path / TIMELINE, notes, why="logger.timeline=true draws one"),
        answers=read_answers(path / VALIDATION, notes),
        notes=notes,
    )


def read_config(path: Path, notes: list[str]) -> Record:
    """The effective config, as it was written: of any version."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"no {path.name}")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {one_line(error)}")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} is no mapping of keys")
        return {}
    return found


def read_lines(path: Path, notes: list[str], *, expected: bool = True, why: str = "") -> list[Record]:
    """The JSON objects of a file, one a line; a comma after one and lone brackets (timeline.json) are no fault."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        if expected:
            notes.append(f"no {path.name}" + (f" ({why})" if why else ""))
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {one_line(error)}")
        return []
    records, torn = [], 0
    for line in (line.strip().removesuffix(",") for line in lines):
        if line in {"", "[", "]"}:
            continue
        try:
            found = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            records.append(found)
        else:
            torn += 1
    if torn:
        notes.append(f"{path.name}: {torn} torn line{'s' * (torn > 1)} left out")
    return records


def read_answers(directory: Path, notes: list[str]) -> list[tuple[str, list[Record]]]:
    """The first and the last validation; one alone if there is one."""
    files = sorted(directory.glob("step_*.jsonl"))
    if not files:
        notes.append(f"no {VALIDATION}/ (data.validation and ppo.val_period make answers)")
    return [(file.stem, read_lines(file, notes)) for file in ([files[0], files[-1]] if len(files) > 1 else files)]


def paired(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The first answer to each prompt of one validation, and of another: by set ("" where it is alone) and prompt."""

    def first(records: Sequence[Record]) -> dict[tuple[str, str], Record]:
        return {(str(r.get("set", "")), str(r.get("id"))): r for r in records if not r.get("sample")}

    then, now = first(before), first(after)
    return [(then[prompt], now[prompt]) for prompt in then if prompt in now]


def flat(config: Record, prefix: str = "") -> dict[str, str]:
    """Dotted keys and their values as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=str)
    return found


def differences(runs: Sequence[Run], *, ignored: Sequence[str] = ("run_dir",)) -> list[tuple[str, list[str]]]:
    """Keys whose values are not the same in all runs, with each run's value ("-" where it has none)."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, "-") for config in configs]) for key in keys if key not in ignored]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def one_line(error: Exception) -> str:
    """A cause without line breaks, at most 200 characters."""
    return " ".join(str(error).split())[:200]
