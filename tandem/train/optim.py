"""The optimizer step: divide, clip, AdamW, learning-rate schedule; and its refusal when a number is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tandem.config.models import Schedule, TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import StepReport
from tandem.train.torch.files import SavedTensors, file_name, held
from tandem.train.torch.mesh import Mesh
from tandem.train.torch.offload import HostMemory
from tandem.train.torch.placement import part_of, region_of, whole_of

MOMENTS, COUNTS = "optimizer", "optimizer.json"
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


class Optimizer:
    """AdamW over named float32 parameters. Norms and biases (one dimension) do not decay.

    On a mesh each rank steps its own parts, which are plain tensors: AdamW looks at one number at a time.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: TrainedModel, total_steps: int, mesh: Mesh
    ) -> None:
        self.parameters = dict(parameters)
        self._mesh = mesh
        self._parts = {name: p if mesh.devices is None else nn.Parameter(part_of(p)) for name, p in parameters.items()}
        self._rule = StepRule(config, total_steps)
        self._away = HostMemory()  # the moments, while they are not on the device
        decaying = [p for p in self._parts.values() if p.dim() > 1]
        plain = [p for p in self._parts.values() if p.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decaying, "weight_decay": config.optimizer.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )

    @torch.no_grad()
    def step(self, divisor: float, *, finite: bool) -> StepReport:
        """Divide the gradient, clip it to `max_grad_norm`, step, clear. Refused when it, or a loss, is not finite.

        A divisor of 0 says that nothing was in the loss: the gradient is cleared and nothing moves. On a mesh all ranks
        step or none does, and the norm is that of the whole gradient.
        """
        self._rule.check(divisor)
        self._away.give_back()
        gradients = self._take_gradients()
        report, factor = self._rule.judge(self._norm(gradients, finite), divisor if gradients else 0.0)
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor)
            for group in self._adamw.param_groups:
                group["lr"] = report.lr
            self._adamw.step()
        self.clear()
        return report

    def _take_gradients(self) -> dict[str, Tensor]:
        """The gradient of every part, summed over the ranks."""
        gradients = self._mesh.take_gradients(self.parameters)
        for name, part in self._parts.items():
            part.grad = gradients.get(name)
        return gradients

    def _norm(self, gradients: Mapping[str, Tensor], finite: bool) -> float:
        """Of the whole gradient; NaN on every rank when a loss of one was not finite. A part on k ranks counts 1/k."""
        total = next(iter(self._parts.values())).new_zeros((), dtype=torch.float64)
        if gradients:
            copies = [self._mesh.copies(self.parameters[name]) for name in gradients]
            total += total_square(list(gradients.values()), copies)
        return math.sqrt(float(self._mesh.total(total if finite else total * math.nan)))

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in (*self.parameters.values(), *self._parts.values()):
            parameter.grad = None

    def park(self) -> None:
        """The moments leave the device until the next step."""
        self._away.take(value for state in self._adamw.state.values() for value in state.values())

    def snapshot(self, copy: bool) -> WriteFiles:
        """Moments by parameter name, float32 exact; counts as JSON."""
        mesh = self._mesh
        tensors = held(self._moments(), rank=mesh.rank, ranks=mesh.ranks, copy=copy)
        counts = json.dumps(self._rule.counts())

        def write(directory: Path) -> None:
            save_file(tensors, directory / file_name(MOMENTS, mesh.rank, mesh.ranks))
            if mesh.rank == 0:
                (directory / COUNTS).write_text(counts)

        return write

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        """Whole, one after the other: all ranks take part."""
        for name, part in self._parts.items():
            for key, value in self._adamw.state.get(part, {}).items():
                here = self._away.read(value).to(part.device)
                yield f"{name}/{key}", whole_of(here, self.parameters[name]) if here.dim() else here

    def load(self, directory: Path) -> None:
        """Continue where the snapshot stood. The schedule's length and the knobs are this run's own."""
        self._rule.resume(json.loads((directory / COUNTS).read_text()))
        self.clear()
        self._away = HostMemory()
        self._adamw.state.clear()
        saved = SavedTensors(directory, MOMENTS)
        for name in saved.names():
            parameter_name, key = name.rsplit("/", 1)
            part = self._parts[parameter_name]
            region = None if key == "step" else region_of(self.parameters[parameter_name])
            # a copy: the memory of a file cannot be given back
            self._adamw.state[part][key] = saved.read(name, region).to(part.device, copy=True)
