"""Suffix sums against their definition, at the ends of the range of decays and of lengths."""

import pytest
import torch

from tandem.algorithms.scan import suffix_sum


def by_definition(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """y_t = sum over s >= t of decay^(s-t) x_s, through the full matrix of powers."""
    step = torch.arange(x.shape[1])
    power = step[:, None] - step
    matrix = torch.where(power >= 0, decay.reshape(-1, 1, 1) ** power.clamp(min=0), 0.0)
    return torch.einsum("ns,nst->nt", x, matrix.expand(len(x), -1, -1))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 256, 257, 300])
@pytest.mark.parametrize("decay", [0.0, 1e-9, 0.5, 0.95, 1.0])
def test_equals_the_definition(length: int, decay: float) -> None:
    x = torch.randn(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    expected = by_definition(x, torch.tensor([decay], dtype=torch.float64))
    torch.testing.assert_close(suffix_sum(x, decay), expected, rtol=1e-12, atol=1e-12)


def test_every_row_may_have_its_own_decay_and_the_input_stays() -> None:
    x = torch.randn(4, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, decay = x.clone(), torch.tensor([0.0, 0.3, 0.99, 1.0], dtype=torch.float64)
    torch.testing.assert_close(suffix_sum(x, decay), by_definition(x, decay), rtol=1e-12, atol=1e-12)
    assert torch.equal(x, before)


def test_decays_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="decay holds 2 rows, x holds 3"):
        suffix_sum(torch.zeros(3, 4), torch.tensor([0.1, 0.2]))
