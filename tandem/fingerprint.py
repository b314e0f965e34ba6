"""Digests of weights: how a trainer and its engines prove to each other that they hold the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

CHUNK = 1 << 22  # words hashed at one time: bounds the int64 copies to 96 MB
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
SPREAD, MIX = -7046029254386353131, -4658895280553007687


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name -> digest of dtype, shape and bytes. Integer sums: exact in any order, cheap on a GPU.

    A word is mixed with its position, so swapped rows or elements change the digest, as does one flipped bit.
    """
    return {name: digest(tensor) for name, tensor in weights}


def digest(tensor: torch.Tensor) -> str:
    """Digest of one tensor, on the device where it lies."""
    words = tensor.detach().contiguous().view(-1).view(WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        mixed = (part + 1) * MIX ^ place * SPREAD
        total += ((mixed ^ (mixed >> 29)) * MIX).sum()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{int(total.item()) % 2**64:016x}"


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first tensor that differs, in words, or None when all are equal."""
    for name, mine in ours.items():
        if name not in theirs:
            return f"{name} is missing there"
        if theirs[name] != mine:
            return f"{name} is {mine} here and {theirs[name]} there"
    extra = [name for name in theirs if name not in ours]
    return f"{extra[0]} exists only there" if extra else None
