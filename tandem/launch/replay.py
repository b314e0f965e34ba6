"""`tandem replay`: compute a recorded step's advantages and losses again, on a CPU, and say whether they match.

The step runs through PPO itself and the objectives themselves. Only the models are played: a trainer that gives what
was recorded of the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tandem.config import Config
from tandem.config.load import load
from tandem.control.flight_recorder import StepRecord, folder, number_of, read_step, recorded
from tandem.launch.build import algorithm_over
from tandem.launch.run_dir import CONFIG, FLIGHT
from tandem.launch.trainers import model_config_of, names_of
from tandem.metrics.reduce import flatten
from tandem.plane.files import read_rows
from tandem.plane.memory import MemoryPlane
from tandem.roles import WriteFiles
from tandem.train.backend import Output, Pack
from tandem.train.objectives import Objective, PolicyObjective, ValueObjective
from tandem.train.packs import pack_rows, unpack_column
from tandem.train.worker import is_finite
from tandem.types import Batch, Metrics, merge

ESTIMATED = ("advantages", "weights", "nll_weights", "returns", "value_weights")
RETRACED = ("ratio", "clip")
Rows = Mapping[str, Mapping[int, Tensor]]  # column -> key -> its row


@dataclass(frozen=True)
class Difference:
    """One column or metric: the largest difference, over the largest number that was recorded (at least 1)."""

    name: str
    count: int
    largest: float
    relative: float


class RecordedTrainer:
    """A Trainer that gives what was recorded of a real one: nothing is inferred, losses are computed anew."""

    def __init__(
        self, name: str, objective: Objective | None, rows: Rows, *, plane: MemoryPlane, multiple: int
    ) -> None:
        self._name = name
        self._objective = objective
        self._rows = rows
        self._plane = plane
        self._multiple = multiple
        self.retraced: dict[str, dict[int, Tensor]] = {}

    async def infer(self, batch: Batch, out: str) -> Metrics:
        """The column is in the plane already."""
        return {}

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        """The losses of the recorded micro-batches."""
        assert self._objective is not None, "a reference only infers"
        columns = await self._plane.get(batch.keys, self._objective.columns)
        metrics: Metrics = {}
        for bin_ in self._bins(batch):
            pack = pack_rows(batch, columns, bin_, self._multiple)
            output = self._output(batch, pack)
            _, told = self._objective(output, pack, scale)
            self._retrace(batch, pack, output)
            metrics = merge(metrics, told if is_finite(told) else {})
        return {f"{self._name}/{name}": metric for name, metric in metrics.items()}

    async def optim_step(self, divisor: float) -> Metrics:
        """Nothing is learned."""
        return {}

    def _row(self, batch: Batch, name: str, key: int) -> Tensor:
        assert batch.trace is not None, "a replay is traced"
        column = batch.trace.column(self._name, name)
        if key not in self._rows.get(column, {}):
            raise ValueError(
                f"sample {key} has no column {column} in the record: the {self._name} did not learn from it"
            )
        return self._rows[column][key]

    def _bins(self, batch: Batch) -> list[list[int]]:
        """The batch's rows by micro-batch, in their order there."""
        places = [
            (int(self._row(batch, "micro_batch", key)), int(self._row(batch, "offset", key)), row)
            for row, key in enumerate(batch.keys)
        ]
        return [[row for _, _, row in bin_] for _, bin_ in groupby(sorted(places), key=lambda place: place[0])]

    def _output(self, batch: Batch, pack: Pack) -> Output:
        def laid(name: str) -> Tensor:
            rows = torch.cat([self._row(batch, name, key) for key in pack.keys])
            return torch.cat([rows, rows.new_zeros(len(pack.tokens_P) - len(rows), *rows.shape[1:])])

        if self._name == "actor":
            return Output(laid("logprobs"), entropy_P=laid("entropy"))
        assert batch.trace is not None, "a replay is traced"
        binned = batch.trace.column(self._name, "logits") in self._rows
        return Output(laid("values"), logits_PB=laid("logits") if binned else None)

    def _retrace(self, batch: Batch, pack: Pack, output: Output) -> None:
        assert self._objective is not None, "asked while it learns"
        assert batch.trace is not None, "a replay is traced"
        for name, column_P in self._objective.trace(output, pack).items():
            if name in RETRACED:
                kept = self.retraced.setdefault(batch.trace.column(self._name, name), {})
                alone = replace(pack, rows=tuple(range(len(pack.keys))))
                rows = unpack_column([alone], [column_P], len(pack.keys))
                kept.update(zip(pack.keys, rows, strict=True))

    async def park(self) -> None:
        """Holds no device."""

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        raise RuntimeError("a recorded trainer has no weights")

    async def load(self, directory: Path) -> None:
        raise RuntimeError("a recorded trainer has no weights")

    async def load_weights(self, directory: Path) -> None:
        raise RuntimeError("a recorded trainer has no weights")

    async def close(self) -> None:
        """Holds nothing."""


@dataclass
class Replayed:
    """What a replay found: differences of columns and of metrics."""

    record: StepRecord
    tokens: int
    columns: list[Difference] = field(default_factory=list)
    metrics: list[Difference] = field(default_factory=list)

    def wrong(self, tolerance: float) -> list[Difference]:
        return [one for one in (*self.columns, *self.metrics) if not one.relative <= tolerance]


def replay(run: str, step: int, *, tolerance: float) -> int:
    """Print what a replay of a step finds; 0 if it matches, else 1. ValueError when there is no such record."""
    found = replay_step(Path(run).expanduser(), step)
    console, wrong = Console(), found.wrong(tolerance)
    table = Table("computed again", "numbers", "largest difference", "relative", title=f"step {step} of {run}")
    for one in (*found.columns, *found.metrics):
        table.add_row(
            one.name, str(one.count), f"{one.largest:.3g}", f"{one.relative:.3g}", style="red" * (one in wrong)
        )
    console.print(table)
    samples = sum(len(group.keys) for group in found.record.groups)
    what = f"{samples} samples, {found.tokens} tokens, {len(found.columns)} columns, {len(found.metrics)} metrics"
    verdict = f"does not match in {', '.join(one.name for one in wrong)}" if wrong else "matches"
    console.print(f"step {step} {verdict} (within {tolerance:g}): {what}", soft_wrap=True, highlight=False)
    return 1 if wrong else 0


def replay_step(run_dir: Path, step: int) -> Replayed:
    """Compute a recorded step again."""
    place = folder(run_dir / FLIGHT, step)
    if not place.is_dir():
        there = [str(number_of(known)) for known in recorded(run_dir / FLIGHT)]
        have = f"there are {', '.join(there)}" if there else "there are none: train with logger.flight_recorder={}"
        raise ValueError(f"{run_dir} has no flight record of step {step}; {have}")
    config = load(str(run_dir / CONFIG)).config
    return asyncio.run(_replay(config, place))


async def _replay(config: Config, place: Path) -> Replayed:
    record, plane = read_step(place), MemoryPlane()
    rows = {name: dict(zip(keys, tensors, strict=True)) for name, (keys, tensors) in read_rows(place).items()}
    for name, column in rows.items():
        if name not in ESTIMATED and not name.startswith("epoch_"):
            await plane.put(list(column), {name: list(column.values())})
    trainers = {
        name: RecordedTrainer(
            name,
            objective_of(name, config),
            rows,
            plane=plane,
            multiple=model_config_of(name, config).sequence_packing.multiple,
        )
        for name in names_of(config)
    }
    algorithm = algorithm_over(config, plane, trainers, span=lambda _: nullcontext(), traced=True)
    algorithm.restore(record.state)
    learned = flatten(await algorithm.step(chunks_of(record), step=record.step - 1, train_policy=record.train_policy))
    found = Replayed(record, sum(int(mask.sum()) for mask in rows["mask"].values()))
    for name in (name for name in ESTIMATED if name in rows):
        keys = list(rows[name])
        found.columns.append(difference(name, (await plane.get(keys, [name]))[name], [rows[name][key] for key in keys]))
    for name, again in ((name, again) for trainer in trainers.values() for name, again in trainer.retraced.items()):
        found.columns.append(difference(name, list(again.values()), [rows[name][key] for key in again]))
    for name in sorted(learned.keys() & record.metrics.keys()):
        ours, theirs = (torch.tensor([value], dtype=torch.float64) for value in (learned[name], record.metrics[name]))
        found.metrics.append(difference(name, [ours], [theirs]))
    return found


def objective_of(name: str, config: Config) -> Objective | None:
    """What the real trainer learned by."""
    if name == "critic":
        assert config.value_loss_fn is not None, "checked when loaded"
        return ValueObjective(config.value_loss_fn)
    return PolicyObjective(config.loss_fn) if name == "actor" else None


async def chunks_of(record: StepRecord) -> AsyncIterator[Batch]:
    """The step's samples as training took them."""
    for _, groups in groupby(record.groups, key=lambda group: group.chunk):
        together = list(groups)
        yield Batch(
            tuple(key for group in together for key in group.keys),
            tuple(length for group in together for length in group.lengths),
            tuple(group.index for group in together for _ in group.keys),
            record.components,
        )


def difference(name: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Difference:
    """NaN where both have it agrees; anything else with it does not."""
    ours, theirs = (torch.cat([x.double().flatten() for x in rows]) for rows in (found, wanted))
    apart = torch.where((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs())
    largest = apart.nan_to_num(nan=torch.inf).max().item() if len(apart) else 0.0
    scale = max(theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 0.0, 1.0)
    return Difference(name, len(apart), largest, largest / scale)
