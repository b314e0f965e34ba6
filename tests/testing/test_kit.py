"""Each check of the invariance kit passes what is right and finds a fault that was planted for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.algorithms.layout import Layout
from tandem.testing import (
    check_estimator,
    check_loss,
    check_reward,
    estimator_is_deterministic,
    first_ratio_gives_the_policy_gradient,
    loss_columns,
    micro_batches_add_up,
    order_of_samples_does_not_matter,
    sample_columns,
)
from tandem.testing.losses import Loss
from tandem.testing.tensors import Columns


def centred(columns: Columns) -> Tensor:
    """The reward against the batch's mean, on the tokens of the mask."""
    mask_NT, reward_N = columns["mask_NT"], columns["reward_N"]
    return torch.where(mask_NT, (reward_N - reward_N.mean())[:, None], 0.0)


def multiplied(columns: Columns) -> Tensor:  # NaN * 0 is NaN
    return (columns["reward_N"][:, None] - columns["values_NT"]) * columns["mask_NT"]


def first_counts(columns: Columns) -> Tensor:
    return torch.where(columns["mask_NT"], (columns["reward_N"] - columns["reward_N"][0])[:, None], 0.0)


def divided(columns: Columns) -> Tensor:
    mask_NT = columns["mask_NT"]
    mean = torch.where(mask_NT, columns["reward_N"][:, None], 0.0).sum() / mask_NT.sum()
    return torch.where(mask_NT, columns["reward_N"][:, None], 0.0) - mean


def noisy(columns: Columns) -> Tensor:
    return centred(columns) + torch.where(columns["mask_NT"], torch.rand(columns["mask_NT"].shape), 0.0)


def greedy(columns: Columns) -> Tensor:
    columns["reward_N"].zero_()
    return centred(columns)


def test_a_right_estimator_passes():
    check_estimator(centred)


@pytest.mark.parametrize(
    ("estimator", "complaint"),
    [(multiplied, "nan in masked slots"), (divided, "outside the mask must be 0"), (first_counts, "order of samples")],
)
def test_a_wrong_estimator_is_found(estimator: Callable[[Columns], Tensor], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        check_estimator(estimator)


@pytest.mark.parametrize(
    ("estimator", "complaint"), [(noisy, "second call differs"), (greedy, "changed its input reward_N")]
)
def test_chance_and_a_changed_input_are_found(estimator: Callable[[Columns], Tensor], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        estimator_is_deterministic(estimator, sample_columns())


def test_the_first_place_that_differs_is_named():
    with pytest.raises(AssertionError, match=r"result 0 .* \d+ of 96 differ, the first at \[\d, \d+\]: .*, wanted"):
        order_of_samples_does_not_matter(first_counts, sample_columns())


def ratio_loss(columns: Columns, layout: Layout) -> Tensor:
    ratio_P = (layout.keep(columns["logprobs_P"]) - layout.keep(columns["old_logprobs_P"])).exp()
    return -layout.keep(layout.keep(columns["weights_P"]) * layout.keep(columns["advantages_P"]) * ratio_P).sum()


def unmasked(columns: Columns, layout: Layout) -> Tensor:
    return -(columns["weights_P"] * columns["logprobs_P"]).sum()


def mean_of_batch(columns: Columns, layout: Layout) -> Tensor:
    return ratio_loss(columns, layout) / layout.mask_P.sum().clamp(min=1)


def by_place(columns: Columns, layout: Layout) -> Tensor:
    place_P = torch.arange(len(layout.mask_P), dtype=torch.float64)
    return layout.keep(place_P * layout.keep(columns["logprobs_P"])).sum()


def doubled(columns: Columns, layout: Layout) -> Tensor:
    return 2 * ratio_loss(columns, layout)


def test_a_right_loss_passes():
    check_loss(ratio_loss)
    first_ratio_gives_the_policy_gradient(ratio_loss, *loss_columns())


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (unmasked, "nan in masked tokens"),
        (mean_of_batch, "cut into 2 micro-batches"),
        (by_place, "micro-batches|order"),
    ],
)
def test_a_wrong_loss_is_found(loss: Loss, complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        check_loss(loss)


def test_a_wrong_scale_at_ratio_1_is_found():
    with pytest.raises(AssertionError, match="not the policy gradient"):
        first_ratio_gives_the_policy_gradient(doubled, *loss_columns())


def test_what_is_no_scalar_or_has_no_gradient_is_named():
    columns, layout = loss_columns()
    with pytest.raises(AssertionError, match=r"one number.*\(80,\)"):
        micro_batches_add_up(lambda c, _: c["logprobs_P"], columns, layout)
    with pytest.raises(AssertionError, match="no gradient with respect to logprobs_P"):
        micro_batches_add_up(lambda c, _: c["logprobs_P"].detach().sum(), columns, layout)


EXAMPLES = [("2+2", "4", "it is 4"), ("2+3", "5", "it is 6")]
calls = itertools.count()


def components_of_right_answers(question: str, answer: str, response: str) -> dict[str, float]:
    return {"right": 1.0, "short": 0.5} if answer in response else {"right": 0.0}


def test_a_right_reward_passes_and_its_scores_come_back():
    scores = check_reward(lambda question, answer, response: float(answer in response), EXAMPLES)
    assert [score.reward for score in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda question, answer, response: float(next(calls)), "alone and .* beside others"),
        (lambda question, answer, response: float(response.split()[-1]), "IndexError"),
        (components_of_right_answers, r"components \['right'\], but \['right', 'short'\]"),
        (lambda question, answer, response: float("nan"), "must be finite"),
    ],
)
def test_a_wrong_reward_is_found(function: Callable[[str, str, str], object], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        check_reward(function, EXAMPLES)


def test_a_function_of_several_responses_is_called_with_lists():
    calls: list[int] = []

    def score(questions: list[str], answers: list[str], responses: list[str]) -> list[float]:
        calls.append(len(questions))
        return [float(answer in response) for answer, response in zip(answers, responses, strict=True)]

    scores = check_reward(score, [*EXAMPLES, *EXAMPLES], batch_size=2)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert max(calls) == 2


def test_a_reward_that_looks_at_its_batch_is_found():
    def score(questions: list[str], answers: list[str], responses: list[str]) -> list[float]:
        return [float(len(response) - max(len(other) for other in responses)) for response in responses]

    with pytest.raises(AssertionError, match="beside others"):
        check_reward(score, [("2 + 2", "4", "4"), ("2 + 2", "4", "It is 4."), ("2 + 2", "4", "Four")], batch_size=2)


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="no examples"):
        check_reward(lambda question, answer, response: 0.0, [])


def test_the_examples_of_the_docs_run():
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # our own page


def test_the_complaint_in_the_docs_is_the_real_one():
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        check_loss(unmasked_sum)
    assert f"AssertionError: {caught.value}\n" in page


def unmasked_sum(columns: Columns, layout: Layout) -> Tensor:
    return -(columns["advantages_P"] * columns["logprobs_P"]).sum()
