"""Checks of a loss: a function from columns of a flat layout to the SUM of weighted losses, a scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.algorithms.layout import Layout, averaging_weights
from tandem.testing.tensors import POISONS, Columns, disturb, must_be_close, must_be_equal, poisoned

# (columns of the tokens, layout) -> the sum of weight * loss over the tokens of the mask, differentiable.
Loss = Callable[[Columns, Layout], Tensor]
EXACT = 1e-9  # of the largest number, in the float64 of loss_columns


def loss_columns(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Layout]:
    """80 tokens of six samples in random order, one sample fully masked, to try a loss on.

    Keys: logprobs_P, old_logprobs_P, gen_logprobs_P, advantages_P, weights_P (means of the samples), values_P,
    old_values_P, returns_P.
    """
    tokens, samples = 80, 6
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, dtype=dtype, generator=draw)

    sample_P = torch.randint(0, samples, (tokens,), generator=draw)
    mask_P = (torch.rand(tokens, generator=draw) < 0.7) & (sample_P != 3)
    layout = Layout(mask_P, sample_P, samples)
    logprobs_P = -3 * torch.rand(tokens, dtype=dtype, generator=draw)
    old_P, values_P = logprobs_P + normal(0.3), normal(1.0)
    return {
        "logprobs_P": logprobs_P,
        "old_logprobs_P": old_P,
        "gen_logprobs_P": old_P + normal(0.3),
        "advantages_P": normal(1.0),
        "weights_P": averaging_weights(layout, "sequence_mean", dtype=dtype).weights_P,
        "values_P": values_P,
        "old_values_P": values_P + normal(0.3),
        "returns_P": values_P + normal(0.5),
    }, layout


def check_loss(
    loss: Loss, *, learned: str = "logprobs_P", columns: Columns | None = None, layout: Layout | None = None
) -> None:
    """Every check but that of the first ratio, which only a policy loss passes. `learned` is what has the gradient."""
    if columns is None or layout is None:
        columns, layout = loss_columns()
    masked_tokens_do_not_matter(loss, columns, layout, learned=learned)
    micro_batches_add_up(loss, columns, layout, learned=learned)
    order_of_tokens_does_not_matter(loss, columns, layout, learned=learned)
    loss_is_zero_on_empty(loss, columns, layout, learned=learned)
    loss_is_deterministic(loss, columns, layout, learned=learned)


def masked_tokens_do_not_matter(
    loss: Loss, columns: Columns, layout: Layout, *, learned: str = "logprobs_P", poisons: Sequence[float] = POISONS
) -> None:
    """NaN, infinity or 1e6 outside the mask change no bit of loss and gradient, and have a gradient of exactly 0."""
    clean, gradient = loss_and_gradient(loss, columns, layout, learned)
    outside = gradient[~layout.mask_P]
    must_be_equal(outside, torch.zeros_like(outside), "the gradient of masked tokens must be 0")
    for poison in poisons:
        spoiled = {name: poisoned(x, layout.mask_P, poison) for name, x in columns.items()}
        found, moved = loss_and_gradient(loss, spoiled, layout, learned)
        must_be_equal(found, clean, f"the loss changed with {poison} in masked tokens")
        must_be_equal(moved, gradient, f"the gradient changed with {poison} in masked tokens")


def micro_batches_add_up(
    loss: Loss,
    columns: Columns,
    layout: Layout,
    *,
    learned: str = "logprobs_P",
    parts: Sequence[int] = (2, 3, 6),
    tolerance: float = EXACT,
) -> None:
    """Cut into micro-batches of whole samples, losses and gradients add up to those of the whole."""
    whole, gradient = loss_and_gradient(loss, columns, layout, learned)
    for count in parts:
        total, pieces = torch.zeros_like(whole), torch.zeros_like(gradient)
        for part in range(count):
            keep = (layout.sample_P % count == part).nonzero().squeeze(1)
            some = Layout(layout.mask_P[keep], layout.sample_P[keep], layout.num_samples)
            value, pieces[keep] = loss_and_gradient(loss, {n: x[keep] for n, x in columns.items()}, some, learned)
            total = total + value
        must_be_close(total, whole, f"the loss depends on a cut into {count} micro-batches", tolerance)
        must_be_close(pieces, gradient, f"the gradient depends on a cut into {count} micro-batches", tolerance)


def order_of_tokens_does_not_matter(
    loss: Loss,
    columns: Columns,
    layout: Layout,
    *,
    learned: str = "logprobs_P",
    seed: int = 1,
    tolerance: float = EXACT,
) -> None:
    """Tokens (and so samples) in another order give the same loss, and each token its own gradient."""
    order = torch.randperm(len(layout.mask_P), generator=torch.Generator().manual_seed(seed))
    moved = Layout(layout.mask_P[order], layout.sample_P[order], layout.num_samples)
    value, gradient = loss_and_gradient(loss, columns, layout, learned)
    found, permuted = loss_and_gradient(loss, {name: x[order] for name, x in columns.items()}, moved, learned)
    must_be_close(found, value, "the loss depends on the order of tokens", tolerance)
    must_be_close(permuted, gradient[order], "the gradient depends on the order of tokens", tolerance)


def first_ratio_gives_the_policy_gradient(
    loss: Loss, columns: Columns, layout: Layout, *, by_sample: bool = False, tolerance: float = EXACT
) -> None:
    """Where old and current policy are one, d loss / d log p_t = -weight_t * A_t (Williams 1992).

    `by_sample` is for a loss that has one ratio a sample: all tokens of a sample are given one advantage.
    """
    same = columns["logprobs_P"]
    advantages_P = layout.sample_P.to(same.dtype) - 2.0 if by_sample else columns["advantages_P"]
    fresh = {**columns, "old_logprobs_P": same, "gen_logprobs_P": same, "advantages_P": advantages_P}
    _, gradient = loss_and_gradient(loss, fresh, layout, "logprobs_P")
    wanted = layout.keep(-columns["weights_P"] * advantages_P)
    must_be_close(gradient, wanted, "at ratio 1 the gradient is not the policy gradient", tolerance)


def loss_is_zero_on_empty(loss: Loss, columns: Columns, layout: Layout, *, learned: str = "logprobs_P") -> None:
    """Without a token that counts, loss and gradient are 0, whatever the columns hold."""
    nothing = Layout(torch.zeros_like(layout.mask_P), layout.sample_P, layout.num_samples)
    spoiled = {name: poisoned(x, nothing.mask_P, float("nan")) for name, x in columns.items()}
    value, gradient = loss_and_gradient(loss, spoiled, nothing, learned)
    must_be_equal(value, torch.zeros_like(value), "the loss of a fully masked batch must be 0")
    must_be_equal(gradient, torch.zeros_like(gradient), "the gradient of a fully masked batch must be 0")


def loss_is_deterministic(loss: Loss, columns: Columns, layout: Layout, *, learned: str = "logprobs_P") -> None:
    """Called again, with other global random numbers, it gives the same bits."""
    disturb(1)
    value, gradient = loss_and_gradient(loss, columns, layout, learned)
    disturb(2)
    again, moved = loss_and_gradient(loss, columns, layout, learned)
    must_be_equal(again, value, "the loss of a second call differs")
    must_be_equal(moved, gradient, "the gradient of a second call differs")


def loss_and_gradient(loss: Loss, columns: Columns, layout: Layout, learned: str) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to one column. AssertionError if it is no differentiable scalar."""
    leaf = columns[learned].clone().requires_grad_()
    value = loss({**columns, learned: leaf}, layout)
    if value.dim() != 0:
        raise AssertionError(f"a loss is one number, the sum over its tokens; got shape {tuple(value.shape)}")
    if not value.requires_grad:
        raise AssertionError(f"the loss has no gradient with respect to {learned}")
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient
