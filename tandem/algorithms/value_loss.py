"""The critic's losses: clipped squared error, Huber, and classification of returns (HL-Gauss)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.layout import Layout
from tandem.algorithms.moments import Moments, moments


class ValueLoss(NamedTuple):
    """The loss, a sum to be divided by the divisor; moments of returns and residuals give the explained variance."""

    loss: Tensor
    tokens: Tensor
    clipped: Tensor
    """How many tokens' clipped error was the larger one."""
    returns: Moments
    values: Moments
    residuals: Moments
    lowest: Tensor
    """The smallest value; infinite if no token counts, as is `highest`."""
    highest: Tensor


@dataclass(frozen=True)
class HlGauss:
    """Histogram of returns: equal bins over [low, high]; sigma is in widths of a bin (0.75 in the paper)."""

    low: float
    high: float
    bins: int = 101
    sigma: float = 0.75

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.bins >= 2 and self.sigma > 0):
            raise ValueError(f"HlGauss wants low < high, at least 2 bins and sigma > 0, got {self}.")


def squared_value_loss(
    values_P: Tensor,
    old_values_P: Tensor,
    returns_P: Tensor,
    weights_P: Tensor,
    layout: Layout,
    *,
    clip_range: float | None = None,
) -> ValueLoss:
    """Sum of weight * 0.5 * max((V - R)^2, (clip(V, old +- range) - R)^2) (PPO2; Engstrom et al. 2020, eq. 2).

    `clip_range` None is the plain squared error.
    """
    values_P, old_P, returns_P = (layout.keep(x_P) for x_P in (values_P, old_values_P, returns_P))
    errors_P = (values_P - returns_P) ** 2
    clipped_P = errors_P
    if clip_range is not None:
        bounded_P = values_P.clamp(old_P - clip_range, old_P + clip_range)
        clipped_P = (bounded_P - returns_P) ** 2
    loss_P = 0.5 * torch.maximum(errors_P, clipped_P)
    return _value_loss(loss_P, clipped_P > errors_P, (values_P, returns_P), weights_P, layout)


def huber_value_loss(
    values_P: Tensor, returns_P: Tensor, weights_P: Tensor, layout: Layout, *, delta: float = 1.0
) -> ValueLoss:
    """Sum of weight * Huber (1964): 0.5 e^2 for |e| <= delta, else delta (|e| - delta / 2), with e = V - R."""
    values_P, returns_P = layout.keep(values_P), layout.keep(returns_P)
    error_P = (values_P - returns_P).abs()
    loss_P = torch.where(error_P <= delta, 0.5 * error_P**2, delta * (error_P - 0.5 * delta))
    return _value_loss(loss_P, error_P > delta, (values_P, returns_P), weights_P, layout)


def hl_gauss_value_loss(
    logits_PK: Tensor, returns_P: Tensor, weights_P: Tensor, layout: Layout, *, histogram: HlGauss
) -> ValueLoss:
    """Sum of weight * cross-entropy to the smoothed return (HL-Gauss, Farebrother et al. 2024, section 3.1)."""
    logits_PK = torch.where(layout.mask_P[:, None], logits_PK, 0.0)
    returns_P = layout.keep(returns_P)
    target_PK = hl_gauss_targets(returns_P, histogram)
    loss_P = -(target_PK * torch.log_softmax(logits_PK, dim=-1)).sum(dim=-1)
    outside_P = (returns_P < histogram.low) | (returns_P > histogram.high)
    return _value_loss(loss_P, outside_P, (hl_gauss_value(logits_PK, histogram), returns_P), weights_P, layout)


def hl_gauss_targets(returns_P: Tensor, histogram: HlGauss) -> Tensor:
    """Mass of a Gaussian around the return in every bin, normalised over the bins; returns outside count as the bound.

    p_k = [Phi((edge_{k+1} - R) / s) - Phi((edge_k - R) / s)] / [Phi((high - R) / s) - Phi((low - R) / s)]
    """
    width = (histogram.high - histogram.low) / histogram.bins
    edges_K = _edges(histogram, returns_P)
    centred_PK = (edges_K - returns_P.clamp(histogram.low, histogram.high)[:, None]) / (histogram.sigma * width)
    cdf_PK = 0.5 * torch.erf(centred_PK / math.sqrt(2.0))
    return cdf_PK.diff(dim=-1) / (cdf_PK[:, -1:] - cdf_PK[:, :1])


def hl_gauss_value(logits_PK: Tensor, histogram: HlGauss) -> Tensor:
    """The value of a histogram: mean of the bins' centres under softmax(logits)."""
    edges_K = _edges(histogram, logits_PK)
    return torch.softmax(logits_PK, dim=-1) @ (0.5 * (edges_K[1:] + edges_K[:-1]))


def _edges(histogram: HlGauss, like: Tensor) -> Tensor:
    return torch.linspace(histogram.low, histogram.high, histogram.bins + 1, dtype=like.dtype, device=like.device)


def _value_loss(
    loss_P: Tensor, clipped_P: Tensor, values_and_returns: tuple[Tensor, Tensor], weights_P: Tensor, layout: Layout
) -> ValueLoss:
    values_P, returns_P = (x_P.detach() for x_P in values_and_returns)
    return ValueLoss(
        loss=layout.keep(layout.keep(weights_P) * loss_P).sum(),
        tokens=layout.mask_P.sum(),
        clipped=(clipped_P & layout.mask_P).sum(),
        returns=moments(returns_P, layout.mask_P),
        values=moments(values_P, layout.mask_P),
        residuals=moments(returns_P - values_P, layout.mask_P),
        lowest=torch.where(layout.mask_P, values_P, torch.inf).amin(),
        highest=torch.where(layout.mask_P, values_P, -torch.inf).amax(),
    )
