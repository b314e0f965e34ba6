"""Scaling, shaping and filters of rewards."""

import pytest
import torch

from tandem.algorithms.rewards import (
    Overlong,
    RewardScale,
    drop_truncated,
    informative_groups,
    penalize_overlong,
    penalize_truncated,
    scale_rewards,
)


def test_rewards_are_clamped_and_then_mapped() -> None:
    reward = torch.tensor([-5.0, 0.0, 0.25, 1.0, 7.0])
    assert scale_rewards(reward, RewardScale(target_min=-1.0)).tolist() == [-1, -1, -0.5, 1, 1]
    assert scale_rewards(reward, RewardScale(target_min=1.0, target_max=0.0)).tolist() == [1, 1, 0.75, 0, 0]
    with pytest.raises(ValueError, match="source_min < source_max"):
        RewardScale(source_min=1.0)


def test_the_overlong_penalty_grows_over_the_buffer_and_is_capped() -> None:
    reward, length = torch.ones(6), torch.tensor([0, 80, 90, 100, 120, 200])
    assert penalize_overlong(reward, length, Overlong(100, 20)).tolist() == [1, 1, 0.5, 0, 0, 0]
    assert penalize_overlong(reward, length, Overlong(100, 20, capped=False)).tolist() == [1, 1, 0.5, 0, -1, -5]
    with pytest.raises(ValueError, match="0 < buffer <= max_length"):
        Overlong(10, 20)


def test_truncated_samples_lose_reward_or_all_their_tokens() -> None:
    truncated = torch.tensor([True, False])
    assert penalize_truncated(torch.tensor([1.0, 1.0]), truncated, 0.5).tolist() == [0.5, 1.0]
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert drop_truncated(mask, truncated).tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_without_a_signal_are_dropped_whole(dtype: torch.dtype) -> None:
    reward = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 1.0, 5.0], dtype=dtype)
    group = torch.tensor([4, 9, 4, 9, 4, 9, -2])
    assert informative_groups(reward, group).tolist() == [False, True, False, True, False, True, False]
    assert informative_groups(reward[:0], group[:0]).tolist() == []
