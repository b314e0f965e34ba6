"""What a recipe wants of a machine beside what every run needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.config import Config
from tandem.config.data_plane import MemoryDataPlane, TransferQueueDataPlane
from tandem.config.load import load


def wanted_by(recipe: str, overrides: Sequence[str]) -> tuple[Path, set[str]]:
    """Where it will write, and its extras."""
    config = load(recipe, overrides).config
    return Path(config.run_dir or "runs").expanduser(), extras_of(config)


def extras_of(config: Config) -> set[str]:
    """The extras that a recipe wants."""
    sections = [config.policy, *([config.value] if config.value else [])]
    wants = {
        "ray": config.cluster.launch == "ray" or not isinstance(config.chosen_data_plane, MemoryDataPlane),
        "vllm": config.policy.generation.engine.name == "vllm",
        "megatron": any(section.backend.name == "megatron" for section in sections),
        "transferqueue": isinstance(config.chosen_data_plane, TransferQueueDataPlane),
        "wandb": config.logger.wandb is not None,
        "mlflow": config.logger.mlflow is not None,
    }
    return {name for name, wanted in wants.items() if wanted}
