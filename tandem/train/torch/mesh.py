"""The ranks that hold one model: some take different samples, some share every layer. One process has no devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tandem.config.models import Parallel
from tandem.train.sharding import Shard
from tandem.train.torch.context import Context
from tandem.train.torch.placement import pieces


@dataclass(frozen=True)
class Mesh:
    """`devices` has the dimensions data and tensor, in this order; None in one process.

    Along data, `context.count` ranks next to each other share their samples.
    """

    parallel: Parallel
    devices: DeviceMesh | None
    context: Context | None = None

    @property
    def shard(self) -> Shard:
        """The share of every batch that this rank takes."""
        if self.devices is None:
            return Shard()
        (index, part), (count, parts) = self.devices.get_coordinate() or (0, 0), self.devices.shape
        sharing = self.parallel.context_parallel_size
        return Shard(index // sharing, count // sharing, index % sharing * parts + part, sharing * parts)

    @property
    def rank(self) -> int:
        """This rank's place among `ranks`."""
        return self.shard.index * self.shard.parts + self.shard.part

    @property
    def ranks(self) -> int:
        """How many ranks hold the model together."""
        return self.shard.count * self.shard.parts

    @property
    def data(self) -> DeviceMesh:
        """The ranks with other samples, or other tokens of the same, and the same part of each layer."""
        assert self.devices is not None, "asked only on several ranks"
        return self.devices["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks with the same samples and other parts of each layer."""
        assert self.devices is not None, "asked only on several ranks"
        return self.devices["tensor"]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on each."""
        if self.devices is not None:
            dist.all_reduce(x, group=self.data.get_group())
            dist.all_reduce(x, group=self.tensor.get_group())
        return x

    def copies(self, parameter: Tensor) -> int:
        """How many ranks hold the same part of it."""
        return self.ranks // pieces(parameter)

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's part of the gradient's SUM over the ranks. The parameter has none afterwards.

        FSDP has added it up in backward. A tensor-parallel norm over a part of the heads or tokens is added up here.
        """
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or self.devices is None:
            return gradient
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor), "a gradient lies as its parameter does"
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        if self.parallel.data_parallel == "replicate":
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=self.data.get_group())
        return gradient


def build_mesh(parallel: Parallel, device: torch.device) -> Mesh:
    """All ranks of torch.distributed where it is set up, tensor-parallel ranks next to each other; or one process."""
    ranks, tensor = dist.get_world_size() if dist.is_initialized() else 1, parallel.tensor_parallel_size
    sharing = parallel.context_parallel_size
    if ranks % (tensor * sharing):
        raise ValueError(
            f"parallel.tensor_parallel_size={tensor} x parallel.context_parallel_size={sharing} does not divide the "
            f"number of ranks, {ranks}: set them to 1, or start a multiple of {tensor * sharing} ranks"
        )
    if not dist.is_initialized():
        return Mesh(parallel, None)
    shape = (ranks // tensor, tensor)
    devices = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    if sharing == 1:
        return Mesh(parallel, devices)
    finer = (ranks // tensor // sharing, sharing, tensor)
    context = init_device_mesh(device.type, finer, mesh_dim_names=("data", "context", "tensor"))["context"]
    return Mesh(parallel, devices, Context(context.get_local_rank(), sharing, context.get_group()))
