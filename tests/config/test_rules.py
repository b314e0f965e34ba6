"""Every rule between keys: a config that breaks it, what the message names, and the way out that makes it load."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.rules_algorithm import ALGORITHM_RULES
from tandem.config.rules_models import MODEL_RULES
from tandem.config.rules_sizes import SIZE_RULES

HERE = Path(__file__).parent
PPO, GRPO = str(HERE / "base.yaml"), str(HERE / "grpo.yaml")
ROWS = "{name:jsonl,path:x}"
NO_CRITIC = "value=null value_loss_fn=null"
OPD = f"ppo.adv_estimator.name=opd {NO_CRITIC}"
GAE, SAMPLER, LOSS = "ppo.adv_estimator", "async_rl.sampler", "loss_fn"
CORRECTION, TIS = f"{LOSS}.importance_sampling_correction", "{name:tis,ratio_max:2}"
KL = f"{LOSS}.reference_policy_kl_penalty"
OVERLONG = "ppo.reward_shaping={name:overlong,max_response_length:%d,overlong_buffer_length:%d}"

# rule, recipe, overrides that break it, overrides after them that mend it, what the message names
CASES = [
    ("gae_and_critic", PPO, "value=null", "value={}", "adv_estimator.name = gae|value = null|add `value: {}`"),
    ("gae_and_critic", PPO, "value_loss_fn=null", "value_loss_fn={name:huber}", "gae|value_loss_fn = null|{name: mse}"),
    ("gae_and_critic", PPO, f"{GAE}.name=rloo", NO_CRITIC, f"{GAE}.name = rloo|value (|value=null|{GAE}.name=gae"),
    ("gae_and_critic", GRPO, "value={} value_loss_fn=null", "value=null", "grpo.adv_estimator.name = grpo|value=null"),
    ("gae_and_critic", GRPO, "value_loss_fn={name:mse}", "value_loss_fn=null", "value_loss_fn (|value_loss_fn=null"),
    ("gae_and_critic", GRPO, "grpo.adv_estimator.name=gae", "grpo.adv_estimator.name=gdpo", "ppo instead of grpo"),
    (
        "lambdas",
        PPO,
        f"{GAE}={{name:gae,gae_lambda:0.9,gae_lambda_policy:0.9,gae_lambda_value:1}}",
        f"{GAE}.gae_lambda=default",
        "gae_lambda = 0.9|gae_lambda_policy = 0.9|gae_lambda_value = 1.0",
    ),
    (
        "lambdas",
        PPO,
        f"{GAE}={{name:gae,gae_lambda:0.9,length_adaptive_alpha:0.05,gae_lambda_value:1}}",
        f"{GAE}.gae_lambda_value=null",
        "gae_lambda = 0.9|length_adaptive_alpha = 0.05",
    ),
    (
        "critic_warm_up",
        PPO,
        f"ppo.policy_training_start_step=2 {GAE}.name=raw_reward {NO_CRITIC}",
        "ppo.policy_training_start_step=0",
        f"policy_training_start_step = 2|{GAE}.name = raw_reward",
    ),
    (
        "critic_warm_up",
        PPO,
        "ppo.policy_training_start_step=20",
        "ppo.policy_training_start_step=19",
        "policy_training_start_step = 20|max_num_steps = 20|above 20",
    ),
    ("reference", PPO, f"{KL}=0.1", "reference={}", f"{KL} = 0.1|reference = null|`reference: {{}}`|{KL}=0"),
    ("reference", PPO, f"{LOSS}.use_kl_in_reward=true {KL}=0.1", "reference={}", f"{KL} = 0.1|reference = null"),
    ("reference", PPO, "reference={}", f"{KL}=0.1", f"reference (|{KL} = 0.0|reference=null"),
    ("reference", PPO, OPD, "reference={model_name:teacher}", f"{GAE}.name = opd|reference = null|TEACHER"),
    (
        "distillation",
        PPO,
        f"{OPD} reference={{model_name:teacher}} {KL}=0.1",
        f"{KL}=0",
        f"{GAE}.name = opd|{KL} = 0.1|{KL}=0",
    ),
    (
        "distillation",
        PPO,
        f"{OPD} reference={{}}",
        "reference.model_name=teacher",
        "reference.model_name = null|teacher",
    ),
    (
        "kl_in_reward",
        GRPO,
        f"{LOSS}.use_kl_in_reward=true {KL}=0.1 reference={{}}",
        "grpo.adv_estimator.name=reinforce_plus_plus",
        f"{LOSS}.use_kl_in_reward = true|grpo.adv_estimator.name = grpo|use_kl_in_reward=false",
    ),
    (
        "group_size",
        GRPO,
        "grpo.num_generations_per_prompt=1 policy.train_global_batch_size=8",
        "grpo.num_generations_per_prompt=2",
        "grpo.adv_estimator.name = grpo|num_generations_per_prompt = 1|num_generations_per_prompt=2",
    ),
    (
        "group_size",
        GRPO,
        "grpo.num_generations_per_prompt=1 policy.train_global_batch_size=8 "
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.adv_estimator.minus_baseline=false",
        "minus_baseline = true|num_generations_per_prompt = 1",
    ),
    (
        "group_size",
        PPO,
        "ppo.num_generations_per_prompt=1 policy.train_global_batch_size=8 ppo.use_dynamic_sampling=true",
        "ppo.num_generations_per_prompt=4",
        "use_dynamic_sampling = true|num_generations_per_prompt = 1",
    ),
    (
        "one_update_ratio",
        PPO,
        f"{LOSS}.ratio=none ppo.ppo_epochs=2",
        f"{LOSS}.ratio=token",
        f"{LOSS}.ratio = none|ppo.ppo_epochs = 2|ppo.ppo_epochs=1",
    ),
    (
        "one_update_ratio",
        PPO,
        f"{LOSS}.ratio=on_policy",
        "policy.train_global_batch_size=32",
        f"{LOSS}.ratio = on_policy|train_global_batch_size = 16|train_global_batch_size=32",
    ),
    (
        "sequence_ratio",
        PPO,
        f"{LOSS}.ratio=sequence",
        f"{LOSS}.loss_aggregation=seq-mean-token-mean",
        f"{LOSS}.ratio = sequence|loss_aggregation = token-mean",
    ),
    (
        "sequence_ratio",
        PPO,
        f"{LOSS}={{ratio:sequence,loss_aggregation:seq-mean-token-mean}} "
        f"{CORRECTION}={{name:seq-mask-tis,ratio_max:2}}",
        f"{CORRECTION}.name=tis",
        f"{CORRECTION}.name = seq-mask-tis|{LOSS}.ratio = sequence",
    ),
    ("correction_bounds", PPO, f"{CORRECTION}.name=tis", f"{CORRECTION}.ratio_max=2", "name = tis|ratio_max = null"),
    ("correction_bounds", PPO, f"{CORRECTION}.name=icepop", f"{CORRECTION}.ratio_max=2", "name = icepop|ratio_max"),
    (
        "correction_bounds",
        PPO,
        f"{CORRECTION}.name=seq-mask-tis",
        f"{CORRECTION}.ratio_max=2",
        "name = seq-mask-tis|ratio_max = null",
    ),
    (
        "correction_bounds",
        PPO,
        f"{CORRECTION}={{name:plain,ratio_max:2}}",
        f"{CORRECTION}.ratio_max=null",
        "name = plain|ratio_max = 2.0",
    ),
    (
        "correction_bounds",
        PPO,
        f"{CORRECTION}={{name:icepop,ratio_min:2,ratio_max:2}}",
        f"{CORRECTION}.ratio_min=0.5",
        "ratio_min = 2.0|ratio_max = 2.0",
    ),
    (
        "lead",
        PPO,
        f"{SAMPLER}.max_lookahead_versions=1",
        f"{CORRECTION}={TIS}",
        f"max_lookahead_versions = 1|{CORRECTION} = null|max_lookahead_versions=0",
    ),
    (
        "lead",
        PPO,
        f"{SAMPLER}={{name:weight_fifo}}",
        f"{CORRECTION}={TIS}",
        f"max_staleness_versions = 1|{CORRECTION} = null|max_staleness_versions=0",
    ),
    (
        "lead",
        PPO,
        "async_rl.weight_update=in_flight",
        f"{CORRECTION}={TIS}",
        f"weight_update = in_flight|several versions|{CORRECTION} = null",
    ),
    (
        "overlap",
        PPO,
        f"{SAMPLER}={{name:windowed,buffer_capacity_groups:2}} {CORRECTION}={TIS}",
        f"{SAMPLER}.buffer_capacity_groups=8",
        "buffer_capacity_groups = 2|num_prompts_per_step = 8",
    ),
    (
        "overlap",
        PPO,
        f"{SAMPLER}={{name:custom,target:mine}} {CORRECTION}={TIS}",
        f"{SAMPLER}.target='mine:it'",
        "target = mine|module:name",
    ),
    (
        "overlap",
        PPO,
        "async_rl.min_groups_for_streaming_train=8",
        "async_rl.min_groups_for_streaming_train=4",
        "min_groups_for_streaming_train = 8|num_prompts_per_step = 8",
    ),
    (
        "overlap",
        PPO,
        "async_rl.min_groups_for_streaming_train=4 async_rl.min_step_batch_fraction=0.5",
        "async_rl.min_step_batch_fraction=0",
        "min_step_batch_fraction = 0.5|min_groups_for_streaming_train = 4",
    ),
    (
        "warm_up_lead",
        PPO,
        f"{SAMPLER}.warmup_lookahead_versions=3",
        "ppo.policy_training_start_step=3",
        "warmup_lookahead_versions = 3|policy_training_start_step = 0",
    ),
    (
        "warm_up_lead",
        GRPO,
        f"{SAMPLER}.warmup_lookahead_versions=3",
        f"{SAMPLER}.warmup_lookahead_versions=null",
        "warmup_lookahead_versions = 3|grpo has none",
    ),
    (
        "warm_up_lead",
        PPO,
        f"ppo.policy_training_start_step=3 {CORRECTION}={TIS} "
        f"{SAMPLER}={{warmup_lookahead_versions:1,max_lookahead_versions:2}}",
        f"{SAMPLER}.warmup_lookahead_versions=2",
        "warmup_lookahead_versions = 1|max_lookahead_versions = 2",
    ),
    (
        "target_kl",
        PPO,
        "ppo.target_kl=0.1 policy.train_global_batch_size=32",
        "ppo.ppo_epochs=2",
        "target_kl = 0.1|ppo_epochs = 1|train_global_batch_size = 32",
    ),
    (
        "mini_batches",
        PPO,
        "policy.train_global_batch_size=12",
        "policy.train_global_batch_size=8",
        "train_global_batch_size = 12|does not divide|num_prompts_per_step = 8|32 samples|train_global_batch_size=8",
    ),
    (
        "mini_batches",
        PPO,
        "policy.train_global_batch_size=64",
        "ppo.num_prompts_per_step=16",
        "train_global_batch_size = 64|is more than|num_generations_per_prompt = 4|train_global_batch_size=32",
    ),
    (
        "response_length",
        PPO,
        "policy.generation.max_new_tokens=128",
        "policy.generation.max_new_tokens=127",
        "max_new_tokens = 128|max_total_sequence_length = 128",
    ),
    (
        "micro_batches",
        PPO,
        "policy.sequence_packing.train_mb_tokens=100",
        "policy.sequence_packing.train_mb_tokens=128",
        "policy.sequence_packing.train_mb_tokens = 100|max_total_sequence_length = 128",
    ),
    (
        "micro_batches",
        PPO,
        "policy.sequence_packing.logprob_mb_tokens=100",
        "policy.sequence_packing.logprob_mb_tokens=null",
        "policy.sequence_packing.logprob_mb_tokens = 100|max_total_sequence_length = 128",
    ),
    (
        "micro_batches",
        PPO,
        "value.sequence_packing.train_mb_tokens=100",
        "policy.max_total_sequence_length=99",
        "value.sequence_packing.train_mb_tokens = 100|max_total_sequence_length = 128",
    ),
    (
        "reward_range",
        PPO,
        "ppo.reward_scaling={source_min:1}",
        "ppo.reward_scaling.source_max=2",
        "source_min = 1.0|source_max = 1.0",
    ),
    (
        "overlong_lengths",
        PPO,
        OVERLONG % (20, 21),
        "ppo.reward_shaping.overlong_buffer_length=20",
        "overlong_buffer_length = 21|max_response_length = 20",
    ),
    (
        "overlong_lengths",
        PPO,
        OVERLONG % (30, 8),
        "policy.generation.max_new_tokens=30",
        "max_response_length = 30|max_new_tokens = 28|max_response_length=28",
    ),
    (
        "advantage_clip",
        PPO,
        "ppo.advantage_clip_low=2 ppo.advantage_clip_high=1",
        "ppo.advantage_clip_low=-2",
        "advantage_clip_low = 2.0|advantage_clip_high = 1.0",
    ),
    (
        "value_bins",
        PPO,
        "value_loss_fn={name:hl_gauss,value_min:1}",
        "value_loss_fn.value_max=2",
        "value_min = 1.0|value_max = 1.0",
    ),
    (
        "learning_rate_warm_up",
        PPO,
        "policy.scheduler.warmup_steps=31 ppo.policy_training_start_step=5",
        "policy.scheduler.warmup_steps=30",
        "policy.scheduler.warmup_steps = 31|max_num_steps = 20|warmup_steps=30",
    ),
    (
        "learning_rate_warm_up",
        PPO,
        "value.scheduler.warmup_steps=41",
        "value.scheduler.warmup_steps=40",
        "value.scheduler.warmup_steps = 41|max_num_steps = 20|warmup_steps=40",
    ),
    (
        "training_law",
        PPO,
        "policy.generation.top_p=0.9",
        "policy.generation.top_p=1.0 policy.generation.temperature=0.7",
        "top_p = 0.9|temperature = 1.0|top_p=1",
    ),
    ("training_law", PPO, "policy.generation.top_k=5", "policy.generation.top_k=null", "top_k = 5|top_k=null"),
    (
        "varlen_attention",
        PPO,
        "policy.attention=varlen policy.precision=bfloat16 cluster.device=cpu",
        "cluster.device=cuda",
        "policy.attention = varlen|cluster.device = cpu",
    ),
    (
        "varlen_attention",
        PPO,
        "value.attention=varlen",
        "value.precision=bfloat16",
        "value.attention = varlen|value.precision = float32",
    ),
    (
        "prompt_template",
        PPO,
        "data.prompt_template=hello",
        "data.prompt_template='{question}'",
        "data.prompt_template = hello|data.train|{question}",
    ),
    (
        "answer_in_prompt",
        PPO,
        f"data.train={ROWS} data.train.answer_field=question",
        "data.train.answer_field=answer",
        "data.train.prompt_field = question|data.train.answer_field = question",
    ),
    (
        "validation_split",
        PPO,
        "data.validation.name=arithmetic",
        "data.validation.split=validation",
        "data.validation.split = train|data.train.split = train",
    ),
    (
        "never_validates",
        PPO,
        f"data.validation={ROWS} ppo.val_period=0 ppo.val_at_start=false ppo.val_at_end=false",
        "ppo.val_at_end=true",
        "data.validation (|val_period = 0|val_at_start = false|val_at_end = false|data.validation=null",
    ),
]


def spaced(overrides: str) -> list[str]:
    """The overrides of a line. YAML wants a blank after a colon; the table has none, so that blanks part overrides."""
    return [text.replace(":", ": ").replace(",", ", ") for text in overrides.split()]


@pytest.mark.parametrize(("rule", "recipe", "broken", "mended", "names"), CASES)
def test_a_broken_rule_names_keys_values_and_way_out(rule: str, recipe: str, broken: str, mended: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load(recipe, spaced(broken))
    found = [message for message in caught.value.messages if all(part in message for part in names.split("|"))]
    assert found, f"{rule}: no message names {names}: {caught.value}"
    load(recipe, [*spaced(broken), *spaced(mended)])


@pytest.mark.parametrize("rule", [*ALGORITHM_RULES, *SIZE_RULES, *MODEL_RULES])
def test_every_rule_has_a_case(rule: Callable):
    assert rule.__name__ in {case[0] for case in CASES}


@pytest.mark.parametrize(
    ("override", "names"), [("ppo=null", "give one"), ("grpo={}", "remove one (ppo=null or grpo=null)")]
)
def test_exactly_one_of_ppo_and_grpo(override: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load(PPO, [override])
    (message,) = caught.value.messages
    assert names in message


def test_all_broken_rules_come_at_once():
    with pytest.raises(ConfigError) as caught:
        load(PPO, ["value=null", "policy.generation.top_k=5", "reference={}", "policy.train_global_batch_size=7"])
    assert len(caught.value.messages) == 4
