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
from tandem.metrics.previous import set_aside

RUN_ID = "mlflow_id.txt"
LAST_STEP = "step"  # logged with every record: tells a resumed run which steps MLflow already has
MAX_PARAM = 500  # characters MLflow stores of a parameter


class MlflowSink:
    """One MLflow run for one run, over its resumes. A resume skips the steps that MLflow already has whole."""

    def __init__(
        self, config: Mlflow, *, run_dir: Path, run_config: Mapping[str, object], resume_step: int | None = None
    ) -> None:
        kept = run_dir / RUN_ID
        if resume_step is None:
            set_aside(kept)
        if config.tracking_uri is not None:
            mlflow.set_tracking_uri(config.tracking_uri)
        try:
            mlflow.set_experiment(config.experiment_name)
            if kept.exists():
                run = mlflow.start_run(run_id=kept.read_text(encoding="utf-8"))
            else:
                run = mlflow.start_run(run_name=run_dir.name)
                mlflow.log_params({key: json.dumps(section)[:MAX_PARAM] for key, section in run_config.items()})
        except mlflow.exceptions.MlflowException as error:
            raise ValueError(
                f"MLflow cannot use {mlflow.get_tracking_uri()} ({error}): set logger.mlflow.tracking_uri to the"
                " address of an MLflow server; a local database needs the whole package (`uv pip install mlflow`)"
            ) from error
        kept.write_text(run.info.run_id, encoding="utf-8")
        self._known = run.data.metrics.get(LAST_STEP, -1.0)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        if step >= self._known:  # of the last one it may lack a part
            # MLflow's databases have no NaN: a value that is not finite is left out.
            finite = {name: value for name, value in record.items() if math.isfinite(value)}
            mlflow.log_metrics({**finite, LAST_STEP: float(step)}, step=step)

    def close(self) -> None:
        mlflow.end_run()
