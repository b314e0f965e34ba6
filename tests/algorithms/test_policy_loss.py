"""The policy loss against plain Python per token; clips, cuts, poison, order, and what PPO must be equal to."""

import math

import pytest
import torch
from torch import Tensor

from tandem.algorithms.correction import CorrectionOptions
from tandem.algorithms.layout import Layout, averaging_weights
from tandem.algorithms.policy_loss import PolicyLossOptions, entropy_loss, nll_loss, policy_loss
from tandem.testing import (
    check_loss,
    first_ratio_gives_the_policy_gradient,
    loss_columns,
    loss_is_zero_on_empty,
    masked_tokens_do_not_matter,
)
from tandem.testing.losses import Loss
from tandem.testing.tensors import Columns

SAMPLES = 6
VARIANTS = {
    "ppo": PolicyLossOptions(),
    "clip higher, dual clip": PolicyLossOptions(clip_high=0.28, dual_clip=3.0),
    "gspo": PolicyLossOptions(ratio="sequence", clip_low=0.03, clip_high=0.04),
    "gspo token": PolicyLossOptions(ratio="sequence_token"),
    "on policy": PolicyLossOptions(on_policy=True),
    "cispo": PolicyLossOptions(objective="cispo"),
    "reinforce": PolicyLossOptions(objective="reinforce"),
    "sapo": PolicyLossOptions(objective="sapo"),
    "geo mean": PolicyLossOptions(objective="geo_mean", clip_low=0.4, clip_high=0.4),
    "tis": PolicyLossOptions(correction=CorrectionOptions("tis", 1.5, 0.5)),
    "icepop": PolicyLossOptions(correction=CorrectionOptions("icepop", 1.5, 0.5)),
    "seq-mask-tis": PolicyLossOptions(correction=CorrectionOptions("seq-mask-tis", 1.2, 0.8)),
    "gspo, plain weights": PolicyLossOptions(
        ratio="sequence", correction=CorrectionOptions("plain", sequence_level=True)
    ),
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


class Batch:
    """Tokens of six samples, one of them fully masked, in random order."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sample = torch.randint(0, SAMPLES, (80,), generator=generator)
        self.mask = (torch.rand(80, generator=generator) < 0.7) & (self.sample != 3)
        current = -torch.rand(80, dtype=dtype, generator=generator) * 3
        old = current + 0.3 * torch.randn(80, dtype=dtype, generator=generator)
        behaviour = old + 0.3 * torch.randn(80, dtype=dtype, generator=generator)
        advantages = torch.randn(80, dtype=dtype, generator=generator)
        self.columns = [current, old, behaviour, advantages]

    def loss(self, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
        """Loss and gradient, with sample-mean weights."""
        layout = Layout(self.mask, self.sample, SAMPLES)
        weights = averaging_weights(layout, "sequence_mean", dtype=self.columns[0].dtype).weights_P
        current, old, behaviour, advantages = self.columns
        current = current.clone().requires_grad_()
        result = policy_loss(current, old, behaviour, advantages, weights, layout, options)
        (gradient,) = torch.autograd.grad(result.loss, current)
        return result.loss.detach(), gradient


def ppo_token(x: float, old: float, advantage: float, options: PolicyLossOptions) -> float:
    ratio = math.exp(x - old)
    clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * options.dual_clip) if options.dual_clip and advantage < 0 else loss


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_ppo_equals_its_definition(dual_clip: float | None) -> None:
    batch = Batch()
    options = PolicyLossOptions(clip_low=0.1, clip_high=0.3, dual_clip=dual_clip)
    count = [int((batch.mask & (batch.sample == s)).sum()) for s in range(SAMPLES)]
    current, old, _, advantages = (column.tolist() for column in batch.columns)
    expected = sum(
        ppo_token(current[p], old[p], advantages[p], options) / count[batch.sample[p]]
        for p in range(80)
        if batch.mask[p]
    )
    assert float(batch.loss(options)[0]) == pytest.approx(expected)


def test_gspo_equals_its_definition() -> None:
    batch, options = Batch(), VARIANTS["gspo"]
    current, old, _, advantages = batch.columns
    expected = 0.0
    for s in range(SAMPLES):
        mine = batch.mask & (batch.sample == s)
        if mine.any():
            ratio = float((current - old)[mine].mean().exp())
            clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
            expected += float(torch.maximum(-advantages[mine] * ratio, -advantages[mine] * clipped).mean())
    assert float(batch.loss(options)[0]) == pytest.approx(expected)


def test_where_the_clip_counts_there_is_no_gradient() -> None:
    x = torch.tensor([0.5, -0.5, 0.5, -0.5, 3.0]).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    layout = Layout(torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.int64), 1)
    zeros, ones = torch.zeros(5), torch.ones(5)
    result = policy_loss(x, zeros, zeros, advantages, ones, layout, PolicyLossOptions(dual_clip=3.0))
    result.loss.backward()
    assert x.grad is not None
    assert [bool(g) for g in x.grad] == [False, False, True, True, False]
    assert result.sums["clip_fraction"] == 2
    assert result.sums["dual_clip_fraction"] == 1


def as_loss(options: PolicyLossOptions) -> Loss:
    """The policy loss in the form that the invariance kit takes."""

    def loss(columns: Columns, layout: Layout) -> Tensor:
        names = ("logprobs_P", "old_logprobs_P", "gen_logprobs_P", "advantages_P", "weights_P")
        return policy_loss(*(columns[name] for name in names), layout, options).loss

    return loss


@pytest.mark.parametrize("name", [name for name, options in VARIANTS.items() if options.correction is None])
def test_first_ratios_are_one_and_the_gradient_is_that_of_reinforce(name: str) -> None:
    options = VARIANTS[name]
    one_ratio = options.ratio == "sequence" or options.objective == "geo_mean"
    first_ratio_gives_the_policy_gradient(as_loss(options), *loss_columns(), by_sample=one_ratio)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_tokens_cuts_order_and_empty_batches(options: PolicyLossOptions, dtype: torch.dtype) -> None:
    columns, layout = loss_columns(dtype=dtype)
    masked_tokens_do_not_matter(as_loss(options), columns, layout)
    loss_is_zero_on_empty(as_loss(options), columns, layout)
    if dtype == torch.float64:
        check_loss(as_loss(options))


def test_on_policy_weights_come_from_the_current_policy() -> None:
    batch = Batch()
    correction = CorrectionOptions("plain")
    got = batch.loss(PolicyLossOptions(on_policy=True, correction=correction))
    batch.columns[1] = batch.columns[0]
    expected = batch.loss(PolicyLossOptions(correction=correction))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_metrics_are_sums_over_tokens() -> None:
    batch = Batch()
    layout = Layout(batch.mask, batch.sample, SAMPLES)
    current, old, behaviour, advantages = batch.columns
    result = policy_loss(current, old, behaviour, advantages, torch.ones(80), layout, PolicyLossOptions())
    ratio = (current - old).exp()[batch.mask]
    torch.testing.assert_close(result.sums["ratio"], ratio.sum())
    torch.testing.assert_close(result.sums["approx_kl_k1"], (old - current)[batch.mask].sum())
    torch.testing.assert_close(result.sums["approx_kl_k3"], (ratio - 1 - ratio.log()).sum())
    assert result.minima["ratio"] == ratio.min()
    assert result.maxima["ratio_clipped"] == 1.2
    assert result.tokens == batch.mask.sum()
    assert result.sums["importance_weight"] == batch.mask.sum()


def test_nll_takes_the_tokens_of_rewarded_samples() -> None:
    batch = Batch()
    layout = Layout(batch.mask, batch.sample, SAMPLES)
    reward = torch.tensor([1.0, 0.0, -1.0, 1.0, 0.5, 0.0])
    x = torch.where(batch.mask, batch.columns[0], torch.nan).requires_grad_()
    loss, count = nll_loss(x, reward, layout)
    chosen = batch.mask & (reward[batch.sample] > 0)
    torch.testing.assert_close(loss.detach(), -batch.columns[0][chosen].sum())
    assert count == chosen.sum()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(chosen, -1.0, 0.0).double())


def test_the_entropy_bonus_raises_entropy_on_the_mask_only() -> None:
    layout = Layout(torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), 2)
    entropy = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    loss = entropy_loss(entropy, torch.tensor([0.5, float("nan"), 1.0]), layout)
    assert loss == -2.5
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.5, 0.0, -1.0]
