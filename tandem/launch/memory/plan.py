"""Config and model sizes -> what lies on each GPU of a run in each phase of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tandem.config import Config
from tandem.config.models import MegatronBackend, SequencePacking, TrainedModel, VllmEngine
from tandem.config.placement import engine_size, placement_of
from tandem.launch.memory.activations import F32, Passes
from tandem.launch.memory.held import Held, Model
from tandem.launch.memory.sizes import ModelSize, Ranks

MIB, GIB = 1 << 20, 1 << 30
NUMBER = {"float32": 4, "bfloat16": 2}
# Allowances, not formulas: what CUDA and its libraries take in each process; what vLLM takes beside weights and cache;
# and what of it stays while it sleeps.
PROCESS, VLLM_WORK, VLLM_ASLEEP = 600 * MIB, 1024 * MIB, 1024 * MIB
SLOTS, POSITIONS = 16, 64  # the transformers engine's cache grows in steps of these (rollout/kv_cache.py)


@dataclass(frozen=True)
class Phase:
    """What one GPU holds at the fullest moment of a phase, and what it may hold: None where nobody knows."""

    name: str
    held: Held
    limit: int | None

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.held.total > self.limit


@dataclass(frozen=True)
class GpuPlan:
    """`count` GPUs that hold the same parts of a run."""

    count: int
    parts: tuple[str, ...]
    phases: tuple[Phase, ...]

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.held.total)


@dataclass(frozen=True)
class MemoryPlan:
    """Of a whole run. `memory` is a GPU's, in bytes."""

    gpus: tuple[GpuPlan, ...]
    memory: int | None
    unknown: tuple[str, ...]  # families whose layers the formulas were not derived from

    @property
    def over(self) -> list[tuple[GpuPlan, Phase]]:
        """Phases that do not fit, the worst first."""
        found = [(gpu, phase) for gpu in self.gpus for phase in gpu.phases if phase.is_over]
        return sorted(found, key=lambda pair: (pair[1].limit or 0) - pair[1].held.total)


@dataclass(frozen=True)
class Engine:
    """What an engine takes of each of its GPUs."""

    weights: int
    cache: int
    needs: int  # bytes of cache without which it cannot write one response
    share: int | None  # the most that it may take, where it was given a share of the GPU
    sleeps: bool

    @property
    def awake(self) -> Held:
        return Held(weights=self.weights, cache=self.cache)

    @property
    def training(self) -> Held:
        """While trainers compute."""
        return Held(processes=VLLM_ASLEEP) if self.sleeps else self.awake

    @property
    def loading(self) -> Held:
        """While weights come: of one that slept, the cache comes after them."""
        return Held(weights=self.weights, processes=VLLM_ASLEEP) if self.sleeps else self.awake


def plan(config: Config, sizes: Mapping[str, ModelSize], memory: int | None) -> MemoryPlan:
    """`sizes` are of actor, critic and reference, each where the run has one."""
    models = {name: model_of(name, config, size) for name, size in sizes.items()}
    engine = engine_of(config, sizes["actor"], memory)
    placement = placement_of(config)
    slots = dict.fromkeys(slot for slots in placement.values() for slot in slots)
    kinds = Counter(tuple(part for part in placement if slot in placement[part]) for slot in slots)
    gpus = []
    for parts, count in kinds.items():
        there = {name: model for name, model in models.items() if name in parts}
        rows = phases(config, there, engine if "engine" in parts else None, sizes["actor"])
        limits = [Phase(name, held, memory) for name, held in rows]
        if "engine" in parts and engine.share is not None:
            limits.append(Phase("one response", Held(engine.weights, cache=engine.needs), engine.share))
        gpus.append(GpuPlan(count, parts, tuple(limits)))
    unknown = {size.family for size in sizes.values() if not size.is_known}
    return MemoryPlan(tuple(gpus), memory, tuple(sorted(unknown)))


def phases(
    config: Config, models: Mapping[str, Model], engine: Engine | None, actor: ModelSize
) -> Iterator[tuple[str, Held]]:
    """The phases that this GPU has a part in, in the order of a step."""
    under_ray = config.cluster.launch == "ray"
    processes = len(models) + (engine is not None) if under_ray else 1
    common = Held(processes=processes * PROCESS)
    awake, training = (engine.awake, engine.training) if engine else (Held(), Held())

    def beside(active: str | None) -> Held:
        return sum((model.away for name, model in models.items() if name != active), common)

    if models:
        yield "start", _starting(models, common + awake)
    if engine:
        yield "generate", beside(None) + awake
    for name, phase in (("actor", "log-probs"), ("reference", "reference"), ("critic", "values")):
        if name in models:
            yield phase, beside(name) + training + models[name].inferring
    for name, phase in (("critic", "critic update"), ("actor", "policy update")):
        if name in models:
            yield phase, beside(name) + training + models[name].updating
    if engine or "actor" in models:
        loading = engine.loading if engine else Held()
        yield "weight sync", beside(None) + loading + _on_their_way(config, actor)
    largest = [F32 * model.size.largest for model in models.values() if model.trained]
    if largest and config.checkpointing.enabled:
        yield "checkpoint", beside(None) + awake + Held(buffers=max(largest))


def _starting(models: Mapping[str, Model], there: Held) -> Held:
    """Models are made one after the other, the critic first, while the engine is up."""
    moments, before = [], there
    for name in ("critic", "actor", "reference"):
        if name in models:
            moments.append(before + Held(weights=models[name].building))
            before += models[name].away
    return max(moments, key=lambda held: held.total)


def _on_their_way(config: Config, actor: ModelSize) -> Held:
    """In one process a copy of all weights; between processes two buckets, and a tensor that is put together."""
    number = NUMBER[config.policy.precision]
    if config.cluster.launch == "local":
        is_live = number == F32 and config.policy.offload != "all"
        return Held(buffers=0 if is_live else number * actor.whole)
    bucket = max(config.cluster.ray.weight_bucket_bytes, number * actor.largest)
    return Held(buffers=2 * bucket + F32 * actor.largest)


def model_of(name: str, config: Config, size: ModelSize) -> Model:
    """Actor, critic or reference as the recipe runs it. A reference runs as the policy does."""
    value = name == "critic"
    section = config.value if value and config.value else config.policy
    ranks = ranks_of(section, len(placement_of(config)[name]))
    longest, packing = config.policy.max_total_sequence_length, section.sequence_packing
    share = -(-config.policy.train_global_batch_size // ranks.samples) * longest
    packs = -(-share // (packing.train_mb_tokens if packing.enabled else longest))

    def passes(budget: int) -> Passes:
        return passes_of(
            section,
            ranks,
            pack_tokens(packing, budget, longest, share),
            value=value,
            chunk=config.policy.logprob_chunk_size,
            tempered=config.policy.generation.temperature != 1.0,
            longest=longest,
        )

    trained, backend = name != "reference", section.backend
    lean = isinstance(backend, MegatronBackend) and not backend.grad_reduce_in_fp32
    streams = value and config.async_rl.min_groups_for_streaming_train is not None
    return Model(
        size=size,
        ranks=ranks,
        training=passes(packing.train_mb_tokens),
        inference=passes(packing.logprob_mb_tokens or packing.train_mb_tokens),
        trained=trained,
        offload=section.offload,
        packs=packs,
        updates=config.optimizer_steps_per_step,
        gradient_waits=trained and streams,
        gradient_number=NUMBER[section.precision] if lean else F32,
    )


def ranks_of(section: TrainedModel, ranks: int) -> Ranks:
    """How the recipe lays a model on so many ranks."""
    backend = section.backend
    if isinstance(backend, MegatronBackend):
        t, c, p = (
            backend.tensor_model_parallel_size,
            backend.context_parallel_size,
            backend.pipeline_model_parallel_size,
        )
        return Ranks(
            tensor=t,
            context=c,
            pipeline=p,
            samples=max(1, ranks // (t * c * p)),
            first_stage=backend.num_layers_in_first_pipeline_stage,
            last_stage=backend.num_layers_in_last_pipeline_stage,
            sequence_parallel=backend.sequence_parallel,
        )
    parallel = section.parallel
    t, c = parallel.tensor_parallel_size, parallel.context_parallel_size
    return Ranks(
        tensor=t,
        context=c,
        samples=max(1, ranks // (t * c)),
        sequence_parallel=parallel.sequence_parallel,
        sharded=ranks > t and parallel.data_parallel != "replicate",
        keep_gathered=parallel.keep_gathered,
    )


def pack_tokens(packing: SequencePacking, budget: int, longest: int, share: int) -> int:
    """Tokens of the fullest micro-batch, its tail included: the budget, or all there is."""
    full = min(budget, share) if packing.enabled else longest
    return -(-full // packing.multiple) * packing.multiple


def passes_of(
    section: TrainedModel, ranks: Ranks, tokens: int, *, value: bool, chunk: int, tempered: bool, longest: int
) -> Passes:
    """How a model runs micro-batches of so many tokens on a GPU; see Passes for the rest."""
    varlen = section.attention != "sdpa" and section.precision == "bfloat16"
    compiled = varlen and not section.parallel.shares_layers if section.compile == "auto" else section.compile
    return Passes(
        backend=section.backend.name,
        number=NUMBER[section.precision],
        checkpointing=section.activation_checkpointing,
        compiled=compiled and section.backend.name == "torch",
        kernel="varlen" if varlen else "sdpa",
        value=value,
        chunk=_up(chunk, SLOTS),
        tempered=tempered,
        tokens=-(-tokens // ranks.context),
        longest=longest,
    )


def engine_of(config: Config, size: ModelSize, memory: int | None) -> Engine:
    """What the recipe's engine takes of a GPU."""
    engine, parts = config.policy.generation.engine, engine_size(config)
    number = NUMBER[config.policy.precision]
    weights = number * size.whole // parts
    longest = config.policy.max_total_sequence_length
    token = number * 2 * size.key * size.layers // parts
    if not isinstance(engine, VllmEngine):
        slots = _up(engine.max_concurrent_samples, SLOTS) * _up(longest, POSITIONS)
        return Engine(weights, slots * token, 0, None, sleeps=False)
    needs = longest * token + VLLM_WORK
    if engine.kv_cache_memory_bytes is not None:
        return Engine(weights, engine.kv_cache_memory_bytes + VLLM_WORK, needs, None, config.sleeps_on_gpus)
    share = None if memory is None else int(engine.gpu_memory_utilization * memory)
    cache = needs if share is None else max(needs, share - weights)
    return Engine(weights, cache, needs, share, config.sleeps_on_gpus)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
