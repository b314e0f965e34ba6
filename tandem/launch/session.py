"""`tandem train`: one run from its recipe to its end, and how it ends early."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console

from tandem.config import Config
from tandem.config.check import to_yaml
from tandem.config.loaded import Loaded
from tandem.control import vault
from tandem.control.checkpoint import find_checkpoint
from tandem.control.controller import Controller
from tandem.launch.answers import before_and_after
from tandem.launch.build import House, build_controller, build_house
from tandem.launch.cast import AS_BUILT, Cast
from tandem.launch.local import LocalMachinery
from tandem.launch.machinery import Machinery
from tandem.launch.memory.report import refuse_what_cannot_fit
from tandem.launch.process import prepare, quiet_libraries
from tandem.launch.run_dir import CONFIG, FLIGHT, HEALTH, UNTRAINED, choose_run_dir, hold, keep_records, logging_to
from tandem.launch.tips import tips
from tandem.metrics.console import Display
from tandem.metrics.previous import set_aside
from tandem.metrics.sinks import first_value, open_sinks, read_steps
from tandem.metrics.timing import Timeline
from tandem.roles import Sink

log = logging.getLogger(__name__)
TERMINATED, OUT_OF_TIME = "SIGTERM", "checkpointing.checkpoint_must_save_by"
EXIT_CODES = {TERMINATED: 143, OUT_OF_TIME: 75}  # 75: not finished, run it again


@dataclass(frozen=True)
class Place:
    """Where a run is: its directory, and the terminal it speaks to."""

    run_dir: Path
    console: Console


def train(loaded: Loaded, cast: Cast = AS_BUILT) -> int:
    """Run a recipe to its end; the exit code. Raises ValueError for bad input before anything is trained."""
    config = loaded.config
    quiet_libraries()
    prepare(config.cluster)
    refuse_what_cannot_fit(loaded)
    place = Place(choose_run_dir(config.run_dir, config.name), Console())
    with hold(place.run_dir), logging_to(place.run_dir, place.console):
        resume_from = find_checkpoint(config.checkpointing.resume, place.run_dir / "checkpoints")
        begin_from(resume_from, place.run_dir / "checkpoints")
        (place.run_dir / CONFIG).write_text(to_yaml(config_of_run(config, place.run_dir)))
        try:
            machinery = machinery_of(config, place.run_dir)
            stopped = asyncio.run(session(config, machinery, place, resume_from, cast))
        except KeyboardInterrupt:
            place.console.print(how_to_go_on("interrupted", place.run_dir), soft_wrap=True, highlight=False)
            raise
        if stopped:
            place.console.print(how_to_go_on(f"stopped by {stopped}", place.run_dir), soft_wrap=True, highlight=False)
    return EXIT_CODES.get(stopped, 1) if stopped else 0  # 1: its engines died


def machinery_of(config: Config, run_dir: Path) -> Machinery:
    """What the recipe's `cluster.launch` names. ValueError when it cannot be had here."""
    if config.cluster.launch == "local":
        return LocalMachinery(config)
    from tandem.launch.ray.machinery import RayMachinery  # an extra: only where it is asked for

    return RayMachinery(config, run_dir)


def config_of_run(config: Config, run_dir: Path) -> Config:
    """The config that the run keeps: `tandem train RUN` goes on in this directory, from its newest checkpoint."""
    checkpointing = config.checkpointing.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"run_dir": str(run_dir), "checkpointing": checkpointing})


def begin_from(checkpoint: Path | None, checkpoints: Path) -> None:
    """Set checkpoints aside that the run does not go on from, so that they are not taken for its newest."""
    newest = max(vault.marked(checkpoints), default=None)
    if newest is None or (checkpoint is not None and checkpoint.resolve() == newest.resolve()):
        return
    if checkpoint is not None and checkpoint.resolve().parent != checkpoints.resolve():
        later = vault.marked(checkpoints)
    else:
        later = [path for path in vault.marked(checkpoints) if checkpoint is None or path.name > checkpoint.name]
    if later:
        aside = next(p for n in count(1) if not (p := checkpoints.with_name(f"checkpoints-{n}")).exists())
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        log.warning("checkpoints of another line were set aside in %s: %s", aside, ", ".join(p.name for p in later))


def how_to_go_on(why: str, run_dir: Path) -> str:
    """What a user whose run ended early wants to know."""
    newest = find_checkpoint("auto", run_dir / "checkpoints")
    kept = f"the newest checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
    return f"{why}; {kept}. Go on with: tandem train {run_dir}"


def folder(warm_start: str) -> Path:
    """The critic's folder of a checkpoint. ValueError when it is none."""
    path = Path(warm_start).expanduser()
    if not any(path.glob("model*.safetensors")):
        raise ValueError(
            f"value.warm_start={warm_start} holds no model.safetensors; give RUN/checkpoints/step_N/critic"
        )
    return path


@contextmanager
def stops(controller: Controller, limit_s: float | None) -> Generator[None]:
    """SIGTERM, or the time limit of the recipe, lets the run save and end. A second SIGTERM ends it at once."""
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        controller.stop(TERMINATED)

    loop.add_signal_handler(signal.SIGTERM, terminate)
    timer = loop.call_later(limit_s, controller.stop, OUT_OF_TIME) if limit_s else None
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if timer:
            timer.cancel()


async def session(config: Config, machinery: Machinery, place: Place, resume_from: Path | None, cast: Cast) -> str:
    """Build the house, run the loop in it, and leave it tidy whatever happens. Returns why it ended early, or ''."""
    timeline = Timeline(place.run_dir / "timeline.json" if config.logger.timeline else None)
    display = Display(config.logger.console, console=place.console)
    sinks: list[Sink] = [display]
    house: House | None = None
    try:
        house = await build_house(config, machinery, cast=cast)
        controller, checkpoints = await build_controller(
            config, house, run_dir=place.run_dir, timeline=timeline, sinks=sinks
        )
        if resume_from:
            await checkpoints.restore(controller, resume_from)
            keep_records(place.run_dir / UNTRAINED, lambda record: controller.has_settled(int(str(record["index"]))))
            keep_records(place.run_dir / HEALTH, lambda record: int(str(record["step"])) <= controller.step)
            if controller.recorder is not None:
                controller.recorder.forget_after(controller.step)
            if controller.health is not None:
                controller.health.recall(read_steps(place.run_dir / "metrics.jsonl", up_to=controller.step))
        else:
            for name in (FLIGHT, HEALTH):
                set_aside(place.run_dir / name)
        if not resume_from and config.value and config.value.warm_start:
            await house.models["critic"].load_weights(folder(config.value.warm_start))
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
        with stops(controller, config.checkpointing.must_save_by_s):
            await run_guarded(controller, machinery)
        if controller.stopped:
            return controller.stopped
        for line in before_and_after(place.run_dir / "validation", config.logger.num_val_samples_to_print):
            display.note(line)
        display.summary(place.run_dir, tips(config))
        return ""
    finally:
        for sink in sinks:
            sink.close()
        timeline.close()
        if house is not None:
            await house.env.close()
        await machinery.close()


async def run_guarded(controller: Controller, machinery: Machinery) -> None:
    """Run the loop; a process that dies under it ends it with that error."""
    loop, guard = asyncio.ensure_future(controller.run()), asyncio.ensure_future(machinery.guard())
    try:
        await asyncio.wait({loop, guard}, return_when=asyncio.FIRST_COMPLETED)
        (loop if loop.done() else guard).result()
    finally:
        for task in (loop, guard):
            task.cancel()
        await asyncio.gather(loop, guard, return_exceptions=True)
