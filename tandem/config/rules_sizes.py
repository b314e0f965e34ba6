"""Rules of sizes: a step cut into mini-batches, lengths that fit into each other, ranges that are not empty."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.algorithm import HlGaussValueLoss, Overlong
from tandem.config.env import SingleTurnEnv
from tandem.config.loaded import Loaded


def mini_batches(loaded: Loaded) -> Iterator[str]:
    """A step is cut into whole mini-batches."""
    config, key = loaded.config, "policy.train_global_batch_size"
    samples, size = config.algorithm.samples_per_step, config.policy.train_global_batch_size
    if samples % size == 0:
        return
    step = f"{loaded.at(f'{loaded.algorithm}.num_prompts_per_step')} x "
    step += f"{loaded.at(f'{loaded.algorithm}.num_generations_per_prompt')} = {samples} samples a step"
    problem = "is more than" if size > samples else "does not divide"
    fitting = max(part for part in range(1, min(size, samples) + 1) if samples % part == 0)
    yield f"{loaded.at(key)} {problem} {step}: set {key}={fitting}"


def response_length(loaded: Loaded) -> Iterator[str]:
    """A response leaves room for its prompt."""
    policy, key = loaded.config.policy, "policy.generation.max_new_tokens"
    if policy.generation.max_new_tokens >= policy.max_total_sequence_length:
        total = "policy.max_total_sequence_length"
        yield (
            f"{loaded.at(key)} leaves no room for a prompt within {loaded.at(total)}: "
            f"lower the first, or raise the second above {policy.generation.max_new_tokens}"
        )


def micro_batches(loaded: Loaded) -> Iterator[str]:
    """The longest sample fits into a micro-batch."""
    length = loaded.config.policy.max_total_sequence_length
    for model in ("policy", "value"):
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            key = f"{model}.sequence_packing.{name}"
            budget = loaded.values.get(key)
            if budget is not None and budget < length and loaded.values[f"{model}.sequence_packing.enabled"]:
                longest = loaded.at("policy.max_total_sequence_length")
                way_out = f"set {key}={length} or more, or allow shorter samples"
                yield f"{loaded.at(key)} does not hold the longest sample, {longest}: {way_out}"


def reward_range(loaded: Loaded) -> Iterator[str]:
    """Reward scaling maps a range that is not empty."""
    scaling, key = loaded.config.algorithm.reward_scaling, f"{loaded.algorithm}.reward_scaling"
    if scaling is not None and scaling.source_min >= scaling.source_max:
        low, high = loaded.at(f"{key}.source_min"), loaded.at(f"{key}.source_max")
        yield f"{low} is not below {high}: give the range that rewards have"


def overlong_lengths(loaded: Loaded) -> Iterator[str]:
    """The penalty's buffer lies within the length that responses can reach."""
    shaping, key = loaded.config.algorithm.reward_shaping, f"{loaded.algorithm}.reward_shaping"
    if not isinstance(shaping, Overlong):
        return
    longest, buffer = f"{key}.max_response_length", f"{key}.overlong_buffer_length"
    if shaping.overlong_buffer_length > shaping.max_response_length:
        way_out = f"set {buffer}={shaping.max_response_length} or less"
        yield f"{loaded.at(buffer)} is more than {loaded.at(longest)}: {way_out}"
    reach = loaded.config.longest_response
    if shaping.max_response_length > reach:
        one_turn = isinstance(loaded.config.env, SingleTurnEnv)
        limit = loaded.at("policy.generation.max_new_tokens" if one_turn else "policy.max_total_sequence_length")
        yield f"{loaded.at(longest)} is more than a response can reach, {limit}: set {longest}={reach} or less"


def advantage_clip(loaded: Loaded) -> Iterator[str]:
    """Advantages are clipped to a range that is not empty."""
    low, high = (f"{loaded.algorithm}.advantage_clip_{end}" for end in ("low", "high"))
    bounds = loaded.config.algorithm.advantage_clip_low, loaded.config.algorithm.advantage_clip_high
    if bounds[0] is not None and bounds[1] is not None and bounds[0] >= bounds[1]:
        yield f"{loaded.at(low)} is not below {loaded.at(high)}: lower the first, or raise the second"


def value_bins(loaded: Loaded) -> Iterator[str]:
    """HL-Gauss bins span a range that is not empty."""
    loss = loaded.config.value_loss_fn
    if isinstance(loss, HlGaussValueLoss) and loss.value_min >= loss.value_max:
        low, high = "value_loss_fn.value_min", "value_loss_fn.value_max"
        yield f"{loaded.at(low)} is not below {loaded.at(high)}: give the range that returns have"


def learning_rate_warm_up(loaded: Loaded) -> Iterator[str]:
    """The learning rate's warm-up ends within the run."""
    config = loaded.config
    steps = {"policy": config.algorithm.max_num_steps - config.policy_training_start_step}
    if config.value is not None:
        steps["value"] = config.algorithm.max_num_steps
    for model, count in steps.items():
        key, total = f"{model}.scheduler.warmup_steps", max(count, 0) * config.optimizer_steps_per_step
        if loaded.values[key] > total:
            yield (
                f"{loaded.at(key)} is more than the {total} optimizer steps of the {model} "
                f"({loaded.at(f'{loaded.algorithm}.max_num_steps')}, {config.optimizer_steps_per_step} a step): "
                f"set {key}={total} or less"
            )


FALLING = ("critic_lags", "entropy_collapse")  # the smaller, the worse


def health_levels(loaded: Loaded) -> Iterator[str]:
    """What is severe is no better than what is worth a warning."""
    for name, levels in loaded.config.logger.health:
        if not isinstance(levels, tuple):
            continue
        warning, severe = levels
        if (severe > warning) if name in FALLING else (severe < warning):
            key, order = f"logger.health.{name}", "most" if name in FALLING else "least"
            yield (
                f"{loaded.at(key)} is [warning, severe], and what is severe must be at {order} the warning: "
                f"set {key}=[{severe:g},{warning:g}]"
            )


SIZE_RULES = (
    mini_batches,
    response_length,
    micro_batches,
    reward_range,
    overlong_lengths,
    advantage_clip,
    value_bins,
    learning_rate_warm_up,
    health_levels,
)
