"""The critic's losses against their definitions; poison, cuts, and what HL-Gauss must recover."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tandem.algorithms.layout import Layout
from tandem.algorithms.moments import explained_variance, merge_moments
from tandem.algorithms.value_loss import (
    HlGauss,
    ValueLoss,
    hl_gauss_targets,
    hl_gauss_value,
    hl_gauss_value_loss,
    huber_value_loss,
    squared_value_loss,
)
from tandem.testing import check_loss, loss_columns, masked_tokens_do_not_matter
from tandem.testing.tensors import Columns

HISTOGRAM = HlGauss(-2.0, 2.0, bins=51)
Loss = Callable[[Tensor, Tensor, Tensor, Layout], ValueLoss]


def squared(values: Tensor, returns: Tensor, weights: Tensor, layout: Layout) -> ValueLoss:
    return squared_value_loss(values, values.detach() * 0.7, returns, weights, layout, clip_range=0.2)


def hl_gauss(values: Tensor, returns: Tensor, weights: Tensor, layout: Layout) -> ValueLoss:
    logits = values[:, None] * torch.linspace(-1, 1, 51, dtype=values.dtype)
    return hl_gauss_value_loss(logits, returns, weights, layout, histogram=HISTOGRAM)


every_loss = pytest.mark.parametrize("loss", [squared, huber_value_loss, hl_gauss])


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values, returns, weights = (torch.randn(60, generator=generator) for _ in range(3))
    return values, returns, weights.abs(), torch.rand(60, generator=generator) < 0.6


def layout_of(mask: Tensor) -> Layout:
    return Layout(mask, torch.arange(len(mask)) % 4, 4)


def test_squared_loss_equals_its_definition_and_counts_clips() -> None:
    values, returns, weights, mask = batch()
    old = values + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    got = squared_value_loss(values, old, returns, weights, layout_of(mask), clip_range=0.2)
    expected, clipped = 0.0, 0
    for v, o, r, w, m in zip(*(x.tolist() for x in (values, old, returns, weights, mask)), strict=True):
        plain, bounded = (v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2
        expected += m * w * 0.5 * max(plain, bounded)
        clipped += m and bounded > plain
    assert float(got.loss) == pytest.approx(expected, rel=1e-5)
    assert got.clipped == clipped
    plain = squared_value_loss(values, old, returns, weights, layout_of(mask))
    torch.testing.assert_close(plain.loss, (0.5 * weights * (values - returns) ** 2)[mask].sum())
    assert got.lowest == values[mask].min()
    assert got.highest == values[mask].max()


def test_where_the_clipped_error_counts_there_is_no_gradient() -> None:
    values = torch.tensor([1.0, 1.0], requires_grad=True)
    layout = layout_of(torch.ones(2, dtype=torch.bool))
    zeros, returns = torch.zeros(2), torch.tensor([2.0, -2.0])
    squared_value_loss(values, zeros, returns, torch.ones(2), layout, clip_range=0.2).loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 3.0]


def test_huber_equals_torch() -> None:
    values, returns, weights, mask = batch()
    got = huber_value_loss(values, returns, weights, layout_of(mask), delta=0.7)
    expected = torch.nn.functional.huber_loss(values, returns, reduction="none", delta=0.7)
    torch.testing.assert_close(got.loss, (weights * expected)[mask].sum())


def test_hl_gauss_targets_are_laws_with_the_mean_of_the_return() -> None:
    returns = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    targets = hl_gauss_targets(returns, HISTOGRAM)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(31, dtype=torch.float64))
    torch.testing.assert_close(hl_gauss_value(targets.log(), HISTOGRAM), returns, rtol=0.0, atol=1e-6)
    outside = hl_gauss_targets(torch.tensor([-99.0, 99.0]), HISTOGRAM)
    assert torch.equal(outside, hl_gauss_targets(torch.tensor([-2.0, 2.0]), HISTOGRAM))
    assert outside.isfinite().all()


def test_hl_gauss_loss_is_smallest_at_its_target() -> None:
    returns, layout = torch.tensor([0.3, -0.8]), layout_of(torch.ones(2, dtype=torch.bool))
    logits = hl_gauss_targets(returns, HISTOGRAM).clamp(min=1e-30).log().requires_grad_()
    result = hl_gauss_value_loss(logits, returns, torch.ones(2), layout, histogram=HISTOGRAM)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_logits_outside_the_mask_have_no_gradient(poison: float) -> None:
    _, returns, weights, mask = batch()
    clean = torch.randn(60, 51, generator=torch.Generator().manual_seed(2))
    gradients = []
    for logits in (clean, torch.where(mask[:, None], clean, poison)):
        logits = logits.clone().requires_grad_()
        result = hl_gauss_value_loss(logits, returns, weights, layout_of(mask), histogram=HISTOGRAM)
        gradients += torch.autograd.grad(result.loss, logits)
    assert torch.equal(*gradients)
    assert not gradients[0][~mask].any()


def test_hl_gauss_refuses_an_empty_range() -> None:
    with pytest.raises(ValueError, match="low < high"):
        HlGauss(1.0, 1.0)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_tokens_cuts_order_and_empty_batches(loss: Loss, dtype: torch.dtype) -> None:
    columns, layout = loss_columns(dtype=dtype)

    def summed(columns: Columns, layout: Layout) -> Tensor:
        return loss(columns["values_P"], columns["returns_P"], columns["weights_P"], layout).loss

    masked_tokens_do_not_matter(summed, columns, layout, learned="values_P")
    if dtype == torch.float64:
        check_loss(summed, learned="values_P")


@every_loss
def test_poison_in_masked_slots_changes_no_residual(loss: Loss) -> None:
    values, returns, weights, mask = batch()
    clean = loss(values, returns, weights, layout_of(mask))
    spoiled = loss(*(torch.where(mask, x, torch.nan) for x in (values, returns, weights)), layout_of(mask))
    assert torch.equal(spoiled.residuals.squares, clean.residuals.squares)


@every_loss
def test_the_explained_variance_of_chunks_adds_up_to_that_of_the_whole(loss: Loss) -> None:
    values, returns, weights, mask = batch()
    whole = loss(values, returns, weights, layout_of(mask))
    parts = [
        loss(v, r, w, layout_of(m))
        for v, r, w, m in zip(*(x.split(20) for x in (values, returns, weights, mask)), strict=True)
    ]
    merged = explained_variance(
        merge_moments([part.returns for part in parts]), merge_moments([part.residuals for part in parts])
    )
    torch.testing.assert_close(merged, explained_variance(whole.returns, whole.residuals))


@every_loss
def test_a_fully_masked_batch_is_zero_and_not_nan(loss: Loss) -> None:
    values = torch.full((5,), torch.nan, requires_grad=True)
    result = loss(values, values.detach(), values.detach(), layout_of(torch.zeros(5, dtype=torch.bool)))
    assert result.loss == 0
    assert result.tokens == 0
    assert explained_variance(result.returns, result.residuals) == 1
