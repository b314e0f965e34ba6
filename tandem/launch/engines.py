"""Which implementation writes the rollouts: an engine in this process."""

from __future__ import annotations

import importlib.util
from functools import partial

from transformers import PreTrainedModel

from tandem import cores
from tandem.config import Config
from tandem.config.models import TransformersEngine, VllmEngine
from tandem.data.chat import text_of
from tandem.launch.models import DTYPES, gguf_file, load_causal_lm, load_tokenizer, location
from tandem.launch.process import device_of
from tandem.roles import Engine
from tandem.rollout.stops import Decode
from tandem.rollout.transformers import transformers_engine

WIDE = 512  # numbers in a hidden state from which on the products of a decode step are work for several cores


def build_engine(config: Config, pad_token_id: int) -> Engine:
    """Load the policy's model into the engine that the recipe names, on the device of this process."""
    match config.policy.generation.engine:
        case TransformersEngine() as section:
            return build_transformers(config, section, pad_token_id)
        case VllmEngine() as section:
            return build_vllm(config, section)


def engine_sleeps(config: Config) -> bool:
    """Whether the engine sleeps while trainers compute here. ValueError where that is asked of a CPU."""
    on_gpu, engine = device_of(config).type == "cuda", config.policy.generation.engine
    if isinstance(engine, VllmEngine) and engine.enable_sleep_mode and not on_gpu:
        raise ValueError(
            "policy.generation.engine.enable_sleep_mode=true gives back a GPU's memory, but this run computes on the "
            "CPU: set it to false, or cluster.device=cuda where there is a GPU"
        )
    return on_gpu and config.sleeps_on_gpus


def decode_of(config: Config) -> Decode | None:
    """Ids to text, which an engine needs to find stop strings."""
    policy = config.policy
    if not policy.generation.stop_strings:
        return None
    name = policy.tokenizer.name or policy.model_name
    return partial(text_of, load_tokenizer(name, trust_remote_code=policy.trust_remote_code))


def build_transformers(config: Config, section: TransformersEngine, pad_token_id: int) -> Engine:
    """The reference engine."""
    policy, device = config.policy, device_of(config)
    model = load_causal_lm(
        policy.model_name,
        dtype=DTYPES[policy.precision],
        device=device,
        trust_remote_code=policy.trust_remote_code,
    )
    return transformers_engine(
        model,
        max_concurrent_samples=section.max_concurrent_samples,
        max_total_sequence_length=policy.max_total_sequence_length,
        pad_token_id=pad_token_id,
        decode=decode_of(config),
        threads=decode_threads(model) if device.type == "cpu" else None,
    )


def decode_threads(model: PreTrainedModel) -> int:
    """A step of a narrow model is done before a second core has woken up."""
    return cores.given() if model.config.get_text_config().hidden_size >= WIDE else 1


def build_vllm(config: Config, section: VllmEngine) -> Engine:
    """vLLM, whose package runs on one kind of device. ValueError when it is not there."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "policy.generation.engine.name=vllm needs the package vllm: install tandem-rl[vllm] on a GPU machine, "
            "scripts/install_vllm_cpu.sh on a CPU; or set policy.generation.engine.name=transformers"
        )
    from tandem.rollout.vllm.engine import vllm_device, vllm_engine  # importing vllm takes seconds

    if vllm_device() != device_of(config).type:
        raise ValueError(
            f"cluster.device={config.cluster.device} is {device_of(config).type} here, but the vllm that is installed "
            f"runs on {vllm_device()}: set cluster.device={vllm_device()}, or install the other vllm"
        )
    policy = config.policy
    if gguf_file(location(policy.model_name)):
        raise ValueError(
            f"policy.model_name={policy.model_name} is a GGUF file, which vLLM does not read as Tandem's trainers do: "
            "save it in transformers' own format (scripts/smollm2.py shows how), or set "
            "policy.generation.engine.name=transformers"
        )
    return vllm_engine(
        section,
        model=location(policy.model_name),
        precision=policy.precision,
        max_total_sequence_length=policy.max_total_sequence_length,
        trust_remote_code=policy.trust_remote_code,
        can_sleep=engine_sleeps(config),
        decode=decode_of(config),
    )
