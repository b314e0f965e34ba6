"""Rules of machines: what a cluster's GPUs are for, and how models are laid on them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tandem.config.data_plane import MemoryDataPlane
from tandem.config.loaded import Loaded
from tandem.config.placement import placement_of

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


CLUSTER_RULES = (plane_within_reach, own_gpus, layers_on_ranks)
