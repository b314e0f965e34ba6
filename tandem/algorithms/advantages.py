"""Advantage estimators without a critic, and what may be done to advantages afterwards."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.gae import discounted_returns
from tandem.algorithms.groups import group_statistics
from tandem.algorithms.moments import masked_mean, masked_variance, standardise, whiten

STD_EPSILON = 1e-6


def grpo_advantages(
    reward_N: Tensor,
    group_N: Tensor,
    *,
    normalize: bool = True,
    leave_one_out: bool = False,
    valid_N: Tensor | None = None,
    std_reward_N: Tensor | None = None,
) -> Tensor:
    """GRPO (Shao et al. 2024, section 4.1.2): A_i = (r_i - baseline_i) / (std_i + 1e-6), one number a sample.

    Not divided where the std is 0, nor with `normalize` off (Dr. GRPO, Liu et al. 2025). See `group_statistics`.
    """
    statistics = group_statistics(
        reward_N, group_N, leave_one_out=leave_one_out, valid_N=valid_N, std_reward_N=std_reward_N
    )
    std_N = statistics.std_N
    divisor_N = torch.where(std_N > 0, std_N + STD_EPSILON, 1.0) if normalize else torch.ones_like(std_N)
    return statistics.centred_N / divisor_N


def rloo_advantages(reward_N: Tensor, group_N: Tensor, *, valid_N: Tensor | None = None) -> Tensor:
    """RLOO (Ahmadian et al. 2024, section 2.2): A_i = r_i - mean of the other rewards of the group; alone: 0."""
    return grpo_advantages(reward_N, group_N, normalize=False, leave_one_out=True, valid_N=valid_N)


def gdpo_advantages(
    components: Mapping[str, Tensor],
    group_N: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
    normalize: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """GDPO (Liu et al. 2026): GRPO advantages per reward component, weighted, then standardised over the batch.

    x_i = sum_c w_c * A_{c,i},     A_i = (x_i - mean x) / std x  (unbiased; not divided where x does not vary)
    """
    weights = dict.fromkeys(components, 1.0) if weights is None else weights
    if weights.keys() != components.keys():
        raise ValueError(f"gdpo: weights for {sorted(weights)}, but reward components {sorted(components)}.")
    total_N = torch.stack(
        [
            weights[name] * grpo_advantages(reward_N, group_N, normalize=normalize, leave_one_out=leave_one_out)
            for name, reward_N in sorted(components.items())
        ]
    ).sum(dim=0)
    everyone_N = torch.ones_like(total_N, dtype=torch.bool)
    centred_N = total_N - masked_mean(total_N, everyone_N)
    std = masked_variance(total_N, everyone_N, unbiased=True).sqrt()
    varies = std > 16 * torch.finfo(total_N.dtype).eps * total_N.abs().amax()
    return centred_N / torch.where(varies, std, 1.0)


def reinforce_plus_plus(rewards_NT: Tensor, mask_NT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """REINFORCE++ (Hu et al. 2025): whitened return-to-go of the token rewards (a KL penalty is among them).

    Holes take no step and reset nothing: the reward at the end reaches every turn.
    """
    return whiten(discounted_returns(rewards_NT, mask_NT, gamma), mask_NT)


def reinforce_plus_plus_baseline(
    reward_N: Tensor,
    mask_NT: Tensor,
    *,
    group_N: Tensor | None = None,
    penalty_NT: Tensor | None = None,
) -> Tensor:
    """REINFORCE++-baseline (Hu et al. 2025): A_{i,t} = standardise(r_i - group mean - penalty_{i,t}).

    Without `group_N` nothing is subtracted. A penalty (coefficient * KL) counts for its own token only.
    """
    if group_N is not None:
        reward_N = group_statistics(reward_N, group_N).centred_N
    advantages_NT = spread(reward_N, mask_NT)
    if penalty_NT is not None:
        advantages_NT = advantages_NT - torch.where(mask_NT, penalty_NT, 0.0)
    return standardise(advantages_NT, mask_NT)


def raw_reward_advantages(reward_N: Tensor, mask_NT: Tensor, *, normalize: bool = False) -> Tensor:
    """A_{i,t} = r_i, optionally standardised over all tokens of the batch."""
    advantages_NT = spread(reward_N, mask_NT)
    return standardise(advantages_NT, mask_NT) if normalize else advantages_NT


class Distillation(NamedTuple):
    """On-policy distillation: advantages, and their mean and unbiased std over the tokens."""

    advantages_NT: Tensor
    mean: Tensor
    std: Tensor


def opd_advantages(teacher_logprobs_NT: Tensor, logprobs_NT: Tensor, mask_NT: Tensor) -> Distillation:
    """On-policy distillation (Lu et al. 2025): A_t = log teacher_t - log policy_t, minus the reverse KL."""
    gap_NT = torch.where(mask_NT, teacher_logprobs_NT, 0.0) - torch.where(mask_NT, logprobs_NT, 0.0)
    std = masked_variance(gap_NT, mask_NT, unbiased=True).sqrt()
    return Distillation(gap_NT, masked_mean(gap_NT, mask_NT), std)


def spread(x_N: Tensor, mask_NT: Tensor) -> Tensor:
    """A sample's number on each token the policy wrote, 0 elsewhere."""
    return torch.where(mask_NT, x_N[:, None], 0.0)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp to [low, high]; None leaves a side open."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def penalize_messages(
    advantages_NT: Tensor,
    *,
    invalid_tool_call_NT: Tensor,
    malformed_thinking_NT: Tensor,
    invalid_tool_call_advantage: float | None,
    malformed_thinking_advantage: float | None,
) -> Tensor:
    """Overwrite the advantages of flagged messages (masks over the tokens of generated messages); None is off.

    An invalid tool call wins over malformed thinking. Comes after the estimator and before the clip.
    """
    if malformed_thinking_advantage is not None:
        advantages_NT = torch.where(malformed_thinking_NT, malformed_thinking_advantage, advantages_NT)
    if invalid_tool_call_advantage is not None:
        advantages_NT = torch.where(invalid_tool_call_NT, invalid_tool_call_advantage, advantages_NT)
    return advantages_NT
