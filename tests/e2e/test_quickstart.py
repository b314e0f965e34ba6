"""The quickstart learns, synchronously and asynchronously, within its published band (docs/quickstart.md)."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tandem.config.load import load
from tests.e2e.runs import run

SEEDS = (1, 2, 3)
# The band of the short form: 14 steps. Ten seeds of the long form stand in docs/quickstart.md.
START, END, ACCURACY = (0.25, 0.62), 0.82, 0.9


def learned(tmp_path: Path, seed: int, *overrides: str) -> tuple[list[float], float, float]:
    """Rewards, and the validation accuracy before and after."""
    short = ["ppo.max_num_steps=14", "ppo.val_period=14", "ppo.max_val_samples=128", "checkpointing.enabled=false"]
    records = run(load("quickstart", [*short, f"seed={seed}", *overrides]).config, tmp_path).records
    accuracy = [record["val/accuracy"] for record in records if "val/accuracy" in record]
    return [r["rollout/reward"] for r in records if "rollout/reward" in r], accuracy[0], accuracy[-1]


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_quickstart_learns_within_its_band(tmp_path: Path, seed: int, lead: int):
    rewards, before, after = learned(tmp_path, seed, f"async_rl.sampler.max_lookahead_versions={lead}")
    assert START[0] <= rewards[0] <= START[1]
    assert statistics.fmean(rewards[-3:]) >= END
    assert before < 0.3
    assert after >= ACCURACY


def test_a_policy_that_is_never_trained_does_not_improve(tmp_path: Path):
    """What the band would say of a run that does not learn: the test above can fail."""
    rewards, _, after = learned(tmp_path, 1, "ppo.policy_training_start_step=13")
    assert statistics.fmean(rewards[-3:]) < END
    assert after < ACCURACY
