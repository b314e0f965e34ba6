"""Discounted suffix sums without a loop over time: the one recurrence behind GAE and discounted returns."""

import torch
from torch import Tensor

# Measured on CPU: 16 to 32 is best for float64 whether the decay is shared or differs by row; 32 needs one level less
# of carries at T = 16k, which is what counts on a GPU.
BLOCK = 32


def suffix_sum(x_NT: Tensor, decay: float | Tensor) -> Tensor:
    """Solve y_t = x_t + decay * y_{t+1} with y_T = 0, i.e. y_t = sum over s >= t of decay^(s-t) * x_s.

    Blockwise: within a block of B columns the sum is a product with the triangular matrix decay^(s-t); what a block
    receives from its right is the same recurrence over block sums with decay^B. Exact for decay 0 and 1 too.
    `decay` is a number or one number per row [N].
    """
    if x_NT.dim() != 2:
        raise ValueError(f"suffix_sum wants a matrix of rows over time, got shape {tuple(x_NT.shape)}.")
    decay_N1 = torch.as_tensor(decay, dtype=x_NT.dtype, device=x_NT.device).reshape(-1, 1)
    if decay_N1.shape[0] not in (1, x_NT.shape[0]):
        raise ValueError(f"decay holds {decay_N1.shape[0]} rows, x holds {x_NT.shape[0]}: give one number or one a row.")
    return _suffix_sum(x_NT, decay_N1)


def _suffix_sum(x_NT: Tensor, decay_N1: Tensor) -> Tensor:
    rows, length = x_NT.shape
    if length <= BLOCK:
        return (x_NT.unsqueeze(1) @ _triangle(decay_N1, length)).squeeze(1)
    blocks = -(-length // BLOCK)
    x_NKB = x_NT.new_zeros(rows, blocks * BLOCK)
    x_NKB[:, :length] = x_NT
    x_NKB = x_NKB.view(rows, blocks, BLOCK)
    triangle = _triangle(decay_N1, BLOCK)
    block_sums_NK = (x_NKB @ triangle[..., :1]).squeeze(-1)
    carry_NK = _suffix_sum(block_sums_NK, decay_N1**BLOCK)
    x_NKB[:, :-1, -1] += decay_N1 * carry_NK[:, 1:]
    return (x_NKB @ triangle).view(rows, blocks * BLOCK)[:, :length]


def _triangle(decay_N1: Tensor, size: int) -> Tensor:
    """[size, size] or [N, size, size]: entry (s, t) is decay^(s-t) for s >= t, else 0 (x @ triangle sums over s)."""
    step_B = torch.arange(size, device=decay_N1.device)
    power_BB = step_B[:, None] - step_B
    triangle = torch.where(power_BB >= 0, decay_N1[..., None] ** power_BB.clamp(min=0), 0.0)
    return triangle[0] if triangle.shape[0] == 1 else triangle
