"""Every key of a NeMo-RL config is accounted for, and the recipe runs what the config ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tandem.config import Config
from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.nemo_rl.importing import Imported, import_config
from tandem.config.nemo_rl.recipe import open_keys, stand_in, to_yaml

HERE = Path(__file__).parent
FILES = ["grpo_base", "grpo_megatron_async", "ppo", "ppo_single_controller", "gspo_list", "flat_data"]


def merged(path: Path) -> object:
    """The file over what it inherits, merged by OmegaConf itself."""
    own = OmegaConf.load(path)
    parents = own.get("defaults", [])
    below = OmegaConf.create({})
    for name in [parents] if isinstance(parents, str) else parents:
        below = OmegaConf.merge(below, merged(path.parent / name))
    for key in [key for key in own if OmegaConf.is_dict(own[key]) and own[key].get("_override_")]:
        below.pop(key, None)
    return OmegaConf.merge(below, own)


def leaves(value: object, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{prefix}.{name}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from leaves(item, f"{prefix}.{i}")
    else:
        yield prefix


def config_of(tmp_path: Path, imported: Imported, recipe: dict | None = None) -> Config:
    """What the recipe runs, with a stand-in for what the user has to fill in."""
    chosen = imported.recipe if recipe is None else recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(chosen, "test"))
    return load(str(path), [f"{key}='{stand_in(key)}'" for key in open_keys(chosen)]).config


def changed(tmp_path: Path, base: str, changes: str) -> Imported:
    path = tmp_path / "changed.yaml"
    path.write_text(f"defaults: {HERE / base}.yaml\n{changes}\n")
    return import_config(path)


@pytest.mark.parametrize("name", FILES)
def test_every_leaf_of_the_file_is_one_row(name: str):
    expected = Counter(leaves(OmegaConf.to_container(merged(HERE / f"{name}.yaml"))))
    rows = Counter(row.key for row in import_config(HERE / f"{name}.yaml").rows if row.given)
    assert rows == expected
    assert max(rows.values()) == 1


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_passes_the_check_once_it_is_filled_in(name: str, tmp_path: Path):
    config_of(tmp_path, import_config(HERE / f"{name}.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_the_recipe_holds_nothing_that_is_the_default(name: str, tmp_path: Path):
    imported = import_config(HERE / f"{name}.yaml")
    whole = config_of(tmp_path, imported)
    for key in leaves(imported.recipe):
        *parents, last = key.split(".")
        if last == "name":
            continue  # which variant: said, also where it is the first one
        shorter = yaml.safe_load(to_yaml(imported.recipe, "test"))
        inside = shorter
        for part in parents:
            inside = inside[part]
        del inside[last]
        try:
            without = config_of(tmp_path, imported, shorter)
        except ConfigError:
            continue  # the key is needed
        assert without != whole, key


@pytest.mark.parametrize("name", FILES)
def test_what_a_row_names_is_in_the_recipe_or_is_the_default(name: str, tmp_path: Path):
    imported = import_config(HERE / f"{name}.yaml")
    values = config_of(tmp_path, imported).model_dump()
    for row in imported.rows:
        for key in row.ours:
            inside = values
            for part in key.split("."):
                assert part in inside, (row.key, key)
                inside = inside[part]


def test_grpo_on_one_gpu(tmp_path: Path):
    config = config_of(tmp_path, import_config(HERE / "grpo_base.yaml"))
    assert config.grpo is not None
    assert (config.seed, config.run_dir) == (7, "out/grpo-tests")
    assert config.grpo.adv_estimator.model_dump() == {
        "name": "grpo",
        "normalize_rewards": True,
        "use_leave_one_out_baseline": True,
    }
    assert config.loss_fn.reference_policy_kl_penalty == 0.02
    assert config.reference is not None
    assert config.loss_fn.importance_sampling_correction is None
    assert config.policy.optimizer.betas == (0.9, 0.98)
    # 12 passes over a step of 32 samples in mini-batches of 16.
    assert (config.policy.scheduler.name, config.policy.scheduler.warmup_steps) == ("constant", 24)
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 2
    assert config.policy.generation.max_new_tokens == 384
    assert (config.policy.activation_checkpointing, config.policy.offload) == ("full", "all")
    assert config.cluster.launch == "local"
    assert config.data.on_too_long == "skip"
    assert config.checkpointing.metric_name == "val:accuracy"


def test_megatron_with_engines_of_its_own_and_the_legacy_block(tmp_path: Path):
    config = config_of(tmp_path, import_config(HERE / "grpo_megatron_async.yaml"))
    backend = config.policy.backend
    assert (backend.name, config.policy.layout[1].sizes) == (
        "megatron",
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 1},
    )
    assert (config.policy.optimizer.lr, config.policy.optimizer.betas) == (3e-6, (0.9, 0.98))
    assert config.policy.scheduler.model_dump() == {"name": "cosine", "warmup_steps": 12, "min_lr_ratio": 0.1}
    assert config.policy.sequence_packing.train_mb_tokens == 2048
    assert config.async_rl.sampler.model_dump() == {
        "name": "in_order",
        "max_lookahead_versions": 2,
        "warmup_lookahead_versions": None,
    }
    assert (config.async_rl.weight_update, config.async_rl.recompute_kv_cache_after_weight_updates) == (
        "in_flight",
        False,
    )
    assert config.loss_fn.importance_sampling_correction is not None
    assert config.loss_fn.importance_sampling_correction.name == "plain"
    own = config.policy.generation.colocated
    assert (own.enabled, own.resources.num_nodes, own.resources.gpus_per_node) == (False, 1, 8)
    assert config.policy.generation.val_temperature == 0.9
    # The default of all sets, overruled by the one that says so.
    given = {"name": "file", "path": "rows/train.jsonl", "prompt_field": "problem", "answer_field": "truth"}
    assert given.items() <= config.data.train.model_dump().items()
    assert config.data.validation is not None
    assert config.data.validation.model_dump()["answer_field"] == "solution"
    assert config.env.verifier.model_dump()["num_workers"] == 8
    assert config.data.prompt_template == "{question}"


def test_ppo_with_shaped_rewards_and_a_critic(tmp_path: Path):
    config = config_of(tmp_path, import_config(HERE / "ppo.yaml"))
    assert config.ppo is not None
    assert config.value is not None
    assert config.ppo.reward_scaling is not None
    assert config.ppo.reward_scaling.target_min == -1.0
    assert config.ppo.reward_shaping is not None
    assert config.ppo.reward_shaping.model_dump() == {
        "name": "overlong",
        "max_response_length": 900,
        "overlong_buffer_length": 128,
        "overlong_buffer_penalty": 0.5,
    }
    assert config.policy.generation.max_new_tokens == 1024 - 124
    assert (config.ppo.policy_training_start_step, config.ppo.ppo_epochs, config.ppo.max_val_samples) == (8, 2, None)
    assert config.loss_fn.loss_aggregation == "seq-mean-token-mean"
    assert config.loss_fn.importance_sampling_correction is not None
    assert config.loss_fn.importance_sampling_correction.model_dump() == {
        "name": "icepop",
        "ratio_max": 5.0,
        "ratio_min": 0.5,
    }
    assert config.value_loss_fn is not None
    assert config.value_loss_fn.model_dump() == {"name": "mse", "scale": 0.4, "cliprange": 0.5}
    assert config.policy.optimizer.weight_decay == 0.01  # torch's default: the file gives a rate alone
    assert (config.value.optimizer.lr, config.value.optimizer.weight_decay) == (1e-5, 0.0)
    assert (config.value.precision, config.value.model_name, config.value.offload) == ("float32", None, "all")
    assert config.policy.parallel.sequence_parallel
    assert (config.policy.sequence_packing.train_mb_tokens, config.policy.sequence_packing.logprob_mb_tokens) == (
        4096,
        8192,
    )
    assert (config.value.sequence_packing.train_mb_tokens, config.value.max_grad_norm) == (2048, 2.0)
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert config.env.verifier.name == "math_verify"
    assert config.data.train.model_dump()["name"] == "gsm8k"
    assert config.data.validation is not None
    assert config.data.validation.model_dump()["split"] == "test"
    assert config.logger.wandb is not None


def test_the_single_controller(tmp_path: Path):
    imported = import_config(HERE / "ppo_single_controller.yaml")
    config = config_of(tmp_path, imported)
    assert config.ppo is not None
    assert config.ppo.reward_shaping is None
    assert config.async_rl.sampler.model_dump()["warmup_lookahead_versions"] == 4
    assert (config.async_rl.stall_timeout_s, config.async_rl.on_stall) == (600.0, "end")
    assert (config.failures.max_infra_attempts_per_prompt, config.failures.max_skipped_prompts) == (5, 0)
    assert config.policy.generation.timeout_s == 300.0
    assert config.data_plane is not None
    assert config.data_plane.model_dump()["num_storage_units"] == 4
    assert (config.policy.offload, config.policy.max_grad_norm) == ("optimizer", 0.8)
    assert config.policy.scheduler.model_dump() == {"name": "linear", "warmup_steps": 20, "min_lr_ratio": 0.1}
    unknown = [row.key for row in imported.rows if row.fate == "unknown"]
    assert unknown == ["my_own_section.switch"]


def test_several_data_sets_become_a_mixture_and_sets(tmp_path: Path):
    sets = """data:
  _override_: true
  max_input_seq_length: 100
  train:
    - {dataset_name: gsm8k, split: train}
    - {dataset_name: ResponseDataset, data_path: more/rows.jsonl, output_key: truth}
    - {dataset_name: ResponseDataset, data_path: org/rows, split: dev}
  validation:
    - {dataset_name: gsm8k, split: test}
    - {dataset_name: AIME2024, repeat: 16}
  default: {input_key: problem, output_key: answer}
"""
    imported = changed(tmp_path, "ppo", sets)
    data = config_of(tmp_path, imported).data.model_dump(exclude_defaults=True)
    assert data["train"] == {
        "name": "mixture",
        "sources": {
            "gsm8k": {"name": "gsm8k"},
            "rows": {"name": "file", "path": "more/rows.jsonl", "prompt_field": "problem", "answer_field": "truth"},
            "rows_2": {"name": "hub", "dataset": "org/rows", "prompt_field": "problem", "split": "dev"},
        },
    }
    assert data["validation"] == {
        "name": "sets",
        "sets": {"gsm8k": {"name": "gsm8k", "split": "test"}, "AIME2024": {"name": "aime_2024"}},
    }
    rows = {row.key: row for row in imported.rows}
    assert rows["data.validation.1.repeat"].fate == "not supported"
    assert list(rows["data.default.input_key"].ours) == [
        f"data.train.sources.{n}.prompt_field" for n in ("rows", "rows_2")
    ]


def test_a_run_without_a_critic_drops_it(tmp_path: Path):
    imported = import_config(HERE / "flat_data.yaml")
    config = config_of(tmp_path, imported)
    assert config.value is None
    assert config.policy.scheduler.model_dump() == {"name": "linear", "warmup_steps": 0, "min_lr_ratio": 0.25}
    assert {row.key: row.fate for row in imported.rows}["value.model_name"] == "implied"
    assert imported.open == ("policy.model_name", "data.prompt_template")


# file, what is changed in it, key, what becomes of it, what the row says
CASES = [
    ("ppo", "ppo: {critic_ppo_epochs: 7}", "ppo.critic_ppo_epochs", "not supported", "ppo_epochs = 2"),
    ("ppo", "ppo: {max_num_epochs: -1}", "ppo.max_num_epochs", "implied", "no limit"),
    ("ppo", "ppo: {max_rollout_turns: 3}", "ppo.max_rollout_turns", "not supported", "issue 8"),
    ("ppo", "ppo: {adv_estimator: {name: opd}}", "ppo.adv_estimator.name", "not supported", "rloo"),
    ("ppo", "ppo: {adv_estimator: {gae_lambda_value: null}}", "ppo.adv_estimator.gae_lambda", "mapped", "the same"),
    ("ppo", "ppo: {adv_estimator: {cross_trajectory: true}}", "ppo.adv_estimator.cross_trajectory", "not supported",
     "one trajectory"),
    ("ppo", "ppo: {reward_shaping: {max_response_length: 1024}}", "ppo.reward_shaping.max_response_length", "mapped",
     "max_response_length = 900"),
    ("ppo", "ppo: {reward_shaping: {mode: reasoning_length}}", "ppo.reward_shaping.mode", "not supported", "overlong"),
    ("ppo", "ppo: {warm_start_value_checkpoint: a/step_3}", "ppo.warm_start_value_checkpoint", "not supported",
     "value.warm_start"),
    ("ppo", "ppo: {skip_reference_policy_logprobs_calculation: true}\nloss_fn: {reference_policy_kl_penalty: 0.1}",
     "ppo.skip_reference_policy_logprobs_calculation", "not supported", "kept"),
    ("grpo_base", "grpo: {adv_estimator: {name: gdpo, reward_weights: [1, 2]}}", "grpo.adv_estimator.reward_weights",
     "not supported", "{component: weight}"),
    ("grpo_base", "grpo: {adv_estimator: {name: gae}}", "grpo.adv_estimator.name", "not supported", "grpo imports"),
    ("grpo_base", "reward_penalties: {penalize_unwanted_tokens: true}", "reward_penalties.penalize_unwanted_tokens",
     "not supported", "verifier"),
    ("grpo_base", "reward_penalties: {penalize_unwanted_tokens: false}", "reward_penalties.penalize_unwanted_tokens",
     "implied", "off"),
    ("ppo", "loss_fn: {force_on_policy_ratio: true, disable_ppo_ratio: true}", "loss_fn.disable_ppo_ratio", "implied",
     "goes first"),
    ("ppo", "loss_fn: {truncated_importance_sampling_type: null}",
     "loss_fn.use_importance_sampling_correction", "mapped", "= tis"),
    ("ppo", "policy: {dtensor_cfg: {lora_cfg: {enabled: true, dim: 4}}}", "policy.dtensor_cfg.lora_cfg.dim",
     "not supported", "LoRA"),
    ("ppo", "policy: {dtensor_cfg: {cpu_offload: true}}", "policy.dtensor_cfg.cpu_offload", "not supported",
     "`policy.offload: all`"),
    ("ppo", "value: {train_global_batch_size: 8}", "value.train_global_batch_size", "not supported", "= 32"),
    ("ppo", "value: {model_name: other/model}", "value.model_name", "mapped", "the same"),
    ("ppo", "policy: {sequence_packing: {algorithm: first_fit_shuffle}}", "policy.sequence_packing.algorithm",
     "implied", "sequence_packing.enabled is false"),
    ("grpo_base", "policy: {sequence_packing: {algorithm: first_fit_shuffle}}", "policy.sequence_packing.algorithm",
     "not supported", "concatenative"),
    ("ppo", "policy: {optimizer: {name: torch.optim.SGD}}", "policy.optimizer.kwargs.lr", "not supported", "AdamW"),
    ("ppo", "policy: {generation: {top_k: 20}}", "policy.generation.top_k", "not supported", "full law"),
    ("ppo", "policy: {generation: {stop_token_ids: [3, 4]}}", "policy.generation.stop_token_ids", "mapped", "the same"),
    ("ppo", "policy: {generation: {vllm_cfg: {precision: fp8}}}", "policy.generation.vllm_cfg.precision",
     "not supported", "precision"),
    ("ppo", "policy: {hf_config_overrides: {max_position_embeddings: 9}}",
     "policy.hf_config_overrides.max_position_embeddings", "not supported", "config.json"),
    ("ppo", "data: {train: {dataset_name: ResponseDataset, data_path: org/name}}", "data.train.data_path", "mapped",
     "data.train.name = hub, data.train.dataset = org/name"),
    ("ppo", "data: {train: {dataset_name: ResponseDataset, data_path: org/name}}", "data.train.split", "mapped",
     "the same"),
    ("ppo", "data: {train: {dataset_name: DAPOMath17K}}", "data.train.dataset_name", "mapped", "= dapo_math_17k"),
    ("ppo", "data: {train: {dataset_name: DAPOMath17K}}", "data.train.split", "implied", "one split"),
    ("ppo", "data: {train: {data_path: rows.csv}}", "data.train.data_path", "mapped", "data.train.path = rows.csv"),
    ("ppo", "data: {train: {input_key: q}}", "data.train.input_key", "implied", "public set"),
    ("ppo", "data: {train: {dataset_name: DeepScaler}}", "data.train.dataset_name", "mapped", "data.train.path"),
    ("ppo", "env: {math: {math_verify_impl: dapo_math_verify}}", "env.math.num_workers", "implied", "deadline"),
    ("ppo", "env: {math: {math_verify_impl: mine}}", "env.math.math_verify_impl", "mapped", "as mine does"),
    ("ppo", "ppo: {max_val_samples: -1}", "ppo.max_val_samples", "mapped", "max_val_samples = null"),
    ("ppo", "data: {train: {surprise: 1}}", "data.train.surprise", "unknown", "not taken over"),
    ("ppo", "env: {countdown: {num_workers: 2}}", "env.countdown.num_workers", "implied", "no data set names it"),
    ("ppo", "data: {default: {env_name: countdown}}", "env.countdown.num_workers", "not supported", "verifier"),
    ("ppo", "logger: {mlflow: {experiment_name: x}}", "logger.mlflow.experiment_name", "implied", "not set"),
    ("ppo", "checkpointing: {save_optimizer: false}", "checkpointing.save_optimizer", "not supported", "optimizer"),
    ("ppo_single_controller", "async_rl: {sampler: {name: ready_first, max_staleness_versions: 2}}",
     "async_rl.sampler.max_staleness_versions", "mapped", "max_lookahead_versions = 2"),
    ("ppo_single_controller", "async_rl: {min_groups_for_streaming_train: 4}",
     "async_rl.min_groups_for_streaming_train", "mapped", "the same"),
    ("ppo_single_controller", "data_plane: {backend: mooncake_cpu}", "data_plane.backend", "not supported",
     "TransferQueue"),
    ("ppo_single_controller", "policy: {draft: {enabled: true, model_name: d}}", "policy.draft.model_name",
     "not supported", "speculative"),
    ("grpo_base", "policy: {dynamic_batching: {enabled: true, train_mb_tokens: 4096}}",
     "policy.dynamic_batching.train_mb_tokens", "not supported", "another key says"),
    ("ppo_single_controller", "ppo: {unheard_of: 1}", "ppo.unheard_of", "unknown", ""),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "key", "fate", "says"), CASES, ids=[case[2] for case in CASES])
def test_a_value_decides(base: str, changes: str, key: str, fate: str, says: str, tmp_path: Path):
    (row,) = [row for row in changed(tmp_path, base, changes).rows if row.key == key]
    assert (row.fate, says in row.text) == (fate, True), row.text


def test_what_the_file_leaves_out_is_what_nemo_rl_would_take(tmp_path: Path):
    path = tmp_path / "short.yaml"
    policy = "{model_name: m, train_global_batch_size: 512, max_total_sequence_length: 600}"
    path.write_text(f"grpo: {{max_num_steps: 3}}\npolicy: {policy}\n")
    imported = import_config(path)
    config = config_of(tmp_path, imported)
    assert config.grpo is not None
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (32, 16)
    assert config.loss_fn.reference_policy_kl_penalty == 0.01
    assert config.grpo.adv_estimator.model_dump()["use_leave_one_out_baseline"]
    assert {row.key for row in imported.rows if row.given} == {"grpo.max_num_steps", *map("policy.{}".format, (
        "model_name", "train_global_batch_size", "max_total_sequence_length"))}  # fmt: skip
