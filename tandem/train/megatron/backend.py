"""A decoder on Megatron-Core, on one GPU or many: packs without padding, sums of losses, one divisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.config.models import MegatronBackend as Sizes
from tandem.config.models import Offload, TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import Loss, Output, Pack, StepReport
from tandem.train.files import WEIGHTS, SavedTensors, first_mismatch, keep, one_after_the_other
from tandem.train.flops import Machine, peak_tflops, shape_of, windows_of
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.megatron.attention import Packed
from tandem.train.megatron.grid import Grid, build_grid
from tandem.train.megatron.model import Stage, local_layer
from tandem.train.megatron.names import Row, check_model, layers_of_stages, name_table, shapes_of
from tandem.train.megatron.optimizer import Optimizer, data_parallel
from tandem.train.megatron.shapes import PRECISIONS, transformer_config
from tandem.train.megatron.weights import Read, fill, whole_tensors
from tandem.train.offload import HostMemory
from tandem.train.sharding import Shard
from tandem.train.torch.attention import Kernel, lay_out
from tandem.train.torch.backend import choose_kernel
from tandem.types import Metrics, merge


def build_megatron_backend(
    model: PreTrainedModel,
    head: TokenLogprobs | ValueHead,
    config: TrainedModel,
    *,
    total_optimizer_steps: int | None,
    device: torch.device,
) -> MegatronBackend:
    """Build this rank's part of a loaded model, which is read and not kept: leave it on the CPU.

    `total_optimizer_steps` None freezes it (a reference): no gradient, no optimizer. A ValueHead takes the place of the
    output layer. Where torch.distributed is set up, all its ranks call this with the same model.
    """
    sizes = config.backend
    assert isinstance(sizes, Sizes), "launch builds the backend that the recipe names"
    check_model(model, sizes)
    kernel = choose_kernel(config, device)
    if isinstance(head, ValueHead):
        nn.Module.to(head, device=device)
    grid = build_grid(sizes, device)
    c, value = model.config.get_text_config(), isinstance(head, ValueHead)
    tied = bool(c.tie_word_embeddings) and not value
    layers = layers_of_stages(c.num_hidden_layers, sizes)
    rows = name_table(c, layers, outputs=head.outputs, value=value, tied=tied)
    shapes = transformer_config(c, config, sizes)
    with device:  # parameters are made where they stay: a copy might lose the marks that Megatron-Core reads
        stage = Stage(
            shapes,
            grid,
            local_layer(shapes, windows_of(c)),
            head,
            layers=layers[grid.stage],
            vocabulary=c.vocab_size,
            inverse_frequencies=model.base_model.get_buffer("rotary_emb.inv_freq").to(device),
            tied=tied,
        )
    trained = total_optimizer_steps is not None
    stage.train(trained)  # Megatron-Core recomputes activations in training mode only
    for parameter in stage.parameters():
        parameter.requires_grad_(trained)
    source = model.state_dict(keep_vars=True)
    if isinstance(head, ValueHead):
        source["value_head.linear.weight"] = head.linear.weight
    fill(rows, grid, dict(stage.named_parameters()).__getitem__, lambda name, region: source[name][region])
    laid = data_parallel(stage, grid) if trained else stage
    optimizer = None
    if total_optimizer_steps is not None:
        optimizer = Optimizer(laid, config, total_optimizer_steps, grid, rows)
        optimizer.fill(lambda name, region: source[name][region])
    shape = shape_of(model.config, head.outputs, head_everywhere=value)
    machine = Machine(shape, peak_tflops(device, PRECISIONS[config.precision]))
    backend = MegatronBackend(
        laid, rows, optimizer, grid=grid, kernel=kernel, device=device, machine=machine, offload=config.offload
    )
    if config.offload == "all":
        backend.park()  # room for the model that is built next
    return backend


class MegatronBackend:
    """Plays `Backend`. Built by `build_megatron_backend`."""

    def __init__(
        self,
        model: DistributedDataParallel | Stage,
        rows: Sequence[Row],
        optimizer: Optimizer | None,
        *,
        grid: Grid,
        kernel: Kernel,
        device: torch.device,
        machine: Machine,
        offload: Offload,
    ) -> None:
        self.machine = machine
        self.optimizer = optimizer
        self.parameters: dict[str, nn.Parameter] = dict(stage_of(model).named_parameters())
        self._model = model
        self._rows = rows
        self._grid = grid
        self._kernel = kernel
        self._device = device
        self._dtype = stage_of(model).config.params_dtype
        self._finite = torch.tensor(True, device=device)  # asked once a step: every answer waits for the device
        self._offload = offload
        self._away = HostMemory()  # weights and gradient; the optimizer has its own

    @property
    def shard(self) -> Shard:
        """By the grid."""
        return self._grid.shard

    def infer(self, packs: Sequence[Pack]) -> Iterator[Output]:
        """Through the pipeline, without a graph; every stage gets what the last one finds."""
        found: list[Output] = []
        self._away.give_back()
        if self._offload != "none":
            self._park_optimizer()

        def keep(output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
            found.append(Output(output.column_P, after_P=output.after_P))
            return output.column_P.sum(), {}

        with torch.no_grad():
            self._run(packs, keep, forward_only=True)
        value = any(row.name.startswith("value_head.") for row in self._rows)
        for number, pack in enumerate(packs):
            if self._grid.is_last:
                output = found[number]
            else:
                empty_P = torch.empty(len(pack.tokens_P), device=self._device)
                output = Output(empty_P, after_P=torch.empty_like(empty_P) if value else None)
            after_P = None if output.after_P is None else self._from_last(output.after_P)
            yield Output(self._from_last(output.column_P), after_P=after_P)

    def _from_last(self, column_P: Tensor) -> Tensor:
        if self._grid.stages > 1:
            source = self._grid.global_rank_of_stage(self._grid.stages - 1)
            dist.broadcast(column_P, source, group=self._grid.groups.pp)
        return column_P.cpu()

    def forward_backward(self, packs: Sequence[Pack], loss: Loss) -> Metrics:
        """1F1B over the stages. `loss` is called on the last one; metrics are there. Not finite spoils the step."""
        parts: list[Metrics] = []
        self._away.give_back()

        def add(output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
            total, metrics = loss(output, pack)
            self._finite &= total.detach().isfinite()
            parts.append(metrics)
            return total, metrics

        self._run(packs, add, forward_only=False)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # done when it returns
        return merge(*parts)

    def _run(self, packs: Sequence[Pack], loss: Loss, *, forward_only: bool) -> None:
        if not packs:
            return

        def step(ahead: Iterator[Pack], model: nn.Module) -> tuple[Tensor | Output, Callable]:
            pack = next(ahead).to(self._device)
            layout = lay_out(pack, self._device, self._kernel, self._grid.context)
            return model(pack, Packed(layout)), lambda output: judged(output, pack)

        def judged(output: Output, pack: Pack) -> tuple[Tensor, Tensor, Metrics]:
            """Megatron-Core's form for sums: with a count of tokens, which nothing divides by."""
            total, metrics = loss(output, pack)
            return total, torch.zeros((), dtype=torch.int, device=self._device), metrics

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=self._model,
            num_microbatches=len(packs),
            seq_length=1,  # lengths vary: stages tell each other
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def optim_step(self, divisor: float) -> StepReport:
        """Divide, clip, step, clear; see Optimizer.step."""
        if self.optimizer is None:
            raise RuntimeError("this model is frozen: it was built without total_optimizer_steps")
        self._away.give_back()
        report = self.optimizer.step(divisor, finite=self._finite)
        self._finite.fill_(True)
        return report

    def park(self) -> None:
        """The optimizer's float32 weights and moments, and with `all` the model's weights and gradient too."""
        if self._offload != "none":
            self._park_optimizer()
        if self._offload == "all":
            gradients = [] if isinstance(self._model, Stage) else [buffer.grad_data for buffer in self._model.buffers]
            self._away.take([*self.parameters.values(), *gradients])

    def _park_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.park()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """In the precision of the forward pass, one whole tensor at a time: all ranks take part.

        These may be the live tensors: copy before the next step. Parked weights are read where they are.
        """
        for name, tensor in self._whole():
            yield name, tensor.to(self._dtype)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        def dtype(row: Row) -> torch.dtype:
            return torch.float32 if row.name.startswith("value_head.") else self._dtype

        def local(name: str) -> Tensor:
            return self._away.read(self.parameters[name]).to(self._device)

        yield from whole_tensors(self._rows, self._grid, local, dtype, self._device)

    def snapshot(self, copy: bool) -> WriteFiles:
        """float32 weights by Hugging Face name and the optimizer: the torch backend's files; see train/files.py."""
        optimizer = self.optimizer
        if optimizer is None:
            tensors = self._whole()
        else:  # in float32 the stepped weights are the model's own
            tensors = optimizer.whole(lambda parameter: self._away.read(optimizer.master(parameter)))
        exact = ((name, tensor.float()) for name, tensor in tensors)
        writes = [keep(exact, WEIGHTS, self._grid.shard, copy=copy)]
        if optimizer is not None:
            writes.append(optimizer.snapshot(copy))
        return one_after_the_other(writes)

    def load(self, directory: Path) -> None:
        """Continue from a snapshot, of whichever backend and however it was cut."""
        self.load_weights(directory)
        if self.optimizer is not None:
            self.optimizer.load(directory)
        self._finite.fill_(True)

    def load_weights(self, directory: Path) -> None:
        """Another architecture is a ValueError that names the first tensor that differs."""
        self._away.give_back()
        saved = SavedTensors(directory, WEIGHTS)
        different = first_mismatch(shapes_of(self._rows), saved.shapes())
        if different:
            raise ValueError(f"{directory} holds another model than this one: {different}")
        read: Read = saved.read
        fill(self._rows, self._grid, self.parameters.__getitem__, read)
        if self.optimizer is not None:
            self.optimizer.fill(read)

    def close(self) -> None:
        """Nothing to hand back: memory goes with the object. The groups serve the process's other models."""


def stage_of(model: DistributedDataParallel | Stage) -> Stage:
    """What is inside the wrapper that keeps gradients."""
    return model if isinstance(model, Stage) else model.module
