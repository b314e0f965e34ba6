"""Estimates of the KL divergence to a reference, as a loss, in the reward, and as a brake."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tandem.algorithms.layout import Layout

KlKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


@dataclass(frozen=True)
class KlOptions:
    """Which estimator, and the clamps on its input (log-ratio) and output; None is off."""

    kind: KlKind = "k3"
    input_clamp: float | None = 20.0
    output_clamp: float | None = 10.0


def kl_estimate(
    logprobs: Tensor, reference_logprobs: Tensor, options: KlOptions, *, weights: Tensor | None = None
) -> Tensor:
    """Per-token estimates of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

    With d = log reference - log policy, clamped:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - 1 - d,  abs = |d|.
    "k1+", "k3+" have that value and the gradient of k2, which is the gradient of the KL itself (Tang & Munos 2025).
    `weights` (importance ratios) multiply before the output clamp and bring the score-function term of the gradient;
    where the input clamp is active the weight is a constant. Gradients are 0 where a clamp is active.
    """
    log_ratio = reference_logprobs - logprobs
    if options.input_clamp is not None:
        if weights is not None:
            weights = torch.where(log_ratio.abs() > options.input_clamp, weights.detach(), weights)
        log_ratio = log_ratio.clamp(-options.input_clamp, options.input_clamp)
    kl = _divergence(log_ratio, options.kind)
    if weights is not None:
        kl = weights * kl
    return kl if options.output_clamp is None else kl.clamp(-options.output_clamp, options.output_clamp)


def kl_loss(
    logprobs_P: Tensor,
    reference_logprobs_P: Tensor,
    weights_P: Tensor,
    layout: Layout,
    options: KlOptions,
    *,
    behaviour_logprobs_P: Tensor | None = None,
) -> Tensor:
    """Sum over tokens of weight * rho * KL, with rho = exp(log policy - log behaviour), differentiable.

    `behaviour_logprobs_P` are the detached current log-probabilities (rho = 1, only its gradient counts) or those of
    the sampler; None drops rho and with it the score-function term (GRPO, Shao et al. 2024, eq. 4).
    """
    logprobs_P, reference_P = layout.keep(logprobs_P), layout.keep(reference_logprobs_P)
    rho_P = None if behaviour_logprobs_P is None else (logprobs_P - layout.keep(behaviour_logprobs_P)).exp()
    return layout.keep(weights_P * kl_estimate(logprobs_P, reference_P, options, weights=rho_P)).sum()


def subtract_kl(rewards_NT: Tensor, kl_NT: Tensor, mask_NT: Tensor, coefficient: float) -> Tensor:
    """KL in the reward (Ouyang et al. 2022, eq. 2, per token): r_t - coefficient * KL_t on the tokens of the mask."""
    return torch.where(mask_NT, rewards_NT - coefficient * kl_NT, 0.0)


@dataclass(frozen=True)
class AdaptiveKl:
    """State of the adaptive KL controller: the coefficient, the KL it steers to, and over how many samples."""

    coefficient: float
    target: float
    horizon: int
    error_clip: float = 0.2


def update_kl(state: AdaptiveKl, kl: float, samples: int) -> AdaptiveKl:
    """Proportional control in log space (Ziegler et al. 2019, section 2.2): the next state.

    e = clip(kl / target - 1, -0.2, 0.2),     coefficient <- coefficient * (1 + e * samples / horizon)
    """
    error = min(max(kl / state.target - 1.0, -state.error_clip), state.error_clip)
    return replace(state, coefficient=state.coefficient * (1.0 + error * samples / state.horizon))


def exceeds_target_kl(kl: float, target_kl: float | None, *, tolerance: float = 1.5) -> bool:
    """Whether to stop the epochs of this step: the policy moved further than tolerance * target; None never stops."""
    return target_kl is not None and not kl <= tolerance * target_kl


def _divergence(log_ratio: Tensor, kind: KlKind) -> Tensor:
    match kind:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            return torch.expm1(log_ratio) - log_ratio
        case "abs":
            return log_ratio.abs()
        case "k1+" | "k3+":
            slope = _divergence(log_ratio, "k2")
            return _divergence(log_ratio, "k1" if kind == "k1+" else "k3").detach() + (slope - slope.detach())
