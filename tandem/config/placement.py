"""Which GPUs of a cluster each part of a run has: the policy's trainer, the critic, the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.models import Colocated, Resources, VllmEngine
from tandem.config.run import Config


@dataclass(frozen=True, order=True)
class Slot:
    """One GPU, or on a CPU one process's place: number `place` of a node."""

    node: int
    place: int


Placement = Mapping[str, tuple[Slot, ...]]


def placement_of(config: Config) -> Placement:
    """The slots of engine, critic, actor and reference, each where the run has one.

    Who has GPUs of its own takes them from the end, engines first; all others share what is left with the actor.
    A part whose slots are not to be had has none: a rule refuses that.
    """
    nodes = [[Slot(n, i) for i in range(config.cluster.gpus_per_node)] for n in range(config.cluster.num_nodes)]
    parts: dict[str, Colocated] = {"engine": config.policy.generation.colocated}
    if config.value:
        parts["critic"] = config.value.colocated
    own = {part: _take(nodes, colocated.resources) for part, colocated in parts.items() if not colocated.enabled}
    left = tuple(slot for node in nodes for slot in node)
    shared = [*parts, "actor", *["reference"] * bool(config.reference)]
    return {part: own.get(part, left) for part in shared}


def engine_size(config: Config) -> int:
    """Slots of one engine: those that share its layers."""
    engine = config.policy.generation.engine
    return engine.tensor_parallel_size if isinstance(engine, VllmEngine) else 1


def engines_of(config: Config) -> list[tuple[Slot, ...]]:
    """The slots of each engine: neighbours on one node."""
    slots, size = placement_of(config)["engine"], engine_size(config)
    return [slots[i : i + size] for i in range(0, len(slots), size)]


def bundles_of(config: Config) -> list[list[tuple[Slot, ...]]]:
    """Of each node, which slots are had together: an engine's, and all others one by one."""
    engines = {slots[0]: slots for slots in engines_of(config)}
    inner = {slot for slots in engines.values() for slot in slots[1:]}
    nodes = [[Slot(n, i) for i in range(config.cluster.gpus_per_node)] for n in range(config.cluster.num_nodes)]
    return [[engines.get(slot, (slot,)) for slot in node if slot not in inner] for node in nodes]


def _take(nodes: list[list[Slot]], resources: Resources) -> tuple[Slot, ...]:
    """Take a node's last places, on as many nodes as are wanted; the last nodes that have them. () where none has."""
    want = resources.gpus_per_node
    chosen = [node for node in nodes if len(node) >= want][-resources.num_nodes :]
    if len(chosen) < resources.num_nodes:
        return ()
    taken = tuple(slot for node in chosen for slot in node[-want:])
    for node in chosen:
        del node[-want:]
    return taken
