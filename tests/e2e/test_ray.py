"""Under Ray a run learns what it learns in one process, and what happens when one of its processes dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from tandem.cli import leaves
from tandem.config import Config
from tandem.launch.machinery import Machinery
from tandem.roles import Engine, Pause
from tandem.types import Metrics
from tests.e2e.runs import Ran, assert_near, run, short_config

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("ray_here")]
UNDER_RAY = ("cluster.launch=ray", "cluster.device=cpu", "cluster.num_threads=1")
TWO_RANKS = (*UNDER_RAY, "cluster.gpus_per_node=2")
SMALL_BUCKETS = "cluster.ray.weight_bucket_bytes=200000"
BY_HANDLES = "cluster.ray.weight_transfer=ipc"  # each engine from the rank beside it
APART = (
    *UNDER_RAY,
    "cluster.gpus_per_node=4",
    "value.colocated.enabled=false",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
    "cluster.ray.weight_transfer=collective",
    SMALL_BUCKETS,
)


def config_of(*overrides: str) -> Config:
    return short_config("ppo.max_num_steps=2", *overrides)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same run in one process."""
    return run(config_of(), tmp_path_factory.mktemp("alone"))


def test_one_rank_under_ray_is_one_process(alone: Ran, tmp_path: Path):
    found = run(config_of(*UNDER_RAY), tmp_path)
    assert found.weights == alone.weights
    assert_near(found, alone, 1e-6)
    assert [step["plane/bytes_get"] for step in found.records] == [step["plane/bytes_get"] for step in alone.records]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "actor-rank-0.log",
        "critic-rank-0.log",
        "engine-0.log",
    }


class Killer:
    """A sink that kills a process of the run after its first step."""

    def __init__(self, machinery: Machinery, label: str) -> None:
        self._machinery = machinery
        self._label = label
        self.killed_at = 0.0

    def write(self, step: int, record: Mapping[str, float]) -> None:
        if "rollout/reward" in record and not self.killed_at:
            self.kill()

    def kill(self) -> None:
        import ray

        process = next(p for p in self._machinery._cluster._processes if p.label == self._label)
        pid = ray.get(process.handle.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        self.killed_at = time.monotonic()

    def close(self) -> None: ...


def test_two_ranks_with_two_engines_learn_as_one_process_and_a_dead_rank_ends_the_run(alone: Ran, tmp_path: Path):
    killers = []

    def killer(machinery: Machinery) -> Killer:
        killers.append(Killer(machinery, "actor rank 1"))
        return killers[0]

    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        run(config_of(*TWO_RANKS, BY_HANDLES, SMALL_BUCKETS), tmp_path, beside=killer)
    (error,) = leaves(caught.value)
    assert re.search(r"(?s)^the process `actor rank 1` died: .*the end of .*actor-rank-1.log:", str(error))
    assert time.monotonic() - killers[0].killed_at < 20
    rest = run(config_of(), tmp_path, resume=True)  # in one process: files of two ranks are any number's
    assert rest.records
    assert_near(rest, Ran(alone.records[-len(rest.records) :], {}), 1e-4)


def test_on_slots_of_their_own_all_is_as_in_one_process_even_when_an_engine_dies(alone: Ran, tmp_path: Path):
    killers = []

    def killer(machinery: Machinery) -> Killer:
        killers.append(Killer(machinery, "engine 1"))
        return killers[0]

    found = run(config_of(*APART), tmp_path, beside=killer)
    assert killers[0].killed_at
    assert_near(found, alone, 1e-6)
    assert found.weights == alone.weights


class DeathAtTheDoor(Killer):
    """Kills the engine when all are paused for the second sync, unnoticed."""

    def __init__(self, machinery: Machinery, label: str) -> None:
        super().__init__(machinery, label)
        start, pauses = machinery.start_engine, count(1)

        async def start_mortal(pad_token_id: int) -> Engine:
            router = await start(pad_token_id)
            pause = router.pause

            async def pause_and_kill(kind: Pause = "drain") -> Metrics:
                metrics = await pause(kind)
                if next(pauses) == 2:
                    await asyncio.to_thread(self.kill)
                return metrics

            router.pause = pause_and_kill
            return router

        machinery.start_engine = start_mortal

    def write(self, step: int, record: Mapping[str, float]) -> None: ...


def test_an_engine_that_dies_while_weights_go_over_ends_the_run(tmp_path: Path):
    killers: list[Killer] = []

    def killer(machinery: Machinery) -> Killer:
        killers.append(DeathAtTheDoor(machinery, "engine 1"))
        return killers[0]

    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        run(config_of(*APART), tmp_path, beside=killer)
    (error,) = leaves(caught.value)
    assert re.search(r"(?s)^an engine died while weights went over.* the process `engine 1` died", str(error))
    assert time.monotonic() - killers[0].killed_at < 20
