"""Every estimator and option takes a real step on the quickstart model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import run, short_config

NO_CRITIC = ("value=null", "value_loss_fn=null")
REFERENCE = ("reference={}", "loss_fn.reference_policy_kl_penalty=0.05")


@pytest.fixture(autouse=True)
def _reward_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "parts.py").write_text(
        "def parts(question, answer, response):\n"
        "    return {'right': float(response.endswith(f'is {answer}.')), 'short': -len(response) / 100}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "raw_reward"])
def test_estimators_without_a_critic_take_a_step(tmp_path: Path, name: str):
    ran = run(short_config(f"ppo.adv_estimator={{name: {name}}}", "ppo.max_num_steps=1", *NO_CRITIC), tmp_path)
    assert set(ran.weights) == {"actor"}
    assert ran.records[0]["actor/grad_norm"] > 0


def test_gdpo_takes_its_components_from_the_reward_function(tmp_path: Path):
    verifier = "env.verifier={name: python, target: 'parts:parts'}"
    ran = run(short_config("ppo.adv_estimator={name: gdpo}", verifier, "ppo.max_num_steps=1", *NO_CRITIC), tmp_path)
    assert {"rollout/component/right", "rollout/component/short"} <= set(ran.records[0])
    assert ran.records[0]["actor/grad_norm"] > 0


def test_gdpo_takes_its_components_from_a_weighted_sum_which_is_logged_part_by_part(tmp_path: Path):
    verifier = (
        "env.verifier={name: weighted_sum, components: {right: {verifier: {name: arithmetic}}, form: {weight: 0.5, "
        "verifier: {name: format, pattern: '.*The answer is -?[0-9]+[.]'}}}}"
    )
    weights = "ppo.adv_estimator={name: gdpo, reward_weights: {right: 1.0, form: 0.5}}"
    (record,) = run(short_config(weights, verifier, "ppo.max_num_steps=1", *NO_CRITIC), tmp_path).records
    right, form = (record[f"rollout/component/{name}"] for name in ("right", "form"))
    assert 0 < right < form <= 1
    assert record["rollout/reward"] == pytest.approx(right + 0.5 * form)
    assert record["actor/grad_norm"] > 0


@pytest.mark.parametrize("in_reward", ["true", "false"])
def test_a_reference_starts_at_no_divergence_and_stays_frozen(tmp_path: Path, in_reward: str):
    ran = run(short_config(*REFERENCE, f"loss_fn.use_kl_in_reward={in_reward}", "ppo.max_num_steps=2"), tmp_path)
    first, second = ran.records
    assert first["reference/kl"] == 0.0
    assert second["reference/kl"] > 0.0
    assert set(ran.weights) == {"actor", "critic", "reference"}


def test_the_kl_coefficient_adapts_and_survives_a_resume(tmp_path: Path):
    changes = (*REFERENCE, "loss_fn.adaptive_kl={target: 0.001, horizon: 100}", "policy.optimizer.lr=1.0e-3")
    whole = run(short_config(*changes), tmp_path / "whole")
    coefficients = [record["reference/kl_coefficient"] for record in whole.records]
    assert coefficients[0] == 0.05
    assert len(set(coefficients)) == 3
    run(short_config(*changes, "ppo.max_num_steps=2"), tmp_path / "part")
    assert run(short_config(*changes), tmp_path / "part", resume=True).records == whole.records[2:]


def test_target_kl_stops_the_epochs_of_a_step(tmp_path: Path):
    changes = ("ppo.ppo_epochs=4", "policy.optimizer.lr=1.0e-2", "ppo.max_num_steps=1")
    free = run(short_config(*changes), tmp_path / "free")
    stopped = run(short_config(*changes, "ppo.target_kl=0.01"), tmp_path / "stopped")
    assert stopped.records[0]["actor/stopped_by_target_kl"] == 1
    assert stopped.records[0]["actor/tokens"] < free.records[0]["actor/tokens"]


def test_dynamic_sampling_trains_only_on_groups_with_spread(tmp_path: Path):
    ran = run(short_config("ppo.use_dynamic_sampling=true", "ppo.max_num_steps=2"), tmp_path)
    assert all(record["rollout/groups_without_spread"] == 0 for record in ran.records)
    assert all(record["rollout/samples"] == 8 for record in ran.records)
    assert ran.records[-1]["run/prompts"] > 8, "groups without spread were replaced"


def test_options_of_the_losses_take_a_step(tmp_path: Path):
    changes = (
        "loss_fn.ratio_clip_c=3.0",
        "loss_fn.entropy_bonus=0.01",
        "loss_fn.positive_example_nll_weight=0.1",
        "loss_fn.loss_aggregation=seq-mean-token-sum-norm",
        "value_loss_fn={name: hl_gauss}",
        "ppo.reward_scaling={target_min: -1.0}",
        "ppo.reward_shaping={name: stop_properly, stop_properly_penalty_coef: 0.5}",
        "ppo.adv_estimator={name: gae, gae_lambda: 0.95, bootstrap_truncated: true}",
        "ppo.max_num_steps=1",
    )
    record = run(short_config(*changes), tmp_path).records[0]
    assert record["actor/grad_norm"] > 0
    assert record["critic/grad_norm"] > 0
    assert "actor/nll_loss" in record or record["rollout/reward"] == 0


def test_critic_warm_up_leaves_the_policy_alone(tmp_path: Path):
    ran = run(short_config("ppo.policy_training_start_step=2"), tmp_path)
    assert [record["run/version"] for record in ran.records] == [0, 0, 1]
    assert ["actor/loss" in record for record in ran.records] == [False, False, True]
