"""What a model learns from: the loss over a pack, and the plane's columns that it reads. Maths is in algorithms/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from tandem.algorithms.correction import CorrectionOptions
from tandem.algorithms.kl import KlOptions, kl_loss
from tandem.algorithms.layout import Layout
from tandem.algorithms.policy_loss import PolicyLoss, PolicyLossOptions, entropy_loss, policy_loss, token_clips
from tandem.algorithms.value_loss import (
    HlGauss,
    ValueLoss,
    hl_gauss_value_loss,
    huber_value_loss,
    squared_value_loss,
)
from tandem.config.algorithm import HlGaussValueLoss, HuberValueLoss, ImportanceSampling, MseValueLoss
from tandem.config.algorithm import PolicyLoss as PolicyLossConfig
from tandem.config.algorithm import ValueLoss as ValueLossConfig
from tandem.train.backend import Output, Pack
from tandem.types import Max, Mean, Metrics, Min


class Objective(Protocol):
    """Sum of the weighted losses of a pack, and metrics; `loss` among them is a Mean over the sum of the weights."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The plane's columns that it reads, `tokens` and `mask` among them: no other travels."""
        ...

    def __call__(self, output: Output, pack: Pack, scale: Mapping[str, float]) -> tuple[Tensor, Metrics]: ...

    def trace(self, output: Output, pack: Pack) -> dict[str, Tensor]:
        """What the loss was computed from and what became of each token, as columns of the pack."""
        ...


class PolicyObjective:
    """The clipped policy loss with its correction, and the auxiliary terms that the recipe asks for."""

    def __init__(self, config: PolicyLossConfig) -> None:
        self._config = config
        self._options = policy_options(config)
        self._kl_options = KlOptions(
            config.reference_policy_kl_type, config.kl_input_clamp_value, config.kl_output_clamp_value
        )
        self._kl_in_loss = config.reference_policy_kl_penalty > 0 and not config.use_kl_in_reward
        self._sampler_in_kl = self._kl_in_loss and config.use_on_policy_kl_approximation

    @property
    def columns(self) -> tuple[str, ...]:
        """Old log-probs unless they are the current ones; what wrote a token only where a term asks."""
        return (
            *("tokens", "mask", "advantages", "weights"),
            *(("old_logprobs",) if not self._options.on_policy else ()),
            *(("gen_logprobs",) if self._options.correction is not None or self._sampler_in_kl else ()),
            *(("ref_logprobs",) if self._kl_in_loss else ()),
            *(("nll_weights",) if self._config.positive_example_nll_weight > 0 else ()),
        )

    def __call__(self, output: Output, pack: Pack, scale: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """`scale` holds `nll` and `kl`, which multiply the coefficients of those terms where they are on."""
        assert output.entropy_P is not None, "a policy's head gives the entropy"
        weights_P, logprobs_P = pack.columns["weights"], output.column_P
        layout = layout_of(pack, weights_P)
        old_P = logprobs_P.detach() if self._options.on_policy else pack.columns["old_logprobs"]
        wrote_P = pack.columns["gen_logprobs"] if self._options.correction is not None else old_P
        policy = policy_loss(logprobs_P, old_P, wrote_P, pack.columns["advantages"], weights_P, layout, self._options)
        terms = self._auxiliary(logprobs_P, output.entropy_P, pack, layout, scale)
        total = policy.loss + sum(terms.values())
        entropy = layout.keep(output.entropy_P.detach()).sum()
        parts = {f"{name}_loss": term.detach() for name, term in terms.items()}
        return total, self._metrics(policy, total.detach(), layout.keep(weights_P).sum(), parts | {"entropy": entropy})

    def trace(self, output: Output, pack: Pack) -> dict[str, Tensor]:
        """Log-probs and entropy as they were learned from, the ratio, and the clip's state (see token_clips)."""
        assert output.entropy_P is not None, "a policy's head gives the entropy"
        logprobs_P = output.column_P.detach()
        old_P = logprobs_P if self._options.on_policy else pack.columns["old_logprobs"]
        layout = layout_of(pack, pack.columns["weights"])
        ratio_P, clip_P = token_clips(logprobs_P, old_P, pack.columns["advantages"], layout, self._options)
        return {"logprobs": logprobs_P, "entropy": output.entropy_P.detach(), "ratio": ratio_P, "clip": clip_P}

    def _auxiliary(
        self, logprobs_P: Tensor, entropy_P: Tensor, pack: Pack, layout: Layout, scale: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """The terms beside the policy loss that are on, each with its coefficient."""
        config, columns = self._config, pack.columns
        terms: dict[str, Tensor] = {}
        if self._kl_in_loss:
            sampler_P = columns["gen_logprobs"] if self._sampler_in_kl else logprobs_P.detach()
            kl = kl_loss(
                logprobs_P,
                columns["ref_logprobs"],
                columns["weights"],
                layout,
                self._kl_options,
                behaviour_logprobs_P=sampler_P,
            )
            terms["kl"] = config.reference_policy_kl_penalty * scale["kl"] * kl
        if config.positive_example_nll_weight > 0:
            nll_P = -layout.keep(columns["nll_weights"]) * layout.keep(logprobs_P)
            terms["nll"] = config.positive_example_nll_weight * scale["nll"] * nll_P.sum()
        if config.entropy_bonus > 0:
            terms["entropy_bonus"] = config.entropy_bonus * entropy_loss(entropy_P, columns["weights"], layout)
        return terms

    def _metrics(self, policy: PolicyLoss, total: Tensor, weight: Tensor, others: Mapping[str, Tensor]) -> Metrics:
        """Means over the tokens that train; losses over the sum of their weights."""
        units = {"tokens": policy.tokens, "correction_units": policy.correction_units, "weight": weight, "loss": total}
        bounds = {"ratio_min": policy.minima["ratio"], "ratio_max": policy.maxima["ratio"]}
        found = numbers({**policy.sums, **units, **bounds, **others})
        tokens, weighed = found["tokens"], found["weight"]
        metrics: Metrics = {"loss": Mean(found["loss"], weighed)}
        if not tokens:
            return metrics
        metrics |= {name: Mean(found[name], weighed) for name in others if name != "entropy"}
        metrics |= {
            "ratio_mean": Mean(found["ratio"], tokens),
            "ratio_min": Min(found["ratio_min"]),
            "ratio_max": Max(found["ratio_max"]),
            "clip_fraction": Mean(found["clip_fraction"], tokens),
            "approx_kl": Mean(found["approx_kl_k3"], tokens),
            "entropy": Mean(found["entropy"], tokens),
        }
        if self._options.dual_clip is not None:
            metrics["dual_clip_fraction"] = Mean(found["dual_clip_fraction"], tokens)
        if self._options.correction is not None:
            metrics["importance_weight"] = Mean(found["importance_weight"], tokens)
            metrics["out_of_bounds"] = Mean(found["out_of_bounds"], found["correction_units"])
        return metrics


class ValueObjective:
    """One of the value losses."""

    def __init__(self, config: ValueLossConfig) -> None:
        self._config = config

    @property
    def columns(self) -> tuple[str, ...]:
        """The values before the update are read only where the loss clips around them."""
        clips = isinstance(self._config, MseValueLoss) and self._config.cliprange is not None
        return ("tokens", "mask", "returns", "value_weights", *(("values",) if clips else ()))

    def __call__(self, output: Output, pack: Pack, scale: Mapping[str, float]) -> tuple[Tensor, Metrics]:
        """`scale` is not read: a value loss has one term."""
        layout = layout_of(pack, pack.columns["value_weights"])
        value = self._loss(output, pack, layout)
        total = self._config.scale * value.loss
        found = numbers(
            {
                "loss": total.detach(),
                "weight": layout.keep(pack.columns["value_weights"]).sum(),
                "tokens": value.tokens,
                "clipped": value.clipped,
                "lowest": value.lowest,
                "highest": value.highest,
            }
        )
        metrics: Metrics = {"loss": Mean(found["loss"], found["weight"])}
        if found["tokens"]:
            metrics["clip_fraction"] = Mean(found["clipped"], found["tokens"])
            metrics |= {"value_min": Min(found["lowest"]), "value_max": Max(found["highest"])}
        return total, metrics

    def trace(self, output: Output, pack: Pack) -> dict[str, Tensor]:
        """Values as they were learned from, and the bins' logits where the loss reads those."""
        logits = {} if output.logits_PB is None else {"logits": output.logits_PB.detach()}
        return {"values": output.column_P.detach(), **logits}

    def _loss(self, output: Output, pack: Pack, layout: Layout) -> ValueLoss:
        returns_P, weights_P = pack.columns["returns"], pack.columns["value_weights"]
        match self._config:
            case MseValueLoss(cliprange=None):
                return squared_value_loss(output.column_P, output.column_P.detach(), returns_P, weights_P, layout)
            case MseValueLoss(cliprange=clip_range):
                old_P = pack.columns["values"]
                return squared_value_loss(output.column_P, old_P, returns_P, weights_P, layout, clip_range=clip_range)
            case HuberValueLoss(delta=delta):
                return huber_value_loss(output.column_P, returns_P, weights_P, layout, delta=delta)
            case HlGaussValueLoss() as c:
                assert output.logits_PB is not None, "checked when built: an hl_gauss critic has bins"
                histogram = HlGauss(c.value_min, c.value_max, c.num_bins, c.sigma_ratio)
                return hl_gauss_value_loss(output.logits_PB, returns_P, weights_P, layout, histogram=histogram)


def policy_options(config: PolicyLossConfig) -> PolicyLossOptions:
    """The recipe's policy loss in the words of the maths."""
    reinforce = config.ratio == "none"
    return PolicyLossOptions(
        objective="reinforce" if reinforce else "cispo" if config.use_cispo else "clipped",
        ratio="sequence" if config.ratio == "sequence" else "token",
        on_policy=config.ratio == "on_policy",
        clip_low=config.ratio_clip_min,
        clip_high=config.ratio_clip_max,
        dual_clip=config.ratio_clip_c,
        correction=correction_options(config.importance_sampling_correction, whole=config.ratio == "sequence"),
    )


def correction_options(config: ImportanceSampling | None, *, whole: bool) -> CorrectionOptions | None:
    """The correction for tokens that another law wrote; `whole` weighs a sample as one, as GSPO does."""
    if config is None:
        return None
    return CorrectionOptions(config.name, config.ratio_max, config.ratio_min, sequence_level=whole)


def layout_of(pack: Pack, weights_P: Tensor) -> Layout:
    """The tokens that train: written by the policy, with a weight. A sample taken out of the loss has none."""
    return Layout(pack.mask_P & (weights_P != 0), pack.sample_P, len(pack.cu_seqlens) - 1)


def numbers(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars as floats, fetched from the device at one time."""
    return dict(zip(tensors, torch.stack([tensor.double() for tensor in tensors.values()]).tolist(), strict=True))
