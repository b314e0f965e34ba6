"""Golden cases of losses: padded rows flattened to our layout, loss and gradient brought back."""

import torch
from torch import Tensor

from tandem.algorithms.correction import CorrectionOptions, importance_weights, mismatch_sums
from tandem.algorithms.kl import KlOptions, kl_loss
from tandem.algorithms.layout import Average, Layout, averaging_weights
from tandem.algorithms.policy_loss import PolicyLoss, PolicyLossOptions, nll_loss, policy_loss
from tandem.algorithms.value_loss import squared_value_loss
from tests.golden.golden_inputs import Case, Outputs, boolean, flat_layout, real, verl_kl


def run_policy_loss(config: Case, inputs: Case) -> Outputs:
    mask_NT = (boolean(inputs["token_mask"]) & boolean(inputs["sample_mask"])[:, None])[:, 1:]
    layout = flat_layout(mask_NT)
    x = real(inputs["curr_logprobs"]).reshape(-1).requires_grad_()
    unfiltered = inputs["curr_logprobs_unfiltered"]
    y = x if unfiltered is None else real(unfiltered).reshape(-1).requires_grad_()
    names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
    prev, generation, reference, advantages = (real(inputs[name])[:, 1:].reshape(-1) for name in names)
    by_token = config["token_level_loss"]
    divisor = (inputs["global_valid_toks"] if by_token else inputs["global_valid_seqs"]) or 1
    weights = averaging_weights(layout, "token_mean" if by_token else "sequence_mean", dtype=x.dtype).weights_P
    options = _nemo_options(config)
    result = policy_loss(x, prev, generation, advantages, weights, layout, options)
    kl = _nemo_kl(config, (y, reference, generation), weights, layout) / divisor
    nll = torch.zeros((), dtype=x.dtype)
    if inputs["rewards"] is not None and config["positive_example_nll_weight"] > 0:
        nll_sum, count = nll_loss(x, real(inputs["rewards"]), layout)
        nll = nll_sum / count.clamp(min=1)
    coefficient = 0.0 if config["use_kl_in_reward"] else config["reference_policy_kl_penalty"]
    loss = result.loss / divisor + coefficient * kl + config["positive_example_nll_weight"] * nll
    gradients = torch.autograd.grad(loss, [x] if unfiltered is None else [x, y])
    outputs: Outputs = {"loss": loss, "grad_curr_logprobs": gradients[0].reshape(mask_NT.shape)}
    if unfiltered is not None:
        outputs["grad_curr_logprobs_unfiltered"] = gradients[1].reshape(mask_NT.shape)
    outputs["metric/kl_penalty"] = kl if coefficient > 0 else 0.0
    outputs["metric/positive_nll_loss"] = nll
    outputs["metric/num_valid_samples"] = real(inputs["sample_mask"]).sum()
    old = x.detach() if config["force_on_policy_ratio"] else prev
    return outputs | _nemo_metrics(config, inputs, result, (x.detach(), old, generation), layout)


def _nemo_options(config: Case) -> PolicyLossOptions:
    objective = "reinforce" if config["disable_ppo_ratio"] else "cispo" if config["use_cispo"] else "clipped"
    return PolicyLossOptions(
        objective=objective,
        ratio="sequence" if config["sequence_level_importance_ratios"] else "token",
        on_policy=config["force_on_policy_ratio"],
        clip_low=config["ratio_clip_min"],
        clip_high=config["ratio_clip_max"],
        dual_clip=config["ratio_clip_c"],
        log_ratio_clamp=None,
        correction=_nemo_correction(config) if config["use_importance_sampling_correction"] else None,
    )


def _nemo_correction(config: Case) -> CorrectionOptions:
    return CorrectionOptions(
        kind=config["truncated_importance_sampling_type"] or "plain",
        high=config["truncated_importance_sampling_ratio"],
        low=config["truncated_importance_sampling_ratio_min"],
        sequence_level=config["sequence_level_importance_ratios"],
    )


def _nemo_kl(config: Case, logprobs: tuple[Tensor, Tensor, Tensor], weights: Tensor, layout: Layout) -> Tensor:
    y, reference, generation = logprobs
    options = KlOptions(
        config["reference_policy_kl_type"], config["kl_input_clamp_value"], config["kl_output_clamp_value"]
    )
    behaviour = generation if config["use_on_policy_kl_approximation"] else y.detach()
    return kl_loss(y, reference, weights, layout, options, behaviour_logprobs_P=behaviour)


def _nemo_metrics(
    config: Case, inputs: Case, result: PolicyLoss, logprobs: tuple[Tensor, Tensor, Tensor], layout: Layout
) -> Outputs:
    x, old, generation = logprobs
    tokens = inputs["global_valid_toks"] or 1
    sums = result.sums | mismatch_sums(old, generation, layout, config["reference_policy_kl_type"])
    outputs: Outputs = {
        "metric/probs_ratio": sums["ratio"] / tokens,
        "metric/probs_ratio_clamped": sums["ratio_clipped"] / tokens,
        "metric/probs_ratio_min": result.minima["ratio"],
        "metric/probs_ratio_max": result.maxima["ratio"],
        "metric/probs_ratio_clamped_min": result.minima["ratio_clipped"],
        "metric/probs_ratio_clamped_max": result.maxima["ratio_clipped"],
        "metric/approx_entropy": sums["entropy_estimate"] / tokens,
    }
    if config["disable_ppo_ratio"]:
        # The reference reports the log-probabilities as "ratios" then; ours are ratios.
        kept = torch.where(layout.mask_P, x, torch.inf), torch.where(layout.mask_P, x, -torch.inf)
        for name in ("probs_ratio", "probs_ratio_clamped"):
            outputs[f"metric/{name}"] = layout.keep(x).sum() / tokens
            outputs[f"metric/{name}_min"], outputs[f"metric/{name}_max"] = kept[0].amin(), kept[1].amax()
    for name in ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"):
        outputs[f"metric/{name}"] = sums[name] / tokens
    # The reference reports the weights whether or not the loss uses them.
    correction = importance_weights(old, generation, layout, _nemo_correction(config))
    if config["sequence_level_importance_ratios"]:
        outputs["metric/sampling_importance_ratio"] = layout.mean(correction.weights_P).sum() / (
            inputs["global_valid_seqs"] or 1
        )
    else:
        outputs["metric/sampling_importance_ratio"] = layout.keep(correction.weights_P).sum() / tokens
    if config["truncated_importance_sampling_type"]:
        by_sample = config["truncated_importance_sampling_type"] == "seq-mask-tis"
        units = (inputs["global_valid_seqs"] or 1) if by_sample else tokens
        outputs["metric/is_oob_ratio"] = correction.out_of_bounds / units
    return outputs


def run_policy_loss_verl(config: Case, inputs: Case) -> Outputs:
    mask = boolean(inputs["response_mask"])
    layout = flat_layout(mask)
    x = real(inputs["log_prob"]).reshape(-1).requires_grad_()
    average, factor = _verl_average(config, layout, mask.shape[1])
    if config["loss_mode"] == "kl_loss":
        reference = real(inputs["ref_log_prob"]).reshape(-1)
        kl = kl_loss(x, reference, average.weights_P, layout, verl_kl(config["kl_loss_type"]))
        loss = config["kl_loss_coef"] * factor * kl / average.shares_N.sum().clamp(min=1)
        (gradient,) = torch.autograd.grad(loss, x)
        return {"kl_loss_times_coef": loss, "grad_log_prob": gradient.reshape(mask.shape)}
    old, advantages = (real(inputs[name]).reshape(-1) for name in ("old_log_prob", "advantages"))
    weights, divisor = average.weights_P, average.shares_N.sum().clamp(min=1)
    if config["loss_mode"] == "geo_mean":
        # One loss a row whatever loss_agg_mode says, and a mean over all rows.
        weights = averaging_weights(layout, "sequence_mean", dtype=x.dtype).weights_P
        divisor, factor = torch.tensor(len(mask)), 1.0
    if inputs["rollout_is_weights"] is not None:
        rollout = real(inputs["rollout_is_weights"]).reshape(-1)
        if config["loss_mode"] == "geo_mean":
            rollout = layout.spread(layout.mean(rollout.log()).exp())
        weights = weights * rollout
    result = policy_loss(x, old, old, advantages, weights, layout, _verl_options(config))
    loss = factor * result.loss / divisor
    (gradient,) = torch.autograd.grad(loss, x)
    tokens = layout.mask_P.sum().clamp(min=1)
    log_ratio = layout.keep(x.detach() - old)
    if config["loss_mode"] not in ("geo_mean", "gspo"):
        log_ratio = log_ratio.clamp(-20.0, 20.0)
    clipped = torch.zeros(()) if config["loss_mode"] == "sapo" else result.sums["clip_fraction"] / tokens
    return {
        "loss": loss,
        "grad_log_prob": gradient.reshape(mask.shape),
        "metric/pg_clipfrac": clipped,
        "metric/ppo_kl": -log_ratio.sum() / tokens,
        "metric/pg_clipfrac_lower": result.sums["dual_clip_fraction"] / tokens,
    }


def _verl_options(config: Case) -> PolicyLossOptions:
    mode = config["loss_mode"]
    objective = {"vanilla": "clipped", "gspo": "clipped", "gpg": "reinforce"}.get(mode, mode)
    return PolicyLossOptions(
        objective=objective,
        ratio="sequence_token" if mode == "gspo" else "token",
        clip_low=config["clip_ratio_low"],
        clip_high=config["clip_ratio_high"],
        dual_clip=config["clip_ratio_c"] if mode == "vanilla" else None,
        log_ratio_clamp={"gspo": 10.0, "geo_mean": None}.get(mode, 20.0),
        sapo_temperature_positive=config["tau_pos"],
        sapo_temperature_negative=config["tau_neg"],
    )


def _verl_average(config: Case, layout: Layout, length: int) -> tuple[Average, float]:
    """Our average, and the factor by which the reference's differs (another global count, dp_size)."""
    info = config.get("global_batch_info") or {}
    kind = {
        "token-mean": "token_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "fixed_length",
    }[config["loss_agg_mode"]]
    length = config.get("loss_scale_factor") or length
    average = averaging_weights(layout, kind, fixed_length=length, dtype=torch.float64)
    own, factor = float(average.shares_N.sum()), float(info.get("dp_size", 1))
    if kind == "fixed_length":
        return average, factor * own / length
    wanted = info.get("batch_num_tokens" if kind == "token_mean" else "global_batch_size")
    return average, factor * (own / wanted if wanted else 1.0)


def run_value_loss(config: Case, inputs: Case) -> Outputs:
    mask = boolean(inputs["token_mask"])
    if "sample_mask" in inputs:
        mask = mask & boolean(inputs["sample_mask"])[:, None]
    layout = flat_layout(mask)
    predicted = real(inputs["values_pred"]).requires_grad_()
    values = predicted
    if config.get("right_shift_first"):
        values = torch.cat([torch.zeros_like(predicted[:, :1]), predicted[:, :-1]], dim=1)
    old, returns = (real(inputs[name]).reshape(-1) for name in ("old_values", "returns"))
    nemo = config["impl"] == "nemo"
    if nemo:
        average, factor = averaging_weights(layout, "token_mean", dtype=torch.float64), config["scale"]
        divisor = torch.tensor(float(inputs["global_valid_toks"] or 1), dtype=torch.float64)
    else:
        average, factor = _verl_average(config, layout, mask.shape[1])
        divisor = average.shares_N.sum().clamp(min=1)
    # A range of 0 is off in NeMo-RL and "clip to the old value" in verl, as in ours.
    clip_range = None if nemo and not config["cliprange"] else config["cliprange"]
    result = squared_value_loss(values.reshape(-1), old, returns, average.weights_P, layout, clip_range=clip_range)
    loss = factor * result.loss / divisor
    (gradient,) = torch.autograd.grad(loss, predicted)
    tokens = divisor if nemo else result.tokens.clamp(min=1)
    returned, valued, residual = result.returns, result.values, result.residuals
    share = returned.count / tokens
    return {
        "loss": loss,
        "grad_values_pred": gradient,
        "metric/vf_clipfrac": result.clipped / tokens,
        "metric/returns_mean": returned.mean * share,
        "metric/values_mean": valued.mean * share,
        "metric/values_min": result.lowest,
        "metric/values_max": result.highest,
        "metric/returns_sq_mean": (returned.squares + returned.count * returned.mean**2) / tokens,
        "metric/residual_sq_mean": (residual.squares + residual.count * residual.mean**2) / tokens,
    }
