"""The table for `policy.generation`: the law that is sampled, the engine, and whose GPUs it has."""

from __future__ import annotations

from tandem.config.nemo_rl.algorithm import has_critic
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

GENERATION, ENGINE, VLLM = "policy.generation", "policy.generation.engine", "policy.generation.vllm_cfg"
OWN = f"{GENERATION}.colocated"


def _backend(source: Source, key: str, value: Plain) -> Outcome:
    match value:
        case "vllm":
            return mapped({f"{ENGINE}.name": "vllm"})
        case "hf":
            return mapped({f"{ENGINE}.name": "transformers"})
    return refused("vllm and transformers are there; vllm takes its place", {f"{ENGINE}.name": "vllm"})


def _new_tokens(source: Source, key: str, value: Plain) -> Outcome:
    room = response_room(source)
    if value == room:
        return mapped({key: value})
    why = "a prompt has a room of its own here, NeMo-RL lets a response take what its prompt leaves"
    if source.get("data.max_input_seq_length") in (None, source.get("policy.max_total_sequence_length")):
        why += "; the file sets no bound between them, so a quarter is the prompt's: change it as your prompts are"
    return mapped({key: room}, why)


def _full_law(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, 1, 1.0, -1):
        return nothing("the full law")
    return refused("training recomputes log-probs of the full law; `temperature` is there")


def _stop_tokens(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("null") if value is None else mapped({key: value})


def _shares(source: Source, key: str, value: Plain) -> Outcome:
    why = "as in NeMo-RL, a model leaves the GPUs while another has its turn"
    parked = {"value.offload": "all"} if has_critic(source) else {}
    if value:
        return mapped({"policy.offload": "all", **parked}, why)
    return mapped({f"{OWN}.enabled": False, "cluster.launch": "ray", **parked}, why if parked else "")


def _own_gpus(source: Source, key: str, value: Plain) -> Outcome:
    """On one node NeMo-RL cuts the node, on several it takes whole ones."""
    name = key.rpartition(".")[2]
    if source.get(f"{OWN}.enabled", True):
        return nothing("shared GPUs")
    if value is None:
        value = source.get("cluster.gpus_per_node", 1) if name == "gpus_per_node" else 1
    return mapped({key: value})


def _tensor_parallel(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, 1):
        return nothing("one GPU an engine")
    if source.get(f"{OWN}.enabled", True):
        return refused(f"on shared GPUs an engine has one; {OWN}.enabled: false gives it {value}")
    return mapped({f"{ENGINE}.tensor_parallel_size": value})


def _kernel_precision(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, "auto", source.get("policy.precision")):
        return nothing("the policy's precision")
    return refused("engines have the policy's precision")


def _logprobs(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, "processed_logprobs"):
        return nothing("log-probs are those of the law that was sampled")
    return refused("log-probs are those of the law that was sampled")


ENTRIES: tuple[Entry, ...] = (
    by(f"{GENERATION}.backend", f"{ENGINE}.name", "vllm, or transformers for hf; others are not supported", _backend),
    by(
        f"{GENERATION}.max_new_tokens",
        f"{GENERATION}.max_new_tokens",
        "less than the whole length: what NeMo-RL's data.max_input_seq_length leaves, or three quarters",
        _new_tokens,
    ),
    same(f"{GENERATION}.temperature {GENERATION}.val_top_p"),
    same(f"{GENERATION}.val_temperature", "NeMo-RL validates at `temperature` where it is not given"),
    Entry(
        tuple(f"{GENERATION}.{name}" for name in ("top_p", "top_k", "val_top_k")),
        "not supported",
        "training recomputes log-probs of the full law; implied for 1 and null",
        _full_law,
    ),
    by(f"{GENERATION}.stop_token_ids", f"{GENERATION}.stop_token_ids", "", _stop_tokens),
    lacking(f"{GENERATION}.stop_strings", "stops are token ids (`stop_token_ids`)"),
    lacking(f"{GENERATION}.ignore_eos", "a response ends with its eos"),
    by(
        f"{OWN}.enabled",
        f"{OWN}.enabled policy.offload value.offload",
        "what shares GPUs leaves them while another has its turn",
        _shares,
    ),
    by(
        f"{OWN}.resources.num_nodes {OWN}.resources.gpus_per_node",
        f"{OWN}.resources",
        "with the same names; null is one node, and all of its GPUs",
        _own_gpus,
    ),
    by(
        f"{VLLM}.tensor_parallel_size",
        f"{ENGINE}.tensor_parallel_size",
        "with GPUs of its own; not supported on shared ones",
        _tensor_parallel,
    ),
    lacking(
        f"{VLLM}.pipeline_parallel_size {VLLM}.expert_parallel_size {VLLM}.enable_expert_parallel",
        "an engine lies on the GPUs of one node (`tensor_parallel_size`)",
        (None, 1, False),
    ),
    lacking(
        f"{VLLM}.expose_http_server {VLLM}.http_server_serving_chat_kwargs {VLLM}.quantization_ignored_layer_kws",
        "an engine has no server of its own, and the policy's precision",
    ),
    renamed(f"{VLLM}.gpu_memory_utilization {VLLM}.enforce_eager", f"{ENGINE}.*"),
    implied(f"{VLLM}.max_model_len", "`policy.max_total_sequence_length`"),
    implied(f"{VLLM}.async_engine", "engines are always asynchronous"),
    implied_by(f"{VLLM}.precision {VLLM}.kv_cache_dtype", "the policy's; others are not supported", _kernel_precision),
    implied_by(f"{VLLM}.logprobs_mode", "log-probs of the law that was sampled, always", _logprobs),
    implied(
        f"{VLLM}.num_last_layers_in_bf16 {VLLM}.num_first_layers_in_bf16 {VLLM}.use_deep_gemm "
        f"{VLLM}.skip_tokenizer_init {VLLM}.load_format {VLLM}.refit_with_reload_api "
        f"{VLLM}.enable_vllm_metrics_logger {VLLM}.vllm_metrics_logger_interval",
        "is how NeMo-RL drives vLLM",
    ),
    renamed(
        " ".join(
            f"{GENERATION}.vllm_kwargs.{name}"
            for name in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
        ),
        f"{ENGINE}.*",
    ),
    lacking(f"{GENERATION}.vllm_kwargs.**", "what `policy.generation.engine` has is passed on, and nothing else"),
    implied(
        f"{GENERATION}.mcore_generation_config.** {GENERATION}.sglang_cfg.** {GENERATION}.dynamo_cfg.**",
        "is for other engines",
    ),
)
