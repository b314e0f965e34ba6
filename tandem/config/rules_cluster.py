"""Rules of machines: what a cluster's GPUs are for, and how models are laid on them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tandem.config.data_plane import MemoryDataPlane
from tandem.config.loaded import Loaded
from tandem.config.placement import engine_size, placement_of

PARTS = {"engine": "policy.generation.colocated", "critic": "value.colocated"}


def plane_within_reach(loaded: Loaded) -> Iterator[str]:
    """Processes of a cluster need a plane that all of them reach."""
    config = loaded.config
    if config.cluster.launch == "ray" and isinstance(config.data_plane, MemoryDataPlane):
        yield (
            f"{loaded.at('data_plane.name')} is out of reach for the other processes of "
            f"{loaded.at('cluster.launch')}: set data_plane.name=ray_actor or transfer_queue, or data_plane=null"
        )


def own_gpus(loaded: Loaded) -> Iterator[str]:
    """GPUs of its own exist only where several processes do, and leave some for the policy's trainer."""
    config = loaded.config
    sections = {"engine": config.policy.generation.colocated}
    if config.value:
        sections["critic"] = config.value.colocated
    apart = {PARTS[part]: section.resources for part, section in sections.items() if not section.enabled}
    if config.cluster.launch == "local":
        for key in apart:
            yield f"{loaded.at(f'{key}.enabled')} needs cluster.launch=ray: set it, or {key}.enabled=true"
        return
    if all(placement_of(config).values()):
        return
    wanted = " and ".join(f"{key}.resources ({r.num_nodes} x {r.gpus_per_node} GPUs)" for key, r in apart.items())
    yield (
        f"{wanted} cannot be had from {loaded.at('cluster.num_nodes')} x {loaded.at('cluster.gpus_per_node')} so that "
        "the policy's trainer has one too: raise the latter or lower the former"
    )


def layers_on_ranks(loaded: Loaded) -> Iterator[str]:
    """Ranks that share a layer or a micro-batch are a part of a trainer's ranks, all of them alike."""
    config = loaded.config
    placement = placement_of(config)
    for part, name, section in (("actor", "policy", config.policy), ("critic", "value", config.value)):
        ranks = len(placement.get(part, ()))
        if not section or not ranks:
            continue
        key, layout = section.layout
        if ranks % math.prod(layout.sizes.values()):
            shared = " x ".join(loaded.at(f"{name}.{key}.{size}") for size in layout.sizes)
            sizes = f"{loaded.at('cluster.num_nodes')} x {loaded.at('cluster.gpus_per_node')}"
            yield (
                f"{shared} does not divide the {ranks} ranks of the {part}, from {sizes}: set the first ones to 1, or "
                "others that fit"
            )


def engines_on_slots(loaded: Loaded) -> Iterator[str]:
    """Under Ray an engine that spans several GPUs has them alone, on one node."""
    config, key = loaded.config, "policy.generation.engine.tensor_parallel_size"
    size, colocated = engine_size(config), "policy.generation.colocated"
    if config.cluster.launch != "ray" or size == 1:
        return
    if config.policy.generation.colocated.enabled:
        yield (
            f"{loaded.at(key)} makes an engine span GPUs, but {loaded.at(f'{colocated}.enabled')} gives each engine "
            f"the one GPU of a rank: set {key}=1, or {colocated}.enabled=false"
        )
    elif config.policy.generation.colocated.resources.gpus_per_node % size:
        own = f"{colocated}.resources.gpus_per_node"
        yield f"{loaded.at(own)} is no multiple of {loaded.at(key)}: set {own} to one, or {key}=1"


def weight_transfer(loaded: Loaded) -> Iterator[str]:
    """Handles need shared memory; two members of a collective on GPUs need two GPUs."""
    config, key, own = loaded.config, "cluster.ray.weight_transfer", "policy.generation.colocated.enabled"
    if config.cluster.launch != "ray":
        return
    if config.cluster.ray.weight_transfer == "ipc" and not config.policy.generation.colocated.enabled:
        yield (
            f"{loaded.at(key)} hands over memory that engine and trainer share, but {loaded.at(own)}: "
            f"set {key}=auto, or {own}=true"
        )
    if (
        config.cluster.ray.weight_transfer == "collective"
        and config.policy.generation.colocated.enabled
        and config.cluster.device != "cpu"
    ):
        yield (
            f"{loaded.at(key)} needs a GPU for each of its members, but {loaded.at(own)} puts engine and trainer on "
            f"one: set {key}=auto, {own}=false, or cluster.device=cpu"
        )


def sleep_mode(loaded: Loaded) -> Iterator[str]:
    """An engine sleeps where trainers need its GPU, and only while nothing is to be written."""
    config, key, own = (
        loaded.config,
        "policy.generation.engine.enable_sleep_mode",
        "policy.generation.colocated.enabled",
    )
    if loaded.values.get(key) is not True:
        return
    if not config.policy.generation.colocated.enabled:
        yield f"{loaded.at(key)}, but {loaded.at(own)}: nobody needs its GPUs; set {key}=false, or {own}=true"
    if config.cluster.device == "cpu":
        yield f"{loaded.at(key)} gives back a GPU's memory, but {loaded.at('cluster.device')}: set {key}=false"
    if config.generates_while_training:
        steps = "async_rl.min_groups_for_streaming_train"
        yield (
            f"{loaded.at(key)}, but {loaded.at('async_rl.sampler')} and {loaded.at(steps)} let requests be written "
            f"while a step trains: set {key}=false, or a lead of 0 and {steps}=null"
        )


def flight_recorder(loaded: Loaded) -> Iterator[str]:
    """What a model learned from is written down by the rank that computes its loss, which the torch backend knows."""
    if loaded.config.logger.flight_recorder is None:
        return
    for model in ("policy", "value"):
        key = f"{model}.backend.name"
        if loaded.values.get(key) == "megatron":
            yield (
                f"{loaded.at('logger.flight_recorder')} has not been tried with {loaded.at(key)}: set {key}=torch, or "
                "logger.flight_recorder=null"
            )


CLUSTER_RULES = (
    plane_within_reach,
    own_gpus,
    layers_on_ranks,
    engines_on_slots,
    weight_transfer,
    sleep_mode,
    flight_recorder,
)
