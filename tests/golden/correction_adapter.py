"""Golden cases of importance correction: verl's rollout weights and rejection, NeMo-RL's log-prob error mask."""

import torch

from tandem.algorithms.correction import sequence_prob_error
from tandem.algorithms.rollout_correction import Rejection, rejection_mask, rollout_weights
from tests.golden.golden_inputs import Case, Outputs, boolean, flat_layout, real


def run_rollout_correction(config: Case, inputs: Case) -> Outputs:
    mask = boolean(inputs["response_mask"])
    layout = flat_layout(mask)
    log_ratio = real(inputs["log_ratio"]).reshape(-1)
    if config["kind"] == "weights":
        result = rollout_weights(
            log_ratio,
            layout,
            level=config["rollout_is"],
            high=config["rollout_is_threshold"],
            normalize=config["batch_normalize"],
        )
        return {
            "weights": result.weights_P.reshape(mask.shape),
            "metric/mean_before_truncation": result.mean,
            "metric/eff_sample_size": result.effective_sample_size,
        }
    names, bounds = config["rollout_rs"].split(","), str(config["rollout_rs_threshold"]).split(",")
    rules = [_rule(name.strip(), bound.strip()) for name, bound in zip(names, bounds, strict=True)]
    kept = rejection_mask(log_ratio, layout, rules)
    return {
        "modified_response_mask": kept.reshape(mask.shape).long(),
        "metric/masked_fraction": 1 - kept.sum().double() / layout.mask_P.sum().clamp(min=1),
    }


def _rule(name: str, bound: str) -> Rejection:
    """ "seq_mean_k1", "0.9_1.1" -> k1 of the sample's mean log-ratio within [log 0.9, log 1.1]."""
    *_, level, statistic = name.split("_")
    low, _, high = bound.rpartition("_")
    return Rejection(statistic, level, float(high), float(low) if low else None)


def run_seq_logprob_mask(config: Case, inputs: Case) -> Outputs:
    sample_mask = boolean(inputs["sample_mask"])
    mask = (boolean(inputs["token_mask"]) & sample_mask[:, None])[:, 1:]
    layout = flat_layout(mask)
    prev, generation = (real(inputs[name])[:, 1:].reshape(-1) for name in ("prev_logprobs", "generation_logprobs"))
    error = sequence_prob_error(prev, generation, layout)
    threshold = config["seq_logprob_error_threshold"]
    bad = torch.zeros_like(sample_mask) if threshold is None else (error > threshold) & sample_mask
    valid = layout.tokens() > 0
    outputs: Outputs = {"sample_mask": (sample_mask & ~bad).long(), "seq_mult_prob_error": error}
    for suffix, alive in (("", valid), ("_after_mask", valid & ~bad)):
        errors = error[alive] if alive.any() else torch.zeros(1, dtype=torch.float64)
        outputs[f"metric/max_seq_mult_prob_error{suffix}"] = errors.max()
        outputs[f"metric/mean_seq_mult_prob_error{suffix}"] = errors.mean()
        outputs[f"metric/min_seq_mult_prob_error{suffix}"] = errors.min()
    correct = (real(inputs["rewards"]) == 1) & bad
    outputs["metric/num_masked_seqs"] = bad.sum()
    outputs["metric/masked_correct_pct"] = correct.sum().double() / bad.sum().clamp(min=1)
    return outputs
