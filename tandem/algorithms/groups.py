"""Statistics of a sample's group: baseline and standard deviation over all samples of one prompt."""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupStatistics(NamedTuple):
    """Per sample: mean reward of its comparison set, the set's unbiased standard deviation, and reward - baseline."""

    baseline_N: Tensor
    std_N: Tensor
    centred_N: Tensor


def group_statistics(
    reward_N: Tensor,
    group_N: Tensor,
    *,
    leave_one_out: bool = False,
    valid_N: Tensor | None = None,
    std_reward_N: Tensor | None = None,
) -> GroupStatistics:
    """Baseline and spread for GRPO (Shao et al. 2024, section 4.1.2) and RLOO (Ahmadian et al. 2024, section 2.2).

    The comparison set of a sample is its group's valid samples, without itself if `leave_one_out`:

        baseline_i = mean of r_j over the set,     std_i = unbiased standard deviation of the set

    A group with at most one valid sample has nothing to compare: baseline = own reward, std 0. `std_reward_N` takes the
    spread from another reward (say, the unshaped one). Rewards are centred on a member of the set first, so that a set
    of equal rewards has a std of exactly 0 whatever the reward's digits.
    """
    valid_N = torch.ones_like(reward_N, dtype=torch.bool) if valid_N is None else valid_N
    peers_NK, set_NK = _comparison_sets(group_N, valid_N, leave_one_out)
    mean_N, std_N = _set_statistics(reward_N, peers_NK, set_NK)
    if std_reward_N is not None:
        _, std_N = _set_statistics(std_reward_N, peers_NK, set_NK)
    alone_N = _valid_in_group(group_N, valid_N) <= 1
    baseline_N = torch.where(alone_N, reward_N, mean_N)
    return GroupStatistics(baseline_N, torch.where(alone_N, 0.0, std_N), reward_N - baseline_N)


def _set_statistics(reward_N: Tensor, peers_NK: Tensor, set_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased std over every sample's set, two-pass and centred on the set's smallest reward."""
    reward_NK = torch.where(set_NK, reward_N[peers_NK], torch.inf)
    origin_N1 = reward_NK.amin(dim=1, keepdim=True)
    size_N = set_NK.sum(dim=1)
    offset_NK = torch.where(set_NK, reward_NK - origin_N1, 0.0)
    mean_N1 = offset_NK.sum(dim=1, keepdim=True) / size_N.clamp(min=1)[:, None]
    squares_N = torch.where(set_NK, (offset_NK - mean_N1) ** 2, 0.0).sum(dim=1)
    return (origin_N1 + mean_N1).squeeze(1), (squares_N / (size_N - 1).clamp(min=1)).sqrt()


def _comparison_sets(group_N: Tensor, valid_N: Tensor, leave_one_out: bool) -> tuple[Tensor, Tensor]:
    """Indices [N, K] of every sample's group, and which of them count; K is the largest group."""
    label_N, order_N, start_N, size_N = _sorted_groups(group_N)
    place_K = torch.arange(int(size_N.max()) if size_N.numel() else 0, device=group_N.device)
    inside_NK = place_K < size_N[label_N, None]
    peers_NK = order_N[(start_N[label_N, None] + place_K).clamp(max=group_N.numel() - 1)]
    set_NK = inside_NK & valid_N[peers_NK]
    if leave_one_out:
        set_NK &= peers_NK != torch.arange(group_N.numel(), device=group_N.device)[:, None]
    return peers_NK, set_NK


def _sorted_groups(group_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels 0..G-1 per sample, samples ordered by label, and where each group starts and how long it is."""
    _, label_N, size_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    return label_N, torch.argsort(label_N, stable=True), size_G.cumsum(0) - size_G, size_G


def _valid_in_group(group_N: Tensor, valid_N: Tensor) -> Tensor:
    _, label_N, size_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    return torch.zeros_like(size_G).index_add(0, label_N, valid_N.long())[label_N]
