"""Digests of weights: how a trainer and its engines prove to each other that they hold the same ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

CHUNK = 1 << 22  # words hashed at one time: bounds the int64 copies to 96 MB
COMPILED_CHUNK = 1 << 28  # of a GPU's kernel, which makes no copies
FUSED = 1 << 16  # words that are worth it
WORD = 1 << 64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
SPREAD, MIX = -7046029254386353131, -4658895280553007687


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> digest of dtype, shape and values. Integer sums: exact in any order, cheap on a GPU.

    A value is mixed with its position, so swapped rows or elements change the digest, as does one flipped bit.
    """
    kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
    sums = []
    for name, tensor in weights:
        kinds[name] = tensor.dtype, tensor.shape
        sums.append(weigh(tensor, tensor.shape, (0,) * tensor.dim()))
    return {
        name: describe(dtype, shape, total)
        for (name, (dtype, shape)), total in zip(kinds.items(), as_numbers(sums), strict=True)
    }


def digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor, on the device where it lies."""
    return fingerprint([("", tensor)])[""]


def describe(dtype: torch.dtype, shape: Sequence[int], total: int) -> str:
    """A digest in words, from the sum of what its blocks weigh."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}:{total % WORD:016x}"


def as_numbers(sums: Sequence[torch.Tensor]) -> list[int]:
    """What blocks weigh, modulo 2**64, in one transfer: each would wait for the device."""
    if not sums:
        return []
    return [number % WORD for number in torch.stack([total.to(sums[0].device) for total in sums]).tolist()]


def weigh(block: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> torch.Tensor:
    """What a block adds to the sum of a tensor of this shape, in which it starts here: modulo 2**64, on its device.

    The weights of blocks that make up a tensor add up to the one of the whole: ranks need not gather what they share.
    0 and -0 weigh the same: they are one number, and a product with the unit matrix may exchange them.
    """
    assert all(first + size <= whole for first, size, whole in zip(start, block.shape, shape, strict=True))
    is_whole_rows = tuple(block.shape[1:]) == tuple(shape[1:])
    if not is_whole_rows and block.dim() != 2:
        raise ValueError(f"a block of {list(block.shape)} in {list(shape)}: only matrices are cut along columns")
    row_size = math.prod(shape[1:])
    first, columns = (start[0] * row_size if start else 0), row_size
    if not is_whole_rows:
        first, columns = first + start[1], block.shape[1]
    values = block.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    is_fused = values.is_cuda and values.numel() >= FUSED
    chunk, add_up = (COMPILED_CHUNK, compiled_mix()) if is_fused else (CHUNK, mix)
    spread = torch.full((), SPREAD, device=block.device)  # inductor takes a place times a number for 32 bits
    for begin in range(0, values.numel(), chunk):
        total += add_up(values[begin : begin + chunk], begin, first + 1, columns, row_size, spread)
    return total


def mix(values: torch.Tensor, begin: int, first: int, columns: int, stride: int, spread: torch.Tensor) -> torch.Tensor:
    """The sum of words mixed with their places, as a signed 64-bit number.

    Element i is the one at `begin + i` of a block of so many columns; the block's rows are `stride` apart from `first`.
    """
    place = torch.arange(begin, begin + values.numel(), device=values.device)
    if columns != stride:
        place = place // columns * stride + place % columns
    place = place + first
    if values.dtype.itemsize > 1 and values.is_floating_point():
        values = values + 0.0  # -0 becomes 0
    words = values.view(WORDS[values.element_size()]).to(torch.int64)
    mixed = (words + 1) * MIX ^ place * spread
    return ((mixed ^ (mixed >> 29)) * MIX).sum()


@functools.cache
def compiled_mix() -> Callable[[torch.Tensor, int, int, int, int, torch.Tensor], torch.Tensor]:
    """One kernel that reads each value once; op by op, forty times as many bytes move."""
    return torch.compile(mix, dynamic=True)


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first tensor that differs, in words, or None when all are equal."""
    for name, mine in ours.items():
        if name not in theirs:
            return f"{name} is missing there"
        if theirs[name] != mine:
            return f"{name} is {mine} here and {theirs[name]} there"
    extra = [name for name in theirs if name not in ours]
    return f"{extra[0]} exists only there" if extra else None
