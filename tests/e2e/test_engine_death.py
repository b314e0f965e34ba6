"""The only engine dies in the middle of a run: the run is saved, ends, and goes on to the bits it would have had."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tandem.control.vault import marked
from tandem.launch.build import build_controller, build_house
from tandem.launch.local import LocalMachinery
from tandem.launch.process import prepare
from tandem.metrics.timing import Timeline
from tests.e2e.runs import run, short_config

RARELY = "checkpointing.save_period=9"


class Killer:
    """A sink that ends the engine once a step is done, while the next one's rollouts are about to begin."""

    def __init__(self, end) -> None:
        self._end = end
        self.task: asyncio.Task | None = None

    def write(self, step: int, record: dict[str, float]) -> None:
        if step == 2:
            self.task = asyncio.get_running_loop().create_task(self._end())

    def close(self) -> None: ...


def test_a_run_whose_engine_dies_is_saved_and_goes_on_to_the_same_bits(tmp_path: Path):
    config = short_config(RARELY)

    async def scene() -> str:
        machinery = LocalMachinery(config)
        try:
            house = await build_house(config, machinery)
            killer = Killer(house.engine.close)
            controller, _ = await build_controller(
                config, house, run_dir=tmp_path / "killed", timeline=Timeline(), sinks=[killer]
            )
            await asyncio.wait_for(controller.run(), timeout=100)
            return controller.stopped
        finally:
            await machinery.close()

    prepare(config.cluster)
    assert asyncio.run(scene()) == "the death of its engines (the engine has ended: the engine was closed)"
    assert [path.name for path in marked(tmp_path / "killed" / "checkpoints")] == ["step_000002"]
    resumed = run(config, tmp_path / "killed", resume=True)
    assert resumed.weights == run(config, tmp_path / "whole").weights
