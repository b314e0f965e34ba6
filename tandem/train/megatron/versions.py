"""What Megatron-Core 0.16, the newest for Python 3.11, and 0.19 want to be told in two ways."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

IS_0_16 = version("megatron-core").startswith("0.16.")


def mlp_of(submodules: MLPSubmodules) -> ModuleSpec | partial[MLP]:
    """For a layer's specification. 0.19 takes the old form too, and warns of it."""
    return ModuleSpec(MLP, submodules=submodules) if IS_0_16 else partial(MLP.as_mlp_submodule, submodules=submodules)


def wrapped(
    model: MegatronModule, settings: DistributedDataParallelConfig, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    """The model with its gradient buffers. 0.19 wants to know where each gradient lies; 0.16 finds the same itself."""
    layout = {}
    if not IS_0_16:
        layout["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            list(model.parameters()), None, groups.dp_cp.size(), settings, expert_data_parallel_world_size=1
        )
    return DistributedDataParallel(model.config, settings, model, pg_collection=groups, **layout)
