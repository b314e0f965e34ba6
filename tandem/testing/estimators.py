"""Checks of an advantage estimator: a function from padded columns to advantages of shape [N, T]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.testing.tensors import POISONS, Columns, disturb, must_be_close, must_be_equal, poisoned

# Columns -> advantages [N, T], or several such tensors (advantages, returns).
Estimator = Callable[[Columns], Tensor | Sequence[Tensor]]
EXACT = 1e-6  # of the largest number: float32 sums in another order


def sample_columns(*, samples: int = 8, tokens: int = 12, group: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A batch to try an estimator on: groups of `group` samples, rows with holes, one row without a token.

    Keys: mask_NT (bool, False at position 0), reward_N, group_N, truncated_N, and per token values_NT, old_logprobs_NT,
    gen_logprobs_NT, ref_logprobs_NT. Float32.
    """
    draw = torch.Generator().manual_seed(seed)
    mask_NT = torch.rand(samples, tokens, generator=draw) < 0.7
    mask_NT[:, 0] = False
    mask_NT[-1] = False
    per_token = ("old_logprobs_NT", "gen_logprobs_NT", "ref_logprobs_NT")
    return {
        "mask_NT": mask_NT,
        "reward_N": torch.randn(samples, generator=draw),
        "group_N": torch.arange(samples) // group,
        "truncated_N": torch.rand(samples, generator=draw) < 0.3,
        "values_NT": torch.randn(samples, tokens, generator=draw),
        **{name: -torch.rand(samples, tokens, generator=draw) for name in per_token},
    }


def check_estimator(estimator: Estimator, columns: Columns | None = None) -> None:
    """Every check of this page. AssertionError says what differs, where and by how much."""
    columns = sample_columns() if columns is None else columns
    masked_slots_do_not_matter(estimator, columns)
    order_of_samples_does_not_matter(estimator, columns)
    estimator_is_zero_on_empty(estimator, columns)
    estimator_is_deterministic(estimator, columns)


def masked_slots_do_not_matter(
    estimator: Estimator, columns: Columns, *, poisons: Sequence[float] = POISONS, mask: str = "mask_NT"
) -> None:
    """NaN, infinity or 1e6 in slots outside the mask change no bit of the result, which is 0 there."""
    mask_NT, clean = columns[mask], _called(estimator, columns)
    for number, result in enumerate(clean):
        outside = result[~mask_NT]
        must_be_equal(outside, torch.zeros_like(outside), f"result {number} outside the mask must be 0")
    for poison in poisons:
        spoiled = _called(estimator, {name: poisoned(x, mask_NT, poison) for name, x in columns.items()})
        for number, (found, wanted) in enumerate(zip(spoiled, clean, strict=True)):
            must_be_equal(found, wanted, f"result {number} changed with {poison} in masked slots")


def order_of_samples_does_not_matter(
    estimator: Estimator, columns: Columns, *, seed: int = 1, tolerance: float = EXACT
) -> None:
    """Samples in another order have the same advantages, each its own."""
    count = len(next(iter(columns.values())))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    moved = _called(estimator, {name: x[order] for name, x in columns.items()})
    for number, (found, wanted) in enumerate(zip(moved, _called(estimator, columns), strict=True)):
        must_be_close(found, wanted[order], f"result {number} depends on the order of samples", tolerance)


def estimator_is_zero_on_empty(estimator: Estimator, columns: Columns, *, mask: str = "mask_NT") -> None:
    """A batch without a token to train on gives 0 everywhere, not NaN."""
    nothing = {**columns, mask: torch.zeros_like(columns[mask])}
    for number, result in enumerate(_called(estimator, nothing)):
        must_be_equal(result, torch.zeros_like(result), f"result {number} of a fully masked batch must be 0")


def estimator_is_deterministic(estimator: Estimator, columns: Columns) -> None:
    """Called again, with other global random numbers, it gives the same bits; and it leaves its input as it was."""
    before = {name: x.clone() for name, x in columns.items()}
    disturb(1)
    first = _called(estimator, columns)
    disturb(2)
    for number, (found, wanted) in enumerate(zip(_called(estimator, columns), first, strict=True)):
        must_be_equal(found, wanted, f"result {number} of a second call differs")
    for name, x in before.items():
        must_be_equal(columns[name], x, f"the estimator changed its input {name}")


def _called(estimator: Estimator, columns: Columns) -> list[Tensor]:
    result = estimator(columns)
    return [result.clone()] if isinstance(result, Tensor) else [x.clone() for x in result]
