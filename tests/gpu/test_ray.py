"""Under Ray on two GPUs a run learns what it learns in one process on one: ranks over NCCL, shared and own GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Ran, assert_near, run, short_config

pytestmark = [pytest.mark.gpu(devices=2), pytest.mark.timeout(280)]
CUDA = ("ppo.max_num_steps=2", "cluster.device=cuda", "policy.precision=float32", "value.precision=float32")
UNDER_RAY = ("cluster.launch=ray", "cluster.gpus_per_node=2")
APART = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}"
LAYOUTS = {
    "engine-on-its-own": (APART,),
    "two-ranks-that-take-turns": ("policy.offload=all", "value.offload=all"),
    "tensor": ("policy.parallel.tensor_parallel_size=2", "value.parallel.tensor_parallel_size=2"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    return run(short_config(*CUDA), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_two_gpus_learns_as_on_one(layout: str, alone: Ran, tmp_path: Path):
    found = run(short_config(*CUDA, *UNDER_RAY, *LAYOUTS[layout]), tmp_path)
    assert_near(found, alone, 1e-3)
