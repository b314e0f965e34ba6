"""Rules of models and data: the law that is sampled, kernels that exist, prompts that say something."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.loaded import Loaded
from tandem.config.models import VllmEngine


def training_law(loaded: Loaded) -> Iterator[str]:
    """Training recomputes log-probs of the full law at this temperature: rollouts must be drawn from just that."""
    for name, full in (("top_p", 1.0), ("top_k", None)):
        key = f"policy.generation.{name}"
        if loaded.values[key] != full:
            off = "null" if full is None else "1"
            yield (
                f"{loaded.at(key)} draws rollouts from a cut law, but training recomputes log-probs of the full law at "
                f"{loaded.at('policy.generation.temperature')}, so the first ratio would not be 1: set {key}={off} "
                f"(temperature is supported)"
            )


COLDEST = 0.01  # vLLM raises what is below to this


def vllm_temperature(loaded: Loaded) -> Iterator[str]:
    """vLLM draws from the law that is asked for."""
    generation = loaded.config.policy.generation
    if not isinstance(generation.engine, VllmEngine):
        return
    for name in ("temperature", "val_temperature"):
        key = f"policy.generation.{name}"
        if 0 < loaded.values[key] < COLDEST:
            engine = loaded.at("policy.generation.engine.name")
            yield f"{loaded.at(key)} is below {COLDEST}, which {engine} would take instead: set {key}={COLDEST} or more"


def varlen_attention(loaded: Loaded) -> Iterator[str]:
    """The variable-length kernel runs on GPUs, in half precision."""
    for model in ("policy", "value"):
        key, precision = f"{model}.attention", f"{model}.precision"
        if loaded.values.get(key) != "varlen":
            continue
        if loaded.config.cluster.device == "cpu":
            yield f"{loaded.at(key)} is a GPU kernel, but {loaded.at('cluster.device')}: set {key}=auto"
        if loaded.values[precision] == "float32":
            way_out = f"set {precision}=bfloat16, or {key}=sdpa"
            yield f"{loaded.at(key)} has no float32 kernel, but {loaded.at(precision)}: {way_out}"


def offload_from_cpu(loaded: Loaded) -> Iterator[str]:
    """What lies in the host's memory cannot be moved there."""
    for model in ("policy", "value"):
        key = f"{model}.offload"
        if loaded.values.get(key, "none") != "none" and loaded.config.cluster.device == "cpu":
            yield f"{loaded.at(key)} moves a model from a GPU, but {loaded.at('cluster.device')}: set {key}=none"


def token_parts(loaded: Loaded) -> Iterator[str]:
    """Ranks that cut the tokens of a micro-batch get as many each."""
    for model, section in (("policy", loaded.config.policy), ("value", loaded.config.value)):
        if section is None:
            continue
        name, layout = section.layout
        parts, key = layout.token_parts, f"{model}.sequence_packing.make_sequence_length_divisible_by"
        if section.sequence_packing.multiple % parts == 0:
            continue
        keys = [f"{model}.{name}.{size}" for size in layout.sizes if "pipeline" not in size]
        cut = ", ".join(loaded.at(each) for each in (*keys, f"{model}.{name}.sequence_parallel"))
        yield (
            f"{loaded.at(key)} makes micro-batches of a multiple of {section.sequence_packing.multiple} tokens, which "
            f"{cut} cut into {parts} parts: set {key}={parts}"
        )


def compiled_layers(loaded: Loaded) -> Iterator[str]:
    """Layers that ranks share are not compiled."""
    for model, section in (("policy", loaded.config.policy), ("value", loaded.config.value)):
        if section is not None and section.compile is True and section.parallel.shares_layers:
            names = ("tensor_parallel_size", "context_parallel_size")
            shared = " and ".join(loaded.at(f"{model}.parallel.{name}") for name in names)
            yield (
                f"{loaded.at(f'{model}.compile')} compiles each layer for one rank, but {shared} share it between "
                f"ranks: set {model}.compile=auto"
            )


def gradient_precision(loaded: Loaded) -> Iterator[str]:
    """Gradients of a float32 model are float32."""
    for model in ("policy", "value"):
        key, precision = f"{model}.backend.grad_reduce_in_fp32", f"{model}.precision"
        if loaded.values.get(key) is False and loaded.values[precision] == "float32":
            yield f"{loaded.at(key)} has no effect with {loaded.at(precision)}: set {key}=true, or {precision}=bfloat16"


def of_torch_alone(loaded: Loaded) -> Iterator[str]:
    """What only the torch backend can be told."""
    for model in ("policy", "value"):
        backend = f"{model}.backend.name"
        if loaded.values.get(backend) != "megatron":
            continue
        key = f"{model}.activation_checkpointing"
        if loaded.values[key] == "selective":
            yield f"{loaded.at(key)} is not there with {loaded.at(backend)}: set {key}=full or none"


MODEL_RULES = (
    training_law,
    vllm_temperature,
    varlen_attention,
    offload_from_cpu,
    token_parts,
    compiled_layers,
    gradient_precision,
    of_torch_alone,
)
