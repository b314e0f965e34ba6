"""Moments against torch on the selected tokens; merging, offsets, poison, and empty masks."""

import pytest
import torch

from tandem.algorithms.moments import (
    explained_variance,
    masked_mean,
    masked_variance,
    merge_moments,
    moments,
    standardise,
    whiten,
)


def batch(offset: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 20, dtype=torch.float64, generator=generator) + offset
    return x.to(dtype), torch.rand(6, 20, generator=generator) < 0.6


def test_equal_torch_on_the_selected_tokens() -> None:
    x, mask = batch()
    torch.testing.assert_close(masked_mean(x, mask), x[mask].mean())
    torch.testing.assert_close(masked_variance(x, mask, unbiased=True), x[mask].var())
    torch.testing.assert_close(masked_variance(x, mask, unbiased=False), x[mask].var(unbiased=False))
    rows = torch.stack([row[kept].mean() for row, kept in zip(x, mask, strict=True)])
    torch.testing.assert_close(masked_mean(x, mask, dim=1), rows)
    torch.testing.assert_close(whiten(x, mask)[mask], (x[mask] - x[mask].mean()) / (x[mask].var() + 1e-8).sqrt())
    deviation = x[mask] - x[mask].mean()
    torch.testing.assert_close(standardise(x, mask)[mask], deviation / x[mask].std(unbiased=False))


def test_a_large_offset_costs_no_digits_in_float32() -> None:
    x, mask = batch(offset=1e4, dtype=torch.float32)
    expected = x[mask].double().var()
    torch.testing.assert_close(masked_variance(x, mask, unbiased=True).double(), expected, rtol=1e-6, atol=0.0)


def test_moments_of_chunks_merge_to_those_of_the_whole() -> None:
    x, mask = batch(offset=1e3)
    for cut in (1, 2, 3, 6):
        merged = merge_moments([moments(a, m) for a, m in zip(x.split(cut), mask.split(cut), strict=True)])
        for got, expected in zip(merged, moments(x, mask), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_statistics_of_the_whole_batch_whiten_a_chunk_as_the_whole() -> None:
    x, mask = batch()
    known = moments(x, mask)
    for function in (whiten, standardise):
        torch.testing.assert_close(function(x[2:4], mask[2:4], statistics=known), function(x, mask)[2:4])


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), 1e6])
def test_poison_in_masked_slots_changes_no_bit(poison: float) -> None:
    x, mask = batch(dtype=torch.float32)
    spoiled = torch.where(mask, x, poison)
    for function in (whiten, standardise, masked_mean):
        assert torch.equal(function(spoiled, mask), function(x, mask))
    assert torch.equal(moments(spoiled, mask).squares, moments(x, mask).squares)


def test_empty_and_single_masks_give_zeros() -> None:
    x = torch.full((2, 3), float("nan"))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(x, mask) == 0
    assert masked_variance(x, mask, unbiased=True) == 0
    assert torch.equal(whiten(x, mask), torch.zeros(2, 3))
    x[0, 1], mask[0, 1] = 5.0, True
    assert torch.equal(whiten(x, mask), torch.zeros(2, 3))
    assert torch.equal(standardise(x, mask), torch.zeros(2, 3))


def test_explained_variance_ignores_a_constant_offset_and_punishes_noise() -> None:
    returns, mask = batch()
    noise = torch.randn(returns.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def of(values: torch.Tensor) -> float:
        return float(explained_variance(moments(returns, mask), moments(returns - values, mask)))

    assert of(returns + 7.0) == pytest.approx(1.0)
    assert of(torch.zeros_like(returns)) == pytest.approx(0.0)
    values = returns + 2 * noise
    variance = (returns - values)[mask].var(unbiased=False) / returns[mask].var(unbiased=False)
    assert of(values) == pytest.approx(1 - float(variance))
    assert of(values) < 0
