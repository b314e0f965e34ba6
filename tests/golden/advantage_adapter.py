"""Golden cases of advantages: GAE, group estimators, whitening and what may follow."""

import torch
from torch import Tensor

from tandem.algorithms.advantages import (
    clip_advantages,
    gdpo_advantages,
    grpo_advantages,
    opd_advantages,
    penalize_messages,
    raw_reward_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    spread,
)
from tandem.algorithms.gae import discounted_returns, gae, length_adaptive_lambda, place_last
from tandem.algorithms.groups import group_statistics
from tandem.algorithms.kl import KlOptions, kl_estimate, subtract_kl
from tandem.algorithms.moments import masked_mean, masked_variance, whiten
from tests.golden.golden_inputs import Case, Outputs, boolean, real, verl_kl


def run_gae(config: Case, inputs: Case) -> Outputs:
    mask, values = boolean(inputs["mask"]), real(inputs["values"])
    if "lam" in config:
        rewards = real(inputs["token_level_rewards"])
        result = gae(
            rewards, values, mask, gamma=config["gamma"], lambda_value=config["lam"], lambda_policy=config["lam"]
        )
        advantages = whiten(result.advantages_NT, mask)
        return {
            "advantages_unwhitened": result.advantages_NT,
            "advantages": advantages,
            "returns": result.returns_NT,
        }
    rewards, _ = _token_rewards(config, inputs)
    lambda_value = _first(config["gae_lambda_value"], config["gae_lambda"])
    lambda_policy: float | Tensor = _first(config["gae_lambda_policy"], config["gae_lambda"])
    if config["length_adaptive_alpha"] > 0:
        lambda_policy = length_adaptive_lambda(mask, config["length_adaptive_alpha"])
    gamma = config["gae_gamma"]
    result = gae(rewards, values, mask, gamma=gamma, lambda_value=lambda_value, lambda_policy=lambda_policy)
    advantages = whiten(result.advantages_NT, mask) if config["normalize_advantages"] else result.advantages_NT
    return {
        "token_level_rewards": rewards,
        "lambda_policy": torch.as_tensor(lambda_policy, dtype=torch.float64).expand(mask.shape[0]),
        "lambda_value": lambda_value,
        "advantages": advantages,
        "returns": result.returns_NT,
    }


def run_token_rewards(config: Case, inputs: Case) -> Outputs:
    if "kl_coef" not in config:
        rewards, kl = _token_rewards(config, inputs)
        return {"token_level_rewards": rewards, "kl": kl}
    mask = boolean(inputs["mask"])
    options = verl_kl(config["kl_penalty"])
    kl = kl_estimate(real(inputs["old_logprobs"]), real(inputs["ref_logprobs"]), options)
    rewards = subtract_kl(real(inputs["token_level_scores"]), kl, mask, config["kl_coef"])
    return {"token_level_rewards": rewards, "mean_kl": masked_mean(kl, mask, dim=1).mean()}


def run_whiten(config: Case, inputs: Case) -> Outputs:
    x, mask = real(inputs["x"]), boolean(inputs["mask"])
    whitened = whiten(x, mask, shift_mean=config["shift_mean"])
    return {
        "mean": masked_mean(x, mask),
        "row_mean": masked_mean(x, mask, dim=1),
        "var_unbiased": masked_variance(x, mask, unbiased=True),
        "var_biased": masked_variance(x, mask, unbiased=False),
        "whitened": whitened,
        "verl_whitened": whitened,
    }


def run_grpo(config: Case, inputs: Case) -> Outputs:
    reward, group, mask = real(inputs["rewards"]), torch.tensor(inputs["group"]), boolean(inputs["mask"])
    if "estimator" not in config:
        leave_one_out = config["use_leave_one_out_baseline"]
        statistics = group_statistics(reward, group, leave_one_out=leave_one_out)
        advantage = grpo_advantages(reward, group, normalize=config["normalize_rewards"], leave_one_out=leave_one_out)
        return {"baseline": statistics.baseline_N, "std": statistics.std_N, "advantage_per_sample": advantage}
    estimator = config["estimator"]
    if estimator.startswith("rloo"):
        advantage = grpo_advantages(reward, group, normalize=False, leave_one_out=True)
    elif estimator == "grpo_vectorized" and config["norm_adv_by_std"]:
        # This variant floors the std at 1e-3; where it does not bite, it is ours.
        statistics = group_statistics(reward, group)
        advantage = statistics.centred_N / (statistics.std_N.clamp(min=1e-3) + 1e-6)
    else:
        advantage = grpo_advantages(reward, group, normalize=config["norm_adv_by_std"])
    if estimator in ("grpo", "rloo"):
        advantage = _keep_single(advantage, reward / (1 + 1e-6 * bool(config["norm_adv_by_std"])), group)
    return {"advantages": spread(advantage, mask)}


def run_baseline_std(config: Case, inputs: Case) -> Outputs:
    statistics = group_statistics(
        real(inputs["rewards"]),
        torch.tensor(inputs["group"]),
        leave_one_out=config["leave_one_out_baseline"],
        valid_N=boolean(inputs["valid_mask"]),
        std_reward_N=None if inputs["std_rewards"] is None else real(inputs["std_rewards"]),
    )
    return {"baseline": statistics.baseline_N, "std": statistics.std_N}


def run_gdpo(config: Case, inputs: Case) -> Outputs:
    components = {name: real(reward) for name, reward in inputs["reward_components"].items()}
    weights = config["reward_weights"]
    advantage = gdpo_advantages(
        components,
        torch.tensor(inputs["group"]),
        weights=None if weights is None else dict(zip(sorted(components), weights, strict=True)),
        normalize=config["normalize_rewards"],
        leave_one_out=config["use_leave_one_out_baseline"],
    )
    return {"advantage_per_sample": advantage}


def run_reinforce_pp(config: Case, inputs: Case) -> Outputs:
    mask = boolean(inputs["mask"])
    if "minus_baseline" in config:
        penalty = None
        if config["use_kl_in_reward"]:
            options = KlOptions(config["reference_policy_kl_type"], config["kl_input_clamp"], config["kl_output_clamp"])
            kl = kl_estimate(real(inputs["logprobs_policy"]), real(inputs["logprobs_reference"]), options)
            penalty = config["reference_policy_kl_penalty"] * kl
        group = torch.tensor(inputs["group"]) if config["minus_baseline"] else None
        reward = real(inputs["rewards"])
        return {"advantages": reinforce_plus_plus_baseline(reward, mask, group_N=group, penalty_NT=penalty)}
    rewards = real(inputs["token_level_rewards"])
    if "gamma" in config:
        gamma = config["gamma"]
        returns = discounted_returns(rewards, mask, gamma)
        return {"advantages": reinforce_plus_plus(rewards, mask, gamma=gamma), "returns": returns}
    reward, group = real(inputs["rewards"]), torch.tensor(inputs["group"])
    centred = _keep_single(group_statistics(reward, group).centred_N, reward, group)
    return {"advantages": whiten(spread(centred, mask), mask)}


def run_raw_reward(config: Case, inputs: Case) -> Outputs:
    advantages = raw_reward_advantages(
        real(inputs["rewards"]), boolean(inputs["mask"]), normalize=config["normalize_advantages"]
    )
    return {"advantages": advantages}


def run_opd(_: Case, inputs: Case) -> Outputs:
    result = opd_advantages(real(inputs["teacher_logprobs"]), real(inputs["prev_logprobs"]), boolean(inputs["mask"]))
    metrics = {"teacher_student_logprob_gap_mean": result.mean, "adv_mean": result.mean, "adv_std": result.std}
    return {"advantages": result.advantages_NT, "metrics": metrics}


def run_advantage_post(config: Case, inputs: Case) -> Outputs:
    if config["kind"] == "clip":
        low, high = config["advantage_clip_low"], config["advantage_clip_high"]
        return {"advantages": clip_advantages(real(inputs["advantages"]), low, high)}
    shape = (len(inputs["messages"]), inputs["seq_len"])
    invalid, malformed = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    flags = []
    for row, messages in enumerate(inputs["messages"]):
        start = 0
        for message in messages:
            span = slice(start, start := start + message["length"])
            if message["role"] == "assistant" and message["generated"]:
                invalid[row, span], malformed[row, span] = (
                    message["is_invalid_tool_call"],
                    message["has_malformed_thinking"],
                )
                flags.append((message["is_invalid_tool_call"], message["has_malformed_thinking"]))
    advantages = penalize_messages(
        real(inputs["advantage_per_sample"])[:, None].expand(shape),
        invalid_tool_call_NT=invalid,
        malformed_thinking_NT=malformed,
        invalid_tool_call_advantage=config["invalid_tool_call_advantage"],
        malformed_thinking_advantage=config["malformed_thinking_advantage"],
    )
    bad_calls = sum(call for call, _ in flags) if config["invalid_tool_call_advantage"] is not None else 0
    bad_thoughts = sum(thought and not (bad_calls and call) for call, thought in flags)
    bad_thoughts = bad_thoughts if config["malformed_thinking_advantage"] is not None else 0
    metrics = {
        "invalid_tool_call_rate": bad_calls / len(flags),
        "malformed_thinking_rate": bad_thoughts / len(flags),
        "num_invalid_tool_calls": bad_calls,
        "num_malformed_thinking": bad_thoughts,
        "num_assistant_messages": len(flags),
    }
    return {"advantages": advantages, "metrics": metrics}


def _token_rewards(config: Case, inputs: Case) -> tuple[Tensor, Tensor]:
    mask = boolean(inputs["mask"])
    rewards = place_last(real(inputs["rewards"]), mask)
    if inputs["logprobs"] is None:
        return rewards, torch.zeros_like(rewards)
    options = KlOptions(config["reference_policy_kl_type"])
    kl = kl_estimate(real(inputs["logprobs"]), real(inputs["reference_logprobs"]), options)
    coefficient = config["reference_policy_kl_penalty"] if config["use_kl_in_reward"] else 0.0
    return subtract_kl(rewards, kl, mask, coefficient), torch.where(mask, kl, 0.0)


def _keep_single(advantage: Tensor, reward: Tensor, group: Tensor) -> Tensor:
    """verl's convention: a group of one keeps its raw reward (ours, and NeMo-RL's: 0)."""
    return torch.where((group[:, None] == group).sum(dim=1) == 1, reward, advantage)


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
