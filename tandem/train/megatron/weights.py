"""Whole tensors by Hugging Face name out of the parts that ranks hold, one at a time; and parts into this rank's model.

All ranks take part in each tensor and all get it: those of the stage that has it put it together over the tensor ranks,
then hand it to the other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.train.megatron.grid import Grid
from tandem.train.megatron.names import Row

# The name of a parameter of this rank's stage -> a tensor of its shape: itself, its moment, its gradient.
Local = Callable[[str], Tensor]
# A Hugging Face tensor's name, and where this rank's part lies in it -> that part.
Read = Callable[[str, tuple[slice, ...]], Tensor]


def whole_tensors(
    rows: Sequence[Row], grid: Grid, local: Local, dtype: Callable[[Row], torch.dtype], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every row's tensor, of what `local` gives. `dtype` is what ranks without it make room for."""
    for row in rows:
        stage, ours = row.homes[0]
        if stage == grid.stage:
            tensor = _over_tensor_ranks(row, grid, row.view(local(ours).detach()))
        else:
            tensor = torch.empty(row.shape, dtype=dtype(row), device=device)
        if grid.stages > 1:
            dist.broadcast(tensor, grid.global_rank_of_stage(stage), group=grid.groups.pp)
        yield row.name, tensor


def _over_tensor_ranks(row: Row, grid: Grid, part: Tensor) -> Tensor:
    parts = grid.groups.tp.size()
    if row.cut is None or parts == 1:
        return part.reshape(row.shape).contiguous()
    part = part.reshape(row.part_shape(parts)).contiguous()
    gathered = [torch.empty_like(part) for _ in range(parts)]
    dist.all_gather(gathered, part, group=grid.groups.tp)
    return torch.cat(gathered, dim=row.cut)


def fill(rows: Sequence[Row], grid: Grid, local: Local, read: Read) -> None:
    """Copy this rank's parts of every row into what `local` gives. Nothing is sent."""
    for row in rows:
        for stage, ours in row.homes:
            if stage == grid.stage:
                target = row.view(local(ours).detach())
                part = read(row.name, row.region(grid.tensor_rank, grid.groups.tp.size()))
                target.copy_(part.reshape(target.shape))
