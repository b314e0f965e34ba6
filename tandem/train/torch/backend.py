"""A transformers causal LM on one rank or many: float32 master weights, packs without padding, sums of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem import onednn
from tandem.config.models import Offload, TrainedModel
from tandem.roles import WriteFiles
from tandem.train.backend import Loss, Output, Pack, StepReport
from tandem.train.files import WEIGHTS, SavedTensors, first_mismatch, keep, one_after_the_other
from tandem.train.flops import Machine, peak_tflops, shape_of
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.offload import HostMemory
from tandem.train.packs import probe_pack
from tandem.train.sharding import Shard
from tandem.train.torch import long_attention
from tandem.train.torch.attention import Kernel, Layout, lay_out, use_packed_attention
from tandem.train.torch.checkpointing import use_checkpointing
from tandem.train.torch.compiling import compile_layers, will_compile
from tandem.train.torch.mesh import Mesh, build_mesh
from tandem.train.torch.optimizer import Optimizer
from tandem.train.torch.parallel import keep_gathered, lay_on_mesh, release
from tandem.train.torch.placement import gathered, part_of, region_of, whole_of
from tandem.train.torch.precision import WorkingCopies, put_copies
from tandem.types import Metrics, merge

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_torch_backend(
    model: PreTrainedModel,
    head: TokenLogprobs | ValueHead,
    config: TrainedModel,
    *,
    total_optimizer_steps: int | None,
    device: torch.device,
) -> TorchBackend:
    """Take a loaded model over: it is moved, made float32 and given packed attention. Do not use it elsewhere.

    `total_optimizer_steps` None freezes it (a reference): no gradient, no optimizer. A ValueHead drops the model's
    output layer: only the backbone and the head are trained, saved and exported. Where torch.distributed is set up, all
    its ranks call this with the same model, and hold it together as `config.parallel` says.
    """
    kernel = choose_kernel(config, device)
    mesh = build_mesh(config.parallel, device)
    dtype, trained = PRECISIONS[config.precision], total_optimizer_steps is not None
    make_ready(model, head, device)
    compiled = will_compile(config, device, kernel)
    if trained and (config.activation_checkpointing == "full" or not compiled):
        use_checkpointing(model, config.activation_checkpointing)
    for parameter in named_parameters(model, head).values():
        parameter.requires_grad_(trained)
    if not trained:
        put_copies(model, named_parameters(model, head), dtype)  # nothing needs the digits
    backbone = model.base_model
    assert isinstance(backbone, PreTrainedModel), "transformers' own word for it is Module"
    whole = BackboneWithHead(backbone, head)
    shape = shape_of(model.config, head.outputs, head_everywhere=isinstance(head, ValueHead))
    lay_on_mesh(whole, backbone, head, mesh, dtype)
    parameters = named_parameters(model, head)
    apart = trained and dtype != torch.float32 and not mesh.shards_weights  # FSDP casts what it gathers
    copies = WorkingCopies(parameters, put_copies(model, parameters, dtype) if apart else {})
    if compiled:
        selective = config.activation_checkpointing == "selective"
        compile_layers(backbone, kernel, trained=trained, selective=selective)
        if isinstance(head, TokenLogprobs):
            head.compile_arithmetic()
    elif onednn.pays(device, dtype) and not config.parallel.shares_layers:
        onednn.use(backbone)
    optimizer = None
    if total_optimizer_steps is not None:  # before any forward pass: FSDP then shows gathered weights in their place
        optimizer = Optimizer(parameters, config, total_optimizer_steps, mesh)
    machine = Machine(shape, peak_tflops(device, dtype))
    backend = TorchBackend(
        whole,
        parameters,
        copies,
        optimizer,
        mesh=mesh,
        kernel=kernel,
        dtype=dtype,
        machine=machine,
        offload=config.offload,
    )
    if config.offload == "all":
        backend.park()  # room for the model that is built next
    return backend


def make_ready(model: PreTrainedModel, head: TokenLogprobs | ValueHead, device: torch.device) -> None:
    """On the device, in float32, with packed attention and without dropout."""
    for module in (model, head):
        nn.Module.to(module, device=device, dtype=torch.float32)  # transformers' own `to` has no signature
    use_packed_attention(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # two passes over one batch must agree
    model.eval()
    if isinstance(head, TokenLogprobs):
        check_output_layer(model, device)


def choose_kernel(config: TrainedModel, device: torch.device) -> Kernel:
    """The attention kernel of this device and precision."""
    if config.attention == "auto":
        if device.type != "cuda" or config.precision != "bfloat16":
            return "sdpa"
        return "varlen_cudnn" if long_attention.is_available(device) else "varlen"
    if config.attention == "varlen" and (device.type != "cuda" or config.precision != "bfloat16"):
        raise ValueError(
            f"attention is varlen, precision {config.precision}, device {device.type}: the varlen kernel needs a GPU "
            "and bfloat16; set attention to auto or sdpa"
        )
    return config.attention


def named_parameters(model: PreTrainedModel, head: nn.Module) -> dict[str, nn.Parameter]:
    """What backbone and head use, by Hugging Face name, tied weights once; the head's own under `value_head.`."""
    used = {id(p) for p in [*model.base_model.parameters(), *head.parameters()]}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in used}
    known = {id(p) for p in parameters.values()}
    own = {f"value_head.{name}": p for name, p in head.named_parameters() if id(p) not in known}
    return parameters | own


@torch.no_grad()
def check_output_layer(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ValueError when the model's logits are more than `lm_head(hidden)`: scaled, capped, shifted."""
    pack = probe_pack(model.config.get_text_config().vocab_size).to(device)
    inputs = {"input_ids": pack.tokens_P[None], "position_ids": pack.positions_P[None], "use_cache": False}
    layout = lay_out(pack, device, "sdpa")
    output_layer = model.get_output_embeddings()
    assert output_layer is not None, "checked by TokenLogprobs"
    plain_PV = output_layer(model.base_model(**inputs, layout=layout).last_hidden_state)
    if not torch.allclose(model(**inputs, layout=layout).logits, plain_PV, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than one linear map (a scale or a cap): not supported"
        )


class BackboneWithHead(nn.Module):
    """One module, so that FSDP sees where a forward pass begins and ends."""

    def __init__(self, backbone: PreTrainedModel, head: TokenLogprobs | ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, pack: Pack, layout: Layout) -> Output:
        """The head's word on every token of the pack."""
        part, context = (slice(None), None) if layout.own is None else (layout.own.part, layout.own.context)
        tokens_1P, positions_1P = pack.tokens_P[None, part], pack.positions_P[None, part]
        out = self.backbone(input_ids=tokens_1P, position_ids=positions_1P, use_cache=False, layout=layout)
        return self.head(gathered(out.last_hidden_state).squeeze(0), pack, context)


class TorchBackend:
    """Plays `Backend`. Built by `build_torch_backend`."""

    def __init__(
        self,
        model: BackboneWithHead,
        parameters: dict[str, nn.Parameter],
        copies: WorkingCopies,
        optimizer: Optimizer | None,
        *,
        mesh: Mesh,
        kernel: Kernel,
        dtype: torch.dtype,
        machine: Machine,
        offload: Offload,
    ) -> None:
        self.machine = machine
        self._model = model
        self.parameters = parameters
        self._copies = copies
        self.optimizer = optimizer
        self._mesh = mesh
        self._kernel = kernel
        self._dtype = dtype
        self._device = next(iter(parameters.values())).device
        self._finite = torch.tensor(True, device=self._device)  # asked once a step: every answer waits for the device
        self._offload = offload
        self._away = HostMemory()  # weights and gradient; the optimizer has its own

    @property
    def head(self) -> TokenLogprobs | ValueHead:
        """What stands on the backbone."""
        return self._model.head

    @property
    def shard(self) -> Shard:
        """By the mesh."""
        return self._mesh.shard

    def infer(self, packs: Sequence[Pack]) -> Iterator[Output]:
        """One pack at a time, without a graph. The first is told when the last has been begun: no pack waits."""
        self._away.give_back()
        if self._offload != "none":
            self._park_optimizer()
        found = []
        for pack in packs:
            with torch.no_grad():
                output = self._forward(pack.to(self._device))
            found.append((output.column_P, output.after_P))
        release(self._model)
        for column_P, after_P in found:
            yield Output(column_P.cpu(), after_P=None if after_P is None else after_P.cpu())

    def forward_backward(self, packs: Sequence[Pack], loss: Loss) -> Metrics:
        """One pack at a time: its graph is gone before the next begins. A loss that is not finite spoils the step."""
        self._away.give_back()
        parts, keep = [], self._mesh.parallel.keep_gathered
        for left, pack in zip(reversed(range(len(packs))), packs, strict=True):
            keep_gathered(self._model, keep and left > 0)
            there = pack.to(self._device)
            total, metrics = loss(self._forward(there), there)
            self._finite &= total.detach().isfinite()
            total.backward()
            parts.append(metrics)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # done when it returns
        return merge(*parts)

    def _forward(self, pack: Pack) -> Output:
        return self._model(pack, lay_out(pack, self._device, self._kernel, self._mesh.context))

    def optim_step(self, divisor: float) -> StepReport:
        """Divide, clip, step, clear; see Optimizer.step."""
        if self.optimizer is None:
            raise RuntimeError("this model is frozen: it was built without total_optimizer_steps")
        self._away.give_back()
        report = self.optimizer.step(divisor, finite=bool(self._finite))
        self._finite.fill_(True)
        self._copies.refresh()
        return report

    def park(self) -> None:
        """The optimizer's moments, and with `all` weights and gradient too."""
        if self._offload != "none":
            self._park_optimizer()
        if self._offload == "all":
            release(self._model)
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            held = (*self.parameters.values(), *self._model.parameters(), *gradients)
            self._away.take(part_of(tensor) for tensor in held)

    def _park_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.park()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """In the precision of the forward pass, one whole tensor at a time: all ranks take part.

        At float32 these may be the live tensors: copy before the next step.
        """
        return self._whole(self._dtype)

    def _whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Cast first: ranks send each other no more digits than are wanted."""
        for name, parameter in self.parameters.items():
            yield name, whole_of(self._away.read(part_of(parameter)).to(self._device, dtype), parameter)

    def snapshot(self, copy: bool) -> WriteFiles:
        """float32 weights by Hugging Face name, and the optimizer; see `files`."""
        writes = [keep(self._whole(torch.float32), WEIGHTS, self._mesh.shard, copy=copy)]
        if self.optimizer is not None:
            writes.append(self.optimizer.snapshot(copy))
        return one_after_the_other(writes)

    def load(self, directory: Path) -> None:
        """Continue from a snapshot."""
        self.load_weights(directory)
        if self.optimizer is not None:
            self.optimizer.load(directory)
        self._finite.fill_(True)

    def load_weights(self, directory: Path) -> None:
        """Another architecture is a ValueError that names the first tensor that differs."""
        self._away.give_back()
        saved = SavedTensors(directory, WEIGHTS)
        different = first_mismatch(self.parameters, saved.shapes())
        if different:
            raise ValueError(f"{directory} holds another model than this one: {different}")
        for name, parameter in self.parameters.items():
            part_of(parameter).copy_(saved.read(name, region_of(parameter)))
        self._copies.refresh()

    def close(self) -> None:
        """Nothing to hand back: memory goes with the object."""
