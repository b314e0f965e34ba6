"""Digests of weights: how a trainer and its engines prove to each other that they hold the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

CHUNK = 1 << 22  # words hashed at one time: bounds the int64 copies to 96 MB
WORD = 1 << 64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
SPREAD, MIX = -7046029254386353131, -4658895280553007687


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> digest of dtype, shape and values. Integer sums: exact in any order, cheap on a GPU.

    A value is mixed with its position, so swapped rows or elements change the digest, as does one flipped bit.
    """
    return {name: digest(tensor) for name, tensor in weights}


def digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor, on the device where it lies."""
    return describe(tensor.dtype, tensor.shape, weigh(tensor, tensor.shape, (0,) * tensor.dim()))


def describe(dtype: torch.dtype, shape: Sequence[int], total: int) -> str:
    """A digest in words, from the sum of what its blocks weigh."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}:{total % WORD:016x}"


def weigh(block: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> int:
    """What a block adds to the sum of a tensor of this shape, in which it starts here: modulo 2**64.

    The weights of blocks that make up a tensor add up to the one of the whole: ranks need not gather what they share.
    0 and -0 weigh the same: they are one number, and a product with the unit matrix may exchange them.
    """
    assert all(first + size <= whole for first, size, whole in zip(start, block.shape, shape, strict=True))
    is_whole_rows = tuple(block.shape[1:]) == tuple(shape[1:])
    if not is_whole_rows and block.dim() != 2:
        raise ValueError(f"a block of {list(block.shape)} in {list(shape)}: only matrices are cut along columns")
    values = block.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    row_size = math.prod(shape[1:])
    for begin in range(0, values.numel(), CHUNK):
        part = values[begin : begin + CHUNK]
        place = torch.arange(begin, begin + part.numel(), device=block.device)
        if not is_whole_rows:
            row, column = place // block.shape[1], place % block.shape[1]
            place = row * row_size + column + start[1]
        total += mix(part, place + (start[0] * row_size + 1 if start else 1))
    return int(total.item()) % WORD


def mix(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The sum of words mixed with their places, as a signed 64-bit number."""
    if values.dtype.itemsize > 1 and values.is_floating_point():
        values = values + 0.0  # -0 becomes 0
    words = values.view(WORDS[values.element_size()]).to(torch.int64)
    mixed = (words + 1) * MIX ^ place * SPREAD
    return ((mixed ^ (mixed >> 29)) * MIX).sum()


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first tensor that differs, in words, or None when all are equal."""
    for name, mine in ours.items():
        if name not in theirs:
            return f"{name} is missing there"
        if theirs[name] != mine:
            return f"{name} is {mine} here and {theirs[name]} there"
    extra = [name for name in theirs if name not in ours]
    return f"{extra[0]} exists only there" if extra else None
