"""Everything in one process: CPU, or one GPU. No Ray."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from tandem.config import Config
from tandem.config.check import to_yaml
from tandem.config.loaded import Loaded
from tandem.control.checkpoint import find_checkpoint
from tandem.launch.answers import before_and_after
from tandem.launch.build import build_controller, build_house
from tandem.launch.run_dir import CONFIG, choose_run_dir, hold, logging_to
from tandem.launch.tips import tips
from tandem.metrics.console import Display
from tandem.metrics.sinks import first_value, open_sinks
from tandem.metrics.timing import Timeline
from tandem.roles import Sink


@dataclass(frozen=True)
class Place:
    """Where a run is: its directory, and the terminal it speaks to."""

    run_dir: Path
    console: Console


def quiet_libraries() -> None:
    """The libraries' own progress bars and fork warnings would tear the live display."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def train(loaded: Loaded) -> None:
    """Run a recipe to its end. Raises ValueError for bad input before anything is trained."""
    config = loaded.config
    quiet_libraries()
    if config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)
    place = Place(choose_run_dir(config.run_dir, config.name), Console())
    with hold(place.run_dir), logging_to(place.run_dir, place.console):
        resume_from = find_checkpoint(config.checkpointing.resume, place.run_dir / "checkpoints")
        (place.run_dir / CONFIG).write_text(to_yaml(config.model_copy(update={"run_dir": str(place.run_dir)})))
        try:
            asyncio.run(session(config, place, resume_from))
        except KeyboardInterrupt:
            place.console.print(how_to_go_on(place.run_dir), soft_wrap=True, highlight=False)
            raise


def how_to_go_on(run_dir: Path) -> str:
    """What a user who pressed Ctrl-C wants to know."""
    newest = find_checkpoint("auto", run_dir / "checkpoints")
    kept = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
    return f"interrupted; {kept}. Go on with: tandem train {run_dir}"


async def session(config: Config, place: Place, resume_from: Path | None) -> None:
    """Build the house, run the loop in it, and leave it tidy whatever happens."""
    house = build_house(config)
    timeline = Timeline(place.run_dir / "timeline.json" if config.logger.timeline else None)
    display = Display(config.logger.console, console=place.console)
    sinks: list[Sink] = [display]
    try:
        controller, checkpoints = build_controller(config, house, run_dir=place.run_dir, timeline=timeline, sinks=sinks)
        if resume_from:
            await checkpoints.restore(controller, resume_from)
        sinks += open_sinks(
            config.logger,
            run_dir=place.run_dir,
            run_config=config.model_dump(mode="json"),
            resume_step=controller.step if resume_from else None,
        )
        display.start(
            config.algorithm.max_num_steps,
            config.name,
            first_step=controller.step,
            accuracy_before=first_value(place.run_dir / "metrics.jsonl", "val/accuracy") if resume_from else None,
        )
        await controller.run()
        for line in before_and_after(place.run_dir / "validation", config.logger.num_val_samples_to_print):
            display.note(line)
        display.summary(place.run_dir, tips(config))
    finally:
        for sink in sinks:
            sink.close()
        timeline.close()
        await house.close()
