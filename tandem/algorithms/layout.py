"""The flat layout of losses: tokens of all samples in one row, and sums over the tokens of a sample."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AverageKind = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]


@dataclass(frozen=True)
class Layout:
    """Which tokens count and whose they are. Samples are whole: all tokens of a sample lie in one layout."""

    mask_P: Tensor
    """bool: the policy wrote this token, and its sample is to be trained on."""
    sample_P: Tensor
    """int64: the sample of each token, 0 .. num_samples-1, masked tokens included."""
    num_samples: int

    def keep(self, x_P: Tensor) -> Tensor:
        """x on the tokens that count, exactly 0 elsewhere, whatever (NaN, infinity) stands there; so for gradients."""
        return torch.where(self.mask_P, x_P, 0.0)

    def sum(self, x_P: Tensor) -> Tensor:
        """Sum over the tokens of every sample [num_samples]."""
        kept_P = self.keep(x_P)
        return kept_P.new_zeros(self.num_samples).index_add(0, self.sample_P, kept_P)

    def tokens(self) -> Tensor:
        """How many tokens of every sample count [num_samples], int64."""
        zeros_N = self.sample_P.new_zeros(self.num_samples)
        return zeros_N.index_add(0, self.sample_P, self.mask_P.long())

    def mean(self, x_P: Tensor) -> Tensor:
        """Mean over the tokens of every sample; 0 for a sample without tokens."""
        return self.sum(x_P) / self.tokens().clamp(min=1)

    def spread(self, x_N: Tensor) -> Tensor:
        """A sample's number on each of its tokens."""
        return x_N[self.sample_P]


@dataclass(frozen=True)
class Average:
    """How to average a loss: sum over tokens of weight * loss, divided by the sum of the shares of all samples."""

    weights_P: Tensor
    shares_N: Tensor


def averaging_weights(
    layout: Layout,
    kind: AverageKind,
    *,
    fixed_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Average:
    """Weights per token and shares of the divisor per sample, such that no loss needs to know how it is averaged.

    token_mean     every token alike:            weight 1,    share n_i        (DAPO, Yu et al. 2025)
    sequence_mean  mean within, then over samples: weight 1/n_i, share 1       (GRPO, Shao et al. 2024)
    sequence_sum   sum within, mean over samples: weight 1,   share 1
    fixed_length   a constant divisor per sample: weight 1,   share fixed_length   (Dr. GRPO, Liu et al. 2025)

    A sample without a token that counts has share 0.
    """
    tokens_N = layout.tokens().to(dtype)
    one_P = layout.mask_P.to(dtype)
    alive_N = (tokens_N > 0).to(dtype)
    match kind:
        case "token_mean":
            return Average(one_P, tokens_N)
        case "sequence_mean":
            weight_N = torch.where(tokens_N > 0, 1.0 / tokens_N.clamp(min=1.0), 0.0)
            return Average(layout.keep(layout.spread(weight_N)), alive_N)
        case "sequence_sum":
            return Average(one_P, alive_N)
        case "fixed_length":
            if fixed_length is None or fixed_length < 1:
                raise ValueError(f"averaging_weights: fixed_length wants a length of at least 1, got {fixed_length}.")
            return Average(one_P, alive_N * fixed_length)
