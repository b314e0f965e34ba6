"""Estimators without a critic against their definitions in plain Python, and their invariances."""

import statistics

import pytest
import torch
from torch import Tensor

from tandem.algorithms.advantages import (
    clip_advantages,
    gdpo_advantages,
    grpo_advantages,
    opd_advantages,
    penalize_messages,
    raw_reward_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
)
from tandem.algorithms.gae import place_last
from tandem.algorithms.groups import group_statistics


def batch() -> tuple[Tensor, Tensor]:
    """Interleaved groups of 5, 3, 2 and 1 samples with labels in no order."""
    group = torch.tensor([7, -1, 7, 3, 7, -1, 7, 3, 7, -1, 99])
    return torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), group


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("all_valid", [False, True])
def test_group_statistics_equal_their_definition(leave_one_out: bool, all_valid: bool) -> None:
    reward, group = batch()
    valid = torch.ones(11, dtype=torch.bool)
    if not all_valid:
        valid[[0, 3, 5]] = False
    got = group_statistics(reward, group, leave_one_out=leave_one_out, valid_N=valid)
    for i in range(11):
        peers = [j for j in range(11) if group[j] == group[i] and valid[j]]
        others = [float(reward[j]) for j in peers if not (leave_one_out and j == i)]
        alone = len(peers) <= 1
        baseline = float(reward[i]) if alone else statistics.fmean(others)
        std = 0.0 if alone or len(others) < 2 else statistics.stdev(others)
        assert float(got.baseline_N[i]) == pytest.approx(baseline, abs=1e-12)
        assert float(got.std_N[i]) == pytest.approx(std, abs=1e-12)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, -1e6 / 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_of_equal_rewards_gives_exactly_zero(reward: float, dtype: torch.dtype, leave_one_out: bool) -> None:
    rewards, group = torch.full((7,), reward, dtype=dtype), torch.zeros(7, dtype=torch.int64)
    assert torch.equal(group_statistics(rewards, group, leave_one_out=leave_one_out).std_N, torch.zeros_like(rewards))
    assert not grpo_advantages(rewards, group, leave_one_out=leave_one_out).any()
    assert not gdpo_advantages({"a": rewards, "b": 3 * rewards}, group, leave_one_out=leave_one_out).any()


def test_rewards_of_invalid_samples_may_be_anything() -> None:
    reward, group = batch()
    valid = torch.ones(11, dtype=torch.bool)
    valid[[0, 3, 5]] = False
    clean = grpo_advantages(reward, group, valid_N=valid)
    spoiled = grpo_advantages(torch.where(valid, reward, torch.nan), group, valid_N=valid)
    assert torch.equal(spoiled[valid], clean[valid])


def test_grpo_moves_with_the_samples() -> None:
    reward, group = batch()
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    moved = grpo_advantages(reward[order], group[order])
    torch.testing.assert_close(moved, grpo_advantages(reward, group)[order])


def test_rloo_is_the_scaled_distance_to_the_group_mean() -> None:
    reward, group = batch()
    size = (group[:, None] == group).sum(dim=1)
    distance = group_statistics(reward, group).centred_N
    expected = torch.where(size > 1, distance * size / (size - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(rloo_advantages(reward, group), expected)


def test_gdpo_normalises_every_component_before_it_weighs_them() -> None:
    reward, group = batch()
    other = reward.flip(0) * 100
    total = 2 * grpo_advantages(reward, group) - 0.5 * grpo_advantages(other, group)
    got = gdpo_advantages({"x": reward, "a": other}, group, weights={"a": -0.5, "x": 2.0})
    torch.testing.assert_close(got, (total - total.mean()) / total.std())
    torch.testing.assert_close(
        gdpo_advantages({"x": reward, "a": other / 100}, group, weights={"a": -0.5, "x": 2}), got, rtol=1e-4, atol=1e-4
    )


def test_gdpo_refuses_weights_for_other_components() -> None:
    reward, group = batch()
    with pytest.raises(ValueError, match=r"weights for \['y'\], but reward components \['x'\]"):
        gdpo_advantages({"x": reward}, group, weights={"y": 1.0})


def test_reinforce_plus_plus_reaches_over_holes_and_whitens() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    rewards = place_last(torch.tensor([1.0, -2.0, 9.0], dtype=torch.float64), mask)
    returns = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    torch.testing.assert_close(reinforce_plus_plus(rewards, mask)[mask], expected)


def test_reinforce_plus_plus_baseline_subtracts_the_group_and_the_penalty() -> None:
    reward, group = batch()
    mask = torch.rand(11, 6, generator=torch.Generator().manual_seed(2)) < 0.7
    penalty = torch.where(mask, torch.rand(11, 6, dtype=torch.float64), torch.nan)
    got = reinforce_plus_plus_baseline(reward, mask, group_N=group, penalty_NT=penalty)
    raw = (group_statistics(reward, group).centred_N[:, None] - penalty)[mask]
    torch.testing.assert_close(got[mask], (raw - raw.mean()) / raw.std(unbiased=False))
    assert not got[~mask].any()


def test_raw_reward_is_the_reward_on_every_token() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    assert raw_reward_advantages(torch.tensor([2.0, float("nan")]), mask).tolist() == [[2, 0, 2], [0, 0, 0]]


def test_opd_is_the_gap_to_the_teacher() -> None:
    mask = torch.tensor([[1, 1, 0]], dtype=torch.bool)
    teacher, student = torch.tensor([[-1.0, -2.0, float("nan")]]), torch.tensor([[-2.0, -1.5, float("nan")]])
    got = opd_advantages(teacher, student, mask)
    assert got.advantages_NT.tolist() == [[1.0, -0.5, 0.0]]
    assert float(got.mean) == pytest.approx(0.25)
    assert float(got.std) == pytest.approx(statistics.stdev([1.0, -0.5]))


def test_clip_leaves_an_open_side_open() -> None:
    x = torch.tensor([-3.0, 0.0, 3.0])
    assert clip_advantages(x, None, 1.0).tolist() == [-3.0, 0.0, 1.0]
    assert clip_advantages(x, -1.0, None).tolist() == [-1.0, 0.0, 3.0]
    assert torch.equal(clip_advantages(x, None, None), x)


def test_an_invalid_tool_call_wins_over_malformed_thinking() -> None:
    call, thought = torch.tensor([[True, True, False, False]]), torch.tensor([[True, False, True, False]])
    names = {"invalid_tool_call_NT": call, "malformed_thinking_NT": thought}
    got = penalize_messages(
        torch.ones(1, 4), **names, invalid_tool_call_advantage=-1.0, malformed_thinking_advantage=-0.5
    )
    assert got.tolist() == [[-1.0, -1.0, -0.5, 1.0]]
