"""The table for what surrounds training: checkpoints, logs, machines."""

from __future__ import annotations

from tandem.config.nemo_rl.entry import (
    Entry,
    Outcome,
    by,
    implied,
    implied_by,
    lacking,
    mapped,
    nothing,
    refused,
    renamed,
    same,
)
from tandem.config.nemo_rl.source import Source
from tandem.config.schema import Plain

SINKS = ("wandb", "mlflow", "swanlab", "tensorboard", "gpu_monitoring")


def under_ray(source: Source) -> bool:
    """Whether the run has more than one process."""
    places = [source.get(f"cluster.{name}", 1) for name in ("num_nodes", "gpus_per_node")]
    return places != [1, 1] or not source.get("policy.generation.colocated.enabled", True)


def _metric(source: Source, key: str, value: Plain) -> Outcome:
    match value:
        case None:
            return nothing("null")
        case "val_reward" | "val:accuracy" | "val:reward":
            return mapped({key: "val:accuracy"})
        case "train:reward" | "train_reward":
            return mapped({key: "train:rollout/reward"})
    return refused("known are val:accuracy and train:reward; ours are `val:` or `train:` and a name of metrics.jsonl")


def _directory(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("null") if value is None else mapped({"run_dir": value})


def _sink(name: str, section: str, target: str) -> Entry:
    """A key of a log that is written only where it is switched on."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if not source.get(f"logger.{section}_enabled", False):
            return nothing(f"{section}_enabled is not set")
        return nothing("null") if value is None else mapped({target: value})

    return by(f"logger.{section}.{name}", target, f"where `{section}_enabled` is true", rule)


def _unused_sink(source: Source, key: str, value: Plain) -> Outcome:
    section = key.split(".")[1].removesuffix("_monitoring")
    switch = {"gpu": "monitor_gpus"}.get(section, f"{section}_enabled")
    if not source.get(f"logger.{switch}", False) or value in ({}, None, False):
        return nothing(f"{switch} is not set")
    return refused("no such setting")


def _processes(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({key: value} | ({"cluster.launch": "ray"} if under_ray(source) else {}))


ENTRIES: tuple[Entry, ...] = (
    same(
        "checkpointing.enabled checkpointing.save_period checkpointing.keep_top_k checkpointing.higher_is_better "
        "checkpointing.checkpoint_must_save_by logger.num_val_samples_to_print"
    ),
    by("checkpointing.checkpoint_dir", "run_dir", "a run keeps all that it writes in one directory", _directory),
    by("checkpointing.metric_name", "checkpointing.metric_name", "val:accuracy, train:rollout/reward", _metric),
    implied(
        "checkpointing.model_save_format checkpointing.save_consolidated checkpointing.save_data_plane "
        "checkpointing.is_async checkpointing.model_cache_dir checkpointing.model_repo_id "
        "checkpointing.resume_if_exists",
        "a checkpoint is whole, in safetensors; a run in its directory goes on from the newest",
    ),
    lacking("checkpointing.save_optimizer", "a checkpoint holds the optimizer", (None, True)),
    implied("logger.log_dir", "logs are in `run_dir`"),
    implied_by(
        "logger.wandb_enabled logger.mlflow_enabled",
        "the section `logger.wandb` or `logger.mlflow` is there, or it is not",
        lambda source, key, value: nothing("by its section"),
    ),
    renamed("logger.tensorboard_enabled", "logger.tensorboard"),
    _sink("project", "wandb", "logger.wandb.project"),
    _sink("name", "wandb", "logger.wandb.name"),
    _sink("experiment_name", "mlflow", "logger.mlflow.experiment_name"),
    _sink("tracking_uri", "mlflow", "logger.mlflow.tracking_uri"),
    lacking(
        "logger.swanlab_enabled logger.monitor_gpus", "TensorBoard, W&B and MLflow are there; GPUs are not watched"
    ),
    Entry(
        (*(f"logger.{name}.**" for name in SINKS), "logger.tensorboard"),
        "not supported",
        "implied where it is switched off",
        _unused_sink,
    ),
    by(
        "cluster.num_nodes cluster.gpus_per_node",
        "cluster",
        "the same, with `launch: ray` for more than one GPU",
        _processes,
    ),
    implied(
        "cluster.master_port_range_low cluster.master_port_range_high cluster.segment_size",
        "Ray chooses ports and places",
    ),
    implied("defaults *._override_", "read: the table shows what is inherited too"),
)
