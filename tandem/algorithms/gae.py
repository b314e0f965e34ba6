"""Generalised advantage estimation over the tokens the policy wrote; critic and policy may use different lambdas."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.scan import padded_length, suffix_sum_inplace

# Elements of one pass over rows on a CPU: a pass should stay in the L2 cache (measured: half the time of one pass over
# all rows). A GPU takes all rows in one pass.
CPU_PASS = 2**17


class Gae(NamedTuple):
    """Advantages (policy lambda) and returns (value lambda); both exactly 0 outside the mask."""

    advantages_NT: Tensor
    returns_NT: Tensor


@torch.no_grad()
def gae(
    rewards_NT: Tensor,
    values_NT: Tensor,
    mask_NT: Tensor,
    *,
    gamma: float,
    lambda_value: float | Tensor,
    lambda_policy: float | Tensor,
    bootstrap_N: Tensor | None = None,
) -> Gae:
    """GAE (Schulman et al. 2016, eq. 11-16), lambdas decoupled as in VC-PPO and VAPO (Yuan et al., Yue et al. 2025).

    Only the mask positions p_0 < ... < p_{n-1} of a row are time steps; holes (tool output, padding) are skipped:

        delta_k  = r_k + gamma * V_{k+1} - V_k,     V_n = bootstrap (0 unless the sample was truncated)
        A_k      = sum_l (gamma * lambda)^l * delta_{k+l}
        return_k = A_k + V_k

    Computed as the lambda-return: return_k = r_k + gamma * h_{k+1} with h_k = (1-lambda) V_k + lambda return_k, so
    h_k = [(1-lambda) V_k + lambda r_k] + gamma * lambda * h_{k+1}: one suffix sum, without a loop over tokens.
    Sums run in float64, so that float32 results are right to their last digits at any length. Lambdas: number or [N].
    """
    assert rewards_NT.shape == values_NT.shape == mask_NT.shape, (rewards_NT.shape, values_NT.shape, mask_NT.shape)
    assert mask_NT.dtype == torch.bool, mask_NT.dtype
    result = Gae(torch.empty_like(values_NT), torch.empty_like(values_NT))
    by_row = isinstance(lambda_value, Tensor) or isinstance(lambda_policy, Tensor)
    one_lambda = lambda_value is lambda_policy or (not by_row and lambda_value == lambda_policy)
    rows, length = mask_NT.shape
    step = max(1, rows) if mask_NT.is_cuda else max(1, CPU_PASS // max(1, length))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        mask, rewards, values = mask_NT[part], rewards_NT[part].double(), values_NT[part].double()
        walk = (mask, _steps(mask), None if bootstrap_N is None else bootstrap_N[part].double(), gamma)
        returns = _lambda_return(rewards, values, _rows(lambda_value, part), *walk)
        target = returns if one_lambda else _lambda_return(rewards, values, _rows(lambda_policy, part), *walk)
        result.returns_NT[part] = torch.where(mask, returns, 0.0)
        result.advantages_NT[part] = torch.where(mask, target - values, 0.0)
    return result


def discounted_returns(rewards_NT: Tensor, mask_NT: Tensor, gamma: float) -> Tensor:
    """Return-to-go R_k = r_k + gamma * R_{k+1} over the tokens of the mask: GAE with a critic of zeros and lambda 1."""
    zeros_NT = torch.zeros_like(rewards_NT)
    return gae(rewards_NT, zeros_NT, mask_NT, gamma=gamma, lambda_value=1.0, lambda_policy=1.0).returns_NT


def length_adaptive_lambda(mask_NT: Tensor, alpha: float) -> Tensor:
    """Length-adaptive GAE (VAPO, Yue et al. 2025): lambda = 1 - 1 / (alpha * n) for n tokens, 0 up to alpha * n = 1."""
    return 1.0 - 1.0 / (alpha * mask_NT.sum(dim=1).double()).clamp(min=1.0)


def place_last(reward_N: Tensor, mask_NT: Tensor) -> Tensor:
    """Put a sample's scalar reward on the last token that the policy wrote; rows without one receive nothing."""
    column_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    last_N1 = torch.where(mask_NT, column_T, -1).amax(dim=1, keepdim=True)
    return torch.where(column_T == last_N1, reward_N[:, None], 0.0)


def _lambda_return(
    rewards_NT: Tensor,
    values_NT: Tensor,
    lambda_: float | Tensor,
    mask_NT: Tensor,
    steps_NT: Tensor | None,
    bootstrap_N: Tensor | None,
    gamma: float,
) -> Tensor:
    """r + gamma * h_next (see `gae`); garbage outside the mask."""
    rows, length = mask_NT.shape
    lambda_N1 = torch.as_tensor(lambda_, dtype=torch.float64, device=mask_NT.device).reshape(-1, 1)
    h_NT = rewards_NT.new_zeros(rows, padded_length(length + 2))
    x_NT = torch.lerp(values_NT, rewards_NT, lambda_N1)
    if steps_NT is None:
        torch.where(mask_NT, x_NT, h_NT.new_zeros(()), out=h_NT[:, 1 : length + 1])
    else:
        h_NT.scatter_(1, torch.where(mask_NT, steps_NT, 0), x_NT)
        h_NT[:, 0] = 0.0
    if bootstrap_N is not None:
        h_NT.scatter_(1, _last(mask_NT, steps_NT) + 1, bootstrap_N[:, None])
    h_NT = suffix_sum_inplace(h_NT, gamma * lambda_N1)
    next_h_NT = h_NT[:, 2 : length + 2] if steps_NT is None else h_NT[:, 1:].gather(1, steps_NT)
    return torch.add(rewards_NT, next_h_NT, alpha=gamma)


def _rows(lambda_: float | Tensor, part: slice) -> float | Tensor:
    return lambda_[part] if isinstance(lambda_, Tensor) else lambda_


def _steps(mask_NT: Tensor) -> Tensor | None:
    """Time step of every token, counted over the mask from 1; column 0 is for what is not a step.

    None where no row has a hole: then a token's column + 1 serves as its step, and nothing needs to move.
    """
    starts_N = (mask_NT[:, 1:] > mask_NT[:, :-1]).sum(dim=1) + mask_NT[:, :1].sum(dim=1)
    return mask_NT.cumsum(dim=1) if bool((starts_N > 1).any()) else None


def _last(mask_NT: Tensor, steps_NT: Tensor | None) -> Tensor:
    """Step of the last token, as [N, 1]; 0 for a row without tokens."""
    if steps_NT is not None:
        return steps_NT[:, -1:]
    column_T = torch.arange(1, mask_NT.shape[1] + 1, device=mask_NT.device)
    return torch.where(mask_NT, column_T, 0).amax(dim=1, keepdim=True)
