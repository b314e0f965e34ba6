"""Importance correction: training on tokens that another law (older weights, another engine) wrote."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.kl import KlKind, KlOptions, kl_estimate
from tandem.algorithms.layout import Layout

CorrectionKind = Literal["plain", "tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class CorrectionOptions:
    """How weights are bounded. Bounds are inclusive; the lower one of None is 0. "plain" has none."""

    kind: CorrectionKind = "tis"
    high: float | None = 2.0
    low: float | None = None
    sequence_level: bool = False
    """One weight a sample, exp of the SUM of its tokens' log-ratios (goes with the GSPO ratio)."""


class Correction(NamedTuple):
    """Weights per token (0 outside the mask); how many units were out of bounds, of how many (tokens or samples)."""

    weights_P: Tensor
    out_of_bounds: Tensor
    units: Tensor


@torch.no_grad()
def importance_weights(
    logprobs_P: Tensor, behaviour_logprobs_P: Tensor, layout: Layout, options: CorrectionOptions
) -> Correction:
    """Weights w = exp(log policy - log behaviour) that let the loss be an average under the policy; constants.

    plain         w
    tis           w clamped to [low, high]                              (truncated IS, Yao et al. 2025)
    icepop        w, but 0 outside [low, high]                          (IcePop, Ling team 2025)
    seq-mask-tis  w, but 0 for samples whose exp(mean log w) is outside [low, high]
    """
    log_weight_P = layout.keep(logprobs_P) - layout.keep(behaviour_logprobs_P)
    weight_P = (layout.spread(layout.sum(log_weight_P)) if options.sequence_level else log_weight_P).exp()
    alive_N = layout.tokens() > 0
    if options.kind == "plain":
        return Correction(layout.keep(weight_P), alive_N.new_zeros((), dtype=torch.int64), layout.mask_P.sum())
    low, high = options.low or 0.0, options.high
    if high is None:
        raise ValueError(f'importance_weights: kind "{options.kind}" needs an upper bound `high`.')
    if options.kind == "seq-mask-tis":
        mean_N = layout.mean(log_weight_P).exp()
        outside_N = (mean_N < low) | (mean_N > high)
        weight_P = torch.where(layout.spread(outside_N), 0.0, weight_P)
        return Correction(layout.keep(weight_P), (outside_N & alive_N).sum(), alive_N.sum())
    outside_P = (weight_P < low) | (weight_P > high)
    bounded_P = weight_P.clamp(low, high) if options.kind == "tis" else torch.where(outside_P, 0.0, weight_P)
    return Correction(layout.keep(bounded_P), (outside_P & layout.mask_P).sum(), layout.mask_P.sum())


@torch.no_grad()
def mismatch_sums(
    logprobs_P: Tensor, behaviour_logprobs_P: Tensor, layout: Layout, kl_kind: KlKind = "k3"
) -> dict[str, Tensor]:
    """How far the trainer's law is from the one that sampled, as sums over tokens (divide by the number of tokens).

    token_mult_prob_error  exp |log behaviour - log policy|: 1 when both compute the same
    gen_kl_error, policy_kl_error   KL(behaviour || policy) and KL(policy || behaviour)
    js_divergence_error    Jensen-Shannon: mean of k3(mixture || policy) and k3(mixture || behaviour)
    """
    policy_P, behaviour_P = layout.keep(logprobs_P), layout.keep(behaviour_logprobs_P)
    options = KlOptions(kl_kind, None, None)
    mixture_P = torch.logaddexp(policy_P, behaviour_P) - torch.log(policy_P.new_tensor(2.0))
    k3 = KlOptions("k3", None, None)
    js_P = 0.5 * (kl_estimate(mixture_P, policy_P, k3) + kl_estimate(mixture_P, behaviour_P, k3))
    per_token = {
        "token_mult_prob_error": (behaviour_P - policy_P).abs().exp(),
        "gen_kl_error": kl_estimate(behaviour_P, policy_P, options),
        "policy_kl_error": kl_estimate(policy_P, behaviour_P, options),
        "js_divergence_error": js_P,
    }
    return {name: layout.keep(x_P).sum() for name, x_P in per_token.items()}


@torch.no_grad()
def sequence_prob_error(logprobs_P: Tensor, behaviour_logprobs_P: Tensor, layout: Layout) -> Tensor:
    """Per sample: mean over its tokens of exp |log behaviour - log policy|; 0 for a sample without tokens.

    Samples above a threshold are left out of the loss: the engine did not compute what the trainer computes.
    """
    return layout.mean((layout.keep(behaviour_logprobs_P) - layout.keep(logprobs_P)).abs().exp())
