"""What happens to rewards before advantages: scaling, shaping for length, and filters of samples and groups."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardScale:
    """A linear map of rewards, which are clamped to the source first; target bounds may be in reverse."""

    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        if not self.source_min < self.source_max:
            raise ValueError(f"RewardScale wants source_min < source_max, got {self.source_min} and {self.source_max}.")


@dataclass(frozen=True)
class Overlong:
    """Lengths in tokens: the last `buffer` tokens before `max_length` cost up to `penalty`."""

    max_length: int
    buffer: int
    penalty: float = 1.0
    capped: bool = True
    """Never subtract more than `penalty`, as in the paper; NeMo-RL and verl go on linearly beyond max_length."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length:
            raise ValueError(f"Overlong wants 0 < buffer <= max_length, got {self.buffer} and {self.max_length}.")


def scale_rewards(reward_N: Tensor, scale: RewardScale) -> Tensor:
    """target_min + (clamp(r) - source_min) / (source_max - source_min) * (target_max - target_min)."""
    share_N = (reward_N.clamp(scale.source_min, scale.source_max) - scale.source_min) / (
        scale.source_max - scale.source_min
    )
    return scale.target_min + share_N * (scale.target_max - scale.target_min)


def penalize_overlong(reward_N: Tensor, length_N: Tensor, overlong: Overlong) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, section 3.4): r - penalty * (length - (max - buffer)) / buffer.

    `length_N`: ALL tokens the policy wrote in the sample, over all its turns. Nothing before the buffer starts.
    """
    excess_N = (length_N - (overlong.max_length - overlong.buffer)).to(reward_N.dtype) / overlong.buffer
    excess_N = excess_N.clamp(0.0, 1.0) if overlong.capped else excess_N.clamp(min=0.0)
    return reward_N - overlong.penalty * excess_N


def penalize_truncated(reward_N: Tensor, truncated_N: Tensor, coefficient: float) -> Tensor:
    """Stop properly: the reward of a truncated sample times the coefficient (which softens a NEGATIVE reward)."""
    return torch.where(truncated_N, reward_N * coefficient, reward_N)


def drop_truncated(mask_NT: Tensor, truncated_N: Tensor) -> Tensor:
    """Overlong filtering (DAPO, Yu et al. 2025, section 3.4): no token of a truncated sample is trained on."""
    return mask_NT & ~truncated_N[:, None]


def informative_groups(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """Dynamic sampling (DAPO, Yu et al. 2025, eq. 8): keep the samples of groups whose rewards are not all equal.

    Whole groups are kept or dropped. Give the reward before shaping: a length penalty is no learning signal.
    """
    _, label_N = torch.unique(group_N, return_inverse=True)
    groups = int(label_N.max()) + 1 if label_N.numel() else 0
    largest_G = reward_N.new_full((groups,), -torch.inf).scatter_reduce(0, label_N, reward_N, "amax")
    smallest_G = reward_N.new_full((groups,), torch.inf).scatter_reduce(0, label_N, reward_N, "amin")
    return (largest_G > smallest_G)[label_N]
