"""Means and variances over the tokens of a mask: two-pass, so that a large offset costs no digits."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations; those of two chunks merge exactly (`merge_moments`)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @property
    def variance(self) -> Tensor:
        """Biased variance (divisor n); 0 without tokens."""
        return self.squares / self.count.clamp(min=1.0)


def moments(x: Tensor, mask: Tensor) -> Moments:
    """Two-pass moments over the mask, in float64: mean = sum x / n, then squares = sum (x - mean)^2."""
    assert x.shape == mask.shape, (x.shape, mask.shape)
    selected = torch.where(mask, x.detach(), 0.0).double()
    count = mask.sum().double()
    mean = selected.sum() / count.clamp(min=1.0)
    deviation = torch.where(mask, selected - mean, 0.0)
    return Moments(count, mean, (deviation**2).sum())


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of chunks (Chan, Golub & LeVeque 1983, eq. 2.1): the same however the tokens were cut.

    squares = squares_a + squares_b + (mean_b - mean_a)^2 * n_a * n_b / n, written for many chunks at once.
    """
    count, mean, squares = (torch.stack(column) for column in zip(*parts, strict=True))
    total = count.sum()
    total_mean = (count * mean).sum() / total.clamp(min=1.0)
    return Moments(total, total_mean, (squares + count * (mean - total_mean) ** 2).sum())


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the mask (of every row if `dim` is given); 0 where it is empty."""
    selected = torch.where(mask, x, 0.0)
    if dim is None:
        return selected.sum() / mask.sum().clamp(min=1)
    return selected.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_variance(x: Tensor, mask: Tensor, *, unbiased: bool) -> Tensor:
    """Two-pass variance over the mask; 0 for fewer tokens than the estimator needs."""
    count, _, squares = moments(x, mask)
    return (squares / (count - float(unbiased)).clamp(min=1.0)).to(x.dtype)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, statistics: Moments | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the mask with the unbiased variance; 0 outside the mask.

    `statistics` are those of the whole batch where x is only a chunk of it. With `shift_mean` off the mean is added
    back. One token alone has no variance and becomes 0 (or the mean).
    """
    count, mean, squares = moments(x, mask) if statistics is None else statistics
    variance = squares / (count - 1.0).clamp(min=1.0)
    return _scale(x, mask, mean, (variance + VARIANCE_FLOOR).rsqrt(), shift_mean)


def standardise(x: Tensor, mask: Tensor, *, statistics: Moments | None = None) -> Tensor:
    """(x - mean) / sqrt(max(var, 1e-8)) over the mask with the biased variance; 0 outside the mask."""
    known = moments(x, mask) if statistics is None else statistics
    return _scale(x, mask, known.mean, known.variance.clamp(min=VARIANCE_FLOOR).rsqrt(), True)


def explained_variance(returns: Moments, residuals: Moments) -> Tensor:
    """1 - Var[returns - values] / Var[returns], biased variances, the denominator floored at 1e-8.

    1 for a perfect critic, 0 for the best constant one, negative for worse. A constant offset does not count.
    """
    return 1.0 - residuals.variance / returns.variance.clamp(min=VARIANCE_FLOOR)


def _scale(x: Tensor, mask: Tensor, mean: Tensor, factor: Tensor, shift_mean: bool) -> Tensor:
    scaled = (torch.where(mask, x, 0.0).double() - mean) * factor
    return torch.where(mask, scaled if shift_mean else scaled + mean, 0.0).to(x.dtype)
