"""From the columns of a batch to what the losses read: advantages, returns, and who is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.algorithms.advantages import (
    clip_advantages,
    gdpo_advantages,
    grpo_advantages,
    opd_advantages,
    raw_reward_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo_advantages,
    spread,
)
from tandem.algorithms.correction import mismatch_sums, sequence_prob_error
from tandem.algorithms.gae import gae, length_adaptive_lambda, place_last
from tandem.algorithms.kl import KlOptions, kl_estimate, subtract_kl
from tandem.algorithms.layout import Layout
from tandem.algorithms.moments import VARIANCE_FLOOR, explained_variance, moments, whiten
from tandem.algorithms.rewards import Overlong as SoftOverlong
from tandem.algorithms.rewards import (
    RewardScale,
    drop_truncated,
    penalize_overlong,
    penalize_truncated,
    scale_rewards,
)
from tandem.config.algorithm import (
    Gae,
    Gdpo,
    Grpo,
    GrpoEstimator,
    Opd,
    Overlong,
    PolicyLoss,
    Ppo,
    RawReward,
    ReinforcePlusPlus,
    Rloo,
)
from tandem.types import Max, Mean, Metrics, Min, Sum


@dataclass(frozen=True)
class Columns:
    """A batch as padded columns; None where there is no reference, no critic, or no bootstrap."""

    reward_N: Tensor
    components: Mapping[str, Tensor]
    truncated_N: Tensor
    trained_N: Tensor
    group_N: Tensor
    mask_NT: Tensor
    gen_logprobs_NT: Tensor
    old_logprobs_NT: Tensor
    ref_logprobs_NT: Tensor | None
    values_NT: Tensor | None
    bootstrap_N: Tensor | None

    def layout(self, mask_NT: Tensor) -> Layout:
        """The same tokens end to end."""
        samples, tokens = mask_NT.shape
        return Layout(mask_NT.flatten(), torch.arange(samples).repeat_interleave(tokens), samples)


@dataclass(frozen=True)
class Estimate:
    """Advantages and (with a critic) returns per token; the mask of the tokens that are trained on; metrics."""

    advantages_NT: Tensor
    returns_NT: Tensor | None
    trained_NT: Tensor
    kl: float | None
    metrics: Metrics


def estimate(columns: Columns, algorithm: Ppo | Grpo, loss_fn: PolicyLoss, kl_coefficient: float) -> Estimate:
    """Leave samples out, scale rewards, shape them, estimate advantages, clip them: in this order.

    A sample that is left out is in no baseline and in no statistic either.
    """
    mask_NT = columns.mask_NT
    trained_NT, left_out = trained_tokens(columns, algorithm)
    columns = replace(columns, mask_NT=trained_NT)
    reward_N, components = shaped_rewards(columns, algorithm)
    kl_NT = reference_kl(columns, loss_fn)
    in_reward = kl_coefficient if loss_fn.use_kl_in_reward else 0.0
    advantages_NT, returns_NT = advantages_of(columns, reward_N, components, kl_NT * in_reward, algorithm)
    advantages_NT = clip_advantages(advantages_NT, algorithm.advantage_clip_low, algorithm.advantage_clip_high)
    tokens = trained_NT.sum().item()
    kl = kl_NT.sum().item() if columns.ref_logprobs_NT is not None else None
    metrics: Metrics = left_out | advantage_metrics(advantages_NT, trained_NT)
    metrics |= mismatch_metrics(replace(columns, mask_NT=mask_NT))
    metrics["rollout/shaped_reward"] = Mean(reward_N.sum().item(), len(reward_N))
    if kl is not None:
        metrics["reference/kl"] = Mean(kl, tokens)
        metrics["reference/kl_coefficient"] = Mean(kl_coefficient, 1)
    if returns_NT is not None and columns.values_NT is not None:
        metrics |= critic_metrics(returns_NT, columns.values_NT, columns.mask_NT)
    return Estimate(advantages_NT, returns_NT, trained_NT, None if kl is None else kl / max(tokens, 1), metrics)


def shaped_rewards(columns: Columns, algorithm: Ppo | Grpo) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Scaling, then shaping. The raw reward stays what dynamic sampling and accuracy look at."""
    reward_N, components = columns.reward_N, columns.components
    if (scaling := algorithm.reward_scaling) is not None:
        scale = RewardScale(scaling.source_min, scaling.source_max, scaling.target_min, scaling.target_max)
        reward_N = scale_rewards(reward_N, scale)
        components = {name: scale_rewards(part_N, scale) for name, part_N in components.items()}
    if (shaping := algorithm.reward_shaping) is None:
        return reward_N, components
    if isinstance(shaping, Overlong):
        penalty = SoftOverlong(
            max_length=shaping.max_response_length,
            buffer=shaping.overlong_buffer_length,
            penalty=shaping.overlong_buffer_penalty,
        )
        return penalize_overlong(reward_N, columns.mask_NT.sum(dim=1), penalty), components
    return penalize_truncated(reward_N, columns.truncated_N, shaping.stop_properly_penalty_coef), components


def reference_kl(columns: Columns, loss_fn: PolicyLoss) -> Tensor:
    """KL of old policy and reference per token, 0 outside the mask and without a reference."""
    if columns.ref_logprobs_NT is None:
        return torch.zeros_like(columns.old_logprobs_NT)
    options = KlOptions(loss_fn.reference_policy_kl_type, loss_fn.kl_input_clamp_value, loss_fn.kl_output_clamp_value)
    old_NT, ref_NT = (torch.where(columns.mask_NT, x, 0.0) for x in (columns.old_logprobs_NT, columns.ref_logprobs_NT))
    return kl_estimate(old_NT, ref_NT, options)


def advantages_of(
    columns: Columns, reward_N: Tensor, components: Mapping[str, Tensor], penalty_NT: Tensor, algorithm: Ppo | Grpo
) -> tuple[Tensor, Tensor | None]:
    """The estimator of the recipe. Only GAE has returns. `penalty_NT` is coefficient x KL in the reward, or 0."""
    mask_NT, group_N = columns.mask_NT, columns.group_N
    valid_N = mask_NT.any(dim=1)
    rewards_NT = subtract_kl(place_last(reward_N, mask_NT), penalty_NT, mask_NT, 1.0)
    match algorithm.adv_estimator:
        case Gae() as estimator:
            return gae_of(columns, rewards_NT, estimator)
        case ReinforcePlusPlus(minus_baseline=False):
            return reinforce_plus_plus(rewards_NT, mask_NT), None
        case ReinforcePlusPlus():
            return reinforce_plus_plus_baseline(reward_N, mask_NT, group_N=group_N, penalty_NT=penalty_NT), None
        case Opd():
            assert columns.ref_logprobs_NT is not None, "checked when loaded: opd has a reference"
            return opd_advantages(columns.ref_logprobs_NT, columns.old_logprobs_NT, mask_NT).advantages_NT, None
        case RawReward(normalize_advantages=normalize):
            return raw_reward_advantages(reward_N, mask_NT, normalize=normalize), None
        case Rloo():
            advantage_N = rloo_advantages(reward_N, group_N, valid_N=valid_N)
        case GrpoEstimator() as e:
            advantage_N = grpo_advantages(
                reward_N,
                group_N,
                normalize=e.normalize_rewards,
                leave_one_out=e.use_leave_one_out_baseline,
                valid_N=valid_N,
            )
        case Gdpo() as e:
            advantage_N = gdpo_advantages(
                components,
                group_N,
                weights=e.reward_weights,
                normalize=e.normalize_rewards,
                leave_one_out=e.use_leave_one_out_baseline,
            )
    return spread(advantage_N, mask_NT), None


def gae_of(columns: Columns, rewards_NT: Tensor, estimator: Gae) -> tuple[Tensor, Tensor]:
    """GAE with the recipe's lambdas; returns are taken before whitening."""
    assert columns.values_NT is not None, "checked when loaded: gae has a critic"
    lambda_policy: float | Tensor = estimator.lambda_policy
    if estimator.length_adaptive_alpha > 0:
        lambda_policy = length_adaptive_lambda(columns.mask_NT, estimator.length_adaptive_alpha)
    estimated = gae(
        rewards_NT,
        columns.values_NT,
        columns.mask_NT,
        gamma=estimator.gae_gamma,
        lambda_value=estimator.lambda_value,
        lambda_policy=lambda_policy,
        bootstrap_N=columns.bootstrap_N,
    )
    advantages_NT = estimated.advantages_NT
    if estimator.normalize_advantages:
        advantages_NT = whiten(advantages_NT, columns.mask_NT)
    return advantages_NT, estimated.returns_NT


def trained_tokens(columns: Columns, algorithm: Ppo | Grpo) -> tuple[Tensor, Metrics]:
    """The policy's tokens less the samples that the recipe leaves out of every loss, and how many those are."""
    trained_NT = columns.mask_NT & columns.trained_N[:, None]
    metrics: Metrics = {}
    if algorithm.overlong_filtering:
        trained_NT = drop_truncated(trained_NT, columns.truncated_N)
        metrics["rollout/filtered_overlong"] = Sum(columns.truncated_N.sum().item())
    if (threshold := algorithm.seq_logprob_error_threshold) is not None:
        layout = columns.layout(columns.mask_NT)
        error_N = sequence_prob_error(columns.old_logprobs_NT.flatten(), columns.gen_logprobs_NT.flatten(), layout)
        trained_NT = trained_NT & (error_N <= threshold)[:, None]
        metrics["rollout/masked_by_logprob_error"] = Sum((error_N > threshold).sum().item())
    return trained_NT, metrics


def mismatch_metrics(columns: Columns) -> Metrics:
    """How far the trainer's log-probs are from the engine's: staleness, precision, or a fault.

    Means over all tokens; and of the samples' own means (seq_mult_prob_error) the largest, the mean and the smallest.
    gen_weight_mean is the mean of exp(old - generation): 1 but for noise, unless the engine drew from a part of the
    vocabulary (top-k, top-p); then it is the trainer's probability of that part.
    """
    layout = columns.layout(columns.mask_NT)
    old_P, gen_P = columns.old_logprobs_NT.flatten(), columns.gen_logprobs_NT.flatten()
    tokens = columns.mask_NT.sum().item()
    metrics: Metrics = {
        f"rollout/{name}": Mean(total.item(), tokens) for name, total in mismatch_sums(old_P, gen_P, layout).items()
    }
    weight_P = (layout.keep(old_P) - layout.keep(gen_P)).exp()
    metrics["rollout/gen_weight_mean"] = Mean(layout.keep(weight_P).sum().item(), tokens)
    error_N = sequence_prob_error(old_P, gen_P, layout)[layout.tokens() > 0]
    if len(error_N):
        metrics |= {
            "rollout/seq_mult_prob_error_max": Max(error_N.max().item()),
            "rollout/seq_mult_prob_error_mean": Mean(error_N.sum().item(), len(error_N)),
            "rollout/seq_mult_prob_error_min": Min(error_N.min().item()),
        }
    return metrics


def advantage_metrics(advantages_NT: Tensor, mask_NT: Tensor) -> Metrics:
    """Spread of the advantages over the policy's tokens."""
    stats = moments(advantages_NT, mask_NT)
    return {
        "advantages/mean": Mean(stats.mean.item(), 1),
        "advantages/std": Mean(stats.variance.sqrt().item(), 1),
        "advantages/abs_max": Max(torch.where(mask_NT, advantages_NT, 0.0).abs().max().item()),
    }


def critic_metrics(returns_NT: Tensor, values_NT: Tensor, mask_NT: Tensor) -> Metrics:
    """How much of the returns the critic explained before it learned from them; nothing where they do not vary."""
    known_NT = torch.where(mask_NT, values_NT, 0.0)
    returns, residuals = moments(returns_NT, mask_NT), moments(returns_NT - known_NT, mask_NT)
    varies = returns.variance.item() > VARIANCE_FLOOR
    explained: Metrics = {"critic/explained_variance": Mean(explained_variance(returns, residuals).item(), 1)}
    return (explained if varies else {}) | {
        "critic/value_mean": Mean(moments(known_NT, mask_NT).mean.item(), 1),
        "critic/return_mean": Mean(returns.mean.item(), 1),
    }
