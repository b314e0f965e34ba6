"""Discounted suffix sums without a loop over time: the one recurrence behind GAE and discounted returns."""

import torch
from torch import Tensor

# Measured in float64 on a CPU: 16 beats 32 by a tenth and 64 by a quarter, with shared and with per-row decays.
BLOCK = 16


def suffix_sum(x_NT: Tensor, decay: float | Tensor) -> Tensor:
    """Solve y_t = x_t + decay * y_{t+1} with y_T = 0, i.e. y_t = sum over s >= t of decay^(s-t) * x_s.

    Blockwise: within a block of B columns the sum is a product with the triangular matrix decay^(s-t); what a block
    receives from its right is the same recurrence over the sums of blocks, with decay^B. Exact for decay 0 and 1 too.
    `decay` is a number or one number per row [N].
    """
    length = x_NT.shape[1]
    buffer = x_NT.new_zeros(x_NT.shape[0], padded_length(length))
    buffer[:, :length] = x_NT
    return suffix_sum_inplace(buffer, decay)[:, :length]


def suffix_sum_inplace(x_NT: Tensor, decay: float | Tensor) -> Tensor:
    """`suffix_sum` of a buffer whose length is a `padded_length`; saves the copy and overwrites the buffer."""
    decay_N1 = torch.as_tensor(decay, dtype=x_NT.dtype, device=x_NT.device).reshape(-1, 1)
    if decay_N1.shape[0] not in (1, x_NT.shape[0]):
        raise ValueError(
            f"decay holds {decay_N1.shape[0]} rows, x holds {x_NT.shape[0]}: give one number or one a row."
        )
    return _blockwise(x_NT, decay_N1)


def padded_length(length: int) -> int:
    """The next multiple of the block, or the length itself where one block is enough."""
    return length if length <= BLOCK else -(-length // BLOCK) * BLOCK


def _blockwise(x_NT: Tensor, decay_N1: Tensor) -> Tensor:
    rows, length = x_NT.shape
    if length <= BLOCK:
        return (x_NT.unsqueeze(1) @ _triangle(decay_N1, length)).squeeze(1)
    x_NKB = x_NT.view(rows, length // BLOCK, BLOCK)
    triangle = _triangle(decay_N1, BLOCK)
    block_sums_NK = (x_NKB @ triangle[..., :1]).squeeze(-1)
    carry_NK = suffix_sum(block_sums_NK, (decay_N1**BLOCK).squeeze(1))
    x_NKB[:, :-1, -1] += decay_N1 * carry_NK[:, 1:]
    return (x_NKB @ triangle).view(rows, length)


def _triangle(decay_N1: Tensor, size: int) -> Tensor:
    """[size, size] or [N, size, size]: entry (s, t) is decay^(s-t) for s >= t, else 0 (x @ triangle sums over s)."""
    step_B = torch.arange(size, device=decay_N1.device)
    power_BB = step_B[:, None] - step_B
    triangle = torch.where(power_BB >= 0, decay_N1[..., None] ** power_BB.clamp(min=0), 0.0)
    return triangle[0] if triangle.shape[0] == 1 else triangle
