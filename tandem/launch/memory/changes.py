"""What would make a recipe fit: changes of its keys, cheapest first, each planned before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from pydantic import ValidationError

from tandem.config import Config
from tandem.config.loaded import Loaded
from tandem.config.models import MegatronBackend, TrainedModel, TransformersEngine, VllmEngine
from tandem.config.rules import broken_rules
from tandem.config.schema import Plain
from tandem.config.tree import COMMAND_LINE
from tandem.launch.memory.plan import MemoryPlan

Planned = Callable[[Config], MemoryPlan]
WANTED, AT_ONCE = 3, 3  # changes that are named; keys that one of them sets at most
SMALLEST_PACK, SMALLEST_CHUNK, SMALLEST_SHARE = 1024, 128, 0.1


@dataclass(frozen=True)
class Change:
    """`key=value` settings, and what they cost: a rank of how much time they take, not a measure of it."""

    settings: Mapping[str, Plain]
    cost: float

    @property
    def text(self) -> str:
        """As the command line takes it."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.settings.items())


def ways_to_fit(loaded: Loaded, planned: Planned) -> list[tuple[Change, MemoryPlan]]:
    """The three cheapest changes under which the plan fits, with that plan; fewer where there are no more.

    Only those are put together of which each alone takes something off a phase that is over.
    """
    useful = [change for change in candidates(loaded.config) if _helps(loaded, change, planned)]
    found: list[tuple[Change, MemoryPlan]] = []
    ways = _together(useful)
    for is_more in (_same_keys, _same_settings):  # first other keys each time; if these are too few, other values
        for change in ways:
            if len(found) == WANTED:
                break
            if any(is_more(change, known) for known, _ in found):
                continue
            config = changed(loaded, change.settings)
            if config is not None and not (after := planned(config)).over:
                found.append((change, after))
    return sorted(found, key=lambda way: way[0].cost)


def _same_keys(change: Change, known: Change) -> bool:
    return known.settings.keys() <= change.settings.keys()


def _same_settings(change: Change, known: Change) -> bool:
    return known.settings.items() <= change.settings.items()


def _together(changes: list[Change]) -> list[Change]:
    """One, two or three of them at a time, cheapest first; never one key twice."""
    joined = []
    for count in range(1, AT_ONCE + 1):
        for chosen in combinations(changes, count):
            settings = {key: value for change in chosen for key, value in change.settings.items()}
            if len(settings) == sum(len(change.settings) for change in chosen):
                joined.append(Change(settings, sum(change.cost for change in chosen)))
    return sorted(joined, key=lambda change: (change.cost, len(change.settings)))


def _helps(loaded: Loaded, change: Change, planned: Planned) -> bool:
    """Whether it is allowed, and lowers a phase that is over."""
    config = changed(loaded, change.settings)
    if config is None:
        return False
    return _excess(planned(config)) < _excess(planned(loaded.config))


def _excess(plan: MemoryPlan) -> int:
    """Bytes over the limit, all phases together."""
    return sum(phase.held.total - (phase.limit or 0) for _, phase in plan.over)


def changed(loaded: Loaded, settings: Mapping[str, Plain]) -> Config | None:
    """The config under these settings; None where a rule refuses them."""
    values = loaded.config.model_dump()
    for key, value in settings.items():
        *parents, name = key.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        section[name] = value
    try:
        config = Config.model_validate(values)
    except ValidationError:
        return None
    origins = dict(loaded.origins) | dict.fromkeys(settings, COMMAND_LINE)
    return None if any(broken_rules(Loaded(config, origins))) else config


def candidates(config: Config) -> list[Change]:
    """Single changes, cheapest first. None alters what is learned: batches, lengths and models stay."""
    sections: dict[str, TrainedModel] = {"policy": config.policy}
    if config.value:
        sections["value"] = config.value
    found = [change for name, section in sections.items() for change in _of_model(name, section, config)]
    found += [*_of_chunk(config), *_of_engine(config), *_of_cluster(config)]
    return sorted(found, key=lambda change: change.cost)


def _of_model(name: str, section: TrainedModel, config: Config) -> Iterator[Change]:
    packing, longest = section.sequence_packing, config.policy.max_total_sequence_length
    if packing.enabled:
        budget, cost = packing.train_mb_tokens // 2, 2.0
        while budget >= max(longest, SMALLEST_PACK):
            yield Change({f"{name}.sequence_packing.train_mb_tokens": budget}, cost)
            budget, cost = budget // 2, cost + 1.5
    modes = {"none": 0, "selective": 1, "full": 2}
    for mode, cost in (("selective", 2.5), ("full", 5.0)):
        if modes[mode] > modes[section.activation_checkpointing]:
            yield Change({f"{name}.activation_checkpointing": mode}, cost)
    places = {"none": 0, "optimizer": 1, "all": 2}
    for place, cost in (("optimizer", 3.0), ("all", 4.0)):
        if places[place] > places[section.offload]:
            yield Change({f"{name}.offload": place}, cost)
    if isinstance(section.backend, MegatronBackend):
        if section.backend.grad_reduce_in_fp32:
            yield Change({f"{name}.backend.grad_reduce_in_fp32": False}, 6.0)
        size = 2 * section.backend.tensor_model_parallel_size
        yield Change({f"{name}.backend.tensor_model_parallel_size": size}, 7.0)
        return
    if section.parallel.keep_gathered:
        yield Change({f"{name}.parallel.keep_gathered": False}, 2.0)
    if section.parallel.data_parallel == "replicate":
        yield Change({f"{name}.parallel.data_parallel": "shard"}, 3.0)
    yield Change({f"{name}.parallel.tensor_parallel_size": 2 * section.parallel.tensor_parallel_size}, 7.0)


def _of_chunk(config: Config) -> Iterator[Change]:
    chunk, cost = config.policy.logprob_chunk_size // 2, 1.0
    while chunk >= SMALLEST_CHUNK:
        yield Change({"policy.logprob_chunk_size": chunk}, cost)
        chunk, cost = chunk // 2, cost + 0.5


def _of_engine(config: Config) -> Iterator[Change]:
    engine, key = config.policy.generation.engine, "policy.generation.engine"
    if isinstance(engine, TransformersEngine):
        count, cost = engine.max_concurrent_samples // 2, 3.5
        while count >= 1:
            yield Change({f"{key}.max_concurrent_samples": count}, cost)
            count, cost = count // 2, cost + 2.0
    if isinstance(engine, VllmEngine):
        yield Change({f"{key}.enable_sleep_mode": True}, 1.5)
        share, cost = engine.gpu_memory_utilization, 3.0
        for tenths in range(9, 0, -1):
            if engine.kv_cache_memory_bytes is None and abs(tenths / 10 - share) > 0.01:
                yield Change({f"{key}.gpu_memory_utilization": tenths / 10}, cost + 10 * abs(tenths / 10 - share))


def _of_cluster(config: Config) -> Iterator[Change]:
    """More GPUs: what a rank holds is cut finer."""
    count = config.cluster.gpus_per_node if config.cluster.launch == "ray" else 1
    for times, cost in ((2, 8.0), (4, 9.0), (8, 10.0)):
        gpus: dict[str, Plain] = {"cluster.gpus_per_node": times * count}
        yield Change(gpus if config.cluster.launch == "ray" else {"cluster.launch": "ray"} | gpus, cost)
