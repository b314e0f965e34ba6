"""Importance weights, rejection and mismatch against plain Python per token."""

import math

import pytest
import torch
from torch import Tensor

from tandem.algorithms.correction import CorrectionOptions, importance_weights, mismatch_sums, sequence_prob_error
from tandem.algorithms.layout import Layout
from tandem.algorithms.rollout_correction import Rejection, rejection_mask, rollout_weights


def batch() -> tuple[Tensor, Tensor, Layout]:
    generator = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(40, dtype=torch.float64, generator=generator) * 2
    policy = behaviour + 0.4 * torch.randn(40, dtype=torch.float64, generator=generator)
    sample = torch.arange(40) % 5
    mask = (torch.rand(40, generator=generator) < 0.6) & (sample != 2)
    return policy, behaviour, Layout(mask, sample, 5)


def tokens_of(layout: Layout, sample: int) -> list[int]:
    return [p for p in range(40) if layout.mask_P[p] and layout.sample_P[p] == sample]


@pytest.mark.parametrize("kind", ["plain", "tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("sequence_level", [False, True])
def test_importance_weights_equal_their_definition(kind: str, sequence_level: bool) -> None:
    policy, behaviour, layout = batch()
    options = CorrectionOptions(kind, 1.2, 0.8, sequence_level)
    got = importance_weights(policy, behaviour, layout, options)
    expected, outside = [0.0] * 40, 0
    for sample in range(5):
        logs = {p: float(policy[p] - behaviour[p]) for p in tokens_of(layout, sample)}
        mean = math.exp(sum(logs.values()) / max(1, len(logs)))
        outside += kind == "seq-mask-tis" and bool(logs) and not 0.8 <= mean <= 1.2
        for p, log in logs.items():
            weight = math.exp(sum(logs.values()) if sequence_level else log)
            beyond = not 0.8 <= weight <= 1.2
            outside += kind in ("tis", "icepop") and beyond
            expected[p] = {
                "plain": weight,
                "tis": min(max(weight, 0.8), 1.2),
                "icepop": 0.0 if beyond else weight,
                "seq-mask-tis": weight if 0.8 <= mean <= 1.2 else 0.0,
            }[kind]
    assert got.weights_P.tolist() == pytest.approx(expected)
    assert got.out_of_bounds == outside
    assert got.units == (4 if kind == "seq-mask-tis" else layout.mask_P.sum())


def test_equal_laws_have_weight_one_and_no_mismatch() -> None:
    policy, _, layout = batch()
    got = importance_weights(policy, policy, layout, CorrectionOptions("tis", 1.0, 1.0))
    assert torch.equal(got.weights_P, layout.mask_P.double())
    sums = mismatch_sums(policy, policy, layout)
    assert sums.pop("token_mult_prob_error") == layout.mask_P.sum()
    assert all(abs(float(x)) < 1e-12 for x in sums.values())


def test_a_bounded_kind_needs_its_bound() -> None:
    policy, behaviour, layout = batch()
    with pytest.raises(ValueError, match='kind "tis" needs an upper bound'):
        importance_weights(policy, behaviour, layout, CorrectionOptions("tis", None))


def test_sequence_error_is_the_mean_over_a_samples_tokens() -> None:
    policy, behaviour, layout = batch()
    got = sequence_prob_error(policy, behaviour, layout).tolist()
    for sample in range(5):
        errors = [math.exp(abs(float(policy[p] - behaviour[p]))) for p in tokens_of(layout, sample)]
        assert got[sample] == pytest.approx(sum(errors) / len(errors) if errors else 0.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e6])
def test_poison_in_masked_slots_changes_no_bit(poison: float) -> None:
    policy, behaviour, layout = batch()
    spoiled = [torch.where(layout.mask_P, x, poison) for x in (policy, behaviour)]
    for kind in ("plain", "tis", "icepop", "seq-mask-tis"):
        options = CorrectionOptions(kind, 1.2, 0.8)
        expected = importance_weights(policy, behaviour, layout, options)
        for a, b in zip(importance_weights(*spoiled, layout, options), expected, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(sequence_prob_error(*spoiled, layout), sequence_prob_error(policy, behaviour, layout))
    assert mismatch_sums(*spoiled, layout) == mismatch_sums(policy, behaviour, layout)
    ratio = torch.where(layout.mask_P, policy - behaviour, poison)
    rules = [Rejection("k3", "max", 0.1), Rejection("k1", "mean", 1.2, 0.8)]
    assert torch.equal(rejection_mask(ratio, layout, rules), rejection_mask(policy - behaviour, layout, rules))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_rollout_weights_have_mean_one(level: str) -> None:
    policy, behaviour, layout = batch()
    got = rollout_weights(policy - behaviour, layout, level=level, high=1.5, normalize=True)
    if level == "token":
        assert float(got.weights_P.sum() / layout.mask_P.sum()) == pytest.approx(1.0)
    else:
        assert float(layout.mean(got.weights_P).sum() / 4) == pytest.approx(1.0)
    assert 0 < got.effective_sample_size <= 1


@pytest.mark.parametrize("level", ["token", "sum", "mean", "max"])
def test_rejection_keeps_or_drops_what_its_rule_says(level: str) -> None:
    policy, behaviour, layout = batch()
    kept = rejection_mask(policy - behaviour, layout, [Rejection("k3", level, 0.1)])
    reduce = {"sum": sum, "max": max, "mean": lambda x: sum(x) / len(x)}.get(level)
    for sample in range(5):
        places = tokens_of(layout, sample)
        logs = [float(policy[p] - behaviour[p]) for p in places]
        k3 = [math.exp(log) - 1 - log for log in logs]
        expected = [x <= 0.1 for x in k3] if reduce is None else [bool(k3) and reduce(k3) <= 0.1] * len(places)
        assert kept[places].tolist() == expected
    assert not kept[~layout.mask_P].any()


def test_rules_are_joined_by_and_and_k1_needs_two_bounds() -> None:
    policy, behaviour, layout = batch()
    one, two = Rejection("k1", "token", 1.3, 0.7), Rejection("k2", "mean", 0.05)
    both = rejection_mask(policy - behaviour, layout, [one, two])
    apart = [rejection_mask(policy - behaviour, layout, [rule]) for rule in (one, two)]
    assert torch.equal(both, apart[0] & apart[1])
    with pytest.raises(ValueError, match="k1 bounds the ratio on both sides"):
        rejection_mask(policy - behaviour, layout, [Rejection("k1", "token", 1.3)])
