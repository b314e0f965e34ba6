"""Generalised advantage estimation over the tokens the policy wrote, with one lambda for the critic and one for the policy."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.scan import suffix_sum

# Elements of one pass. On a CPU a pass should stay inside the L2 cache (measured); a GPU wants all rows in one launch.
CPU_PASS = 2**17


class Gae(NamedTuple):
    """Advantages (policy lambda) and returns (value lambda); both exactly 0 outside the mask."""

    advantages_NT: Tensor
    returns_NT: Tensor


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
    """GAE (Schulman et al. 2016, eq. 11-16), with decoupled lambdas (VC-PPO, Yuan et al. 2025; VAPO, Yue et al. 2025).

    Only the mask positions p_0 < ... < p_{n-1} of a row are time steps; holes (tool output, padding) are skipped:

        delta_k  = r_k + gamma * V_{k+1} - V_k,     V_n = bootstrap (0 unless the sample was truncated)
        A_k      = sum_l (gamma * lambda)^l * delta_{k+l}
        return_k = A_k + V_k

    Computed as the lambda-return G_k = r_k + gamma * h_{k+1} with h_k = (1-lambda) V_k + lambda G_k, hence
    h_k = [(1-lambda) V_k + lambda r_k] + gamma * lambda * h_{k+1}: one suffix sum over compacted rows, and A = G - V.
    The sum runs in float64, so a float32 result is exact to its last digits at any length. Lambdas: number or [N].
    Rewards and values are not differentiated.
    """
    if not rewards_NT.shape == values_NT.shape == mask_NT.shape or mask_NT.dim() != 2:
        raise ValueError(
            "gae wants rewards, values and mask of one shape [N, T], got "
            f"{tuple(rewards_NT.shape)}, {tuple(values_NT.shape)}, {tuple(mask_NT.shape)}."
        )
    columns = (_column(value, rewards_NT) for value in (lambda_value, lambda_policy, bootstrap_N))
    lambda_value_N1, lambda_policy_N1, bootstrap_N1 = columns
    one_lambda = isinstance(lambda_value, float) and lambda_value == lambda_policy
    result = Gae(torch.empty_like(values_NT), torch.empty_like(values_NT))
    rows, length = mask_NT.shape
    step = rows if mask_NT.is_cuda else max(1, CPU_PASS // max(1, length))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        mask = mask_NT[part]
        rewards, values = rewards_NT[part].double(), values_NT[part].double()
        walk = _Walk(mask.cumsum(1), mask, bootstrap_N1[part], gamma)
        returns = walk.returns(rewards, values, lambda_value_N1[part])
        policy_returns = returns if one_lambda else walk.returns(rewards, values, lambda_policy_N1[part])
        result.returns_NT[part] = torch.where(mask, returns, 0.0)
        result.advantages_NT[part] = torch.where(mask, policy_returns - values, 0.0)
    return result
