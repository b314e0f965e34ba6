"""What the checks say of two tensors that should agree, and the noise that tells a seeded function from another."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from torch import Tensor

Columns = Mapping[str, Tensor]
POISONS = (float("nan"), float("inf"), 1e6)


def disturb(seed: int) -> None:
    """Set the global random numbers to another place: who draws from them without a seed of its own shows it."""
    torch.manual_seed(seed)
    random.seed(seed)


def poisoned(x: Tensor, mask: Tensor, poison: float) -> Tensor:
    """x with `poison` wherever the mask, over x's first dimensions, is False; other types than floats stay."""
    if not x.is_floating_point() or x.shape[: mask.dim()] != mask.shape:
        return x
    wide = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
    return torch.where(wide, x, torch.full_like(x, poison))


def must_be_equal(found: Tensor, wanted: Tensor, what: str) -> None:
    """Bit for bit."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}")
    differs = ~((found == wanted) | (found.isnan() & wanted.isnan()))
    if differs.any():
        raise AssertionError(f"{what}: {example(found, wanted, differs)}")


def must_be_close(found: Tensor, wanted: Tensor, what: str, tolerance: float) -> None:
    """Within `tolerance` of the largest number that is wanted."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}")
    bound = tolerance * max(wanted.abs().max().item(), 1.0) if wanted.numel() else 0.0
    differs = ~((found - wanted).abs() <= bound)
    if differs.any():
        raise AssertionError(f"{what}: {example(found, wanted, differs)}")


def example(found: Tensor, wanted: Tensor, differs: Tensor) -> str:
    """How many places differ, and the first of them."""
    at = tuple(differs.nonzero()[0].tolist())
    where = f" at {list(at)}" if at else ""
    return (
        f"{int(differs.sum())} of {differs.numel()} differ, the first{where}: {found[at]:.9g}, wanted {wanted[at]:.9g}"
    )
