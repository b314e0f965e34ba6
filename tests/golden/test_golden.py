"""Our maths against recorded outputs of NeMo-RL and verl (../shared/golden/FORMAT.md; a subset lies in cases/)."""

import copy
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.adapter import RUNNERS, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Kinds of `suspect` that are not to be reproduced: the right answers have tests at the end of this file.
NOT_REPRODUCED = ("bug", "numerical", "edge")


def files() -> list[Path]:
    outside = ROOT.parent / "shared" / "golden"
    return sorted(HERE.glob("cases/*.json")) + sorted(outside.rglob("*.json"))


def cases() -> list[Any]:
    found = []
    for path in files():
        content = json.loads(path.read_text())
        for case in content.get("cases", []) if isinstance(content, dict) else []:
            case["topic"] = content["topic"]
            found.append(pytest.param(content["topic"], case, id=f"{path.parent.name}-{case['id']}"))
    return found


@pytest.mark.parametrize(("topic", "case"), cases())
def test_case_equals_the_reference(topic: str, case: dict[str, Any]) -> None:
    got = run(topic, case)
    assert differences(case, got) == []
    assert not any(math.isnan(x) for x in numbers(list(got.values())))


def test_committed_cases_cover_every_topic_and_stay_small() -> None:
    committed = sorted(HERE.glob("cases/*.json"))
    assert {json.loads(path.read_text())["topic"] for path in committed} == set(RUNNERS)
    assert sum(path.stat().st_size for path in committed) <= 200_000


@pytest.mark.parametrize("topic", sorted(RUNNERS))
def test_a_perturbed_output_is_detected(topic: str) -> None:
    for case in json.loads((HERE / "cases" / f"{topic}.json").read_text())["cases"]:
        skipped = left_out(case)
        for field, expected in case["outputs"].items():
            if skipped is None or field in skipped or not list(numbers(expected)):
                continue
            if topic == "packing" and field != "num_bins":
                continue
            wrong = copy.deepcopy(run(topic, case))
            assert differences(case, wrong) == []
            spoil(wrong, field, case)
            assert differences(case, wrong) != [], (case["id"], field)
            return
    pytest.fail(f"no case of {topic} compares anything")


def differences(case: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Names of the fields that differ from the recorded ones beyond their tolerance."""
    skipped = left_out(case)
    if skipped is None:
        return []
    wrong = []
    for field, expected in case["outputs"].items():
        if field in skipped or field == "verl_error":
            continue
        tolerance = (case["tol"].get("f64_fields") or {}).get(field, case["tol"]["f64"])
        if field not in got or not equal(got[field], expected, tolerance, where(case, field)):
            wrong.append(field)
    if case["topic"] == "gae" and "oracle" in case:
        exact = {"rtol": 1e-9, "atol": 1e-9}
        for field in ("advantages", "returns"):
            if field in case["oracle"] and not equal(got[field], case["oracle"][field], exact, where(case, field)):
                wrong.append(f"oracle/{field}")
    return wrong


def left_out(case: dict[str, Any]) -> set[str] | None:
    """Fields not to compare; None leaves the case out (bugs of a reference; never a convention)."""
    fields: set[str] = set()
    if case["topic"] == "packing":
        unique = case["config"]["algorithm"] == "concatenative"
        fields |= set() if unique else {"reference_plan"}
        adjusted = case["config"]["min_bin_count"] or case["config"]["bin_count_multiple"]
        tie_breaking = case["config"]["algorithm"] != "first_fit_decreasing"
        fields |= {"bin_totals_sorted"} if adjusted or tie_breaking else set()
    suspect = case.get("suspect")
    if suspect and (suspect["kind"] in NOT_REPRODUCED or suspect.get("fields")):
        return fields | set(suspect["fields"]) if suspect.get("fields") else None
    return fields


def where(case: dict[str, Any], field: str) -> Any:
    """The mask under which a field is compared, or None for everywhere."""
    rule = (case.get("compare") or {}).get(field) or (case.get("compare") or {}).get("*") or ""
    return case["inputs"]["mask"] if rule.startswith("where mask==1") else None


def equal(got: Any, expected: Any, tolerance: dict[str, float], mask: Any = None) -> bool:
    if isinstance(expected, list):
        masks = mask if isinstance(mask, list) else [None] * len(expected)
        if not isinstance(got, list) or len(got) != len(expected):
            return False
        return all(m == 0 or equal(g, e, tolerance, m) for g, e, m in zip(got, expected, masks, strict=True))
    if isinstance(expected, dict):
        return isinstance(got, dict) and all(
            name in got and equal(got[name], value, tolerance) for name, value in expected.items()
        )
    if expected is None or isinstance(expected, bool):
        return got == expected
    if isinstance(expected, str) and expected not in ("NaN", "Infinity", "-Infinity"):
        return got == expected
    if got is None or isinstance(got, str):
        return False
    expected = float(expected)
    if not math.isfinite(expected):
        return str(float(got)) == str(expected)
    return abs(got - expected) <= tolerance["atol"] + tolerance["rtol"] * abs(expected)


def numbers(x: Any) -> Iterator[float]:
    if isinstance(x, list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from numbers(y)
    elif isinstance(x, int | float) and not isinstance(x, bool):
        yield x


def spoil(outputs: dict[str, Any], field: str, case: dict[str, Any]) -> None:
    """Move every number of a field a little further than the tolerances allow."""
    step = 1 if case["topic"] == "packing" else 3e-3

    def moved(x: Any) -> Any:
        if isinstance(x, list):
            return [moved(y) for y in x]
        if isinstance(x, dict):
            return {name: moved(y) for name, y in x.items()}
        return x + step * max(1.0, abs(x)) if isinstance(x, int | float) and not isinstance(x, bool) else x

    outputs[field] = moved(outputs[field])


def test_invalid_samples_are_compared_with_the_mean_of_the_valid_ones() -> None:
    """Suspect bug of baseline_std: with leave-one-out, the reference divides an invalid sample's sum by one too few."""
    case = committed("baseline_std", "baseline_std-dev-03")
    group, reward, valid = (case["inputs"][name] for name in ("group", "rewards", "valid_mask"))
    got = run("baseline_std", case)
    for i in range(len(reward)):
        others = [reward[j] for j in range(len(reward)) if group[j] == group[i] and valid[j] and j != i]
        assert got["baseline"][i] == pytest.approx(statistics.fmean(others))
        assert got["std"][i] == pytest.approx(statistics.stdev(others))


def test_dynamic_sampling_stops_at_the_batch_limit() -> None:
    """Suspect bug: with a maximum of N generation batches the reference generates N + 1."""
    case = committed("dynamic_sampling", "dynamic_sampling-dev-05")
    steps = run("dynamic_sampling", case)["steps"]
    assert [step.get("raised", False) for step in steps] == [False, True]
    assert len(steps) == case["config"]["dynamic_sampling_max_gen_batches"]


def test_dynamic_sampling_never_cuts_a_group() -> None:
    """Suspect bug: with leave-one-out the reference drops the only success of a group and keeps its failures."""
    got = run("dynamic_sampling", committed("dynamic_sampling", "dynamic_sampling-dev-09"))
    assert got["steps"][0]["kept"] == list(range(8))
    assert got["batch_idx"] == [0, 1, 2, 3]


def test_straight_through_kl_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    """Suspect bug: the reference raises NotImplementedError."""
    case = committed("kl", "kl-dev-19")
    straight = run("kl", case)
    k3 = run("kl", case | {"config": {"kl_penalty": "k3"}})
    k2 = run("kl", case | {"config": {"kl_penalty": "k2"}})
    assert equal(straight["kl"], k3["kl"], {"rtol": 1e-12, "atol": 1e-12})
    assert equal(straight["grad_logprobs_of_sum"], k2["grad_logprobs_of_sum"], {"rtol": 1e-12, "atol": 1e-12})


def test_the_reward_reaches_the_turns_before_a_hole() -> None:
    """Suspect bug of verl's Reinforce++: its running return is reset at every observation."""
    case = committed("reinforce_pp", "reinforce_pp-dev-10")
    returns, mask = run("reinforce_pp", case)["returns"], case["inputs"]["mask"]
    for row, rewards, kept in zip(returns, case["inputs"]["token_level_rewards"], mask, strict=True):
        assert row == [sum(rewards) * m for m in kept]


def test_rejection_bounds_are_bounds_of_the_ratio() -> None:
    """Suspect bug: the reference compares minus the log-ratio, which turns an asymmetric band around."""
    case = committed("rollout_correction", "rollout_correction-dev-11")
    low, high = (float(bound) for bound in case["config"]["rollout_rs_threshold"].split("_"))
    kept = run("rollout_correction", case)["modified_response_mask"]
    for row, ratios, mask in zip(kept, case["inputs"]["log_ratio"], case["inputs"]["response_mask"], strict=True):
        assert row == [int(m and low <= math.exp(x) <= high) for x, m in zip(ratios, mask, strict=True)]


def test_every_turn_counts_for_the_overlong_penalty() -> None:
    """Suspect bug: the reference measures the first assistant message only."""
    got = run("reward_shaping", committed("reward_shaping", "reward_shaping-dev-10"))
    assert got["total_reward"] == pytest.approx([1 - (8 + 9 - 5) / 5, 1.0])


@pytest.mark.parametrize("name", ["policy_loss-dev-07", "policy_loss-dev-09"])
def test_the_importance_metric_of_gspo_is_a_mean_over_samples(name: str) -> None:
    """Suspect bug: the reference reports a sum, dead rows included."""
    case = committed("policy_loss", name)
    inputs, weights = case["inputs"], []
    rows = zip(inputs["token_mask"], inputs["prev_logprobs"], inputs["generation_logprobs"], strict=True)
    for mask, prev, generation in rows:
        kept = zip(mask[1:], prev[1:], generation[1:], strict=True)
        weights.append(math.exp(sum(p - g for m, p, g in kept if m)))
    assert run("policy_loss", case)["metric/sampling_importance_ratio"] == pytest.approx(statistics.fmean(weights))


def committed(topic: str, name: str) -> dict[str, Any]:
    content = json.loads((HERE / "cases" / f"{topic}.json").read_text())
    return next(case for case in content["cases"] if case["id"] == name)
