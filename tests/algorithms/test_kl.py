"""KL estimates against the exact divergence, their gradients at clamps, and the two brakes."""

import math

import pytest
import torch

from tandem.algorithms.kl import (
    AdaptiveKl,
    KlOptions,
    exceeds_target_kl,
    kl_estimate,
    kl_loss,
    subtract_kl,
    update_kl,
)
from tandem.algorithms.layout import Layout


def laws() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    return torch.log_softmax(logits[0], 0), torch.log_softmax(logits[1] * 0.7, 0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_under_the_policy_is_the_divergence(kind: str) -> None:
    policy, reference = laws()
    exact = (policy.exp() * (policy - reference)).sum()
    mean = (policy.exp() * kl_estimate(policy, reference, KlOptions(kind, None, None))).sum()
    torch.testing.assert_close(mean, exact)


@pytest.mark.parametrize("kind", ["k1+", "k2", "k3+"])
def test_the_gradient_under_the_policy_is_that_of_the_divergence(kind: str) -> None:
    policy, reference = laws()
    logits = policy.clone().requires_grad_()
    x = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((x.exp() * (x - reference)).sum(), logits, retain_graph=True)
    estimate = kl_estimate(x, reference, KlOptions(kind, None, None))
    (got,) = torch.autograd.grad((policy.exp() * estimate).sum(), logits)
    torch.testing.assert_close(got, exact)


def test_k3_with_its_score_function_term_has_that_gradient_too() -> None:
    policy, reference = laws()
    logits = policy.clone().requires_grad_()
    x = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((x.exp() * (x - reference)).sum(), logits, retain_graph=True)
    estimate = kl_estimate(x, reference, KlOptions("k3", None, None), weights=(x - x.detach()).exp())
    (got,) = torch.autograd.grad((policy.exp() * estimate).sum(), logits)
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("clamps", [(20.0, 10.0), (20.0, None), (None, 10.0)])
def test_beyond_a_clamp_there_is_no_gradient(kind: str, clamps: tuple[float | None, float | None]) -> None:
    x = torch.tensor([-30.0, -0.5, 0.0], requires_grad=True)
    reference = torch.tensor([0.0, -0.4, -30.0])
    kl = kl_estimate(x, reference, KlOptions(kind, *clamps), weights=(x - x.detach()).exp())
    assert clamps[1] is None or kl.abs().max() <= clamps[1]
    kl.sum().backward()
    assert x.grad is not None
    assert x.grad[0] == 0
    assert x.grad[2] == 0
    assert x.grad[1] != 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
def test_masked_tokens_add_nothing_to_the_loss_and_its_gradient(poison: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(30, generator=generator) < 0.5
    layout = Layout(mask, torch.arange(30) // 10, 3)
    columns = [torch.randn(30, generator=generator) for _ in range(4)]

    def loss_and_gradient(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        reference, weights, behaviour = others
        loss = kl_loss(x, reference, weights, layout, KlOptions(), behaviour_logprobs_P=behaviour)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    clean = loss_and_gradient(*columns)
    spoiled = loss_and_gradient(*(torch.where(mask, column, poison) for column in columns))
    assert all(torch.equal(a, b) for a, b in zip(clean, spoiled, strict=True))
    assert not clean[1][~mask].any()


def test_kl_in_the_reward_is_taken_off_the_tokens_of_the_mask() -> None:
    mask = torch.tensor([[True, True, False]])
    got = subtract_kl(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[2.0, 4.0, float("nan")]]), mask, 0.1)
    torch.testing.assert_close(got, torch.tensor([[-0.2, 0.6, 0.0]]))


def test_the_adaptive_coefficient_steers_to_its_target() -> None:
    state = AdaptiveKl(0.1, target=1.0, horizon=100)
    for _ in range(200):
        state = update_kl(state, 0.3 / state.coefficient, samples=50)
    assert state.coefficient == pytest.approx(0.3, rel=0.01)
    assert update_kl(AdaptiveKl(1.0, 1.0, 100), 1e9, 100).coefficient == pytest.approx(1.2)


def test_the_target_stops_beyond_its_tolerance_and_at_nan() -> None:
    assert not exceeds_target_kl(0.015, 0.01)
    assert exceeds_target_kl(0.0151, 0.01)
    assert exceeds_target_kl(math.nan, 0.01)
    assert not exceeds_target_kl(1e9, None)
