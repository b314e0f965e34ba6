"""The quickstart learns with the real vLLM on a CPU: synchronously and ahead, in all ways that weights are updated."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the package vllm: .ci/vllm makes an environment with it")

from tandem.config.load import load
from tandem.launch.machinery import Machinery
from tests.e2e.runs import Ran, assert_near, run, short_config
from tests.e2e.test_quickstart import ACCURACY, END, START
from tests.e2e.test_ray import UNDER_RAY, Killer

SHORT = ("ppo.max_num_steps=14", "ppo.val_period=14", "ppo.max_val_samples=128", "checkpointing.enabled=false")


@pytest.mark.parametrize(
    ("lead", "update"),
    [(0, "drain"), (0, "in_flight"), (1, "drain"), (1, "in_flight"), (1, "abort_and_reissue")],
)
def test_the_quickstart_learns_with_vllm_within_the_same_band(tmp_path: Path, lead: int, update: str):
    ahead = (f"async_rl.sampler.max_lookahead_versions={lead}", f"async_rl.weight_update={update}")
    records = run(load("quickstart_vllm", [*SHORT, "seed=1", *ahead]).config, tmp_path).records
    rewards = [record["rollout/reward"] for record in records if "rollout/reward" in record]
    accuracy = [record["val/accuracy"] for record in records if "val/accuracy" in record]
    assert START[0] <= rewards[0] <= START[1]
    assert statistics.fmean(rewards[-3:]) >= END
    assert accuracy[0] < 0.3
    assert accuracy[-1] >= ACCURACY
    assert max(record["staleness/max"] for record in records if "staleness/max" in record) == lead


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Three steps in one process."""
    return run(short_config(recipe="quickstart_vllm"), tmp_path_factory.mktemp("alone"))


@pytest.mark.usefixtures("ray_here")
def test_under_ray_it_learns_the_same_and_requests_of_a_dead_engine_are_written_by_another(alone: Ran, tmp_path: Path):
    killers: list[Killer] = []

    def killer(machinery: Machinery) -> Killer:
        killers.append(Killer(machinery, "engine 1"))
        return killers[0]

    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    config = short_config(
        *UNDER_RAY, "cluster.gpus_per_node=3", "cluster.ray.weight_transfer=collective", apart, recipe="quickstart_vllm"
    )
    found = run(config, tmp_path, beside=killer)
    assert killers[0].killed_at
    assert_near(found, alone, 1e-4)


@pytest.mark.slow  # its parts are tested apart: two ranks in one process, one rank under Ray
@pytest.mark.usefixtures("ray_here")
def test_an_engine_of_two_ranks_under_ray_learns_the_same(alone: Ran, tmp_path: Path):
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    config = short_config(
        *UNDER_RAY,
        "cluster.gpus_per_node=3",
        "cluster.ray.weight_transfer=collective",
        "cluster.ray.weight_bucket_bytes=65536",
        "policy.generation.engine.tensor_parallel_size=2",
        apart,
        recipe="quickstart_vllm",
    )
    assert_near(run(config, tmp_path), alone, 1e-4)
