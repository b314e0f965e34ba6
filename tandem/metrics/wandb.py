"""Metrics to Weights & Biases; the only home of its import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

try:
    import wandb  # type: ignore  # an extra: most checkouts do not have it
except ImportError as error:
    raise ValueError("logger.wandb needs the package wandb: `uv sync --extra wandb`, or remove logger.wandb") from error

from tandem.config.run import Wandb
from tandem.metrics.previous import set_aside

RUN_ID = "wandb_id.txt"


class WandbSink:
    """One W&B run for one run, over its resumes. W&B ignores a step it already has: a resume doubles nothing."""

    def __init__(
        self, config: Wandb, *, run_dir: Path, run_config: Mapping[str, object], resume_step: int | None = None
    ) -> None:
        kept = run_dir / RUN_ID
        if resume_step is None:
            set_aside(kept)
        run_id = kept.read_text(encoding="utf-8") if kept.exists() else None
        self._run = wandb.init(
            project=config.project,
            name=config.name or run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=dict(run_config),
        )
        kept.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, record: Mapping[str, float]) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()
