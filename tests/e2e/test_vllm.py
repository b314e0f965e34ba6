"""The quickstart learns with the real vLLM on a CPU: synchronously and ahead, weights after a drain and in flight."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the package vllm: .ci/vllm makes an environment with it")

from tandem.config.load import load
from tests.e2e.runs import run
from tests.e2e.test_quickstart import ACCURACY, END, START

SHORT = ("ppo.max_num_steps=14", "ppo.val_period=14", "ppo.max_val_samples=128", "checkpointing.enabled=false")


@pytest.mark.parametrize("update", ["drain", "in_flight"])
@pytest.mark.parametrize("lead", [0, 1])
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
