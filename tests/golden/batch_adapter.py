"""Golden cases of what happens to a batch around the loss: rewards, filters, packing, KL, explained variance."""

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.kl import AdaptiveKl, KlOptions, kl_estimate, update_kl
from tandem.algorithms.moments import explained_variance, merge_moments, moments
from tandem.algorithms.rewards import (
    Overlong,
    RewardScale,
    informative_groups,
    penalize_overlong,
    penalize_truncated,
    scale_rewards,
)
from tandem.train.packing import plan_bins
from tests.golden.golden_inputs import Case, Outputs, boolean, real, verl_kl


def run_kl(config: Case, inputs: Case) -> Outputs:
    if "horizon" in config:
        state = AdaptiveKl(config["init_kl_coef"], config["target_kl"], config["horizon"], config["error_clip"])
        coefficients = []
        for update in inputs["updates"]:
            state = update_kl(state, update["current_kl"], update["n_steps"])
            coefficients.append(state.coefficient)
        return {"coefficients": coefficients}
    logprobs, reference = real(inputs["logprobs"]).requires_grad_(), real(inputs["logprobs_reference"])
    options = verl_kl(config["kl_penalty"]) if "kl_penalty" in config else None
    if options is None:
        options = KlOptions(config["kl_type"], config["input_clamp_value"], config["output_clamp_value"])
    behaviour = {
        None: None,
        "self": logprobs.detach(),
        "generation": None if inputs.get("generation_logprobs") is None else real(inputs["generation_logprobs"]),
    }[config.get("importance_weights")]
    weights = None if behaviour is None else (logprobs - behaviour).exp()
    kl = kl_estimate(logprobs, reference, options, weights=weights)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    return {"kl": kl, "grad_logprobs_of_sum": gradient}


def run_explained_variance(_: Case, inputs: Case) -> Outputs:
    returns, values, residuals = [], [], []
    for chunk in inputs["micro_batches"]:
        mask, r, v = boolean(chunk["mask"]), real(chunk["returns"]), real(chunk["values"])
        for parts, x in ((returns, r), (values, v), (residuals, r - v)):
            parts.append(moments(x, mask))
    whole_returns, whole_residuals = merge_moments(returns), merge_moments(residuals)
    unbias = whole_returns.count / (whole_returns.count - 1).clamp(min=1)
    verl = 1 - whole_residuals.variance * unbias / (whole_returns.variance * unbias + 1e-5)
    return {
        "explained_variance": explained_variance(whole_returns, whole_residuals),
        "returns_mean": whole_returns.mean,
        "values_mean": merge_moments(values).mean,
        "explained_variance_verl": verl,
    }


def run_reward_scaling(config: Case, inputs: Case) -> Outputs:
    components = inputs["components"] or {}
    bounds = {name: value for name, value in config.items() if name != "enabled"}

    def scale(reward: list[float]) -> Tensor:
        return scale_rewards(real(reward), RewardScale(**bounds)) if config["enabled"] else real(reward)

    outputs: Outputs = {"total_reward": scale(inputs["total_reward"])}
    if components:
        outputs["components"] = {name: scale(reward) for name, reward in components.items()}
    return outputs


def run_reward_shaping(config: Case, inputs: Case) -> Outputs:
    reward = real(inputs["total_reward"])
    if not config["enabled"]:
        return {"total_reward": reward, "unshaped_total_reward": None}
    if config.get("stop_properly_penalty_coef") is not None:
        shaped = penalize_truncated(reward, boolean(inputs["truncated"]), config["stop_properly_penalty_coef"])
        return {"total_reward": shaped, "unshaped_total_reward": reward}
    names = ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty")
    if any(config.get(name) is None for name in names):
        return {"error": "ValueError"}
    try:
        overlong = Overlong(*(config[name] for name in names), capped=False)
    except ValueError:
        return {"error": "ValueError"}
    lengths = inputs["response_token_lengths"]
    if lengths is None:
        lengths = [sum(m["length"] for m in row if m["role"] == "assistant") for row in inputs["messages"]]
    shaped = penalize_overlong(reward, torch.tensor(lengths), overlong)
    return {"total_reward": shaped, "unshaped_total_reward": reward}


def run_dynamic_sampling(config: Case, inputs: Case) -> Outputs:
    wanted = config["num_prompts_per_step"] * config["num_generations_per_prompt"]
    steps: list[Outputs] = []
    complete = False
    cached: list[tuple[int, float, float, float]] = []
    first = 0
    for number, batch in enumerate(inputs["generation_batches"], start=1):
        raw, group = real(batch["raw_reward"]), torch.tensor(batch["group"])
        reward = raw if batch["shaped_reward"] is None else real(batch["shaped_reward"])
        statistics = group_statistics(reward, group, leave_one_out=config["leave_one_out_baseline"], std_reward_N=raw)
        rows = zip(
            range(first, first + len(raw)),
            reward.tolist(),
            statistics.baseline_N.tolist(),
            statistics.std_N.tolist(),
            strict=True,
        )
        first += len(raw)
        step: Outputs = {"std": statistics.std_N}
        steps.append(step)
        if not config["use_dynamic_sampling"]:
            cached = list(rows)
            complete = True
            step.update(kept=None, complete=True, cached=[], discarded=None)
            break
        kept = [row for row, keep in zip(rows, informative_groups(raw, group).tolist(), strict=True) if keep]
        cached += kept
        complete = len(cached) >= wanted
        step["kept"] = [row[0] for row in kept]
        if not complete and number >= config["dynamic_sampling_max_gen_batches"]:
            step["raised"] = True
            break
        step.update(complete=complete, cached=[row[0] for row in cached])
        step["discarded"] = len(cached) - wanted if complete else None
        if complete:
            break
    if not complete:
        return {"steps": steps, "batch_idx": None}
    index, rewards, baselines, stds = (list(column) for column in zip(*cached[:wanted], strict=True))
    return {
        "steps": steps,
        "batch_idx": index,
        "batch_reward": rewards,
        "batch_baseline": baselines,
        "batch_std": stds,
    }


def run_packing(config: Case, inputs: Case) -> Outputs:
    lengths, capacity = inputs["sequence_lengths"], config["bin_capacity"]
    try:
        plan = plan_bins(
            lengths,
            capacity,
            config["algorithm"],
            min_bin_count=config["min_bin_count"] or 0,
            bin_count_multiple=config["bin_count_multiple"] or 1,
        )
    except ValueError:
        return {"error": "ValueError"}
    totals = sorted(sum(lengths[i] for i in bin_) for bin_ in plan)
    return {
        "num_bins": len(plan),
        "lower_bound": -(-sum(lengths) // capacity),
        "reference_plan": plan,
        "bin_totals_sorted": totals,
    }
