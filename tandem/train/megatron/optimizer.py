"""The optimizer step on Megatron-Core's distributed optimizer: AdamW in float32, cut over the data-parallel ranks.

AdamW itself is torch's, the same fused kernel that the torch backend steps with. get_megatron_optimizer is passed by:
it would take another one where TransformerEngine is installed, and leaves weight decay to a scheduler of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from tandem.config.models import TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import StepReport
from tandem.train.files import COUNTS, MOMENTS, SavedTensors, keep
from tandem.train.megatron.grid import Grid
from tandem.train.megatron.model import Stage, set_on
from tandem.train.megatron.names import Row
from tandem.train.megatron.versions import wrapped
from tandem.train.megatron.weights import Read, fill, whole_tensors
from tandem.train.offload import HostMemory
from tandem.train.optim import StepRule

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


def data_parallel(stage: Stage, grid: Grid) -> DistributedDataParallel:
    """Gradients go into one buffer, in float32 if asked, and are added up over the data-parallel ranks in the step."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grid.sizes.grad_reduce_in_fp32, use_distributed_optimizer=True
    )
    return wrapped(stage, settings, grid.groups)


class Optimizer:
    """AdamW over a stage's parameters. Norms and biases (one dimension) do not decay."""

    def __init__(
        self, model: DistributedDataParallel, config: TrainedModel, total_steps: int, grid: Grid, rows: Sequence[Row]
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(model.module.named_parameters())
        self._model = model
        self._grid = grid
        self._rows = rows
        self._rule = StepRule(config, total_steps)
        self._device = next(iter(self.parameters.values())).device
        mark_parts(self.parameters, rows, grid.stage)
        knobs = config.optimizer
        decaying = [p for p in self.parameters.values() if p.dim() > 1]
        plain = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [
            {"params": decaying, "weight_decay": knobs.weight_decay, "is_expert_parallel": False},
            {"params": plain, "weight_decay": 0.0, "is_expert_parallel": False},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=knobs.lr,
            bf16=config.precision == "bfloat16",
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,  # clipped here, with the divisor
        )
        self._sharded = DistributedOptimizer(
            self._adamw,
            settings,
            None,
            None,
            model_chunks=[model],
            per_model_buffers={0: model.buffers},
            data_parallel_group=grid.groups.dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=grid.groups.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
        self._sharded.grad_stats_parallel_group = grid.groups.intra_dist_opt
        self._sharded.tp_group = grid.groups.tp

        self._masters = masters_of(self._sharded)
        self._away = HostMemory()  # what is stepped and the moments, while they are not on the device

    @torch.no_grad()
    def step(self, divisor: float, *, finite: Tensor) -> StepReport:
        """Add gradients up over the ranks, divide, clip, step, clear. All ranks step, or none does; see StepRule."""
        self._rule.check(divisor)
        self._away.give_back()
        self.sum_gradients()
        self._sharded.prepare_grads()
        spoiled = (~finite).float()
        dist.all_reduce(spoiled, op=dist.ReduceOp.MAX, group=self._grid.groups.intra_dist_opt)
        norm = float("nan") if spoiled else float(self._sharded.get_grad_norm())
        report, factor = self._rule.judge(norm, divisor)
        if factor is not None:
            gradients = [p.grad for p in self._sharded.get_parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
            for group in self._adamw.param_groups:
                group["lr"] = report.lr
            self._sharded.step_with_ready_grads()
        self.clear()
        return report

    def sum_gradients(self) -> None:
        """Over data- and context-parallel ranks, of norms over tensor ranks, of a tied embedding over its two stages.

        Call it once before a step: what is in the buffers afterwards is no partial sum that more can be added to.
        """
        finalize_model_grads([self._model], None, pg_collection=self._grid.groups)

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        self._model.zero_grad_buffer()
        self._sharded.zero_grad()

    def park(self) -> None:
        """Float32 weights and moments leave the device until the next step. A float32 model's own weights stay."""
        moments = (x for state in self._adamw.state.values() for x in state.values())
        own = (p for ps in self._sharded.shard_fp32_from_float16_groups for p in ps)
        self._away.take([*moments, *own])

    def whole(self, shard: Callable[[nn.Parameter], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """By Hugging Face name, what `shard` gives of each parameter's part on this data-parallel rank. float32."""
        known: dict[str, Tensor] = {}

        def local(name: str) -> Tensor:
            if name not in known:  # q, k and v ask for one parameter, one after the other
                known.clear()
                known[name] = self._over_data_ranks(self.parameters[name], shard)
            return known[name]

        yield from whole_tensors(self._rows, self._grid, local, lambda _: torch.float32, self._device)

    def _over_data_ranks(self, parameter: nn.Parameter, shard: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """Each element is on one rank and 0 on the others: the sum is exact."""
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        part = shard(parameter) if self._is_here(parameter) else None
        if part is not None:
            flat[self._range(parameter)] = self._away.read(part.detach()).flatten().to(flat)
        dist.all_reduce(flat, group=self._grid.groups.dp_cp)
        return flat.view(parameter.shape)

    def _is_here(self, parameter: nn.Parameter) -> bool:
        return parameter in self._masters

    def _range(self, parameter: nn.Parameter) -> slice:
        place = self._sharded._get_model_param_range_map(parameter)["param"]
        return slice(place.start, place.end)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weights that are stepped: this rank's part."""
        return self._masters[parameter]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part, once summed."""
        return vars(parameter)["main_grad"].view(-1)[self._range(parameter)]

    def snapshot(self, copy: bool) -> WriteFiles:
        """Moments by Hugging Face name, float32 exact, and counts: the torch backend's files."""
        counts = {COUNTS: json.dumps(self._rule.counts())}
        return keep(self._moments(), MOMENTS, self._grid.shard, copy=copy, texts=counts)

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        if self._rule.steps == 0:
            return
        for row in self._rows:
            yield f"{row.name}/step", torch.tensor(float(self._rule.steps))
        for key in MOMENT_NAMES:
            for name, tensor in self.whole(lambda p, key=key: self._adamw.state[self.master(p)].get(key)):
                yield f"{name}/{key}", tensor

    def fill(self, read: Read) -> None:
        """Set the float32 weights exactly, which a bfloat16 model would round."""
        self._away.give_back()
        self._fill_shards(read, self.master)

    def _fill_shards(self, read: Read, shard: Callable[[nn.Parameter], Tensor]) -> None:
        """Each parameter's tensors are read into its whole, and this rank's part is kept."""
        by_parameter: dict[str, list[Row]] = {}
        for row in self._rows:
            for stage, ours in row.homes:
                if stage == self._grid.stage:
                    by_parameter.setdefault(ours, []).append(row)
        for ours, rows in by_parameter.items():
            parameter = self.parameters[ours]
            if self._is_here(parameter):
                whole = torch.empty(parameter.shape, dtype=torch.float32, device=self._device)
                fill([_at(row, self._grid.stage, ours) for row in rows], self._grid, lambda _, w=whole: w, read)
                shard(parameter).data.copy_(whole.view(-1)[self._range(parameter)])

    def load(self, directory: Path) -> None:
        """Continue where a snapshot of whichever backend stood. The schedule's length and the knobs are this run's."""
        self._rule.resume(json.loads((directory / COUNTS).read_text()))
        self._away.give_back()
        self.clear()
        self._adamw.state.clear()
        saved = SavedTensors(directory, MOMENTS)
        if not any(True for _ in saved.names()):
            return
        for parameter in self.parameters.values():
            if self._is_here(parameter):
                master = self.master(parameter)
                state = {key: torch.zeros_like(master.detach()) for key in MOMENT_NAMES}
                state["step"] = torch.tensor(float(self._rule.steps), device=self._device)
                self._adamw.state[master] = state
        for key in MOMENT_NAMES:
            self._fill_shards(
                lambda name, region, key=key: saved.read(f"{name}/{key}", region),
                lambda p, key=key: self._adamw.state[self.master(p)][key],
            )


def mark_parts(parameters: Mapping[str, nn.Parameter], rows: Sequence[Row], stage: int) -> None:
    """Say which parameters tensor ranks share: a gradient's norm counts a part on every rank, and a copy on one.

    Megatron-Core 0.16 marks only those that it initialises itself.
    """
    for row in rows:
        for home, ours in row.homes:
            if home == stage:
                set_on(parameters[ours], tensor_model_parallel=row.cut is not None)


def masters_of(sharded: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """The float32 part that is stepped, of every parameter with a part on this rank.

    Megatron-Core's own map of places is wrong in 0.19 where one group has bfloat16 and float32 parameters, as a critic
    has: it counts them in one order and steps them in another.
    """
    pairs = (
        (sharded.model_float16_groups, sharded.shard_fp32_from_float16_groups),
        (sharded.model_fp32_groups, sharded.shard_fp32_groups),
    )
    return {
        parameter: part
        for parameters, parts in pairs
        for of_model, of_shards in zip(parameters, parts, strict=True)
        for parameter, part in zip(of_model, of_shards, strict=True)
    }


def _at(row: Row, stage: int, ours: str) -> Row:
    return Row(row.name, row.shape, ((stage, ours),), row.view, row.cut)
