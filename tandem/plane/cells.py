"""Tensors as bytes and back, exactly: every dtype, every shape, and in each cell the key of the row it belongs to.

A cell is [key, dtype, dimensions, shape...] in int64, then the data, padded to 8 bytes so that views stay aligned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.plane.row_server import Column
from tandem.plane.rows import dtype_of

# A dtype's place here is its number in a cell.
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
WORD = 8


def encode(name: str, keys: Sequence[int], tensors: Sequence[torch.Tensor]) -> Column:
    """A column of rows, one copy of the data. TypeError: two dtypes in it, or one that does not travel."""
    if not tensors:
        return Column("", (), np.empty(0, np.uint8))
    dtype = dtype_of(name, tensors)
    if dtype not in NUMBERS:
        raise TypeError(f"column {name!r} holds {dtype}, which no plane of several processes carries")
    sizes = [WORD * (3 + tensor.dim() + -(-tensor.nbytes // WORD)) for tensor in tensors]
    flat = np.zeros(sum(sizes), np.uint8)
    start = 0
    for key, tensor, size in zip(keys, tensors, sizes, strict=True):
        head = WORD * (3 + tensor.dim())
        flat[start : start + head].view(np.int64)[:] = (key, NUMBERS[tensor.dtype], tensor.dim(), *tensor.shape)
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        flat[start + head : start + head + data.size] = data
        start += size
    return Column(str(dtype), tuple(sizes), flat)


def decode(keys: Sequence[int], column: Column) -> list[torch.Tensor]:
    """The tensors of a column, copied once: they may be written to. KeyError: a cell is another row's."""
    own = Column(column.dtype, column.sizes, column.flat.copy())
    return [decode_cell(key, cell) for key, cell in zip(keys, own.split(), strict=True)]


def decode_cell(key: int, cell: np.ndarray) -> torch.Tensor:
    """One tensor, a view of the cell's bytes. KeyError when the cell belongs to another row."""
    owner, number, dims = cell[: 3 * WORD].view(np.int64).tolist()
    if owner != key:
        raise KeyError(f"the plane has no row {key}: it was dropped while it was read, and its place holds row {owner}")
    head = WORD * (3 + dims)
    shape = cell[3 * WORD : head].view(np.int64).tolist()
    dtype = DTYPES[number]
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(cell[head : head + count]).view(dtype).view(shape)
