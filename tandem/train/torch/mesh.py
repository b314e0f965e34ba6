"""The ranks that hold one model: some take different samples, some share every layer. One process has no devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# Numbers that are added up over the ranks in one call: 128 MiB in float32.
BUCKET = 1 << 25


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
    def data(self) -> DeviceMesh:
        """The ranks with other samples, or other tokens of the same, and the same part of each layer."""
        assert self.devices is not None, "asked only on several ranks"
        return self.devices["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks with the same samples and other parts of each layer."""
        assert self.devices is not None, "asked only on several ranks"
        return self.devices["tensor"]

    @property
    def shards_weights(self) -> bool:
        """Whether FSDP holds the weights: several ranks have the same part of each layer, and none wants it whole."""
        return self._spreads and self.parallel.data_parallel != "replicate"

    @property
    def _spreads(self) -> bool:
        return self.devices is not None and self.data.size() > 1

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on each."""
        if self.devices is not None:
            dist.all_reduce(x, group=self.data.get_group())
            dist.all_reduce(x, group=self.tensor.get_group())
        return x

    def copies(self, parameter: Tensor) -> int:
        """How many ranks hold the same part of it."""
        return self.shard.ranks // pieces(parameter)

    def take_gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """This rank's part of the gradient's SUM over the ranks, where there is one; the parameters have none then.

        FSDP has added it up in backward. A tensor-parallel norm over a part of the heads or tokens is added up here.
        """
        found = {name: local_gradient(p) for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        if self._spreads and not self.shards_weights:
            add_up(list(found.values()), self.data.get_group())
        return found


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part, as the parameter is laid out over the tensor ranks."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        assert isinstance(parameter, DTensor), "a gradient lies as its parameter does"
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    assert gradient is not None, "asked where there is one"
    return gradient.contiguous()


def add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup, limit: int = BUCKET) -> None:
    """Sums over the ranks, in place, many tensors at a time: a call to the network costs as much as a megabyte."""
    for bucket in buckets(gradients, limit):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(x) for part, x in zip(parts, bucket, strict=True)])


def buckets(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """In their order, as many neighbours together as hold `limit` numbers; a larger tensor is alone."""
    found: list[list[Tensor]] = []
    room = -1
    for tensor in tensors:
        if tensor.numel() > room:
            found.append([])
            room = limit
        found[-1].append(tensor)
        room -= tensor.numel()
    return found


def build_mesh(parallel: Parallel, device: torch.device) -> Mesh:
    """All ranks of torch.distributed where it is set up, tensor-parallel ranks next to each other; or one process."""
    ranks, tensor = dist.get_world_size() if dist.is_initialized() else 1, parallel.tensor_parallel_size
    sharing = parallel.context_parallel_size
    if ranks % (tensor * sharing):
        raise ValueError(
            f"parallel.tensor_parallel_size={tensor} x parallel.context_parallel_size={sharing} does not divide the "
            f"number of ranks, {ranks}: set them to 1, or start a multiple of {tensor * sharing} ranks"
        )
    if parallel.data_parallel is not None and ranks == tensor:
        raise ValueError(
            f"parallel.data_parallel={parallel.data_parallel} says how ranks with the same part of each layer hold it, "
            f"but each part is on one rank (parallel.tensor_parallel_size={tensor}, {ranks} in all): set it to null"
        )
    if parallel.keep_gathered and ranks == tensor:
        raise ValueError(
            "parallel.keep_gathered=true keeps what ranks gather from each other of a layer, but each part is on one "
            f"rank (parallel.tensor_parallel_size={tensor}, {ranks} in all): set it to false"
        )
    if ranks == 1:  # an engine in this process may have set up a world of its own
        return Mesh(parallel, None)
    shape = (ranks // tensor, tensor)
    devices = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    if sharing == 1:
        return Mesh(parallel, devices)
    finer = (ranks // tensor // sharing, sharing, tensor)
    context = init_device_mesh(device.type, finer, mesh_dim_names=("data", "context", "tensor"))["context"]
    return Mesh(parallel, devices, Context(context.get_local_rank(), sharing, context.get_group()))
