"""`tandem eval`: score the validation set with a run's weights, or with a recipe's model as it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.config import Config
from tandem.config.data_plane import MemoryDataPlane
from tandem.config.load import load
from tandem.launch.build import build_evaluator, build_house
from tandem.launch.export import checkpoint_of
from tandem.launch.local import LocalMachinery
from tandem.launch.process import quiet_libraries
from tandem.launch.run_dir import CONFIG
from tandem.launch.show import is_checkpoint
from tandem.types import Metrics
from tandem.weights.publisher import Publisher


def evaluate_target(target: str, overrides: Sequence[str]) -> None:
    """Print a table and write every answer to a file. Raises ValueError when the target is not one."""
    recipe, checkpoint = resolve(target)
    config = load(recipe, overrides).config
    if config.data.validation is None:
        raise ValueError(f"{target} has no data.validation; give one, e.g. data.validation.name=arithmetic")
    quiet_libraries()
    answers = Path("evals") / time.strftime("%Y%m%d-%H%M%S") if checkpoint is None else checkpoint.parents[1] / "evals"
    metrics = asyncio.run(evaluate(config, checkpoint, answers))
    table = Table("metric", "value", title=f"{target} ({checkpoint.name if checkpoint else 'untrained'})")
    for name, metric in metrics.items():
        table.add_row(name, f"{metric.value:.4g}")
    console = Console()
    console.print(table)
    console.print(f"answers: {answers}/", soft_wrap=True, highlight=False)


def resolve(target: str) -> tuple[str, Path | None]:
    """Run directory, checkpoint or recipe -> the recipe to load, and the checkpoint whose weights to use."""
    path = Path(target).expanduser()
    if not path.is_dir():
        return target, None
    checkpoint = checkpoint_of(target, best=False)
    return str((checkpoint if is_checkpoint(path) else path) / CONFIG), checkpoint


async def evaluate(config: Config, checkpoint: Path | None, answers: Path) -> Metrics:
    """Score the validation set once."""
    config = config.model_copy(update={"data_plane": MemoryDataPlane()})  # whichever plane the run has
    machinery = LocalMachinery(config)
    try:
        house = await build_house(config, machinery)
        if checkpoint is not None:
            actor = await machinery.start_trainer("actor", house.plane)
            await actor.load_weights(checkpoint / "actor")
            await Publisher(machinery.carrier(), [house.engine], pause="drain", recompute_kv=False).publish(0)
        evaluator = build_evaluator(config, house, answers)
        assert evaluator is not None, "checked above"
        step = int(checkpoint.name.removeprefix("step_")) if checkpoint else 0
        return await evaluator(step)
    finally:
        await machinery.close()
