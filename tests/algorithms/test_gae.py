"""GAE against the O(T^2) definition, and what must not change it: holes, poison, rows, how rows are cut."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from tandem.algorithms.gae import discounted_returns, gae, length_adaptive_lambda, place_last


def by_definition(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambda_N: Tensor, bootstrap_N: Tensor
) -> Tensor:
    """A_k = sum_l (gamma lambda)^l delta_{k+l} over the mask positions of every row, in float64."""
    advantages = torch.zeros(values.shape, dtype=torch.float64)
    for row in range(len(values)):
        positions = mask[row].nonzero().squeeze(1)
        if len(positions) == 0:
            continue
        r, v = rewards[row, positions].double(), values[row, positions].double()
        delta = r + gamma * torch.cat([v[1:], bootstrap_N[row : row + 1].double()]) - v
        step = torch.arange(len(positions))
        power = (step - step[:, None]).clamp(min=0)
        weights = torch.where(step >= step[:, None], (gamma * lambda_N[row]) ** power, 0.0)
        advantages[row, positions] = weights @ delta
    return advantages


def batch(rows: int, length: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, and a mask with tool turns in the middle and at the end, an empty row and a full one."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, length, dtype=dtype, generator=generator) for _ in range(2))
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, -2:] = False
    mask[0], mask[1] = False, True
    return rewards, values, mask


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lambda_", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("truncated", [False, True])
def test_equals_the_definition(gamma: float, lambda_: float, truncated: bool) -> None:
    rewards, values, mask = batch(5, 90, seed=1)
    bootstrap = torch.tensor([3.0, -2.0, 0.0, 1.5, 0.5], dtype=torch.float64) * truncated
    lambdas = torch.full((5,), lambda_, dtype=torch.float64)
    got = gae(
        rewards,
        values,
        mask,
        gamma=gamma,
        lambda_value=lambda_,
        lambda_policy=lambda_,
        bootstrap_N=bootstrap if truncated else None,
    )
    expected = by_definition(rewards, values, mask, gamma, lambdas, bootstrap)
    torch.testing.assert_close(got.advantages_NT, expected, rtol=1e-12, atol=1e-12)
    returns = torch.where(mask, expected + values, 0.0)
    torch.testing.assert_close(got.returns_NT, returns, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("truncated", [False, True])
def test_rows_without_holes_take_the_short_way_to_the_same_numbers(truncated: bool) -> None:
    rewards, values, _ = batch(5, 90, seed=2)
    mask = (torch.arange(90) >= torch.tensor([[0], [10], [89], [90], [3]])) & (
        torch.arange(90) < torch.tensor([[90], [50], [90], [90], [4]])
    )
    bootstrap = torch.tensor([3.0, -2.0, 0.7, 1.5, 0.5], dtype=torch.float64)
    lambdas = torch.full((5,), 0.9, dtype=torch.float64)
    got = gae(
        rewards,
        values,
        mask,
        gamma=0.97,
        lambda_value=0.9,
        lambda_policy=0.9,
        bootstrap_N=bootstrap if truncated else None,
    )
    expected = by_definition(rewards, values, mask, 0.97, lambdas, bootstrap * truncated)
    torch.testing.assert_close(got.advantages_NT, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("lambda_", [0.95, 1.0])
def test_is_exact_at_16k_tokens_without_any_decay(dtype: torch.dtype, tolerance: float, lambda_: float) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 16384, dtype=dtype, generator=generator)
    rewards = torch.randn(2, 16384, dtype=dtype, generator=generator)
    mask = torch.ones(2, 16384, dtype=torch.bool)
    mask[1, 1000:5000] = False
    got = gae(rewards, values, mask, gamma=1.0, lambda_value=1.0, lambda_policy=lambda_)
    assert got.advantages_NT.dtype == dtype
    # The definition in its recurrent form, exactly rounded additions in float64.
    for row in range(2):
        positions = mask[row].nonzero().squeeze(1)
        r, v = rewards[row, positions].double(), values[row, positions].double()
        delta = r + torch.cat([v[1:], v.new_zeros(1)]) - v
        expected, advantage = torch.zeros_like(delta), 0.0
        for k, step in reversed(list(enumerate(delta.tolist()))):
            expected[k] = advantage = step + lambda_ * advantage
        scale = expected.abs().max()
        error = (got.advantages_NT[row, positions].double() - expected).abs().max() / scale
        assert error < tolerance
        returns = r.flip(0).cumsum(0).flip(0)
        assert (got.returns_NT[row, positions].double() - returns).abs().max() / returns.abs().max() < tolerance


def test_the_critic_and_the_policy_have_their_own_lambdas() -> None:
    rewards, values, mask = batch(4, 40, seed=4)
    lambda_policy = length_adaptive_lambda(mask, 0.2)
    both = gae(rewards, values, mask, gamma=0.99, lambda_value=1.0, lambda_policy=lambda_policy)
    value_only = gae(rewards, values, mask, gamma=0.99, lambda_value=1.0, lambda_policy=1.0)
    assert torch.equal(both.returns_NT, value_only.returns_NT)
    expected = by_definition(rewards, values, mask, 0.99, lambda_policy, torch.zeros(4))
    torch.testing.assert_close(both.advantages_NT, expected, rtol=1e-12, atol=1e-12)


def test_length_adaptive_lambda_is_zero_for_short_rows() -> None:
    mask = torch.arange(100) < torch.tensor([[0], [20], [40], [100]])
    expected = torch.tensor([0.0, 0.0, 0.5, 0.8], dtype=torch.float64)
    torch.testing.assert_close(length_adaptive_lambda(mask, 0.05), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("holes", [False, True])
def test_poison_in_masked_slots_changes_no_bit(poison: float, holes: bool) -> None:
    rewards, values, mask = batch(6, 70, seed=5, dtype=torch.float32)
    if not holes:
        mask = torch.arange(70) < torch.arange(6)[:, None] * 14
    clean = gae(rewards, values, mask, gamma=0.9, lambda_value=1.0, lambda_policy=0.8)
    spoiled = [torch.where(mask, x, poison) for x in (rewards, values)]
    assert_bit_equal(clean, gae(*spoiled, mask, gamma=0.9, lambda_value=1.0, lambda_policy=0.8))
    assert torch.equal(clean.advantages_NT, torch.where(mask, clean.advantages_NT, 0.0))


def test_holes_take_no_step() -> None:
    rewards, values, mask = batch(6, 70, seed=6)
    packed = [torch.zeros_like(x) for x in (rewards, values)]
    packed_mask = torch.arange(70) < mask.sum(dim=1, keepdim=True)
    for into, x in zip(packed, (rewards, values), strict=True):
        into[packed_mask] = x[mask]
    with_holes = gae(rewards, values, mask, gamma=0.9, lambda_value=0.9, lambda_policy=0.8)
    without = gae(*packed, packed_mask, gamma=0.9, lambda_value=0.9, lambda_policy=0.8)
    for a, b in zip(with_holes, without, strict=True):
        torch.testing.assert_close(a[mask], b[packed_mask], rtol=1e-12, atol=1e-12)


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, values, mask = batch(6, 70, seed=7, dtype=torch.float32)
    whole = gae(rewards, values, mask, gamma=0.9, lambda_value=1.0, lambda_policy=0.8)
    monkeypatch.setattr("tandem.algorithms.gae.CPU_PASS", 1)
    assert_bit_equal(whole, gae(rewards, values, mask, gamma=0.9, lambda_value=1.0, lambda_policy=0.8))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    moved = gae(rewards[order], values[order], mask[order], gamma=0.9, lambda_value=1.0, lambda_policy=0.8)
    assert_bit_equal([x[order] for x in whole], moved)


def test_without_a_critic_and_without_decay_it_is_reinforce() -> None:
    reward, (_, values, mask) = torch.tensor([1.0, -1.0, 0.5, 2.0]), batch(4, 30, seed=8, dtype=torch.float32)
    got = gae(place_last(reward, mask), torch.zeros_like(values), mask, gamma=1.0, lambda_value=1.0, lambda_policy=1.0)
    reinforce = torch.where(mask, reward[:, None], 0.0)
    assert_bit_equal(got, (reinforce, reinforce))


def test_a_batch_without_any_token_gives_zeros() -> None:
    rewards, values, mask = batch(3, 20, seed=9)
    got = gae(rewards, values, torch.zeros_like(mask), gamma=0.9, lambda_value=0.9, lambda_policy=0.9)
    assert_bit_equal(got, (torch.zeros_like(values), torch.zeros_like(values)))


def test_the_reward_lands_on_the_last_token_the_policy_wrote() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    placed = place_last(torch.tensor([2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 0, 2, 0], [0] * 6, [0, 0, 0, 0, 0, 4]]


def test_discounted_returns_count_steps_over_the_mask() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 1]], dtype=torch.bool)
    rewards = torch.tensor([[1.0, 9.0, 2.0, 9.0, 4.0]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 0.0, 4.0]]


def assert_bit_equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
