"""Tensors that lie on several ranks: the part that is here, and the whole of it. A plain tensor is all here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory, without a graph."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of parts that lie as those of `like` do. All ranks take part, and all get it."""
    if not isinstance(like, DTensor):
        return part
    spread = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    placements = list(like.placements)
    for dimension in range(like.device_mesh.ndim):  # FSDP cut last and on the first dimension: undo that first
        placements[dimension] = Replicate()
        spread = spread.redistribute(placements=placements)
    return spread.to_local()


def gathered(tensor: Tensor) -> Tensor:
    """The whole of an activation that may be cut over the tensor ranks, with its graph: they all get it.

    Its gradient must be whole on each of them.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def region_of(like: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole."""
    if not isinstance(like, DTensor):
        return tuple(slice(0, size) for size in like.shape)
    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def pieces(tensor: Tensor) -> int:
    """How many different parts there are."""
    if not isinstance(tensor, DTensor):
        return 1
    cut = [size for size, at in zip(tensor.device_mesh.shape, tensor.placements, strict=True) if not at.is_replicate()]
    return int(torch.tensor(cut, dtype=torch.int64).prod())
