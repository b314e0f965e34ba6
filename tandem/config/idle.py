"""Keys that are set but have no effect in this run: a table of what each needs. Setting one of them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.config.data import ArithmeticData, ReasoningGymData, own_template
from tandem.config.health import Health
from tandem.config.loaded import Loaded
from tandem.config.schema import Plain


@dataclass(frozen=True)
class Needs:
    """`keys` have an effect only where the value of `cause` is `active`. `{algorithm}` is ppo or grpo."""

    keys: tuple[str, ...]
    cause: str
    active: Callable[[Plain], bool]
    way_out: str


def _on(value: Plain) -> bool:
    return bool(value)


def _off(value: Plain) -> bool:
    return not value


VALIDATING = (
    "{algorithm}.val_period",
    "{algorithm}.val_at_start",
    "{algorithm}.val_at_end",
    "{algorithm}.max_val_samples",
    "{algorithm}.val_batch_size",
    "{algorithm}.num_val_generations_per_prompt",
    "policy.generation.val_temperature",
    "policy.generation.val_top_p",
    "logger.num_val_samples_to_print",
)
PENALISING = tuple(
    f"loss_fn.{name}"
    for name in (
        "reference_policy_kl_type",
        "use_kl_in_reward",
        "use_on_policy_kl_approximation",
        "kl_input_clamp_value",
        "kl_output_clamp_value",
        "adaptive_kl",
    )
)
CLIPPING = tuple(f"loss_fn.{name}" for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_cispo"))
SAVING = tuple(
    f"checkpointing.{name}"
    for name in (
        *("save_period", "save_at_end", "keep_last_n", "keep_top_k", "metric_name", "higher_is_better", "async_save"),
        "checkpoint_must_save_by",
    )
)
ENGINE = "policy.generation.engine"
HEALTH = "logger.health"
PENALTY, ESTIMATOR = "loss_fn.reference_policy_kl_penalty", "{algorithm}.adv_estimator"

RAY_KEYS = ("address", "dashboard", "start_timeout_s", "deadline_s", "weight_transfer", "weight_bucket_bytes")
UNDER_RAY = (
    *(f"cluster.{name}" for name in ("num_nodes", "gpus_per_node")),
    *(f"{model}.parallel.{name}" for model in ("policy", "value") for name in ("data_parallel", "keep_gathered")),
    *(f"cluster.ray.{name}" for name in RAY_KEYS),
    *(
        f"{who}.colocated.{name}"
        for who in ("policy.generation", "value")
        for name in ("resources.num_nodes", "resources.gpus_per_node")
    ),
)

TABLE = (
    Needs(
        ("cluster.gpu_memory_gib", "cluster.memory_plan"),
        "cluster.device",
        lambda device: device != "cpu",
        "set cluster.device=cuda or auto",
    ),
    Needs(UNDER_RAY, "cluster.launch", lambda launch: launch == "ray", "set cluster.launch=ray"),
    Needs(("cluster.ray.dashboard",), "cluster.ray.address", _off, "take cluster.ray.address back"),
    *(
        Needs(
            tuple(f"{who}.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node")),
            f"{who}.colocated.enabled",
            _off,
            f"set {who}.colocated.enabled=false",
        )
        for who in ("policy.generation", "value")
    ),
    Needs(VALIDATING, "data.validation", _on, "give data.validation"),
    Needs(
        ("policy.generation.val_top_p",),
        "policy.generation.val_temperature",
        _on,
        "set policy.generation.val_temperature above 0",
    ),
    Needs(SAVING, "checkpointing.enabled", _on, "set checkpointing.enabled=true"),
    Needs(
        tuple(f"{HEALTH}.{name}" for name in Health.model_fields if name != "enabled"),
        f"{HEALTH}.enabled",
        _on,
        f"set {HEALTH}.enabled=true",
    ),
    Needs((f"{HEALTH}.critic_lags", f"{HEALTH}.critic_steps"), "value", _on, "give value"),
    Needs((f"{HEALTH}.reference_kl",), "reference", _on, "give reference"),
    Needs(
        (f"{HEALTH}.groups_filtered",),
        "{algorithm}.use_dynamic_sampling",
        _on,
        "set {algorithm}.use_dynamic_sampling=true",
    ),
    Needs(
        (f"{HEALTH}.groups_stale", f"{HEALTH}.staleness_near_bound"),
        "async_rl.sampler.name",
        lambda name: name in ("weight_fifo", "windowed"),
        "set async_rl.sampler.name=weight_fifo",
    ),
    Needs(PENALISING, PENALTY, _on, f"set {PENALTY} above 0"),
    Needs(
        ("loss_fn.use_on_policy_kl_approximation",),
        "loss_fn.use_kl_in_reward",
        _off,
        "set loss_fn.use_kl_in_reward=false",
    ),
    Needs(CLIPPING, "loss_fn.ratio", lambda ratio: ratio in ("token", "sequence"), "set loss_fn.ratio=token"),
    Needs(("loss_fn.ratio_clip_c",), "loss_fn.use_cispo", _off, "set loss_fn.use_cispo=false"),
    Needs(
        ("{algorithm}.dynamic_sampling_max_gen_batches",),
        "{algorithm}.use_dynamic_sampling",
        _on,
        "set {algorithm}.use_dynamic_sampling=true",
    ),
    Needs(
        ("async_rl.recompute_kv_cache_after_weight_updates",),
        "async_rl.weight_update",
        lambda update: update == "in_flight",
        "set async_rl.weight_update=in_flight",
    ),
    Needs(
        ("async_rl.discard_partial_rollouts",),
        "async_rl.weight_update",
        lambda update: update == "abort_and_reissue",
        "set async_rl.weight_update=abort_and_reissue",
    ),
    Needs(
        (f"{ESTIMATOR}.gae_lambda_policy",),
        f"{ESTIMATOR}.length_adaptive_alpha",
        _off,
        f"set {ESTIMATOR}.length_adaptive_alpha=0",
    ),
    Needs(
        (f"{ESTIMATOR}.bootstrap_truncated",),
        "{algorithm}.overlong_filtering",
        _off,
        "set {algorithm}.overlong_filtering=false",
    ),
    Needs(
        (f"{ENGINE}.gpu_memory_utilization",),
        f"{ENGINE}.kv_cache_memory_bytes",
        _off,
        f"set {ENGINE}.kv_cache_memory_bytes=null",
    ),
    *(
        Needs(
            (f"{model}.scheduler.min_lr_ratio",),
            f"{model}.scheduler.name",
            lambda name: name != "constant",
            f"set {model}.scheduler.name=cosine or linear",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            tuple(f"{model}.sequence_packing.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens", "algorithm")),
            f"{model}.sequence_packing.enabled",
            _on,
            f"set {model}.sequence_packing.enabled=true",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            (f"{model}.parallel.sequence_parallel",),
            f"{model}.parallel.tensor_parallel_size",
            lambda size: size != 1,
            f"set {model}.parallel.tensor_parallel_size=2 or more",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            (f"{model}.parallel.keep_gathered",),
            f"{model}.parallel.data_parallel",
            lambda how: how != "replicate",
            f"set {model}.parallel.data_parallel=shard",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            (
                f"{model}.compile",
                *(
                    f"{model}.parallel.{name}"
                    for name in (
                        *("tensor_parallel_size", "context_parallel_size", "sequence_parallel"),
                        *("data_parallel", "keep_gathered"),
                    )
                ),
            ),
            f"{model}.backend.name",
            lambda name: name == "torch",
            f"set {model}.backend.name=torch",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            (f"{model}.backend.sequence_parallel",),
            f"{model}.backend.tensor_model_parallel_size",
            lambda size: size != 1,
            f"set {model}.backend.tensor_model_parallel_size=2 or more",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs(
            tuple(f"{model}.backend.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last")),
            f"{model}.backend.pipeline_model_parallel_size",
            lambda size: size != 1,
            f"set {model}.backend.pipeline_model_parallel_size=2 or more",
        )
        for model in ("policy", "value")
    ),
    *(
        Needs((f"{model}.trust_remote_code",), f"{model}.model_name", _on, f"give {model}.model_name")
        for model in ("value", "reference")
    ),
)


def of_sources(loaded: Loaded) -> Iterator[Needs]:
    """What the keys of data sources need: they stand wherever a source does."""
    for key, _ in loaded.config.data.sources():
        yield Needs((f"{key}.split", f"{key}.revision"), f"{key}.path", _off, f"take {key}.path back")
    if all(isinstance(source, ArithmeticData | ReasoningGymData) for _, source in loaded.config.data.sources()):
        way_out = "its rows are made here and never bad: give rows of your own"
        yield Needs(("data.on_bad_row",), "data.train.name", lambda _: False, way_out)
    own = [f"{key}.prompt_template" for key, source in loaded.config.data.sources() if own_template(source)]
    if len(own) == len(list(loaded.config.data.sources())):
        yield Needs(("data.prompt_template",), own[0], _off, f"take {own[0]} back")


def idle_keys(loaded: Loaded) -> dict[str, str]:
    """Every key without an effect in this run, set or not, and why."""
    found: dict[str, str] = {}
    for needs in (*TABLE, *of_sources(loaded)):
        cause = needs.cause.format(algorithm=loaded.algorithm)
        if cause not in loaded.values or needs.active(loaded.values[cause]):
            continue
        way_out = needs.way_out.format(algorithm=loaded.algorithm)
        for key in (key.format(algorithm=loaded.algorithm) for key in needs.keys):
            if key in loaded.values:
                found.setdefault(key, f"{loaded.at(cause)}: {way_out}")
    return found


def idle_messages(loaded: Loaded) -> Iterator[str]:
    """Refuse what is set to no effect. Switching off (null, false, 0) what is off anyway asks for nothing."""
    for key, why in idle_keys(loaded).items():
        if key in loaded.written and loaded.values[key]:
            yield f"{loaded.at(key)} has no effect because {why}, or take the key back ({key}=default)"
