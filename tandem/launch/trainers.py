"""Actor, critic and reference of a recipe, in this process: one Worker each, their heads and objectives differ."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tandem.config import Config
from tandem.config.algorithm import HlGaussValueLoss, ValueLoss
from tandem.config.models import TrainedModel
from tandem.launch.models import load_causal_lm
from tandem.launch.process import device_of
from tandem.roles import DataPlane
from tandem.train.backend import Backend
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.objectives import Objective, PolicyObjective, ValueObjective
from tandem.train.torch.backend import build_torch_backend
from tandem.train.worker import Worker


def names_of(config: Config) -> tuple[str, ...]:
    """The models that the recipe asks for. Critic first: the order in which a checkpoint writes them."""
    return (*["critic"] * bool(config.value), "actor", *["reference"] * bool(config.reference))


def model_config_of(name: str, config: Config) -> TrainedModel:
    """The section that says how a model is run: a reference runs as the policy does."""
    return config.value if name == "critic" and config.value else config.policy


def build_trainer(name: str, config: Config, plane: DataPlane, *, thread: ThreadPoolExecutor | None = None) -> Worker:
    """Load a model and make it a Trainer. Where torch.distributed is set up, all its ranks call this alike.

    `thread` is the one that it computes in, if it shares one with others.
    """
    check_device(name, config)
    model_config = model_config_of(name, config)
    check_offload("value" if name == "critic" else "policy", model_config, device_of(config))
    source = {"actor": None, "critic": config.value, "reference": config.reference}[name]
    model = load_causal_lm(
        (source.model_name if source else None) or config.policy.model_name,
        dtype=torch.float32,
        device=device_of(config) if model_config.backend.name == "torch" else torch.device("cpu"),
        trust_remote_code=source.trust_remote_code if source else config.policy.trust_remote_code,
    )
    objective: Objective | None = None
    if name == "critic":
        assert config.value_loss_fn is not None, "checked when loaded"
        head = ValueHead(model.config.get_text_config().hidden_size, support=support_of(config.value_loss_fn))
        objective = ValueObjective(config.value_loss_fn)
    else:
        head = TokenLogprobs(
            model.get_output_embeddings(),
            temperature=config.policy.generation.temperature,
            chunk_size=config.policy.logprob_chunk_size,
        )
        objective = PolicyObjective(config.loss_fn) if name == "actor" else None
    backend = backend_of(model_config)(
        model, head, model_config, total_optimizer_steps=optimizer_steps(name, config), device=device_of(config)
    )
    return Worker(
        name,
        backend,
        plane=plane,
        packing=model_config.sequence_packing,
        objective=objective,
        clock=time.perf_counter,
        thread=thread,
    )


def check_offload(section: str, config: TrainedModel, device: torch.device) -> None:
    """Refuse to move a model out of the memory in which it stays."""
    if config.offload != "none" and device.type == "cpu":
        raise ValueError(
            f"{section}.offload={config.offload} moves a model from a GPU to the host's memory, but this run computes "
            f"on the CPU: set {section}.offload=none, or cluster.device=cuda where there is a GPU"
        )


def backend_of(config: TrainedModel) -> Callable[..., Backend]:
    """What builds the backend that the recipe names."""
    if config.backend.name == "torch":
        return build_torch_backend
    try:
        with warnings.catch_warnings(action="ignore"):  # that TransformerEngine and Apex are not there: not asked for
            from tandem.train.megatron.backend import build_megatron_backend  # an extra: not everywhere
    except ImportError as error:
        raise ValueError(
            f"backend.name=megatron needs the extra megatron ({error}): install tandem-rl[megatron], or set "
            "backend.name=torch"
        ) from error
    return build_megatron_backend


def check_device(name: str, config: Config) -> None:
    """Raise ValueError where a backend cannot compute on this process's device: Megatron-Core has no CPU mode."""
    if model_config_of(name, config).backend.name == "megatron" and device_of(config).type != "cuda":
        key = f"{'value' if name == 'critic' else 'policy'}.backend.name"
        raise ValueError(
            f"{key}=megatron computes on GPUs only, and this process has none that it may use "
            f"(cluster.device={config.cluster.device}): set {key}=torch, or run it on a GPU"
        )


def support_of(loss: ValueLoss) -> tuple[float, float, int] | None:
    """The bins of a value head that classifies, or None for a scalar head."""
    return (loss.value_min, loss.value_max, loss.num_bins) if isinstance(loss, HlGaussValueLoss) else None


def optimizer_steps(name: str, config: Config) -> int | None:
    """How often a model's optimizer steps in the whole run; None for a reference, which never does."""
    if name == "reference":
        return None
    steps = config.algorithm.max_num_steps - (config.policy_training_start_step if name == "actor" else 0)
    return steps * config.optimizer_steps_per_step
