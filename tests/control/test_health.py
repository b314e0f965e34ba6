"""Each verdict: a history that triggers it, with its knob, and one that must not; how a run says it; its thresholds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.config.health import Health
from tandem.control.health import CHECKS, FINE, SEVERE, WARNING, WATCHED, Facts, judge
from tandem.control.health_watch import HealthWatch

DOCS = Path(__file__).parents[2] / "docs" / "health.md"
FACTS = Facts(algorithm="ppo", groups_per_step=4, runs_ahead=True, max_staleness=4)
AT_LEAD_0 = Facts(algorithm="ppo", groups_per_step=4, runs_ahead=False, max_staleness=None)
GOOD = {
    "critic/explained_variance": 0.4,
    "rollout/gen_kl_error": 1e-4,
    "rollout/token_mult_prob_error": 1.01,
    "rollout/seq_mult_prob_error_max": 1.1,
    "rollout/gen_weight_mean": 1.0,
    "rollout/tokens": 1000.0,
    "rollout/reward": 0.5,
    "rollout/groups": 4.0,
    "rollout/groups_without_spread": 0.2,
    "rollout/truncated": 0.02,
    "staleness/mean": 1.0,
    "staleness/max": 1.0,
    "actor/clip_fraction": 0.01,
    "actor/approx_kl": 1e-3,
    "actor/entropy": 0.5,
    "actor/grad_norm": 1.0,
    "actor/steps_skipped": 0.0,
    "critic/grad_norm": 2.0,
    "critic/steps_skipped": 0.0,
    "reference/kl": 0.01,
    "time/step_s": 10.0,
    "time/control/wait_for_groups_s": 1.0,
    "time/control/learn_s": 6.0,
    "buffer/ready_groups": 2.0,
}
TIMES = ("time/step_s", "time/control/wait_for_groups_s", "time/control/learn_s")


def history(**columns: list[float]) -> list[dict[str, float]]:
    """Good steps, but for these metrics (`room__what`); the longest column says how many. None: not there."""
    length = max((len(values) for values in columns.values()), default=8)
    records = [dict(GOOD) for _ in range(length)]
    for name, values in columns.items():
        for record, value in zip(records[-len(values) :], values, strict=True):
            record[name.replace("__", "/", 1).replace("control__", "control/")] = value
    return records


def times(step: float, wait: float, learn: float, ready: float = 0.0) -> list[dict[str, float]]:
    return [
        {**GOOD, **dict(zip(TIMES, (step, wait, learn), strict=True)), "buffer/ready_groups": ready} for _ in range(3)
    ]


MISMATCH = {"rollout__gen_kl_error": [0.05] * 3}
SPREAD = "rollout__groups_without_spread"
# verdict, history, severity, words of the text
TRIGGERS = [
    (
        "critic_lags",
        history(critic__explained_variance=[-1e-5] * 5),
        WARNING,
        "value.optimizer.lr|warm-up|-1e-05|5 steps",
    ),
    ("critic_lags", history(critic__explained_variance=[-1e-5] * 10), SEVERE, "10 steps"),
    ("critic_lags", history(critic__explained_variance=[-2.0] * 5), SEVERE, "-2"),
    ("engine_mismatch", history(**MISMATCH), WARNING, "stale weights|1 versions old|lead"),
    ("engine_mismatch", history(rollout__gen_kl_error=[0.2] * 3), SEVERE, "0.2 nats"),
    (
        "engine_mismatch",
        history(**MISMATCH, staleness__mean=[0.0] * 3, staleness__max=[0.0] * 3),
        WARNING,
        "precision|seq_logprob_error_threshold",
    ),
    (  # stale, but the fresh steps at the start were as wrong
        "engine_mismatch",
        history(
            rollout__gen_kl_error=[0.05] * 6, staleness__max=[0, 0, 0, 1, 1, 1], staleness__mean=[0, 0, 0, 1, 1, 1]
        ),
        WARNING,
        "precision",
    ),
    (  # stale, and the fresh steps at the start were right
        "engine_mismatch",
        history(
            rollout__gen_kl_error=[1e-9] * 3 + [0.05] * 3,
            staleness__max=[0, 0, 0, 1, 1, 1],
            staleness__mean=[0, 0, 0, 1, 1, 1],
        ),
        WARNING,
        "stale weights",
    ),
    ("engine_mismatch", history(**MISMATCH, rollout__gen_weight_mean=[0.8] * 3), WARNING, "80.0%|top-k"),
    ("clip_fraction", history(actor__clip_fraction=[0.3] * 3), WARNING, "30%|policy.optimizer.lr|ppo.ppo_epochs"),
    ("clip_fraction", history(actor__clip_fraction=[0.6] * 3), SEVERE, "60%"),
    ("update_kl", history(actor__approx_kl=[0.1]), WARNING, "0.1 nats|ppo.target_kl"),
    ("update_kl", history(actor__approx_kl=[1.9]), SEVERE, "1.9"),
    ("reference_kl", history(reference__kl=[0.6] * 3), WARNING, "reference_policy_kl_penalty"),
    ("reference_kl", history(reference__kl=[3.0] * 3), SEVERE, "3 nats"),
    ("entropy_collapse", history(actor__entropy=[0.5] * 3 + [0.02] * 3), WARNING, "entropy 0.02|0.5|entropy_bonus"),
    (
        "entropy_collapse",
        history(actor__entropy=[0.5] * 3 + [0.001] * 3, rollout__reward=[0.5] * 3 + [0.0] * 3),
        SEVERE,
        "0.001",
    ),
    ("reward_fell", history(rollout__reward=[0.8] * 6 + [0.45] * 3), WARNING, "fell to 0.45|from 0.8|resume"),
    ("reward_fell", history(rollout__reward=[0.47, 0.0, 0.0, 0.0]), SEVERE, "policy.optimizer.lr"),
    ("no_reward_spread", history(**{SPREAD: [1.0] * 3}), SEVERE, "100%|env.verifier|num_generations_per_prompt"),
    ("no_reward_spread", history(**{SPREAD: [0.95] * 3}), WARNING, "95%"),
    (
        "no_reward_spread",
        history(**{SPREAD: [0.2] * 3 + [1.0] * 3}, rollout__reward=[0.1] * 3 + [1.0] * 3),
        WARNING,
        "solved|data.train",
    ),
    ("groups_filtered", history(rollout__untrained_no_signal=[6.0] * 3), WARNING, "18 of 30|60%|use_dynamic_sampling"),
    ("groups_filtered", history(rollout__untrained_no_signal=[40.0] * 3), SEVERE, "91%"),
    ("length_limit", history(rollout__truncated=[0.2] * 3), WARNING, "20%|max_new_tokens|ppo.reward_shaping"),
    ("length_limit", history(rollout__truncated=[1.0] * 3), SEVERE, "100%"),
    ("grad_norm_spike", history(actor__grad_norm=[1.0] * 6 + [20.0]), WARNING, "actor|20 times|policy.max_grad_norm"),
    ("grad_norm_spike", history(critic__grad_norm=[2.0] * 6 + [500.0]), SEVERE, "critic|250 times|value.max_grad_norm"),
    ("steps_refused", history(actor__steps_skipped=[1.0]), WARNING, "1 optimizer steps of the actor|policy.precision"),
    ("steps_refused", history(critic__steps_skipped=[1.0, 0.0, 2.0]), SEVERE, "3 optimizer steps of the critic"),
    ("groups_stale", history(rollout__untrained_stale=[1.0] * 3), WARNING, "3 of 15|max_staleness_versions"),
    ("groups_stale", history(rollout__untrained_stale=[9.0] * 3), SEVERE, "69%"),
    ("staleness_near_bound", history(staleness__mean=[3.5] * 3), WARNING, "3.5 versions|4 are allowed"),
    ("slow_generation", times(10, 6, 3), WARNING, "6 of 10 s|60%|twice the engines|2.00 times"),
    ("slow_training", times(10, 0.0, 8, ready=4), WARNING, "8 of 10 s|1.67 times"),
]
# verdict, a history that is just short of it
NEAR = [
    ("critic_lags", history(critic__explained_variance=[0.0, -0.12, 0.07, -0.1, -0.1, -0.1, -0.1])),
    ("engine_mismatch", history(rollout__gen_kl_error=[0.05, 0.05, 0.009])),
    ("clip_fraction", history(actor__clip_fraction=[0.3, 0.1, 0.3, 0.3])),
    ("update_kl", history(actor__approx_kl=[0.1, 0.04])),
    ("reference_kl", history(reference__kl=[0.4] * 3)),
    ("entropy_collapse", history(actor__entropy=[0.5] * 3 + [0.03] * 3)),
    ("reward_fell", history(rollout__reward=[0.2, 0.6, 0.3, 0.7, 0.3, 0.2, 0.5])),  # noise
    ("no_reward_spread", history(**{SPREAD: [0.85] * 3})),
    ("groups_filtered", history(rollout__untrained_no_signal=[3.0] * 3)),
    ("length_limit", history(rollout__truncated=[0.2, 0.2, 0.05])),
    ("grad_norm_spike", history(actor__grad_norm=[1.0] * 6 + [9.0])),
    ("grad_norm_spike", history(critic__grad_norm=[2.0, 3.0, 500.0])),  # too few to know what is usual
    ("steps_refused", history(actor__steps_skipped=[1.0] + [0.0] * 20)),
    ("groups_stale", history(rollout__untrained_stale=[1.0, 0.0, 0.0])),
    ("staleness_near_bound", history(staleness__mean=[3.0] * 3)),
    ("slow_generation", times(10, 2, 6)),
    ("slow_training", times(10, 0.0, 8, ready=3)),
]


@pytest.mark.parametrize(("name", "records", "severity", "words"), TRIGGERS)
def test_a_history_triggers_its_verdict(name: str, records: list[dict[str, float]], severity: int, words: str):
    verdict = judge(records, FACTS, Health())[name]
    assert verdict.severity == severity
    assert [word for word in words.split("|") if word not in verdict.text] == []


@pytest.mark.parametrize(("name", "records"), NEAR)
def test_a_history_just_short_of_it_does_not(name: str, records: list[dict[str, float]]):
    assert judge(records, FACTS, Health())[name].severity == FINE


def test_every_verdict_is_tried_both_ways():
    assert {name for name, *_ in TRIGGERS} == set(CHECKS) == {name for name, _ in NEAR}


def test_a_good_history_has_no_verdict_and_none_of_what_it_lacks():
    assert {v.severity for v in judge(history(), FACTS, Health()).values()} == {FINE}
    alone = judge([{"rollout/reward": 0.5}], AT_LEAD_0, Health())
    assert set(alone) == {"reward_fell"}
    unknown = judge([{**GOOD, "critic/explained_variance": float("nan")}], FACTS, Health())
    assert "critic_lags" not in unknown


def test_at_lead_0_the_gain_is_that_of_running_ahead():
    text = judge(times(10, 4, 5), AT_LEAD_0, Health())["slow_generation"].text
    assert "max_lookahead_versions=1" in text
    assert "1.67 times" in text  # 10 / (max(4, 5) + 1)
    assert "slow_training" not in judge(times(10, 4, 5), AT_LEAD_0, Health())


def test_thresholds_are_the_recipes():
    records = history(actor__approx_kl=[0.1])
    assert judge(records, FACTS, Health(update_kl=(0.2, 0.5)))["update_kl"].severity == FINE
    assert judge(records, FACTS, Health(update_kl=(0.01, 0.05)))["update_kl"].severity == SEVERE


def test_a_verdict_is_said_when_it_begins_gets_worse_and_ends_and_is_a_metric_meanwhile():
    remarks: list[dict[str, str | int]] = []
    watch = HealthWatch(Health(steps=2), FACTS, remarks.append)
    metrics = [
        watch.observe(step, {**GOOD, "actor/approx_kl": kl})
        for step, kl in enumerate([0.0, 0.1, 0.1, 0.9, 0.1, 0.0, 0.1, 0.0, 0.0], start=1)
    ]
    assert [m["health/update_kl"] for m in metrics] == [0, 1, 1, 2, 1, 0, 1, 0, 0]
    assert {remark["verdict"] for remark in remarks} == {"update_kl"}
    assert [(r["step"], r["change"], r["severity"]) for r in remarks] == [
        (2, "begins", "warning"),
        (4, "gets worse", "severe"),
        (9, "ends", "fine"),
    ]


def test_a_run_that_goes_on_knows_what_was_said():
    remarks: list[dict[str, str | int]] = []
    watch = HealthWatch(Health(), FACTS, remarks.append)
    watch.recall(history(critic__explained_variance=[-0.1] * 5))
    assert watch.observe(6, {**GOOD, "critic/explained_variance": -0.1})["health/critic_lags"] == WARNING
    assert remarks == []
    for step in range(7, 11):
        watch.observe(step, {**GOOD, "critic/explained_variance": -0.1})
    assert [(r["step"], r["change"]) for r in remarks] == [(10, "gets worse")]


def test_what_a_history_keeps_is_what_the_verdicts_read():
    assert set(GOOD) <= WATCHED


def test_the_table_in_the_docs_is_the_one_in_the_code():
    """A row: | `name` | warning | severe | ... |; one number stands in the first column of the two."""
    rows = re.findall(r"^\| `(\w+)` \|([^|]+)\|([^|]*)\|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    written = {name: tuple(float(cell) for cell in cells if cell.strip()) for name, *cells in rows}
    fields = {n: v if isinstance(v, tuple) else (float(v),) for n, v in Health() if n != "enabled"}
    assert written == fields
