"""Runs of one recipe that differ in their lead, over one house: engines and trainers start and compile once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.many_gpus.runs import steps_of
from tandem.config import Config
from tandem.config.load import load
from tandem.launch.build import House, build_controller, build_house
from tandem.launch.machinery import Machinery
from tandem.launch.memory.report import refuse_what_cannot_fit
from tandem.launch.process import prepare, quiet_libraries
from tandem.launch.session import machinery_of, run_guarded
from tandem.metrics.sinks import open_sinks
from tandem.metrics.timing import Timeline
from tandem.roles import Carrier, DataPlane, Engine, Gpus, Trainer


class Standing:
    """A machinery whose trainers and ways of weights outlive a run."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery
        self._trainers: dict[str, Trainer] = {}
        self._carrier: Carrier | None = None

    async def start_plane(self) -> DataPlane:
        return await self._machinery.start_plane()

    async def start_engine(self, pad_token_id: int) -> Engine:
        return await self._machinery.start_engine(pad_token_id)

    async def start_trainers(self, plane: DataPlane) -> dict[str, Trainer]:
        """Those of the first run go on as they are."""
        self._trainers = self._trainers or await self._machinery.start_trainers(plane)
        return self._trainers

    def carrier(self) -> Carrier:
        """One process group for all runs."""
        self._carrier = self._carrier or self._machinery.carrier()
        return self._carrier

    def gpus(self) -> Gpus:
        return self._machinery.gpus()

    async def guard(self) -> None:
        await self._machinery.guard()

    async def close(self) -> None:
        await self._machinery.close()


async def run_leads(recipe: str, runs: Mapping[int, Path]) -> None:
    """`runs`: where each lead's metrics and timeline go."""
    first = load(recipe)
    quiet_libraries()
    prepare(first.config.cluster)
    refuse_what_cannot_fit(first)
    assert first.config.run_dir is not None, "the recipe names it"
    machinery = Standing(machinery_of(first.config, Path(first.config.run_dir)))
    house: House | None = None
    try:
        house = await build_house(first.config, machinery)
        for lead, run_dir in runs.items():
            overrides = [f"ppo.max_num_steps={steps_of(lead)[0]}"]
            if lead:
                overrides += [f"async_rl.sampler.max_lookahead_versions={lead}", "async_rl.weight_update=in_flight"]
            await run_one(load(recipe, overrides).config, house, machinery, run_dir)
    finally:
        if house is not None:
            await house.env.close()
        await machinery.close()


async def run_one(config: Config, house: House, machinery: Machinery, run_dir: Path) -> None:
    """A run to its end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    timeline = Timeline(run_dir / "timeline.json")
    sinks = open_sinks(config.logger, run_dir=run_dir, run_config=config.model_dump(mode="json"))
    try:
        controller, _ = await build_controller(config, house, run_dir=run_dir, timeline=timeline, sinks=sinks)
        await run_guarded(controller, machinery)
    finally:
        for sink in sinks:
            sink.close()
        timeline.close()
