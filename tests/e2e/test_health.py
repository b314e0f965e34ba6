"""A real quickstart with one sabotaged knob gets the right verdict; the healthy one gets none that is severe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.load import load
from tandem.launch.run_dir import HEALTH
from tests.e2e.runs import run

SHORT = ("data.validation=null", "checkpointing.enabled=false")


def remarks(run_dir: Path, steps: int, *overrides: str) -> tuple[list[dict[str, float]], list[dict]]:
    """The records of a run, and what it said of its health."""
    config = load("quickstart", [f"ppo.max_num_steps={steps}", *SHORT, *overrides]).config
    records = run(config, run_dir).records
    file = run_dir / HEALTH
    return records, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("lead", [0, 1])
def test_a_healthy_run_has_no_severe_verdict(tmp_path: Path, lead: int):
    records, said = remarks(tmp_path, 6, f"async_rl.sampler.max_lookahead_versions={lead}")
    assert {name for record in records for name in record if name.startswith("health/")} > {"health/critic_lags"}
    assert max(value for record in records for name, value in record.items() if name.startswith("health/")) < 2
    assert [remark for remark in said if remark["severity"] == "severe"] == []
    assert [remark for remark in said if not remark["verdict"].startswith("slow_")] == []


def test_a_critic_that_cannot_learn_is_told(tmp_path: Path):
    records, said = remarks(tmp_path, 5, "value.optimizer.lr=1.0e-7")
    (remark,) = [remark for remark in said if not remark["verdict"].startswith("slow_")]
    assert (remark["verdict"], remark["step"], remark["change"]) == ("critic_lags", 5, "begins")
    assert "value.optimizer.lr" in remark["text"]
    assert [record["health/critic_lags"] for record in records] == [0, 0, 0, 0, 1]


def test_a_policy_that_is_ruined_by_its_learning_rate_is_told(tmp_path: Path):
    _, said = remarks(tmp_path, 4, "policy.optimizer.lr=1.0e-2")
    severe = {remark["verdict"]: remark["step"] for remark in said if remark["severity"] == "severe"}
    assert severe["update_kl"] == 1  # before anything else shows it
    assert {"reward_fell", "length_limit"} <= severe.keys()
    assert all("policy.optimizer.lr" in r["text"] for r in said if r["verdict"] in ("update_kl", "reward_fell"))


def test_switched_off_there_is_no_verdict(tmp_path: Path):
    small = ("ppo.num_prompts_per_step=4", "policy.train_global_batch_size=16")
    records, said = remarks(tmp_path, 1, "policy.optimizer.lr=1.0e-2", "logger.health.enabled=false", *small)
    assert not [name for name in records[0] if name.startswith("health/")]
    assert said == []
