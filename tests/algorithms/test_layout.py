"""Averages as data: weights and shares give the average that was asked for, however the batch is cut."""

import pytest
import torch

from tandem.algorithms.layout import Layout, averaging_weights


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 12, generator=generator) < torch.tensor([[0.9], [0.2], [0.6], [0.0], [0.5], [1.0]])
    mask[4] = torch.arange(12) == 7
    return torch.randn(6, 12, dtype=torch.float64, generator=generator), mask


def flat(mask: torch.Tensor) -> Layout:
    rows, length = mask.shape
    return Layout(mask.reshape(-1), torch.arange(rows).repeat_interleave(length), rows)


def expected(loss: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    rows = [x[m] for x, m in zip(loss, mask, strict=True) if m.any()]
    return {
        "token_mean": loss[mask].mean(),
        "sequence_mean": torch.stack([row.mean() for row in rows]).mean(),
        "sequence_sum": torch.stack([row.sum() for row in rows]).mean(),
        "fixed_length": torch.stack([row.sum() / 100 for row in rows]).mean(),
    }[kind]


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_weights_and_shares_give_the_average_of_any_cut(kind: str, cut: int) -> None:
    loss, mask = padded()
    total, divisor = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for x, m in zip(loss.split(cut), mask.split(cut), strict=True):
        average = averaging_weights(flat(m), kind, fixed_length=100, dtype=torch.float64)
        total += (average.weights_P * x.reshape(-1)).sum()
        divisor += average.shares_N.sum()
    torch.testing.assert_close(total / divisor, expected(loss, mask, kind))


def test_sums_of_samples_do_not_depend_on_the_order_of_tokens_and_ignore_poison() -> None:
    x, mask = padded()
    layout, column = flat(mask), x.reshape(-1)
    order = torch.randperm(72, generator=torch.Generator().manual_seed(1))
    moved = Layout(layout.mask_P[order], layout.sample_P[order], 6)
    torch.testing.assert_close(moved.sum(column[order]), layout.sum(column))
    torch.testing.assert_close(layout.sum(column), torch.where(mask, x, 0.0).sum(dim=1))
    assert torch.equal(layout.mean(torch.where(layout.mask_P, column, torch.nan)), layout.mean(column))
    assert layout.tokens().tolist() == mask.sum(dim=1).tolist()
    assert layout.mean(column)[3] == 0


def test_a_fixed_length_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="fixed_length wants a length of at least 1, got None"):
        averaging_weights(flat(padded()[1]), "fixed_length")
