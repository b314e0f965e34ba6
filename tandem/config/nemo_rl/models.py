"""The table for `policy` and `value`: sizes of a batch, backends and how they lie on ranks, packing."""

from __future__ import annotations

from tandem.config.models import ALIGNMENT, SequencePacking
from tandem.config.nemo_rl.entry import (
    Entry,
    Outcome,
    by,
    implied,
    implied_by,
    is_same,
    lacking,
    mapped,
    nothing,
    refused,
    renamed,
    same,
)
from tandem.config.nemo_rl.source import Source
from tandem.config.schema import Plain, choices

MEGATRON, DTENSOR = "MODEL.megatron_cfg", "MODEL.DTENSOR"
PACKING = "MODEL.sequence_packing"
ORDERS = choices(SequencePacking.model_fields["algorithm"].annotation)


def trained_by_megatron(source: Source, model: str) -> bool:
    return source.get(f"{model}.megatron_cfg.enabled", False) is True


def _model_name(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, source.get("policy.model_name")):
        return nothing("the critic starts from the policy's backbone")
    return mapped({"value.model_name": value})


def _tokenizer(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, source.get("policy.model_name")):
        return nothing("the policy's own")
    return mapped({"policy.tokenizer.name": value})


def _chat_template(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, "default"):
        return nothing("the tokenizer's own")
    if "{" in str(value):
        return refused("put the template into a file; policy.tokenizer.chat_template is its path")
    return mapped({"policy.tokenizer.chat_template": value})


def _template_argument(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, {}):
        return nothing("none")
    return mapped({key: value})


def _as_policy(name: str) -> Entry:
    """What actor and critic share."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        common = source.get(f"policy.{name}")
        if value in (None, common):
            return nothing("as the policy's")
        return refused(f"both models learn from the same mini-batches and samples: policy.{name} = {common}")

    return implied_by(f"value.{name}", f"`policy.{name}` is of both models; another number is not supported", rule)


def _precision(source: Source, key: str, value: Plain) -> Outcome:
    if value in ("bfloat16", "float32"):
        return mapped({"MODEL.precision": value})
    return refused("bfloat16 and float32 are there")


def _micro_batch(kind: str) -> Entry:
    """Samples of a micro-batch count only where nothing packs them: then they say how much memory there is."""
    size = {"train": "train_micro_batch_size", "logprob": "logprob_batch_size"}[kind]

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        model = key.split(".")[0]
        if any(source.get(f"{model}.{way}.enabled", False) for way in ("sequence_packing", "dynamic_batching")):
            return nothing("the budget of tokens decides")
        length = source.get("policy.max_total_sequence_length")
        if not (isinstance(value, int) and isinstance(length, int)):
            return nothing("the budget of tokens decides")
        return mapped({f"{PACKING}.{kind}_mb_tokens": value * length}, "a budget of as many tokens")

    note = "as many tokens, where NeMo-RL packs nothing; implied else. Micro-batches do not change the result"
    return by(f"MODEL.{size}", f"{PACKING}.{kind}_mb_tokens", note, rule)


def _divisible(source: Source, key: str, value: Plain) -> Outcome:
    if isinstance(value, int) and value > 0 and ALIGNMENT % value == 0:
        return nothing(f"micro-batches are multiples of {ALIGNMENT} anyway")
    return mapped({f"{PACKING}.make_sequence_length_divisible_by": value})


def _clip(source: Source, key: str, value: Plain) -> Outcome:
    model = key.split(".")[0]
    inner = key.startswith(f"{model}.megatron_cfg.")
    if not inner and trained_by_megatron(source, model) and source.has(f"{model}.megatron_cfg.optimizer.clip_grad"):
        return nothing("megatron_cfg.optimizer.clip_grad decides")
    return mapped({"MODEL.max_grad_norm": value or None})


def _offloads(source: Source, key: str, value: Plain) -> Outcome:
    if not value:
        return nothing("false")
    if source.get("policy.generation.colocated.enabled", True):
        return nothing("on shared GPUs all of it leaves (`policy.offload: all`)")
    return mapped({"policy.offload": "optimizer"})


def _checkpointed(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"MODEL.activation_checkpointing": "full"}) if value else nothing("none is the default")


def _megatron(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"MODEL.backend.name": "megatron"}) if value else nothing("the torch backend is the default")


def _reduced(source: Source, key: str, value: Plain) -> Outcome:
    if not value and source.get(f"{key.split('.')[0]}.precision") == "float32":
        return nothing("gradients of a float32 model are float32")
    return mapped({"MODEL.backend.grad_reduce_in_fp32": value})


def _packs(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({f"{PACKING}.enabled": True}) if value else nothing("samples are packed all the same, to one result")


def _order(source: Source, key: str, value: Plain) -> Outcome:
    if value in ORDERS:
        return mapped({f"{PACKING}.algorithm": value})
    return refused(f"known are {', '.join(ORDERS)}; the result is the same")


def _one(keys: str, why: str) -> Entry:
    return lacking(keys, why, (None, 1, False))


def _overrides(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("none") if value in (None, {}) else refused("change the model's own config.json")


def _decay(source: Source, key: str, value: Plain) -> Outcome:
    decay = source.get(f"{key.split('.')[0]}.megatron_cfg.optimizer.weight_decay", 0.0)
    return nothing("weight decay is constant") if is_same(value, decay) else refused("weight decay is constant")


SIZES = (
    same("policy.model_name policy.train_global_batch_size policy.max_total_sequence_length policy.logprob_chunk_size"),
    by("value.model_name", "value.model_name", "implied where it is the policy's", _model_name),
    by("policy.tokenizer.name", "policy.tokenizer.name", "implied where it is the model's", _tokenizer),
    by(
        "policy.tokenizer.chat_template",
        "policy.tokenizer.chat_template",
        "a path; a template's text is not",
        _chat_template,
    ),
    by(
        "policy.tokenizer.chat_template_kwargs policy.tokenizer.chat_template_kwargs.*",
        "policy.tokenizer.chat_template_kwargs",
        "",
        _template_argument,
    ),
    implied("policy.tokenizer.is_tokenizer_processor policy.tokenizer.use_fastokens", "a tokenizer of transformers"),
    implied("value.tokenizer.**", "the critic reads the policy's token ids"),
    Entry(
        ("MODEL.hf_config_overrides", "MODEL.hf_config_overrides.**"),
        "not supported",
        "change the model's own config.json",
        _overrides,
    ),
    _as_policy("train_global_batch_size"),
    _micro_batch("train"),
    _micro_batch("logprob"),
    implied("policy.generation_batch_size", "engines batch by themselves"),
    _as_policy("max_total_sequence_length"),
    by("MODEL.precision", "MODEL.precision", "bfloat16, float32; others are not supported", _precision),
    by(
        "policy.offload_optimizer_for_logprob",
        "policy.offload",
        "optimizer; implied on shared GPUs, where all of the model leaves",
        _offloads,
    ),
    by(
        "MODEL.make_sequence_length_divisible_by",
        f"{PACKING}.make_sequence_length_divisible_by",
        f"implied where it divides {ALIGNMENT}",
        _divisible,
    ),
    by(
        f"MODEL.max_grad_norm {MEGATRON}.optimizer.clip_grad",
        "MODEL.max_grad_norm",
        "with Megatron its own `clip_grad` decides",
        _clip,
    ),
    implied("value.reward_model_cfg.**", "the value head is always there"),
    implied("policy.refit_buffer_size_gb", "`cluster.ray.weight_bucket_bytes` is its like"),
    lacking("policy.draft.** policy.router_replay.**", "speculative decoding and models with experts are not there"),
)

TORCH = (
    implied(f"{DTENSOR}.enabled", "the torch backend is the default"),
    implied(f"{DTENSOR}._v2 {DTENSOR}.env_vars {DTENSOR}.clear_cache_every_n_steps", "is how NeMo-RL runs its workers"),
    renamed(
        f"{DTENSOR}.tensor_parallel_size {DTENSOR}.context_parallel_size {DTENSOR}.sequence_parallel",
        "MODEL.parallel.*",
    ),
    _one(f"{DTENSOR}.expert_parallel_size", "models with experts are not there"),
    by(
        f"{DTENSOR}.activation_checkpointing {MEGATRON}.activation_checkpointing",
        "MODEL.activation_checkpointing",
        "full",
        _checkpointed,
    ),
    lacking(f"{DTENSOR}.cpu_offload", "weights train on the GPU; `MODEL.offload: all` parks them between their turns"),
    lacking(f"{DTENSOR}.custom_parallel_plan", "Llama, Qwen2 and Qwen3 have their plan"),
    lacking("MODEL.DTENSOR.lora_cfg.** MODEL.megatron_cfg.peft.**", "LoRA is not there: all weights are trained"),
    implied(
        f"{DTENSOR}.model_save_format {DTENSOR}.save_consolidated {DTENSOR}.single_rank_consolidation "
        f"{DTENSOR}.consolidation_timeout_minutes",
        "checkpoints are safetensors; `tandem export` writes a Hugging Face directory",
    ),
)

MEGATRON_ENTRIES = (
    by(f"{MEGATRON}.enabled", "MODEL.backend.name", "megatron, or torch", _megatron),
    renamed(
        f"{MEGATRON}.tensor_model_parallel_size {MEGATRON}.pipeline_model_parallel_size "
        f"{MEGATRON}.context_parallel_size {MEGATRON}.sequence_parallel "
        f"{MEGATRON}.num_layers_in_first_pipeline_stage {MEGATRON}.num_layers_in_last_pipeline_stage",
        "MODEL.backend.*",
    ),
    by(
        f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32",
        "MODEL.backend.grad_reduce_in_fp32",
        "",
        _reduced,
    ),
    implied(
        f"{MEGATRON}.distributed_data_parallel_config.*",
        "Megatron's own data parallel with its distributed optimizer, always",
    ),
    _one(
        f"{MEGATRON}.expert_model_parallel_size {MEGATRON}.expert_tensor_parallel_size "
        f"{MEGATRON}.virtual_pipeline_model_parallel_size",
        "models with experts and the interleaved schedule are not there",
    ),
    implied(f"{MEGATRON}.moe_* {MEGATRON}.freeze_moe_router", "is for models with experts, which are not there"),
    lacking(f"{MEGATRON}.fp8_cfg.** {MEGATRON}.fp8_cfg", "FP8 is not there"),
    lacking(
        f"{MEGATRON}.fine_grained_activation_offloading {MEGATRON}.offload_modules {MEGATRON}.env_vars "
        f"{MEGATRON}.env_vars.**",
        "`MODEL.activation_checkpointing` saves activations",
    ),
    implied(
        f"{MEGATRON}.converter_type {MEGATRON}.pipeline_dtype {MEGATRON}.empty_unused_memory_level "
        f"{MEGATRON}.*_fusion {MEGATRON}.defer_fp32_logits {MEGATRON}.use_* {MEGATRON}.layernorm_epsilon "
        f"{MEGATRON}.attention_backend {MEGATRON}.force_overwrite_initial_ckpt",
        "the model and its kernels are chosen from its config.json",
    ),
    implied_by(
        f"{MEGATRON}.scheduler.start_weight_decay {MEGATRON}.scheduler.end_weight_decay "
        f"{MEGATRON}.scheduler.weight_decay_incr_style",
        "weight decay is constant; another course is not supported",
        lambda source, key, value: (
            nothing("weight decay is constant") if value == "constant" else _decay(source, key, value)
        ),
    ),
)

PACKS = (
    by(f"{PACKING}.enabled", f"{PACKING}.enabled", "packing is on; it does not change the result", _packs),
    implied("MODEL.dynamic_batching.enabled", "its token budgets become those of `sequence_packing`"),
    by(
        f"{PACKING}.train_mb_tokens MODEL.dynamic_batching.train_mb_tokens",
        f"{PACKING}.train_mb_tokens",
        "",
        lambda source, key, value: mapped({f"{PACKING}.train_mb_tokens": value}),
    ),
    by(
        f"{PACKING}.logprob_mb_tokens MODEL.dynamic_batching.logprob_mb_tokens",
        f"{PACKING}.logprob_mb_tokens",
        "",
        lambda source, key, value: mapped({f"{PACKING}.logprob_mb_tokens": value}),
    ),
    by(f"{PACKING}.algorithm", f"{PACKING}.algorithm", "first_fit_shuffle is not supported", _order),
    implied(
        f"{PACKING}.sequence_length_round {PACKING}.microbatch_order MODEL.dynamic_batching.sequence_length_round",
        f"rows are packed without padding, to multiples of {ALIGNMENT}",
    ),
)

ENTRIES: tuple[Entry, ...] = (*SIZES, *TORCH, *MEGATRON_ENTRIES, *PACKS)
