"""From columns to advantages: order of rewards, who is left out, and that masked slots never matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.algorithms.estimate import Columns, estimate
from tandem.config.algorithm import (
    Gae,
    Gdpo,
    Grpo,
    GrpoEstimator,
    Opd,
    Overlong,
    PolicyLoss,
    Ppo,
    RawReward,
    ReinforcePlusPlus,
    RewardScaling,
    Rloo,
    StopProperly,
)
from tandem.testing import check_estimator

N, T = 6, 9


def columns(**changes: object) -> Columns:
    """Six samples in three groups, with holes, and one that was cut off."""
    draw = torch.Generator().manual_seed(3)
    mask_NT = torch.rand(N, T, generator=draw) < 0.7
    mask_NT[:, 0] = False
    mask_NT[:, 3] = True
    made = Columns(
        reward_N=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
        components={"a": torch.rand(N, generator=draw), "b": torch.rand(N, generator=draw)},
        truncated_N=torch.tensor([False, False, True, False, False, False]),
        trained_N=torch.ones(N, dtype=torch.bool),
        group_N=torch.tensor([4, 4, 7, 7, 9, 9]),
        mask_NT=mask_NT,
        gen_logprobs_NT=-torch.rand(N, T, generator=draw),
        old_logprobs_NT=-torch.rand(N, T, generator=draw),
        ref_logprobs_NT=-torch.rand(N, T, generator=draw),
        values_NT=torch.randn(N, T, generator=draw),
        bootstrap_N=None,
    )
    return replace(made, **changes)


ESTIMATORS = [
    Gae(),
    Gae(gae_lambda=0.9, gae_gamma=0.99, normalize_advantages=False),
    Gae(length_adaptive_alpha=0.5),
    GrpoEstimator(),
    GrpoEstimator(use_leave_one_out_baseline=True, normalize_rewards=False),
    Rloo(),
    ReinforcePlusPlus(),
    ReinforcePlusPlus(minus_baseline=False),
    Gdpo(),
    RawReward(),
    RawReward(normalize_advantages=True),
    Opd(),
]
LOSS = PolicyLoss(reference_policy_kl_penalty=0.1, use_kl_in_reward=True)


def as_estimator(algorithm: Ppo) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """From columns to advantages and returns, in the form that the invariance kit takes."""

    def estimated(given: Mapping[str, Tensor]) -> list[Tensor]:
        components = {"a": given["a_N"], "b": given["b_N"]}
        known = {name: x for name, x in given.items() if name not in ("a_N", "b_N")}
        result = estimate(columns(**known, components=components), algorithm, LOSS, 0.1)
        return [result.advantages_NT, *([result.returns_NT] if result.returns_NT is not None else [])]

    return estimated


def tensors(given: Columns) -> dict[str, Tensor]:
    """The columns by name, components among them."""
    plain = {name: x for name, x in vars(given).items() if isinstance(x, Tensor)}
    return plain | {f"{name}_N": part_N for name, part_N in given.components.items()}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.name)
@pytest.mark.parametrize("filtering", [False, True])
def test_masked_slots_order_and_empty_batches(estimator, filtering: bool):
    threshold = 10.0 if filtering else None
    algorithm = Ppo(adv_estimator=estimator, overlong_filtering=filtering, seq_logprob_error_threshold=threshold)
    check_estimator(as_estimator(algorithm), tensors(columns()))


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.name)
@pytest.mark.parametrize("poison", [float("nan"), 1e6])
def test_masked_slots_never_matter_to_a_metric(estimator, poison: float):
    clean, per_token = columns(), ("gen_logprobs_NT", "old_logprobs_NT", "ref_logprobs_NT", "values_NT")
    dirty = replace(clean, **{name: torch.where(clean.mask_NT, getattr(clean, name), poison) for name in per_token})
    algorithm = Ppo(adv_estimator=estimator, overlong_filtering=True, seq_logprob_error_threshold=10.0)
    ours, theirs = (estimate(c, algorithm, LOSS, 0.1) for c in (clean, dirty))
    assert ours.metrics == theirs.metrics


def test_rewards_are_scaled_before_they_are_shaped():
    algorithm = Grpo(
        adv_estimator=RawReward(),
        reward_scaling=RewardScaling(target_min=-1.0, target_max=1.0),
        reward_shaping=StopProperly(stop_properly_penalty_coef=0.5),
    )
    result = estimate(columns(), algorithm, PolicyLoss(), 0.0)
    per_sample = result.advantages_NT.sum(1) / columns().mask_NT.sum(1)
    assert per_sample.tolist() == pytest.approx([1.0, -1.0, -0.5, 1.0, 1.0, 1.0])


def test_the_overlong_penalty_counts_the_tokens_the_policy_wrote():
    shaping = Overlong(max_response_length=5, overlong_buffer_length=4, overlong_buffer_penalty=1.0)
    result = estimate(columns(), Grpo(adv_estimator=RawReward(), reward_shaping=shaping), PolicyLoss(), 0.0)
    lengths = columns().mask_NT.sum(1)
    expected = columns().reward_N - ((lengths - 1) / 4).clamp(0, 1)
    torch.testing.assert_close(result.advantages_NT.sum(1) / lengths, expected)


def test_a_filtered_sample_is_in_no_loss_and_in_no_baseline():
    result = estimate(columns(), Grpo(overlong_filtering=True, adv_estimator=Rloo()), PolicyLoss(), 0.0)
    assert not result.trained_NT[2].any()
    assert (result.advantages_NT[2] == 0).all()
    assert (result.advantages_NT[3] == 0).all(), "alone in its group now, it has nothing to compare with"
    assert result.metrics["rollout/filtered_overlong"].value == 1


def test_a_sample_that_the_engine_and_the_trainer_disagree_on_is_masked():
    far = columns().gen_logprobs_NT.clone()
    far[1] -= 9.0
    result = estimate(columns(gen_logprobs_NT=far), Ppo(seq_logprob_error_threshold=10.0), PolicyLoss(), 0.0)
    assert result.trained_NT.any(1).tolist() == [True, False, True, True, True, True]
    assert result.metrics["rollout/masked_by_logprob_error"].value == 1


def test_how_far_engine_and_trainer_are_apart_is_told_by_token_and_by_sample():
    here = columns()
    metrics = estimate(here, Ppo(seq_logprob_error_threshold=1.0001), PolicyLoss(), 0.0).metrics
    ratio_NT = (here.old_logprobs_NT - here.gen_logprobs_NT).abs().exp()
    samples = [ratio_NT[n][here.mask_NT[n]].mean().item() for n in range(N)]
    assert metrics["rollout/masked_by_logprob_error"].value == N, "those that are masked are told of too"
    assert metrics["rollout/token_mult_prob_error"].value == pytest.approx(ratio_NT[here.mask_NT].mean().item())
    assert metrics["rollout/seq_mult_prob_error_max"].value == pytest.approx(max(samples))
    assert metrics["rollout/seq_mult_prob_error_mean"].value == pytest.approx(sum(samples) / N)
    assert metrics["rollout/seq_mult_prob_error_min"].value == pytest.approx(min(samples))


def test_kl_in_the_reward_lowers_the_advantage_of_tokens_that_drifted():
    near = columns(ref_logprobs_NT=columns().old_logprobs_NT)
    plain = Gae(normalize_advantages=False)
    without, with_kl = (estimate(c, Ppo(adv_estimator=plain), LOSS, 0.1) for c in (near, columns()))
    assert with_kl.kl is not None
    assert with_kl.kl > 0
    assert with_kl.advantages_NT.sum() < without.advantages_NT.sum()


def test_ppo_without_knowledge_equals_reinforce():
    ignorant = columns(values_NT=torch.zeros(N, T))
    gae = estimate(ignorant, Ppo(adv_estimator=Gae(normalize_advantages=False)), PolicyLoss(), 0.0)
    reinforce = estimate(ignorant, Ppo(adv_estimator=RawReward()), PolicyLoss(), 0.0)
    torch.testing.assert_close(gae.advantages_NT, reinforce.advantages_NT)
