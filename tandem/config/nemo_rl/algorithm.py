"""The table for `ppo` and `grpo`: sizes, rewards, estimators, and the legacy blocks of asynchronous training."""

from __future__ import annotations

from tandem.config.nemo_rl.entry import (
    Entry,
    Outcome,
    by,
    implied,
    implied_by,
    lacking,
    mapped,
    nothing,
    refused,
    renamed,
    same,
)
from tandem.config.nemo_rl.lengths import response_room
from tandem.config.nemo_rl.source import Source
from tandem.config.schema import Plain

ESTIMATOR = "ALGO.adv_estimator"
ESTIMATORS = ("gae", "grpo", "gdpo", "reinforce_plus_plus", "raw_reward")


def estimator_of(source: Source) -> str:
    """The name of the advantage estimator, NeMo-RL's default where the file gives none."""
    return source.get(f"{source.algorithm}.adv_estimator.name", "gae" if source.algorithm == "ppo" else "grpo")


def has_critic(source: Source) -> bool:
    return source.algorithm == "ppo" and estimator_of(source) == "gae"


def _epochs(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("-1: no limit") if value == -1 else mapped({"ALGO.max_num_epochs": value})


def _validation_samples(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"ALGO.max_val_samples": None if value == -1 else value})


def _turns(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("one turn") if value in (None, 1) else refused("environments of several turns are issue 8")


def _critic_epochs(source: Source, key: str, value: Plain) -> Outcome:
    epochs = source.get(f"{source.algorithm}.ppo_epochs", 1)
    if value in (None, epochs):
        return nothing("as many as ppo_epochs")
    return refused(
        f"both models make ppo_epochs = {epochs} passes; a longer warm-up (policy_training_start_step) helps"
    )


def _skip_reference(source: Source, key: str, value: Plain) -> Outcome:
    if value and source.get("loss_fn.reference_policy_kl_penalty", 0.0) > 0:
        return refused("a KL penalty is measured against the reference; it is kept")
    return nothing("there is a reference section where there is a KL penalty")


def _estimator(source: Source, key: str, value: Plain) -> Outcome:
    known = [name for name in ESTIMATORS if source.algorithm == "ppo" or name not in ("gae", "raw_reward")]
    if value in known:
        return mapped({f"{ESTIMATOR}.name": value})
    return refused(f"no such estimator; {source.algorithm} imports {', '.join(known)}, and Tandem has rloo and opd too")


def of(*names: str, settings: str) -> Entry:
    """Settings of some estimators; the others do not read them."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if estimator_of(source) not in names:
            return nothing(f"{estimator_of(source)} does not read it")
        return nothing("null") if value is None else mapped({key: value})

    keys = tuple(f"{ESTIMATOR}.{setting}" for setting in settings.split())
    return Entry(keys, "mapped", f"the same, of {', '.join(names)}", rule)


def _gae_lambda(source: Source, key: str, value: Plain) -> Outcome:
    section = f"{source.algorithm}.adv_estimator"
    policy = source.get(f"{section}.length_adaptive_alpha", 0.0) or source.get(f"{section}.gae_lambda_policy")
    if estimator_of(source) != "gae":
        return nothing(f"{estimator_of(source)} does not read it")
    if policy is not None and source.get(f"{section}.gae_lambda_value") is not None:
        return nothing("policy and value have lambdas of their own")
    return mapped({f"{ESTIMATOR}.gae_lambda": value})


def _legacy_normalisation(source: Source, key: str, value: Plain) -> Outcome:
    name = key.split(".")[-1]
    if source.has("grpo.adv_estimator.name"):
        return nothing("adv_estimator has its own")
    return mapped({f"grpo.adv_estimator.{name}": value})


def _reward_weights(source: Source, key: str, value: Plain) -> Outcome:
    if value is None:
        return nothing("every component weighs 1")
    return refused(f"a list; write {source.algorithm}.adv_estimator.reward_weights: {{component: weight}}")


def _scaling(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"ALGO.reward_scaling": {}}) if value else nothing("no section reward_scaling")


def _stops_properly(source: Source) -> bool:
    return source.get(f"{source.algorithm}.reward_shaping.stop_properly_penalty_coef") is not None


def _shaping(source: Source, key: str, value: Plain) -> Outcome:
    if not value:
        return nothing("no section reward_shaping")
    return mapped({"ALGO.reward_shaping.name": "stop_properly" if _stops_properly(source) else "overlong"})


def _overlong(source: Source, key: str, value: Plain) -> Outcome:
    name = key.split(".")[-1]
    if _stops_properly(source):
        return nothing("stop_properly_penalty_coef takes its place")
    reach = response_room(source)
    if name == "max_response_length" and isinstance(value, int) and value > reach:
        return mapped({"ALGO.reward_shaping.max_response_length": reach}, "as long as a response can get")
    return mapped({f"ALGO.reward_shaping.{name}": value})


def _stop_coefficient(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("null") if value is None else mapped({"ALGO.reward_shaping.stop_properly_penalty_coef": value})


def _lead(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("the sampler's default") if value else nothing("synchronous: a lead of 0 is the default")


def _in_flight(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"async_rl.weight_update": "in_flight"}) if value else nothing("`drain` is the default")


SIZES = (
    same(
        "ALGO.num_prompts_per_step ALGO.num_generations_per_prompt ALGO.max_num_steps ALGO.ppo_epochs "
        "ALGO.policy_training_start_step ALGO.val_period ALGO.val_at_start ALGO.val_at_end ALGO.val_batch_size "
        "ALGO.use_dynamic_sampling ALGO.dynamic_sampling_max_gen_batches ALGO.overlong_filtering "
        "ALGO.seq_logprob_error_threshold ALGO.advantage_clip_low ALGO.advantage_clip_high"
    ),
    by("ALGO.max_num_epochs", "ALGO.max_num_epochs", "-1 is no limit", _epochs),
    renamed("ALGO.seed", "seed"),
    implied_by("ALGO.max_rollout_turns", "1. More turns are not supported (issue 8)", _turns),
    implied_by(
        "ALGO.critic_ppo_epochs ALGO.critic_train_epochs",
        "as many passes as `ppo_epochs`; another number is not supported",
        _critic_epochs,
    ),
    lacking(
        "ALGO.warm_start_value_checkpoint ALGO.initial_value_weights_path",
        "NeMo-RL's checkpoints are not read; `value.warm_start` takes the critic of a Tandem checkpoint, "
        "`value.model_name` a Hugging Face directory",
    ),
    lacking(
        "ALGO.initial_policy_weights_path",
        "NeMo-RL's checkpoints are not read; `policy.model_name` takes a Hugging Face directory",
    ),
    by("ALGO.max_val_samples", "ALGO.max_val_samples", "-1 is null: all", _validation_samples),
    lacking("ALGO.val_start_at", "validation begins with the first period", (None, -1, 0)),
    implied("ALGO.batch_multiplier", "dynamic sampling starts prompts one by one, as many as it needs"),
    implied("ALGO.calculate_advantages_on_gpu", "advantages are computed where the controller is"),
    implied_by(
        "ALGO.skip_reference_policy_logprobs_calculation",
        "there is a section `reference`, or there is not",
        _skip_reference,
    ),
    lacking(
        "ALGO.invalid_tool_call_advantage ALGO.malformed_thinking_advantage reward_penalties.**",
        "NeMo-Gym's penalties; a verifier of your own (`env.verifier.name: python`) can give them",
    ),
)

REWARDS = (
    by(f"{ESTIMATOR}.name", f"{ESTIMATOR}.name", f"{', '.join(ESTIMATORS)}; others are not supported", _estimator),
    by(
        f"{ESTIMATOR}.gae_lambda",
        f"{ESTIMATOR}.gae_lambda",
        "of gae; implied where policy and value have their own",
        _gae_lambda,
    ),
    of("gae", settings="gae_gamma gae_lambda_value gae_lambda_policy length_adaptive_alpha"),
    of("gae", "raw_reward", settings="normalize_advantages"),
    of("grpo", "gdpo", settings="normalize_rewards use_leave_one_out_baseline"),
    of("reinforce_plus_plus", settings="minus_baseline"),
    Entry(
        (f"{ESTIMATOR}.reward_weights",),
        "not supported",
        "a list in NeMo-RL; ours goes by component: `ALGO.adv_estimator.reward_weights: {name: weight}`",
        _reward_weights,
    ),
    lacking(f"{ESTIMATOR}.cross_trajectory", "a sample is one trajectory"),
    by(
        "grpo.normalize_rewards grpo.use_leave_one_out_baseline",
        "grpo.adv_estimator",
        "with the same names; implied where `adv_estimator` is given",
        _legacy_normalisation,
    ),
    by("ALGO.reward_scaling.enabled", "ALGO.reward_scaling", "the section is there, or it is not", _scaling),
    same(
        "ALGO.reward_scaling.source_min ALGO.reward_scaling.source_max ALGO.reward_scaling.target_min "
        "ALGO.reward_scaling.target_max"
    ),
    by("ALGO.reward_shaping.enabled", "ALGO.reward_shaping.name", "overlong, or stop_properly", _shaping),
    by(
        "ALGO.reward_shaping.overlong_buffer_length ALGO.reward_shaping.overlong_buffer_penalty "
        "ALGO.reward_shaping.max_response_length",
        "ALGO.reward_shaping",
        "with the same names; a length is cut to what a response can reach. Implied beside stop_properly_penalty_coef",
        _overlong,
    ),
    by(
        "ALGO.reward_shaping.stop_properly_penalty_coef",
        "ALGO.reward_shaping.stop_properly_penalty_coef",
        "",
        _stop_coefficient,
    ),
    lacking("ALGO.reward_shaping.**", "only `overlong` and `stop_properly`"),
)

LEGACY_ASYNC = (
    implied_by(
        "ALGO.ASYNC.enabled", "there is no switch: asynchronous is a lead above 0, `max_lookahead_versions`", _lead
    ),
    renamed("ALGO.ASYNC.max_trajectory_age_steps", "async_rl.sampler.max_lookahead_versions"),
    renamed(
        "ALGO.ASYNC.warmup_generation_lead_steps ALGO.ASYNC.warmup_max_trajectory_age_steps",
        "async_rl.sampler.warmup_lookahead_versions",
    ),
    by("ALGO.ASYNC.in_flight_weight_updates", "async_rl.weight_update", "in_flight, or drain", _in_flight),
    renamed("ALGO.ASYNC.recompute_kv_cache_after_weight_updates", "async_rl.recompute_kv_cache_after_weight_updates"),
    implied("ALGO.ASYNC.drop_incomplete_targets_on_restore", "a resumed run generates unfinished prompts again"),
)

ENTRIES = (*SIZES, *REWARDS, *LEGACY_ASYNC)
