"""Metrics to MLflow; the only home of its import."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

try:
    import mlflow  # type: ignore  # an extra: most checkouts do not have it
except ImportError as error:
    raise ValueError(
        "logger.mlflow needs the package mlflow: `uv sync --extra mlflow`, or remove logger.mlflow"
    ) from error

from tandem.config.run import Mlflow

RUN_ID = "mlflow_id.txt"
LAST_STEP = "step"  # logged with every record: tells a resumed run which steps MLflow already has
MAX_PARAM = 500  # characters MLflow stores of a parameter


class MlflowSink:
    """One MLflow run for one run directory. A resumed run skips the steps that MLflow already has."""

    def __init__(self, config: Mlflow, *, run_dir: Path, run_config: Mapping[str, object]) -> None:
        if config.tracking_uri is not None:
            mlflow.set_tracking_uri(config.tracking_uri)
        mlflow.set_experiment(config.experiment_name)
        kept = run_dir / RUN_ID
        if kept.exists():
            run = mlflow.start_run(run_id=kept.read_text(encoding="utf-8"))
        else:
            run = mlflow.start_run(run_name=run_dir.name)
            mlflow.log_params({key: json.dumps(section)[:MAX_PARAM] for key, section in run_config.items()})
        kept.write_text(run.info.run_id, encoding="utf-8")
        self._known = run.data.metrics[LAST_STEP] if LAST_STEP in run.data.metrics else -1.0

    def write(self, step: int, record: Mapping[str, float]) -> None:
        if step > self._known:
            # MLflow's databases have no NaN: a value that is not finite is left out.
            finite = {name: value for name, value in record.items() if math.isfinite(value)}
            mlflow.log_metrics({**finite, LAST_STEP: float(step)}, step=step)

    def close(self) -> None:
        mlflow.end_run()
