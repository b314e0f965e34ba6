"""`tandem eval`: score data with a run's weights, with a model that no run has trained, or with a recipe's model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tandem.config import Config
from tandem.config.data_plane import MemoryDataPlane
from tandem.config.load import algorithm_of, load
from tandem.config.recipes import shipped_recipes
from tandem.launch.build import House, build_evaluator, build_house
from tandem.launch.eval_data import data_override
from tandem.launch.export import checkpoint_of
from tandem.launch.local import LocalMachinery
from tandem.launch.models import shape_of
from tandem.launch.process import prepare, quiet_libraries
from tandem.launch.run_dir import CONFIG
from tandem.launch.show import CHECKPOINTS, is_checkpoint
from tandem.types import Metrics
from tandem.weights.publisher import Publisher

MODEL_RECIPE = "evaluate"  # ships with the package: what a model that comes without a recipe is evaluated with


@dataclass(frozen=True)
class Asked:
    """What the command's options ask for. None: as the recipe says."""

    data: tuple[str, ...] = ()
    verifier: str | None = None
    k: int | None = None
    temperature: float | None = None
    limit: int | None = None
    batch: int | None = None
    out: str | None = None

    def overrides(self, algorithm: str) -> Iterator[tuple[str, str]]:
        """Option -> `key=value`."""
        if self.verifier is not None:
            yield "--verifier", f"env.verifier.name={self.verifier}"
        if self.k is not None:
            yield "--k", f"{algorithm}.num_val_generations_per_prompt={self.k}"
        if self.temperature is not None:
            yield "--temperature", f"policy.generation.val_temperature={self.temperature}"
        if self.limit is not None:
            yield "--limit", f"{algorithm}.max_val_samples={self.limit}"
        elif self.data:
            yield "--data", f"{algorithm}.max_val_samples=null"  # a run looks at some prompts now and then, this at all
        if self.batch is not None:
            yield "--batch", f"{algorithm}.val_batch_size={self.batch}"


@dataclass(frozen=True)
class Target:
    """What is evaluated: a recipe with overrides of its own, and the checkpoint whose weights to use, if any."""

    recipe: str
    checkpoint: Path | None = None
    overrides: tuple[str, ...] = ()
    untrained: str = "untrained"  # what to call the weights where there is no checkpoint

    @property
    def step(self) -> int:
        return int(self.checkpoint.name.removeprefix("step_")) if self.checkpoint else 0

    @property
    def weights(self) -> str:
        return self.checkpoint.name if self.checkpoint else self.untrained


def evaluate_target(name: str, overrides: Sequence[str], asked: Asked) -> None:
    """Print a table and write every answer to a file. Raises ValueError when the target is not one."""
    quiet_libraries()
    target = resolve(name, overrides)
    config = config_of(target, overrides, asked)
    if config.data.validation is None:
        raise ValueError(f"{name} has no data.validation: say what to score with --data, e.g. --data arithmetic")
    answers = place_of(target, asked.out)
    console = Console()
    prepare(config.cluster)
    metrics = asyncio.run(evaluate(config, target, answers))
    (answers / "metrics.json").write_text(
        json.dumps({name: metric.value for name, metric in metrics.items()}, indent=2) + "\n", encoding="utf-8"
    )
    console.print(f"{name} ({target.weights}): {how(config)}", soft_wrap=True, highlight=False, markup=False)
    console.print(table_of(list(config.data.validation_sets), metrics))
    console.print(f"answers: {answers}/step_{target.step:06d}.jsonl", soft_wrap=True, highlight=False)


def config_of(target: Target, overrides: Sequence[str], asked: Asked) -> Config:
    """The config of an evaluation. ConfigError when an option and an override say the same key."""
    algorithm = algorithm_of(target.recipe, overrides)
    asks = dict(asked.overrides(algorithm))
    for option, override in asks.items():
        key, _, _ = override.partition("=")
        if option != "--data" and any(text.partition("=")[0].strip() == key for text in overrides):
            raise ValueError(f"{option} and {key}=... say the same thing: give one of them")
    begin = [*target.overrides]
    if asked.data:
        begin += [
            data_override(asked.data),
            f"{algorithm}.val_at_end=true",
        ]  # a recipe that never validates has that off
    unless_written = [asks.pop("--data")] if "--data" in asks else []
    forget = "data.validation" if asked.data else None
    return load(target.recipe, [*begin, *unless_written, *overrides, *asks.values()], forget=forget).config


def resolve(name: str, overrides: Sequence[str] = ()) -> Target:
    """Run directory, checkpoint, model folder, model on a hub, or recipe."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file() and not is_checkpoint(path) and not (path / CONFIG).is_file():
            return model_target(str(path), overrides)
        if not is_checkpoint(path) and not (path / CHECKPOINTS).is_dir() and not (path / CONFIG).is_file():
            raise ValueError(
                f"{name} is neither a run directory (with {CONFIG}), nor a checkpoint, nor a model (with config.json)"
            )
        checkpoint = checkpoint_of(name, best=False)
        return Target(str((checkpoint if is_checkpoint(path) else path) / CONFIG), checkpoint)
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~")) and path.suffix not in (".yaml", ".yml")
    if name not in shipped_recipes() and is_hub_name and not path.exists():
        return model_target(name, overrides)
    return Target(name)


def model_target(name: str, overrides: Sequence[str]) -> Target:
    """A model without a recipe: the precision it was saved in, and lengths that it has positions for."""
    shape = shape_of(name, trust_remote_code="policy.trust_remote_code=true" in overrides)
    positions = shape.config.get_text_config().max_position_embeddings
    precision = "float32" if shape.config.dtype is torch.float32 else "bfloat16"
    defaults = load(MODEL_RECIPE, [f"policy.model_name={json.dumps(name)}"]).config.policy
    length = min(defaults.max_total_sequence_length, positions)
    return Target(
        MODEL_RECIPE,
        overrides=(
            f"policy.model_name={json.dumps(name)}",
            f"policy.precision={precision}",
            f"policy.max_total_sequence_length={length}",
            f"policy.generation.max_new_tokens={min(defaults.generation.max_new_tokens, length // 2)}",
        ),
        untrained="as it is",
    )


def place_of(target: Target, out: str | None) -> Path:
    """Where the answers go: `out`, or a new folder of evals/, which is in the run's directory if there is one."""
    if out is not None:
        place = Path(out).expanduser()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ValueError(f"--out {out} is there already: give a folder that is new or empty")
        return place
    evals = target.checkpoint.parents[1] / "evals" if target.checkpoint else Path("evals")
    stem = time.strftime("%Y%m%d-%H%M%S")
    candidates = (evals / (stem if number == 0 else f"{stem}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


async def evaluate(config: Config, target: Target, answers: Path) -> Metrics:
    """Score the validation sets once."""
    config = config.model_copy(update={"data_plane": MemoryDataPlane()})  # whichever plane the run has
    machinery = LocalMachinery(config)
    house: House | None = None
    try:
        house = await build_house(config, machinery, trains=False)
        if target.checkpoint is not None:
            actor = await machinery.start_trainer("actor", house.plane)
            await actor.load_weights(target.checkpoint / "actor")
            await Publisher(machinery.carrier(), [house.engine], pause="drain", recompute_kv=False).publish(0)
        evaluator = build_evaluator(config, house, answers)
        assert evaluator is not None, "checked above"
        return await evaluator(target.step, lambda: None)
    finally:
        if house is not None:
            await house.env.close()
        await machinery.close()


def table_of(sets: Sequence[str], metrics: Metrics) -> Table:
    """A line for each metric; a column for each set, and one for all prompts together where there are several."""
    several = len(sets) > 1
    columns = {"all": "val/", **{name: f"val/{name}/" for name in sets}} if several else {"value": "val/"}
    table = Table("metric", *columns)
    own = tuple(f"val/{name}/" for name in sets if name)
    for name in [name for name in metrics if not name.startswith(own)]:
        cells = [metrics.get(name.replace("val/", prefix, 1)) for prefix in columns.values()]
        table.add_row(name, *("" if cell is None else f"{cell.value:.4g}" for cell in cells))
    return table


def how(config: Config) -> str:
    """How the answers were drawn and scored, in one line."""
    generation, algorithm = config.policy.generation, config.algorithm
    law = f"temperature {generation.val_temperature:g}, top-p {generation.val_top_p:g}"
    return (
        f"{law if generation.val_temperature else 'greedy'}, {algorithm.num_val_generations_per_prompt} a prompt, "
        f"at most {generation.max_new_tokens} new tokens, {scored_by(config)}"
    )


def scored_by(config: Config) -> str:
    """The verifier, or the environment that rewards by itself."""
    return f"verifier {config.verifier.name}" if config.verifier else f"env {config.env.name}"
