"""Short runs of the real house in this process: what they trained, and the bits they ended with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.config import Config
from tandem.config.load import load
from tandem.control.checkpoint import find_checkpoint
from tandem.fingerprint import fingerprint
from tandem.launch.build import House, build_controller, build_house
from tandem.launch.local import LocalMachinery
from tandem.launch.machinery import Machinery
from tandem.launch.process import prepare
from tandem.launch.session import machinery_of, run_guarded
from tandem.metrics.timing import Timeline
from tandem.roles import Fingerprint, Sink

SHORT = (
    "{algorithm}.num_prompts_per_step=4",
    "{algorithm}.num_generations_per_prompt=2",
    "{algorithm}.max_num_steps=3",
    "policy.train_global_batch_size=4",
    "data.validation=null",
    "data.train.size=64",
    "cluster.deterministic=true",
    "checkpointing.save_period=1",
    "checkpointing.keep_last_n=9",
)


class Memory:
    """A sink that keeps the records, without what depends on the clock."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def write(self, step: int, record: dict[str, float]) -> None:
        timed = ("time/", "speed/", "buffer/", "health/slow_")
        ends = ("_s", "/tflops", "/mfu")
        kept = {name: value for name, value in record.items() if not name.startswith(timed) and not name.endswith(ends)}
        self.records.append(kept)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Ran:
    """The end of a run: every metric of every step, and digests of the models' weights."""

    records: list[dict[str, float]]
    weights: dict[str, dict[str, str]]


def short_config(*overrides: str, recipe: str = "quickstart") -> Config:
    algorithm = "grpo" if recipe.endswith("grpo") else "ppo"
    return load(recipe, [*(change.format(algorithm=algorithm) for change in SHORT), *overrides]).config


# What a test does beside the run: called with the machinery, gives a sink.
Beside = Callable[[Machinery], Sink]


def run(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    beside: Beside | None = None,
    machinery: Machinery | None = None,
) -> Ran:
    """Run the loop to its end."""
    prepare(config.cluster)
    return asyncio.run(_run(config, machinery or machinery_of(config, run_dir), run_dir, resume, beside))


async def _run(config: Config, machinery: Machinery, run_dir: Path, resume: bool, beside: Beside | None) -> Ran:
    sink = Memory()
    sinks = [sink, *([beside(machinery)] if beside else [])]
    house: House | None = None
    try:
        house = await build_house(config, machinery)
        controller, checkpoints = await build_controller(
            config, house, run_dir=run_dir, timeline=Timeline(), sinks=sinks
        )
        checkpoint = find_checkpoint("auto", run_dir / "checkpoints") if resume else None
        if checkpoint:
            await checkpoints.restore(controller, checkpoint)
        await run_guarded(controller, machinery)
        return Ran(sink.records, await digests(machinery))
    finally:
        if house is not None:
            await house.env.close()
        await machinery.close()


async def digests(machinery: Machinery) -> dict[str, Fingerprint]:
    """Of every model's weights, wherever they are."""
    if isinstance(machinery, LocalMachinery):
        return {name: fingerprint(worker.export_weights()) for name, worker in machinery.workers.items()}
    exports = {name: await group.call("export") for name, group in machinery.groups.items()}
    return {name: delivery.fingerprint for name, ((_, delivery), *_) in exports.items()}


def assert_near(found: Ran, wanted: Ran, tolerance: float) -> None:
    """Bytes that go to several ranks, and padding, depend on the cut; nothing else does."""
    for step, expected in zip(found.records, wanted.records, strict=True):
        assert step.keys() == expected.keys()
        for name, value in expected.items():
            if not name.endswith(("/bytes_get", "/pad_fraction")):
                assert step[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
