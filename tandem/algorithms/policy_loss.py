"""The policy's loss: clipped PPO and its relatives, as a weighted sum over the tokens of a flat layout."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.correction import CorrectionOptions, importance_weights
from tandem.algorithms.layout import Layout

Objective = Literal["clipped", "cispo", "reinforce", "sapo", "geo_mean"]
RatioKind = Literal["token", "sequence", "sequence_token"]


@dataclass(frozen=True)
class PolicyLossOptions:
    """Which loss; the defaults are PPO."""

    objective: Objective = "clipped"
    ratio: RatioKind = "token"
    on_policy: bool = False
    """Take the current policy as the old one: every ratio is 1, with a gradient."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    log_ratio_clamp: float | None = 20.0
    """Bound on the log-ratio before exp; None is off. A token beyond it has no gradient."""
    correction: CorrectionOptions | None = None
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05


class PolicyLoss(NamedTuple):
    """The loss, a sum to be divided by the divisor, and metrics that merge: sums over `tokens`, minima and maxima.

    sums: ratio, ratio_clipped, clip_fraction, dual_clip_fraction, approx_kl_k1 and approx_kl_k3 (old || current),
    entropy_estimate, importance_weight, and out_of_bounds, which is a sum over `correction_units` instead (tokens, or
    samples for seq-mask-tis). minima, maxima: ratio, ratio_clipped; infinite if no token counts.
    """

    loss: Tensor
    tokens: Tensor
    correction_units: Tensor
    sums: dict[str, Tensor]
    minima: dict[str, Tensor]
    maxima: dict[str, Tensor]


class _Terms(NamedTuple):
    """Per token: loss, ratio, the ratio after clipping, and whether a clip (the dual clip) was what counted."""

    loss_P: Tensor
    ratio_P: Tensor
    clipped_ratio_P: Tensor
    clipped_P: Tensor
    dual_clipped_P: Tensor


def policy_loss(
    logprobs_P: Tensor,
    old_logprobs_P: Tensor,
    behaviour_logprobs_P: Tensor,
    advantages_P: Tensor,
    weights_P: Tensor,
    layout: Layout,
    options: PolicyLossOptions,
) -> PolicyLoss:
    """Sum over tokens of weight * correction * loss_t; loss_t of the objectives is in `_terms`.

    Two ratios, not one: the clip is around the proximal policy `old_logprobs` (recomputed by the trainer when the step
    starts), r = exp(logprobs - old), while what the tokens' writer did differently (an engine, older weights) is the
    constant weight exp(old - behaviour) of `options.correction`: decoupled PPO (Hilton et al. 2022; AReaL, Fu et al.
    2025). Slots outside the mask add exactly zero to loss and gradient, whatever stands in them.
    """
    x_P, behaviour_P, advantages_P = (layout.keep(y) for y in (logprobs_P, behaviour_logprobs_P, advantages_P))
    old_P = x_P.detach() if options.on_policy else layout.keep(old_logprobs_P)
    log_ratio_P = _log_ratio(x_P, old_P, layout, options)
    terms = _terms(x_P, log_ratio_P, advantages_P, layout, options)
    correction_P, outside, units = torch.ones_like(x_P), layout.sample_P.new_zeros(()), layout.mask_P.sum()
    if options.correction is not None:
        correction_P, outside, units = importance_weights(old_P, behaviour_P, layout, options.correction)
    loss = layout.keep(layout.keep(weights_P) * correction_P * terms.loss_P).sum()
    per_token = _metrics(x_P.detach(), behaviour_P, log_ratio_P.detach(), terms) | {"importance_weight": correction_P}
    sums = {name: layout.keep(value_P).sum() for name, value_P in per_token.items()} | {"out_of_bounds": outside}
    ratios = {"ratio": terms.ratio_P.detach(), "ratio_clipped": terms.clipped_ratio_P.detach()}
    minima = {name: torch.where(layout.mask_P, y_P, torch.inf).amin() for name, y_P in ratios.items()}
    maxima = {name: torch.where(layout.mask_P, y_P, -torch.inf).amax() for name, y_P in ratios.items()}
    return PolicyLoss(loss, layout.mask_P.sum(), units, sums, minima, maxima)


@torch.no_grad()
def token_clips(
    logprobs_P: Tensor, old_logprobs_P: Tensor, advantages_P: Tensor, layout: Layout, options: PolicyLossOptions
) -> tuple[Tensor, Tensor]:
    """Of each token the ratio, and what became of it: 0 its gradient counts, 1 it is clipped, 2 dual-clipped (int8)."""
    x_P, advantages_P = layout.keep(logprobs_P), layout.keep(advantages_P)
    old_P = x_P if options.on_policy else layout.keep(old_logprobs_P)
    terms = _terms(x_P, _log_ratio(x_P, old_P, layout, options), advantages_P, layout, options)
    state_P = torch.where(terms.dual_clipped_P, 2, terms.clipped_P.long())
    return layout.keep(terms.ratio_P), torch.where(layout.mask_P, state_P, 0).to(torch.int8)


def nll_loss(logprobs_P: Tensor, reward_N: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Sum of -log p over the tokens of samples with reward > 0, and their number (VAPO, Yue et al. 2025, positive NLL).

    The divisor is the number in the whole batch, not in this chunk: add up the counts first.
    """
    positive_P = layout.mask_P & layout.spread(reward_N > 0)
    return torch.where(positive_P, -logprobs_P, 0.0).sum(), positive_P.sum()


def entropy_loss(entropy_P: Tensor, weights_P: Tensor, layout: Layout) -> Tensor:
    """Minus the weighted sum of entropies (Mnih et al. 2016, section 4): added with a coefficient it is a bonus."""
    return -layout.keep(layout.keep(weights_P) * layout.keep(entropy_P)).sum()


def _log_ratio(x_P: Tensor, old_P: Tensor, layout: Layout, options: PolicyLossOptions) -> Tensor:
    """token: log r_t = x - old (PPO). sequence: its mean over the sample (GSPO, Zheng et al. 2025, eq. 7).

    sequence_token: the value of the mean, the gradient of the token (GSPO-token, eq. 14).
    """
    log_ratio_P = x_P - old_P
    match options.ratio:
        case "sequence":
            log_ratio_P = layout.spread(layout.mean(log_ratio_P))
        case "sequence_token":
            log_ratio_P = layout.spread(layout.mean(log_ratio_P)).detach() + (x_P - x_P.detach())
        case "token":
            pass
    bound = options.log_ratio_clamp
    return layout.keep(log_ratio_P if bound is None else log_ratio_P.clamp(-bound, bound))


def _terms(
    x_P: Tensor, log_ratio_P: Tensor, advantages_P: Tensor, layout: Layout, options: PolicyLossOptions
) -> _Terms:
    """Per-token losses. With r = exp(log_ratio), c = clip(r, 1 - low, 1 + high), A the advantage:

    clipped    max(-A r, -A c); dual clip: min(that, -A dual_clip) where A < 0   (PPO eq. 7; Ye et al. 2020, eq. 5)
    cispo      -A sg[c] x                                                      (MiniMax-M1 2025, eq. 4-5)
    reinforce  -A x                                                            (Williams 1992; GPG, Chu et al. 2025)
    sapo       -A * 4/tau * sigmoid(tau (r - 1))                               (SAPO, Gao et al. 2025)
    geo_mean   see `_geometric_mean`                                           (GMPO, Zhao et al. 2025)
    """
    ratio_P = log_ratio_P.exp()
    clipped_ratio_P = ratio_P.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    never_P = torch.zeros_like(layout.mask_P)
    match options.objective:
        case "clipped":
            return _clipped(ratio_P, clipped_ratio_P, advantages_P, options.dual_clip)
        case "cispo":
            loss_P = -advantages_P * clipped_ratio_P.detach() * x_P
            return _Terms(loss_P, ratio_P, clipped_ratio_P, ratio_P != clipped_ratio_P, never_P)
        case "reinforce":
            return _Terms(-advantages_P * x_P, ratio_P, ratio_P, never_P, never_P)
        case "sapo":
            positive, negative = options.sapo_temperature_positive, options.sapo_temperature_negative
            tau_P = torch.where(advantages_P > 0, positive, negative).to(ratio_P.dtype)
            gate_P = torch.sigmoid(tau_P * (ratio_P - 1.0)) * 4.0 / tau_P
            return _Terms(-advantages_P * gate_P, ratio_P, ratio_P, never_P, never_P)
        case "geo_mean":
            return _geometric_mean(log_ratio_P, advantages_P, layout, options)


def _clipped(ratio_P: Tensor, clipped_ratio_P: Tensor, advantages_P: Tensor, dual_clip: float | None) -> _Terms:
    plain_P, bounded_P = -advantages_P * ratio_P, -advantages_P * clipped_ratio_P
    loss_P = torch.maximum(plain_P, bounded_P)
    dual_P = torch.zeros_like(loss_P, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_P = -advantages_P * dual_clip
        dual_P = (advantages_P < 0) & (loss_P > ceiling_P)
        loss_P = torch.where(advantages_P < 0, torch.minimum(loss_P, ceiling_P), loss_P)
    return _Terms(loss_P, ratio_P, clipped_ratio_P, bounded_P > plain_P, dual_P)


def _geometric_mean(log_ratio_P: Tensor, advantages_P: Tensor, layout: Layout, options: PolicyLossOptions) -> _Terms:
    """GMPO: -(mean A) * exp(mean over the sample of the pessimistic of log r and clip(log r, -low, high)).

    Clips in log space; clip_fraction counts tokens with A > 0, dual_clip_fraction those with A < 0.
    """
    bounded_P = log_ratio_P.clamp(-options.clip_low, options.clip_high)
    sign_P = advantages_P.sign()
    pessimistic_P = sign_P * torch.minimum(sign_P * log_ratio_P, sign_P * bounded_P)
    ratio_N = layout.mean(pessimistic_P).exp()
    loss_P = layout.spread(-layout.mean(advantages_P) * ratio_N)
    outside_P = log_ratio_P != bounded_P
    ratio_P, clipped_ratio_P = log_ratio_P.exp(), bounded_P.exp()
    return _Terms(loss_P, ratio_P, clipped_ratio_P, outside_P & (advantages_P > 0), outside_P & (advantages_P < 0))


def _metrics(x_P: Tensor, behaviour_P: Tensor, log_ratio_P: Tensor, terms: _Terms) -> dict[str, Tensor]:
    return {
        "ratio": terms.ratio_P.detach(),
        "ratio_clipped": terms.clipped_ratio_P.detach(),
        "clip_fraction": terms.clipped_P.to(x_P.dtype),
        "dual_clip_fraction": terms.dual_clipped_P.to(x_P.dtype),
        "approx_kl_k1": -log_ratio_P,
        "approx_kl_k3": torch.expm1(log_ratio_P) - log_ratio_P,
        "entropy_estimate": -(x_P - behaviour_P).exp() * x_P,
    }
