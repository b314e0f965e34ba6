"""The ranks that hold one model: who has which stage, which part of its layers, which tokens, which samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from tandem.config.models import MegatronBackend
from tandem.train.sharding import Shard
from tandem.train.torch.context import Context

RNG = "model-parallel-rng"  # the state that Megatron-Core's sequence parallel forks; nothing draws from it


@dataclass(frozen=True)
class Grid:
    """This rank's place among `tensor x context x data x pipeline` ranks, in Megatron-Core's order."""

    sizes: MegatronBackend
    groups: ProcessGroupCollection

    @property
    def tensor_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def context(self) -> Context | None:
        """The ranks that share a pack; None where one has it all."""
        group = self.groups.cp
        return Context(group.rank(), group.size(), group) if group.size() > 1 else None

    @property
    def stage(self) -> int:
        """Which part of the layers, from the input on."""
        return self.groups.pp.rank()

    @property
    def stages(self) -> int:
        return self.groups.pp.size()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def shard(self) -> Shard:
        """The share of every batch. Part 0, which speaks, is on the last stage: it sees the loss."""
        tensor, context = self.groups.tp.size(), self.groups.cp.size()
        part = ((self.stages - 1 - self.stage) * context + self.groups.cp.rank()) * tensor + self.tensor_rank
        return Shard(self.groups.dp.rank(), self.groups.dp.size(), part, tensor * context * self.stages)

    def global_rank_of_stage(self, stage: int) -> int:
        """The rank of torch.distributed that holds a stage and otherwise what this rank holds."""
        return dist.get_global_rank(self.groups.pp, stage)


def build_grid(sizes: MegatronBackend, device: torch.device) -> Grid:
    """Set Megatron-Core's groups up over all ranks of torch.distributed, or over one process where that is not set up.

    Megatron-Core keeps one set of groups a process: models of other sizes need ranks of their own.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    check_sizes(sizes, dist.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            context_parallel_size=sizes.context_parallel_size,
            create_gloo_process_groups=False,
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for (name, wanted), group in zip(sizes.sizes.items(), (groups.tp, groups.pp, groups.cp), strict=True):
        if group.size() != wanted:
            raise ValueError(
                f"backend.{name}={wanted}, but another model in this process has {group.size()}: Megatron-Core keeps "
                "one set of groups a process; give both models the same sizes, or each ranks of its own"
            )
    if RNG not in get_cuda_rng_tracker().get_states():
        get_cuda_rng_tracker().add(RNG, 0)
    return Grid(sizes, groups)


def check_sizes(sizes: MegatronBackend, ranks: int) -> None:
    """Raise ValueError where the ranks cannot be shared out so."""
    together = math.prod(sizes.sizes.values())
    if ranks % together:
        wanted = " x ".join(f"backend.{name}={size}" for name, size in sizes.sizes.items())
        raise ValueError(
            f"{wanted} does not divide the number of ranks, {ranks}: make them smaller, or start a multiple of "
            f"{together} ranks"
        )
