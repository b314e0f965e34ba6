"""Flight records for a report: distributions of whole steps, and a few samples with every token's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from tandem.report.run import FLIGHT, Run, one_line

MOST_STEPS = 3  # records that are read: the first, the middle one, the last
SAMPLES = 6  # of a step, in the token view
TOKENS = 24_000  # of all samples of the token view together
Row = dict[str, np.ndarray]
Decode = Callable[[Sequence[int]], list[str]]  # ids -> the text of each


@dataclass(frozen=True)
class Sample:
    """One recorded sample. `row` holds its columns; `why` says what it was chosen for."""

    run: str
    step: int
    prompt_id: str
    why: str
    reward: float
    row: Row


@dataclass
class Flight:
    """What was read of a run's records. `learned`: values and returns of the tokens that the critic learned from."""

    steps: list[int] = field(default_factory=list)
    lengths: dict[int, np.ndarray] = field(default_factory=dict)  # step -> tokens the policy wrote, by sample
    staleness: dict[int, np.ndarray] = field(default_factory=dict)  # step -> versions behind, by token
    learned: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


def read_flight(run: Run) -> Flight:
    """The first, the middle and the last record; what cannot be read is noted in the run's notes."""
    flight = Flight()
    if not (run.path / FLIGHT).is_dir():
        run.notes.append("no flight/ (logger.flight_recorder={} records every token)")
        return flight
    from tandem.control.flight_recorder import recorded  # with torch: only where there are records

    places = recorded(run.path / FLIGHT)
    if not places:
        run.notes.append("flight/ holds no record")
    for number in sorted({0, len(places) // 2, len(places) - 1} if places else ()):
        try:
            read_step_into(flight, run, places[number])
        except (ValueError, OSError, KeyError, SafetensorError) as error:
            run.notes.append(f"{FLIGHT}/{places[number].name} cannot be read: {one_line(error)}")
    return flight


def read_step_into(flight: Flight, run: Run, place: Path) -> None:
    """One record's distributions and samples."""
    from tandem.control.flight_recorder import read_step
    from tandem.plane.files import FILE

    record = read_step(place)
    keys = [(key, group.prompt_id) for group in record.groups for key in group.keys]
    with safe_open(place / FILE, framework="numpy") as file:
        there = set(file.keys())

        def cells(key: int) -> Row:
            prefix = f"{key}/"
            names = [name.removeprefix(prefix) for name in there if name.startswith(prefix)]
            return {name: file.get_tensor(prefix + name) for name in names if not name.endswith("/logits")}

        brief = {key: brief_of(file.get_tensor, there, key) for key, _ in keys}
        rows = {key: cells(key) for key in chosen(brief)}
    masks = {key: cell["mask"].astype(bool) for key, cell in brief.items()}
    flight.steps.append(record.step)
    flight.lengths[record.step] = np.array([mask.sum() for mask in masks.values()])
    behind = [record.version - cell["versions"][masks[key]] for key, cell in brief.items()]
    flight.staleness[record.step] = np.concatenate(behind)
    of_critic = [cell for cell in brief.values() if {"values", "returns", "value_weights"} <= cell.keys()]
    if of_critic:
        values, returns = (
            np.concatenate([cell[name][cell["value_weights"] > 0] for cell in of_critic]).astype(np.float64)
            for name in ("values", "returns")
        )
        flight.learned[record.step] = values, returns
    reasons, prompts = chosen(brief), dict(keys)
    flight.samples += [
        Sample(run.name, record.step, prompts[key], reasons[key], float(brief[key]["reward"]), row)
        for key, row in rows.items()
    ]


def brief_of(get: Callable[[str], np.ndarray], there: set[str], key: int) -> Row:
    """The columns that distributions and the choice of samples need."""
    wanted = ("mask", "versions", "reward", "values", "returns", "value_weights", "advantages")
    return {name: get(f"{key}/{name}") for name in wanted if f"{key}/{name}" in there}


def chosen(brief: dict[int, Row]) -> dict[int, str]:
    """Which samples to show, and why: best and worst reward, the largest advantage, the longest, then in order."""
    reward = {key: float(cell["reward"]) for key, cell in brief.items()}
    push = {key: float(np.abs(cell.get("advantages", np.zeros(1))).max(initial=0)) for key, cell in brief.items()}
    length = {key: int(cell["mask"].sum()) for key, cell in brief.items()}
    if not brief:
        return {}
    wanted = [
        (max(reward, key=reward.__getitem__), "highest reward"),
        (min(reward, key=reward.__getitem__), "lowest reward"),
        (max(push, key=push.__getitem__), "largest advantage"),
        (max(length, key=length.__getitem__), "longest"),
    ]
    found: dict[int, str] = {}
    for key, why in [*wanted, *((key, "in order") for key in brief)]:
        if key in found and why != "in order":
            found[key] += f", {why}"
        elif key not in found and len(found) < SAMPLES:
            found[key] = why
    return found


def calibration(values: np.ndarray, returns: np.ndarray, bins: int = 10) -> tuple[list[float], list[float]]:
    """Mean value and mean return of equally many tokens each, by value: on the diagonal the critic is calibrated."""
    order = np.argsort(values, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [float(values[part].mean()) for part in parts], [float(returns[part].mean()) for part in parts]


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(return - value) / Var(return); None where the returns do not vary."""
    spread = float(returns.var()) if len(returns) else 0.0
    return 1 - float((returns - values).var()) / spread if spread > 0 else None
