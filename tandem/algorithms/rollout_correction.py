"""Rollout correction as in verl: truncated weights normalised over the batch, and rejection of tokens or samples."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.layout import Layout

# exp(20) = 5e8: beyond it a log-ratio says "wrong", not how wrong.
LOG_RATIO_BOUND = 20.0


class RolloutWeights(NamedTuple):
    """Weights per token (0 outside the mask); over tokens: mean before truncation, effective sample size in (0, 1]."""

    weights_P: Tensor
    mean: Tensor
    effective_sample_size: Tensor


@torch.no_grad()
def rollout_weights(
    log_ratio_P: Tensor, layout: Layout, *, level: Literal["token", "sequence"], high: float, normalize: bool
) -> RolloutWeights:
    """Truncated importance weights min(exp(log train - log rollout), high); a sequence has the product of its tokens'.

    `normalize` divides by the mean (over tokens, or over samples). Effective sample size: 1 / mean((w / mean w)^2).
    """
    kept_P = layout.keep(log_ratio_P)
    if level == "sequence":
        kept_P = layout.spread(layout.sum(kept_P))
    weight_P = kept_P.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    truncated_P = layout.keep(weight_P.clamp(max=high))
    if normalize:
        mean = _mean(truncated_P, layout, level)
        truncated_P = torch.where(mean > 0, truncated_P / mean, truncated_P)
    clipped_P = weight_P.clamp(1.0 / high, high)
    size = _mean(clipped_P, layout, "token") ** 2 / _mean(clipped_P**2, layout, "token")
    return RolloutWeights(truncated_P, _mean(weight_P, layout, "token"), torch.where(layout.mask_P.any(), size, 1.0))


@dataclass(frozen=True)
class Rejection:
    """One rule: a statistic of the log-ratio, for tokens or over a sample, and the band that is kept.

    k1 is bounded in the ratio train/rollout itself, on both sides; k2 and k3 are divergences with an upper bound.
    """

    statistic: Literal["k1", "k2", "k3"]
    level: Literal["token", "sum", "mean", "max"]
    high: float
    low: float | None = None


@torch.no_grad()
def rejection_mask(log_ratio_P: Tensor, layout: Layout, rules: list[Rejection]) -> Tensor:
    """Tokens of the mask that every rule keeps; a rule over samples keeps or drops a sample whole."""
    log_ratio_P = layout.keep(log_ratio_P).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    kept_P = layout.mask_P
    for rule in rules:
        low, high = _band(rule)
        statistic_P = _per_level(_statistic(log_ratio_P, rule), layout, rule)
        kept_P = kept_P & (statistic_P >= low) & (statistic_P <= high)
    return kept_P


def _statistic(log_ratio_P: Tensor, rule: Rejection) -> Tensor:
    match rule.statistic:
        case "k1":
            return log_ratio_P
        case "k2":
            return 0.5 * log_ratio_P**2
        case "k3":
            return torch.expm1(log_ratio_P) - log_ratio_P


def _per_level(statistic_P: Tensor, layout: Layout, rule: Rejection) -> Tensor:
    match rule.level:
        case "token":
            return statistic_P
        case "sum":
            return layout.spread(layout.sum(statistic_P))
        case "mean":
            return layout.spread(layout.mean(statistic_P))
        case "max":
            low_N = statistic_P.new_full((layout.num_samples,), -torch.inf)
            valid_P = torch.where(layout.mask_P, statistic_P, -torch.inf)
            return layout.spread(low_N.scatter_reduce(0, layout.sample_P, valid_P, "amax"))


def _band(rule: Rejection) -> tuple[float, float]:
    """Bounds of the statistic: logs of the ratio's bounds for k1, an upper bound for divergences."""
    if rule.statistic != "k1":
        return -math.inf, rule.high
    if rule.low is None or rule.low <= 0:
        raise ValueError(f"Rejection: k1 bounds the ratio on both sides, `low` must be above 0, got {rule.low}.")
    return math.log(rule.low), math.log(rule.high)


def _mean(x_P: Tensor, layout: Layout, level: Literal["token", "sequence"]) -> Tensor:
    """Mean over tokens, or over the samples that have any (all tokens of a sample hold one number then)."""
    if level == "token":
        return layout.keep(x_P).sum() / layout.mask_P.sum().clamp(min=1)
    return layout.mean(x_P).sum() / (layout.tokens() > 0).sum().clamp(min=1)
