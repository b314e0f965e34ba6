"""The memory plan of a recipe for people: a table for `tandem check`, and a refusal before a run that cannot fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tandem.config import Config
from tandem.config.loaded import Loaded
from tandem.launch.memory.changes import ways_to_fit
from tandem.launch.memory.held import Held
from tandem.launch.memory.plan import GIB, GpuPlan, MemoryPlan, Phase, plan
from tandem.launch.memory.sizes import ModelSize, size_of
from tandem.launch.models import shape_of
from tandem.launch.trainers import names_of

log = logging.getLogger(__name__)
TIGHT = 0.9  # of a GPU's memory: the formulas are within a tenth of what was measured
WORDS = {
    **{"gradients": "grads", "optimizer": "optim", "activations": "activ", "cache": "engine", "buffers": "copies"},
    "processes": "CUDA",
}


@dataclass(frozen=True)
class Shapes:
    """The sizes of a recipe's models: what a plan needs beside the config."""

    sizes: dict[str, ModelSize]

    def plan(self, config: Config, memory: int | None) -> MemoryPlan:
        """Of this config, which may differ from the recipe in all but its models."""
        return plan(config, self.sizes, memory)


def shapes_of(config: Config) -> Shapes:
    """Read each model's config.json and nothing more. ValueError in words where one cannot be had."""
    sources = {"actor": None, "critic": config.value, "reference": config.reference}
    by_name: dict[tuple[str, bool], ModelSize] = {}
    sizes = {}
    for part in names_of(config):
        source = sources[part]
        own = source is not None and source.model_name is not None
        name = (source.model_name if source else None) or config.policy.model_name
        trust = source.trust_remote_code if own and source else config.policy.trust_remote_code
        if (name, trust) not in by_name:
            by_name[name, trust] = size_of(shape_of(name, trust_remote_code=trust))
        sizes[part] = by_name[name, trust]
    return Shapes(sizes)


def memory_of(config: Config) -> int | None:
    """Bytes of the smallest GPU that this process sees, or of those that the recipe names; the lesser of both."""
    named = None if config.cluster.gpu_memory_gib is None else int(config.cluster.gpu_memory_gib * GIB)
    there = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return min([*there, *([named] if named else [])], default=None)


def runs_on_gpus(config: Config) -> bool:
    """Whether the run will compute on GPUs, as far as this process can tell: Ray may have some elsewhere."""
    if config.cluster.device != "auto":
        return config.cluster.device == "cuda"
    return torch.cuda.is_available() or (config.cluster.launch == "ray" and config.cluster.gpu_memory_gib is not None)


def report(loaded: Loaded) -> Iterator[RenderableType]:
    """For `tandem check`: a table for each kind of GPU, what does not fit, and what would make it fit."""
    config = loaded.config
    yield Text("\nmemory of a GPU", style="bold")
    if config.cluster.device == "cpu":
        yield Text("cluster.device=cpu: the plan is about GPUs, and this run uses none")
        return
    try:
        shapes = shapes_of(config)
    except ValueError as error:
        yield Text(f"not planned: {error}")
        return
    memory = memory_of(config)
    found = shapes.plan(config, memory)
    for gpu in found.gpus:
        yield table(gpu, memory)
    if memory is None:
        yield Text("No GPU here: say what a GPU has to know whether this fits, as in cluster.gpu_memory_gib=80")
    for line in notes(found):
        yield Text(line)
    if found.over:
        yield Text(complaint(found))
        yield Text("\n".join(advice(loaded, shapes, memory)))


def table(gpu: GpuPlan, memory: int | None) -> Table:
    """One row a phase, one column for each use of memory that occurs. GiB."""
    used = [field.name for field in fields(Held) if any(vars(phase.held)[field.name] for phase in gpu.phases)]
    size = "" if memory is None else f" of {memory / GIB:.1f} GiB"
    title = f"{gpu.count} GPU{'s' * (gpu.count > 1)}{size}: {', '.join(gpu.parts)}"
    found = Table(
        title=title,
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    found.add_column("GiB", no_wrap=True)
    for name in [*(WORDS.get(name, name) for name in used), "all", *["free"] * (memory is not None)]:
        found.add_column(name, justify="right", no_wrap=True)
    for phase in gpu.phases:
        cells = [f"{vars(phase.held)[name] / GIB:.1f}" for name in used]
        free = [] if phase.limit is None else [f"{(phase.limit - phase.held.total) / GIB:.1f}"]
        found.add_row(phase.name, *cells, f"{phase.held.total / GIB:.1f}", *free, style="red" if phase.is_over else "")
    return found


def notes(found: MemoryPlan) -> Iterator[str]:
    """What a reader should know of how sure the plan is."""
    for family in found.unknown:
        yield f"layers of {family} are counted as those of a Llama: take the plan for a guess"
    if found.memory is not None and not found.over:
        fullest = max((gpu.fullest for gpu in found.gpus), key=lambda phase: phase.held.total)
        if fullest.held.total > TIGHT * found.memory:
            yield f"tight: {fullest.name} leaves less than a tenth of a GPU's memory free"


def complaint(found: MemoryPlan) -> str:
    """The phase that is furthest over its limit, with its numbers."""
    gpu, phase = found.over[0]
    others = [other.name for _, other in found.over[1:]]
    also = f" (also over: {', '.join(dict.fromkeys(others))})" if others else ""
    return (
        f"the recipe does not fit its GPUs: {phase.name} takes {phase.held.total / GIB:.1f} GiB of a GPU with "
        f"{', '.join(gpu.parts)}, {_limit(phase)}{also}: {parts_of(phase)}"
    )


def _limit(phase: Phase) -> str:
    assert phase.limit is not None, "what is over has a limit"
    whose = "the engine's share (gpu_memory_utilization) is" if phase.name == "one response" else "which has"
    return f"{whose} {phase.limit / GIB:.1f} GiB"


def parts_of(phase: Phase) -> str:
    """What a phase is made of, the largest first."""
    held = sorted(vars(phase.held).items(), key=lambda pair: -pair[1])
    return ", ".join(f"{WORDS.get(name, name)} {size / GIB:.1f}" for name, size in held if size >= GIB / 20)


def advice(loaded: Loaded, shapes: Shapes, memory: int | None) -> Iterator[str]:
    """The cheapest changes that make it fit, each planned."""
    ways = ways_to_fit(loaded, lambda config: shapes.plan(config, memory))
    if not ways:
        yield "No change of these knobs makes it fit: take more or larger GPUs (cluster.launch=ray), or a smaller model"
        return
    yield "Each of these makes it fit, the cheapest first:"
    for change, after in ways:
        fullest = max((gpu.fullest for gpu in after.gpus), key=lambda phase: phase.held.total)
        yield f"  {change.text}    (then {fullest.held.total / GIB:.1f} GiB at most, in {fullest.name})"


def refuse_what_cannot_fit(loaded: Loaded) -> None:
    """Before a run on GPUs: ValueError where its plan is over their memory, a warning where it is tight.

    Models whose layers the formulas do not know are never refused.
    """
    config = loaded.config
    if not runs_on_gpus(config) or (memory := memory_of(config)) is None:
        return
    shapes = shapes_of(config)
    found = shapes.plan(config, memory)
    for line in notes(found):
        log.warning("memory plan: %s", line)
    if not found.over:
        return
    lines = [complaint(found), *advice(loaded, shapes, memory)]
    if config.cluster.memory_plan == "warn" or found.unknown:
        log.warning("\n".join(lines))
        return
    raise ValueError("\n".join([*lines, "To run it as it is: cluster.memory_plan=warn"]))
