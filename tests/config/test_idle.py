"""A key that is set but has no effect in this run is refused, and says what it needs."""

from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.health import Health
from tandem.config.idle import TABLE
from tandem.config.load import load
from tandem.config.rules_sizes import FALLING

BASE = str(Path(__file__).with_name("base.yaml"))
KL_ON = ["loss_fn.reference_policy_kl_penalty=0.1", "reference={}"]
VALIDATE = ["data.validation={name: arithmetic, split: validation}"]
SAVE = ["checkpointing.enabled=true"]
RANKS = ["cluster.launch=ray", "cluster.gpus_per_node=2"]
RATIO = ["loss_fn.ratio=token"]
NO_CRITIC = ["ppo.adv_estimator.name=rloo", "value=null", "value_loss_fn=null"]
CRITIC = ["ppo.adv_estimator.name=gae", "value={}", "value_loss_fn={name: mse}"]
NO_SAVE, NO_RATIO = ["checkpointing.enabled=false"], ["loss_fn.ratio=none"]
STALE = ["async_rl.sampler={name: weight_fifo}", "loss_fn.importance_sampling_correction={name: plain}"]
# What a threshold needs besides health that is on.
HEALTH_NEEDS = {
    "reference_kl": KL_ON,
    "groups_filtered": ["ppo.use_dynamic_sampling=true"],
    "groups_stale": STALE,
    "staleness_near_bound": STALE,
}

GSM8K = ["data.train={name: gsm8k, path: x.jsonl}"]

# set, while, has an effect with, what it needs
MEGATRON = ["policy.backend.name=megatron", "value.backend.name=megatron"]
ON_CPU = ["cluster.device=cpu"]
CASES = [
    ("cluster.gpu_memory_gib=80", ON_CPU, ["cluster.device=cuda"], "cluster.device = cpu"),
    ("cluster.memory_plan=warn", ON_CPU, ["cluster.device=cuda"], "cluster.device = cpu"),
    ("ppo.val_period=5", [], VALIDATE, "data.validation = null"),
    ("ppo.val_at_start=true", [], VALIDATE, "data.validation = null"),
    ("ppo.val_at_end=true", [], VALIDATE, "data.validation = null"),
    ("ppo.max_val_samples=8", [], VALIDATE, "data.validation = null"),
    ("ppo.val_batch_size=8", [], VALIDATE, "data.validation = null"),
    (
        "ppo.num_val_generations_per_prompt=8",
        [],
        [*VALIDATE, "policy.generation.val_temperature=1"],
        "data.validation = null",
    ),
    (
        "policy.generation.val_top_p=0.5",
        [],
        [*VALIDATE, "policy.generation.val_temperature=1"],
        "data.validation = null",
    ),
    (
        "policy.generation.val_top_p=0.5",
        VALIDATE,
        ["policy.generation.val_temperature=1"],
        "policy.generation.val_temperature = 0.0",
    ),
    ("policy.generation.val_temperature=0.5", [], VALIDATE, "data.validation = null"),
    ("logger.num_val_samples_to_print=2", [], VALIDATE, "data.validation = null"),
    ("checkpointing.save_period=10", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.save_at_end=true", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.keep_last_n=3", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.keep_top_k=3", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.metric_name=train:rollout/reward", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.higher_is_better=true", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.async_save=true", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("checkpointing.checkpoint_must_save_by=00:01:00:00", NO_SAVE, SAVE, "checkpointing.enabled = false"),
    ("loss_fn.reference_policy_kl_type=k1", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    ("loss_fn.use_kl_in_reward=true", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    ("loss_fn.use_on_policy_kl_approximation=true", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    ("loss_fn.kl_input_clamp_value=10", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    ("loss_fn.kl_output_clamp_value=10", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    ("loss_fn.adaptive_kl={target: 0.1, horizon: 10}", [], KL_ON, "reference_policy_kl_penalty = 0.0"),
    (
        "loss_fn.use_on_policy_kl_approximation=true",
        [*KL_ON, "loss_fn.use_kl_in_reward=true"],
        ["loss_fn.use_kl_in_reward=false"],
        "use_kl_in_reward = true",
    ),
    ("loss_fn.ratio_clip_min=0.2", NO_RATIO, RATIO, "loss_fn.ratio = none"),
    ("loss_fn.ratio_clip_max=0.3", NO_RATIO, RATIO, "loss_fn.ratio = none"),
    ("loss_fn.ratio_clip_c=3", NO_RATIO, RATIO, "loss_fn.ratio = none"),
    ("loss_fn.use_cispo=true", NO_RATIO, RATIO, "loss_fn.ratio = none"),
    ("loss_fn.ratio_clip_c=3", ["loss_fn.use_cispo=true"], ["loss_fn.use_cispo=false"], "use_cispo = true"),
    (
        "async_rl.recompute_kv_cache_after_weight_updates=true",
        [],
        ["async_rl.weight_update=in_flight", "loss_fn.importance_sampling_correction={name: plain}"],
        "async_rl.weight_update = drain",
    ),
    (
        "async_rl.discard_partial_rollouts=true",
        [],
        ["async_rl.weight_update=abort_and_reissue"],
        "async_rl.weight_update = drain",
    ),
    (
        "policy.generation.engine.gpu_memory_utilization=0.7",
        ["policy.generation.engine={name: vllm, kv_cache_memory_bytes: 1000000}"],
        ["policy.generation.engine.kv_cache_memory_bytes=null"],
        "policy.generation.engine.kv_cache_memory_bytes = 1000000",
    ),
    (
        "ppo.dynamic_sampling_max_gen_batches=3",
        [],
        ["ppo.use_dynamic_sampling=true"],
        "ppo.use_dynamic_sampling = false",
    ),
    (
        "ppo.adv_estimator.gae_lambda_policy=0.9",
        ["ppo.adv_estimator.length_adaptive_alpha=0.05"],
        ["ppo.adv_estimator.length_adaptive_alpha=0"],
        "length_adaptive_alpha = 0.05",
    ),
    (
        "ppo.adv_estimator.bootstrap_truncated=true",
        ["ppo.overlong_filtering=true"],
        ["ppo.overlong_filtering=false"],
        "ppo.overlong_filtering = true",
    ),
    ("policy.scheduler.min_lr_ratio=0.1", [], ["policy.scheduler.name=cosine"], "policy.scheduler.name = constant"),
    ("value.scheduler.min_lr_ratio=0.1", [], ["value.scheduler.name=linear"], "value.scheduler.name = constant"),
    *(
        (
            f"{model}.sequence_packing.{change}",
            [f"{model}.sequence_packing.enabled=false"],
            [f"{model}.sequence_packing.enabled=true"],
            f"{model}.sequence_packing.enabled = false",
        )
        for model in ("policy", "value")
        for change in ("train_mb_tokens=4096", "logprob_mb_tokens=4096", "algorithm=concatenative")
    ),
    *(
        (
            f"{model}.parallel.sequence_parallel=true",
            [],
            [f"{model}.parallel.tensor_parallel_size=2", *RANKS],
            f"{model}.parallel.tensor_parallel_size = 1",
        )
        for model in ("policy", "value")
    ),
    *(
        (f"cluster.{setting}", [], ["cluster.launch=ray"], "cluster.launch = local")
        for setting in ("num_nodes=2", "gpus_per_node=2", "ray.address=auto", "ray.dashboard=true")
    ),
    *(
        (f"cluster.ray.{setting}", [], ["cluster.launch=ray"], "cluster.launch = local")
        for setting in ("start_timeout_s=5", "deadline_s=5", "weight_transfer=object_store", "weight_bucket_bytes=5")
    ),
    (
        "cluster.ray.dashboard=true",
        [*RANKS, "cluster.ray.address=auto"],
        ["cluster.ray.address=null"],
        "address = auto",
    ),
    *(
        (
            f"{who}.colocated.resources.{name}=1",
            ["cluster.launch=ray", "cluster.gpus_per_node=3"],
            [f"{who}.colocated.enabled=false"],
            f"{who}.colocated.enabled = true",
        )
        for who in ("policy.generation", "value")
        for name in ("num_nodes", "gpus_per_node")
    ),
    *(
        (f"{model}.parallel.data_parallel=shard", [], ["cluster.launch=ray"], "cluster.launch = local")
        for model in ("policy", "value")
    ),
    *(
        (f"{model}.parallel.keep_gathered=true", [], ["cluster.launch=ray"], "cluster.launch = local")
        for model in ("policy", "value")
    ),
    *(
        (
            f"{model}.parallel.keep_gathered=true",
            [*RANKS, f"{model}.parallel.data_parallel=replicate"],
            [f"{model}.parallel.data_parallel=shard"],
            f"{model}.parallel.data_parallel = replicate",
        )
        for model in ("policy", "value")
    ),
    *(
        (
            f"{model}.{option}",
            [*RANKS, *MEGATRON],
            [f"{model}.backend.name=torch"],
            f"{model}.backend.name = megatron",
        )
        for model in ("policy", "value")
        for option in (
            *("parallel.tensor_parallel_size=2", "parallel.context_parallel_size=2"),
            *("parallel.data_parallel=replicate", "parallel.keep_gathered=true", "compile=true"),
        )
    ),
    *(
        (
            f"{model}.backend.sequence_parallel=true",
            [*RANKS, *MEGATRON],
            [f"{name}.backend.tensor_model_parallel_size=2" for name in ("policy", "value")],
            f"{model}.backend.tensor_model_parallel_size = 1",
        )
        for model in ("policy", "value")
    ),
    *(
        (
            f"{model}.backend.num_layers_in_{stage}_pipeline_stage=2",
            [*RANKS, *MEGATRON],
            [f"{name}.backend.pipeline_model_parallel_size=2" for name in ("policy", "value")],
            f"{model}.backend.pipeline_model_parallel_size = 1",
        )
        for model in ("policy", "value")
        for stage in ("first", "last")
    ),
    *(
        (
            f"logger.health.{name}={('[0, -2]' if name in FALLING else '[1, 2]') if isinstance(value, tuple) else 1}",
            ["logger.health.enabled=false", *HEALTH_NEEDS.get(name, [])],
            ["logger.health.enabled=true"],
            "logger.health.enabled = false",
        )
        for name, value in Health()
        if name != "enabled"
    ),
    *(
        (f"logger.health.{name}", NO_CRITIC, CRITIC, "value = null")
        for name in ("critic_lags=[0, -1]", "critic_steps=4")
    ),
    ("logger.health.reference_kl=[1, 2]", [], KL_ON, "reference = null"),
    ("logger.health.groups_filtered=[0.1, 0.2]", [], ["ppo.use_dynamic_sampling=true"], "use_dynamic_sampling = false"),
    *(
        (f"logger.health.{name}", [], STALE, "async_rl.sampler.name = in_order")
        for name in ("groups_stale=[0.1, 0.2]", "staleness_near_bound=0.5")
    ),
    ("value.trust_remote_code=true", [], ["value.model_name=m"], "value.model_name = null"),
    ("reference.trust_remote_code=true", KL_ON, ["reference.model_name=m"], "reference.model_name = null"),
]


# keys of data sources, wherever one stands
OF_SOURCES = [
    ("data.on_bad_row=skip", [], GSM8K, "data.train.name = arithmetic"),
    ("data.train.split=test", GSM8K, ["data.train.path=null"], "data.train.path = x.jsonl"),
    ("data.train.revision=abc", GSM8K, ["data.train.path=null"], "data.train.path = x.jsonl"),
    (
        "data.train.sources.a.split=test",
        ["data.train={name: mixture, sources: {a: {name: gsm8k, path: x.jsonl}}}"],
        ["data.train.sources.a.path=null"],
        "data.train.sources.a.path = x.jsonl",
    ),
    (
        "data.prompt_template='{question}?'",
        [*GSM8K, "data.train.prompt_template='{question}!'"],
        ["data.train.prompt_template=null"],
        "data.train.prompt_template = ",
    ),
]


@pytest.mark.parametrize(("override", "around", "way_out", "cause"), [*CASES, *OF_SOURCES])
def test_a_key_without_effect_is_refused(override: str, around: list[str], way_out: list[str], cause: str):
    key, _, _ = override.partition("=")
    with pytest.raises(ConfigError) as caught:
        load(BASE, [*around, override])
    (message,) = caught.value.messages
    assert message.startswith(key)
    assert cause in message
    assert f"{key}=default" in message
    load(BASE, [*around, override, *way_out])
    load(BASE, [*around, f"{key}=default"])


def test_every_key_of_the_table_has_a_case():
    tried = {override.partition("=")[0] for override, *_ in CASES}
    assert {key.format(algorithm="ppo") for needs in TABLE for key in needs.keys} == tried


@pytest.mark.parametrize("override", ["loss_fn.use_kl_in_reward=false", "loss_fn.adaptive_kl=null", "ppo.val_period=0"])
def test_switching_off_what_is_off_anyway_is_no_mistake(override: str):
    load(BASE, [override])


def test_defaults_without_effect_are_no_mistake():
    assert load(BASE).config.algorithm.val_at_start
