"""Rules of the algorithm: estimator and critic, reference and KL, ratio and correction, lead and warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.algorithm import Gae, Gdpo, GrpoEstimator, Opd, ReinforcePlusPlus, Rloo
from tandem.config.asynchrony import Custom, Windowed
from tandem.config.loaded import Loaded

WITHOUT_CRITIC = "grpo, rloo, reinforce_plus_plus, gdpo, raw_reward or opd"


def gae_and_critic(loaded: Loaded) -> Iterator[str]:
    """`value` and `value_loss_fn` are there exactly when the estimator is gae, and gae is PPO's."""
    config, estimator = loaded.config, loaded.at(f"{loaded.algorithm}.adv_estimator.name")
    gae = isinstance(config.algorithm.adv_estimator, Gae)
    if gae and config.grpo:
        yield (
            f"{estimator} needs a critic, and grpo has none: name the section ppo instead of grpo, "
            f"or choose {WITHOUT_CRITIC}"
        )
        return
    for key, there in (("value", config.value), ("value_loss_fn", config.value_loss_fn)):
        example = "{}" if key == "value" else "{name: mse}"
        if gae and there is None:
            way_out = f"add `{key}: {example}`, or choose {WITHOUT_CRITIC}"
            yield f"{estimator} learns from a critic, but {loaded.at(key)}: {way_out}"
        if not gae and there is not None:
            way_out = f"remove it ({key}=null)" + (", or choose ppo.adv_estimator.name=gae" if config.ppo else "")
            yield f"{estimator} uses no critic, but {loaded.at(key)} is given: {way_out}"


def lambdas(loaded: Loaded) -> Iterator[str]:
    """`gae_lambda` is what the lambdas of policy and value fall back to: with both given it says nothing."""
    estimator, section = loaded.config.algorithm.adv_estimator, f"{loaded.algorithm}.adv_estimator"
    if not isinstance(estimator, Gae) or f"{section}.gae_lambda" not in loaded.written:
        return
    policy = "length_adaptive_alpha" if estimator.length_adaptive_alpha else "gae_lambda_policy"
    if loaded.values[f"{section}.{policy}"] is not None and estimator.gae_lambda_value is not None:
        yield (
            f"{loaded.at(f'{section}.gae_lambda')} has no effect because {loaded.at(f'{section}.{policy}')} and "
            f"{loaded.at(f'{section}.gae_lambda_value')} replace it: remove one of them, "
            f"or take the key back ({section}.gae_lambda=default)"
        )


def critic_warm_up(loaded: Loaded) -> Iterator[str]:
    """Steps in which only the critic learns need a critic, and must end before the run does."""
    ppo, key = loaded.config.ppo, "ppo.policy_training_start_step"
    if ppo is None or ppo.policy_training_start_step == 0:
        return
    if not isinstance(ppo.adv_estimator, Gae):
        yield (
            f"{loaded.at(key)} trains only the critic at first, but {loaded.at('ppo.adv_estimator.name')} has none: "
            f"set {key}=0, or ppo.adv_estimator.name=gae"
        )
    if ppo.policy_training_start_step >= ppo.max_num_steps:
        yield (
            f"{loaded.at(key)} is not below {loaded.at('ppo.max_num_steps')}: the policy would never train; "
            f"lower the first, or raise the second above {ppo.policy_training_start_step}"
        )


def reference(loaded: Loaded) -> Iterator[str]:
    """A reference model is there exactly when something is measured against it."""
    config, penalty = loaded.config, "loss_fn.reference_policy_kl_penalty"
    opd = isinstance(config.algorithm.adv_estimator, Opd)
    user = loaded.at(f"{loaded.algorithm}.adv_estimator.name" if opd else penalty)
    if config.reference is None and (opd or config.loss_fn.reference_policy_kl_penalty > 0):
        way_out = "add `reference: {}`" + f", or set {penalty}=0"
        if opd:
            way_out = "add `reference: {model_name: TEACHER}`, or choose another estimator"
        yield f"{user} needs a reference model, but {loaded.at('reference')}: {way_out}"
    if config.reference is not None and not opd and config.loss_fn.reference_policy_kl_penalty == 0:
        way_out = f"remove it (reference=null), or set {penalty}=0.001"
        yield f"{loaded.at('reference')} is given, but {user} uses none: {way_out}"


def distillation(loaded: Loaded) -> Iterator[str]:
    """`opd` learns from another model than itself, and from nothing else."""
    config, penalty = loaded.config, "loss_fn.reference_policy_kl_penalty"
    if not isinstance(config.algorithm.adv_estimator, Opd):
        return
    estimator = loaded.at(f"{loaded.algorithm}.adv_estimator.name")
    if config.loss_fn.reference_policy_kl_penalty > 0:
        yield (
            f"{estimator} already pulls the policy to the reference, and {loaded.at(penalty)} would do so twice: "
            f"set {penalty}=0, or choose another estimator"
        )
    if config.reference is not None and config.reference.model_name in (None, config.policy.model_name):
        yield (
            f"{estimator} learns from a teacher, but {loaded.at('reference.model_name')} is the policy itself "
            f"({loaded.at('policy.model_name')}): name the teacher"
        )


def kl_in_reward(loaded: Loaded) -> Iterator[str]:
    """Only estimators with an advantage of their own for each token can carry a KL term of each token."""
    loss, key = loaded.config.loss_fn, "loss_fn.use_kl_in_reward"
    estimator = loaded.config.algorithm.adv_estimator
    if loss.use_kl_in_reward and not isinstance(estimator, Gae | ReinforcePlusPlus | Opd):
        name = loaded.at(f"{loaded.algorithm}.adv_estimator.name")
        yield (
            f"{loaded.at(key)} puts the KL into the rewards of single tokens, but {name} has one reward a sample: "
            f"set {key}=false for a KL term in the loss, or choose reinforce_plus_plus or gae"
        )


def group_size(loaded: Loaded) -> Iterator[str]:
    """What compares the samples of a prompt needs two of them."""
    algorithm, section = loaded.config.algorithm, loaded.algorithm
    if algorithm.num_generations_per_prompt > 1:
        return
    key, estimator = f"{section}.num_generations_per_prompt", algorithm.adv_estimator
    minus_baseline = isinstance(estimator, ReinforcePlusPlus) and estimator.minus_baseline
    if isinstance(estimator, GrpoEstimator | Rloo | Gdpo) or minus_baseline:
        who = f"{section}.adv_estimator.{'minus_baseline' if minus_baseline else 'name'}"
        yield f"{loaded.at(who)} compares the samples of a prompt, but {loaded.at(key)}: set {key}=2 or more"
    if algorithm.use_dynamic_sampling:
        who = f"{section}.use_dynamic_sampling"
        yield (
            f"{loaded.at(who)} drops groups whose rewards are all equal, and with {loaded.at(key)} all are: "
            f"set {key}=2 or more, or {who}=false"
        )


def one_update_ratio(loaded: Loaded) -> Iterator[str]:
    """Without a ratio nothing corrects for the updates that the policy makes within a step."""
    config, key, section = loaded.config, "loss_fn.ratio", loaded.algorithm
    if config.loss_fn.ratio not in ("on_policy", "none"):
        return
    if config.algorithm.ppo_epochs > 1:
        epochs = f"{section}.ppo_epochs"
        yield (
            f"{loaded.at(key)} has no ratio to correct the second pass over a batch, but {loaded.at(epochs)}: "
            f"set {epochs}=1, or {key}=token"
        )
    samples, mini_batch = config.algorithm.samples_per_step, "policy.train_global_batch_size"
    if config.loss_fn.ratio == "on_policy" and config.policy.train_global_batch_size < samples:
        yield (
            f"{loaded.at(key)} holds for one update a step, but {loaded.at(mini_batch)} cuts {samples} samples "
            f"({section}.num_prompts_per_step x num_generations_per_prompt): set {mini_batch}={samples}, or {key}=token"
        )


def sequence_ratio(loaded: Loaded) -> Iterator[str]:
    """GSPO's ratio is one number a sample: tokens must not be weighed one by one."""
    loss, key = loaded.config.loss_fn, "loss_fn.ratio"
    if loss.ratio != "sequence":
        return
    if loss.loss_aggregation == "token-mean":
        aggregation = "loss_fn.loss_aggregation"
        yield (
            f"{loaded.at(key)} is one ratio a sample, but {loaded.at(aggregation)} weighs samples by their length: "
            f"set {aggregation}=seq-mean-token-mean, or {key}=token"
        )
    correction = loss.importance_sampling_correction
    if correction is not None and correction.name == "seq-mask-tis":
        name = "loss_fn.importance_sampling_correction.name"
        yield f"{loaded.at(name)} weighs token by token, but {loaded.at(key)}: set {name}=tis, or {key}=token"


def correction_bounds(loaded: Loaded) -> Iterator[str]:
    """Every correction but `plain` is cut at `ratio_max`; `plain` has no bounds."""
    correction, key = loaded.config.loss_fn.importance_sampling_correction, "loss_fn.importance_sampling_correction"
    if correction is None:
        return
    name, low, high = correction.name, correction.ratio_min, correction.ratio_max
    if name == "plain":
        for bound in ("ratio_min", "ratio_max"):
            if loaded.values[f"{key}.{bound}"] is not None:
                yield (
                    f"{loaded.at(f'{key}.name')} has no bounds, but {loaded.at(f'{key}.{bound}')}: "
                    f"remove {bound}, or set {key}.name=tis"
                )
    elif high is None:
        yield (
            f"{loaded.at(f'{key}.name')} needs an upper bound, but {loaded.at(f'{key}.ratio_max')}: "
            f"set {key}.ratio_max=2, or {key}.name=plain"
        )
    elif low is not None and low >= high:
        yield f"{loaded.at(f'{key}.ratio_min')} is not below {loaded.at(f'{key}.ratio_max')}: lower it, or remove it"


def lead(loaded: Loaded) -> Iterator[str]:
    """Stale samples, and samples that several versions wrote, need a correction."""
    correction, update = "loss_fn.importance_sampling_correction", "async_rl.weight_update"
    if loaded.config.loss_fn.importance_sampling_correction is not None:
        return
    add = f"add {correction}='{{name: tis, ratio_max: 2}}'"
    sampler = loaded.config.async_rl.sampler
    if sampler.stale:
        bound = staleness_bound(loaded)
        way_out = add if sampler.name == "custom" else f"{add}, or set {bound}=0"
        yield f"{loaded.at(bound)} trains on samples of older versions, but {loaded.at(correction)}: {way_out}"
    if loaded.config.async_rl.mixes_versions:
        aborts = loaded.config.async_rl.weight_update == "abort_and_reissue"
        way_out = f"{add}, or set async_rl.discard_partial_rollouts=true" if aborts else add
        yield f"{loaded.at(update)} lets several versions write one sample, but {loaded.at(correction)}: {way_out}"


def warm_up_lead(loaded: Loaded) -> Iterator[str]:
    """Banking batches in critic warm-up needs a warm-up, and is never tighter than the normal bound."""
    key = "async_rl.sampler.warmup_lookahead_versions"
    warmup = loaded.values.get(key)
    if not isinstance(warmup, int):
        return
    start, normal = "ppo.policy_training_start_step", loaded.config.async_rl.sampler.tickets(1, 0) - 1
    if loaded.config.policy_training_start_step == 0:
        came = loaded.at(start) if loaded.config.ppo else "grpo has none"
        yield f"{loaded.at(key)} is for the critic's warm-up, but {came}: set {start} above 0, or {key}=null"
    if warmup < normal:
        yield (
            f"{loaded.at(key)} is below {loaded.at(staleness_bound(loaded))}: in warm-up generation may run ahead "
            f"further, not less; set {key}={normal} or more, or null"
        )


def staleness_bound(loaded: Loaded) -> str:
    """The key that bounds how far the sampler's generation runs ahead."""
    names = ("max_lookahead_versions", "max_staleness_versions")
    return next(key for name in names if (key := f"async_rl.sampler.{name}") in loaded.values)


def overlap(loaded: Loaded) -> Iterator[str]:
    """The buffer and the chunks fit the step; a custom sampler is named as module:name."""
    config, key = loaded.config, "async_rl.sampler.buffer_capacity_groups"
    groups, prompts = config.algorithm.num_prompts_per_step, f"{loaded.algorithm}.num_prompts_per_step"
    sampler, streams = config.async_rl.sampler, config.async_rl.min_groups_for_streaming_train
    if isinstance(sampler, Windowed) and sampler.buffer_capacity_groups < groups:
        yield f"{loaded.at(key)} never holds a step: {loaded.at(prompts)}; set {key}={groups} or more"
    if isinstance(sampler, Custom) and not all(sampler.target.partition(":")):
        yield f"{loaded.at('async_rl.sampler.target')} is not module:name, as in my_module:my_sampler"
    if streams is None:
        return
    chunk, fraction = "async_rl.min_groups_for_streaming_train", "async_rl.min_step_batch_fraction"
    if streams >= groups:
        yield f"{loaded.at(chunk)} is no part of a step: {loaded.at(prompts)}; lower it, or set {chunk}=null"
    if config.async_rl.min_step_batch_fraction > 0:
        yield (
            f"{loaded.at(fraction)} refuses a short last step, but with {loaded.at(chunk)} it has begun before it is "
            f"known to be short: set {fraction}=0, or {chunk}=null"
        )


def target_kl(loaded: Loaded) -> Iterator[str]:
    """Stopping the updates of a step early needs more than one of them."""
    config, key = loaded.config, f"{loaded.algorithm}.target_kl"
    if config.algorithm.target_kl is not None and config.optimizer_steps_per_step <= 1:
        epochs, mini_batch = f"{loaded.algorithm}.ppo_epochs", "policy.train_global_batch_size"
        yield (
            f"{loaded.at(key)} stops the updates of a step early, but {loaded.at(epochs)} and {loaded.at(mini_batch)} "
            f"make one update a step: raise {epochs}, lower {mini_batch}, or remove {key} ({key}=null)"
        )


ALGORITHM_RULES = (
    gae_and_critic,
    lambdas,
    critic_warm_up,
    reference,
    distillation,
    kl_in_reward,
    group_size,
    overlap,
    one_update_ratio,
    sequence_ratio,
    correction_bounds,
    lead,
    warm_up_lead,
    target_kl,
)
