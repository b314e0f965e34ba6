"""The places metrics are written to: JSON lines, TensorBoard, and the services that a run asks for."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from tandem.config.run import Logger
from tandem.metrics.previous import set_aside
from tandem.roles import Sink

log = logging.getLogger(__name__)


def open_sinks(
    config: Logger, *, run_dir: Path, run_config: Mapping[str, object], resume_step: int | None = None
) -> list[Sink]:
    """Every sink of the run but the console. `resume_step`: the last step of the checkpoint, None for a new run."""
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl", resume_step=resume_step)]
    if config.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard", resume_step=resume_step))
    if config.wandb is not None:
        from tandem.metrics.wandb import WandbSink

        sinks.append(WandbSink(config.wandb, run_dir=run_dir, run_config=run_config, resume_step=resume_step))
    if config.mlflow is not None:
        from tandem.metrics.mlflow import MlflowSink

        sinks.append(MlflowSink(config.mlflow, run_dir=run_dir, run_config=run_config, resume_step=resume_step))
    return sinks


class JsonLines:
    """One JSON object a line, flushed at each write. JSON has no NaN and no infinity: both are written as null.

    A new run sets an earlier file aside. A resumed run drops what was written after the checkpoint and appends.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            set_aside(path)
        elif path.exists():
            _drop_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files of TensorBoard. A resumed run hides the steps after its checkpoint and writes them anew."""

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import: only when it is on

        if resume_step is None:
            set_aside(directory)
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def first_value(path: Path, name: str) -> float | None:
    """The first value of a metric in a metrics.jsonl: what a resumed run shows as its start. None if there is none."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as lines:
        records = (json.loads(line) for line in lines if _step_of(line) is not None)
        return next((record[name] for record in records if record.get(name) is not None), None)


def read_steps(path: Path, *, up_to: int) -> list[dict[str, float]]:
    """The records of the steps that a metrics.jsonl holds, without what was not finite; validations are left out."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if (step := _step_of(line)) is not None and step <= up_to]
    finite = [{name: value for name, value in record.items() if value is not None} for record in records]
    return [record for record in finite if "time/step_s" in record]


def _drop_after(path: Path, resume_step: int) -> None:
    """Keep the lines up to `resume_step`. The file is replaced whole: a kill leaves the old one or the new one."""
    kept = path.with_name(f"{path.name}.tmp")
    with path.open(encoding="utf-8") as lines, kept.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines, start=1):
            step = _step_of(line)
            if step is None:
                log.warning("%s:%d is no metrics record (cut off by a kill?): dropped", path, number)
            elif step <= resume_step:
                file.write(line)
    kept.replace(path)


def _step_of(line: str) -> int | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
