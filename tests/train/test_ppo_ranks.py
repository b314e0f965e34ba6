"""A whole step of the real algorithm, its actor, critic and reference on two ranks each, is that of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.plane.memory import MemoryPlane
from tandem.roles import WriteFiles
from tandem.train.worker import Worker
from tandem.types import Batch, Metrics, merge
from tests.train.ppo_steps import BATCH, OBJECTIVES, algorithm_of, chunks, plane_of_rollouts
from tests.train.ranks import on_ranks
from tests.train.small_models import actor_backend, critic_backend, settings, worker
from tests.train.test_torch_ranks import CONTEXT, REPLICATE, SEQUENCE, SHARD, TENSOR, UNPACKED, distance
from tests.train.updates import OPTIMIZER

LAYOUTS = {"shard": SHARD, "replicate": REPLICATE, "tensor": TENSOR, "sequence": SEQUENCE, "context": CONTEXT}
WRITTEN = ("old_logprobs", "ref_logprobs", "values", "values_after", "advantages", "returns", "weights")


class OnAllRanks:
    """One Trainer of the ranks together. Every rank makes the calls; then all have what each wrote and found."""

    def __init__(self, worker: Worker, plane: MemoryPlane) -> None:
        self._worker = worker
        self._plane = plane

    async def infer(self, batch: Batch, out: str) -> Metrics:
        metrics = await self._worker.infer(batch, out)
        for written in gathered(await self._present(batch, (out, f"{out}_after"))):
            for name, rows in written.items():
                await self._plane.put(list(rows), {name: list(rows.values())})
        return merge(*gathered(metrics))

    async def _present(self, batch: Batch, names: tuple[str, ...]) -> dict[str, dict[int, torch.Tensor]]:
        found: dict[str, dict[int, torch.Tensor]] = {}
        for name in names:
            for key in batch.keys:
                try:
                    row = (await self._plane.get([key], [name]))[name][0]
                except KeyError:
                    continue
                found.setdefault(name, {})[key] = row
        return found

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        return merge(*gathered(await self._worker.forward_backward(batch, scale)))

    async def optim_step(self, divisor: float) -> Metrics:
        return merge(*gathered(await self._worker.optim_step(divisor)))

    async def park(self) -> None:
        await self._worker.park()

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        return await self._worker.snapshot(copy=copy)

    async def load(self, directory: Path) -> None:
        await self._worker.load(directory)

    async def load_weights(self, directory: Path) -> None:
        await self._worker.load_weights(directory)

    async def close(self) -> None:
        await self._worker.close()


def gathered(mine: Any) -> list[Any]:
    """What every rank has, in their order."""
    if not dist.is_initialized():
        return [mine]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def step(parallel: tuple, packing: tuple = ()) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Metrics]:
    """Columns, weights and metrics after two epochs of two mini-batches."""
    return asyncio.run(_step(parallel, packing))


async def _step(parallel: tuple, packing: tuple) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Metrics]:
    config = settings(parallel=dict(parallel), optimizer=OPTIMIZER)
    plane = await plane_of_rollouts()
    torch.manual_seed(1)
    backends = {
        "critic": critic_backend(config),
        "actor": actor_backend(config=config, temperature=0.7),
        "reference": actor_backend(config=config, temperature=0.7, steps=None),
    }
    models = {
        name: OnAllRanks(worker(backend, plane, OBJECTIVES[name], 64, name, **dict(packing)), plane)
        for name, backend in backends.items()
    }
    algorithm = algorithm_of(plane, models, ppo_epochs=2)
    metrics = await algorithm.step(chunks(4), step=0, train_policy=True)
    columns = await plane.get(BATCH.keys, WRITTEN)
    weights = {
        f"{name}/{tensor_name}": tensor.clone()
        for name, backend in backends.items()
        for tensor_name, tensor in backend.export_weights()
    }
    for model in models.values():
        await model.close()
    return {name: torch.cat([row.flatten() for row in rows]) for name, rows in columns.items()}, weights, metrics


def steps(layouts: dict[str, tuple]) -> dict[str, tuple]:
    return {name: step(*layout) for name, layout in layouts.items()}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, tuple]]:
    layouts = {name: (parallel,) for name, parallel in LAYOUTS.items()} | {"unpacked": (SHARD, UNPACKED)}
    return on_ranks(2, steps, layouts, folder=tmp_path_factory.mktemp("ppo"), timeout_s=240)


@pytest.mark.parametrize("name", [*LAYOUTS, "unpacked"])
def test_a_step_of_two_ranks_is_that_of_one_process(name, seen):
    columns, weights, metrics = step(())
    for rank in seen:
        found_columns, found_weights, found_metrics = rank[name]
        assert distance(found_columns, columns) < 1e-5
        assert distance(found_weights, weights) < 1e-5
        assert found_metrics.keys() == metrics.keys()
        for metric_name, metric in metrics.items():
            if "pad_fraction" not in metric_name and "tflops" not in metric_name:
                found = found_metrics[metric_name].value
                assert found == pytest.approx(metric.value, rel=1e-5, abs=1e-7), metric_name
