"""Schedules, clipping, AdamW, refusals; sums that do not depend on threads."""

import math

import pytest
import torch
from torch import nn

from tandem.config.models import Parallel, Schedule
from tandem.train.optim import learning_rate, sum_of_squares
from tandem.train.torch.mesh import Mesh
from tandem.train.torch.optimizer import Optimizer
from tests.train.small_models import settings

ALONE = Mesh(Parallel(), None)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule(), [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule(warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0]),
        (Schedule(name="linear"), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Schedule(name="linear", warmup_steps=1, min_lr_ratio=0.25), [0.5, 1.0, 0.75, 0.5, 0.25]),
        (Schedule(name="cosine"), [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5), 0.0]),
        (Schedule(name="cosine", warmup_steps=9), [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_the_rate_warms_up_and_falls_over_all_steps(schedule, rates):
    found = [learning_rate(schedule, 2.0, step, 5) for step in range(5)]
    assert found == pytest.approx([2.0 * rate for rate in rates], abs=1e-12)


def test_the_rate_stays_at_its_floor_after_the_last_step():
    assert learning_rate(Schedule(name="linear", min_lr_ratio=0.1), 1.0, 50, 5) == pytest.approx(0.1)
    assert learning_rate(Schedule(name="cosine"), 1.0, 0, 1) == 1.0


@pytest.mark.parametrize("elements", [0, 1, 1000, 1 << 14, (1 << 14) + 1, 300_007])
def test_sum_of_squares_is_exact_and_free_of_threads(elements):
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(sum_of_squares(x).item())
    assert found[0] == found[1]
    assert found[0] == pytest.approx(x.double().square().sum().item(), rel=1e-12)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": nn.Parameter(torch.randn(4, 3, generator=generator)),
        "norm": nn.Parameter(torch.randn(3, generator=generator)),
    }


def test_a_step_is_divide_clip_and_torchs_adamw():
    config = settings(max_grad_norm=0.5, optimizer={"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9)})
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, config, 10, ALONE)
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.2}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    for step in range(3):
        for name in ours:
            gradient = torch.randn(ours[name].shape, generator=torch.Generator().manual_seed(step))
            ours[name].grad = gradient * 8
            theirs[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        reference.step()
        report = optimizer.step(8.0, finite=True)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert all(p.grad is None for p in ours.values())
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_the_schedule_counts_steps_that_were_made():
    optimizer = Optimizer(parameters(), settings(scheduler={"name": "linear"}), 5, ALONE)
    rates = []
    for value in (1.0, math.nan, 1.0):
        for p in optimizer.parameters.values():
            p.grad = torch.full_like(p, value)
        rates.append(optimizer.step(1.0, finite=True).lr)
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.75e-2])


def test_a_divisor_of_0_moves_nothing_and_is_no_refusal():
    own = parameters()
    before = {name: p.detach().clone() for name, p in own.items()}
    optimizer = Optimizer(own, settings(), 5, ALONE)
    for p in own.values():
        p.grad = torch.zeros_like(p)
    report = optimizer.step(0.0, finite=True)
    assert not report.refused
    assert report.refusals_left == 3
    assert all(torch.equal(p, before[name]) for name, p in own.items())


@pytest.mark.parametrize("divisor", [-1.0, math.nan, math.inf])
def test_a_divisor_without_meaning_is_refused(divisor):
    with pytest.raises(ValueError, match="finite divisor"):
        Optimizer(parameters(), settings(), 5, ALONE).step(divisor, finite=True)
