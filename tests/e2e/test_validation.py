"""Validation leaves training alone: a run with it ends with the bits of a run without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import run, short_config

SETS = (
    "data.validation={name: sets, sets: {a: {name: arithmetic, split: validation, size: 6},"
    " b: {name: arithmetic, split: validation, size: 3}}}"
)
OFTEN = (SETS, "{0}.val_period=1", "{0}.num_val_generations_per_prompt=2", "{0}.val_batch_size=4")


@pytest.mark.parametrize(("recipe", "temperature"), [("quickstart", 1.0), ("quickstart_grpo", 0.0)])
def test_a_run_with_validation_trains_the_same_bits(tmp_path: Path, recipe: str, temperature: float):
    algorithm = "grpo" if recipe.endswith("grpo") else "ppo"
    validates = [each.format(algorithm) if "{0}" in each else each for each in OFTEN]
    if not temperature:
        validates.remove(f"{algorithm}.num_val_generations_per_prompt=2")
    plain = run(short_config(recipe=recipe), tmp_path / "plain")
    config = short_config(*validates, f"policy.generation.val_temperature={temperature}", recipe=recipe)
    validated = run(config, tmp_path / "validated")
    assert validated.weights == plain.weights
    trained = [record for record in validated.records if "rollout/reward" in record]
    assert trained == plain.records
    looked = [record for record in validated.records if "val/accuracy" in record]
    assert len(looked) == 4  # before the first step and after each of three
    assert all({"val/a/accuracy", "val/b/accuracy"} <= record.keys() for record in looked)
    assert all(("val/pass@2" in record) == bool(temperature) for record in looked)
    files = sorted((tmp_path / "validated" / "validation").iterdir())
    assert [file.name for file in files] == [f"step_{step:06d}.jsonl" for step in range(4)]
    records = [json.loads(line) for line in files[-1].read_text().splitlines()]
    assert [record["set"] for record in records].count("a") == 6 * (2 if temperature else 1)


def test_the_best_checkpoint_can_be_ranked_by_one_of_several_sets(tmp_path: Path):
    ranked = ["checkpointing.metric_name=val:b/reward", "ppo.max_num_steps=1", "ppo.val_period=1"]
    found = run(short_config(SETS, *ranked), tmp_path)
    newest = [record["val/b/reward"] for record in found.records if "val/b/reward" in record][-1]
    manifest = json.loads((tmp_path / "checkpoints" / "step_000001" / "manifest.json").read_text())
    assert manifest["score"] == newest
