"""What every optimizer's step decides by: divisor, clip, learning-rate schedule, and refusal of what is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.config.models import Schedule, TrainedModel
from tandem.train.backend import StepReport

# Elements summed at one time. torch splits longer sums between threads, and the bits then depend on their number.
SUM_BLOCK = 1 << 14


def learning_rate(schedule: Schedule, lr: float, step: int, total_steps: int) -> float:
    """The rate of step 0, 1, ... of `total_steps`: linear warm-up, then constant, or down to lr * min_lr_ratio."""
    if step < schedule.warmup_steps:
        return lr * (step + 1) / (schedule.warmup_steps + 1)
    left = max(1, total_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / left)
    floor = schedule.min_lr_ratio
    match schedule.name:
        case "constant":
            return lr
        case "linear":
            return lr * (floor + (1 - floor) * (1 - progress))
        case "cosine":
            return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def sum_of_squares(x: Tensor) -> Tensor:
    """float64 sum of x^2, with the same bits for any number of threads."""
    flat = x.detach().flatten()
    whole = flat.numel() // SUM_BLOCK * SUM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, SUM_BLOCK), dim=1, dtype=torch.float64).square()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
    total = sum_of_squares(blocks.sqrt()) if blocks.numel() > SUM_BLOCK else blocks.sum()
    return total + rest


def total_square(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The float64 sum over all tensors of their x^2 / count. A GPU does it in a few kernels: threads are no matter."""
    if tensors[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        return (norms.square() / torch.tensor(counts, device=norms.device)).sum()
    total = tensors[0].new_zeros((), dtype=torch.float64)
    for tensor, count in zip(tensors, counts, strict=True):
        total += sum_of_squares(tensor) / count
    return total


class StepRule:
    """What every optimizer's step decides by: the schedule, the divisor, the clip, and when to refuse. It counts."""

    def __init__(self, config: TrainedModel, total_steps: int) -> None:
        self.steps = 0
        self._config = config
        self._total_steps = total_steps
        self._refusals = 0

    @staticmethod
    def check(divisor: float) -> None:
        """Before anything is summed."""
        if not (math.isfinite(divisor) and divisor >= 0):
            raise ValueError(f"optim_step wants a finite divisor >= 0, got {divisor}")

    def judge(self, norm: float, divisor: float) -> tuple[StepReport, float | None]:
        """The report, and what to multiply the gradient's sum with before the step: None where nothing is to move.

        `norm` is that of the sum, NaN where a loss was not finite. A divisor of 0 says that nothing was in the loss.
        """
        lr = learning_rate(self._config.scheduler, self._config.optimizer.lr, self.steps, self._total_steps)
        if not math.isfinite(norm):
            self._refusals += 1
            return StepReport(norm, lr, refused=True, refusals_left=self._refusals_left), None
        if divisor == 0:
            return StepReport(0.0, lr, refusals_left=self._refusals_left), None
        norm /= divisor
        limit = self._config.max_grad_norm
        clip = 1.0 if limit is None or norm <= limit else limit / norm
        self.steps += 1
        return StepReport(norm, lr, refusals_left=self._refusals_left), clip / divisor

    @property
    def _refusals_left(self) -> int:
        return self._config.max_skipped_optimizer_steps - self._refusals

    def counts(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"steps": self.steps, "refusals": self._refusals, "total_steps": self._total_steps}

    def resume(self, counts: Mapping[str, int]) -> None:
        """The schedule's length and the knobs are this run's own."""
        self.steps, self._refusals = counts["steps"], counts["refusals"]
