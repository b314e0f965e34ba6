"""One update of an actor or a critic with all that can be seen of it: the same function on one process and on ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tandem.config.algorithm import HlGaussValueLoss, MseValueLoss, PolicyLoss
from tandem.plane.memory import MemoryPlane
from tandem.train.objectives import Objective, PolicyObjective, ValueObjective
from tandem.train.torch.backend import TorchBackend
from tandem.train.torch.placement import whole_of
from tandem.types import Batch, Metrics, merge
from tests.train.small_models import SHAPE, actor_backend, batch_of, critic_backend, llama, qwen, rows, settings, worker

STEPS = 3
OBJECTIVES: dict[str, Objective] = {
    "actor": PolicyObjective(PolicyLoss()),
    "critic": ValueObjective(MseValueLoss()),
    "bins": ValueObjective(HlGaussValueLoss(value_min=-2.0, value_max=2.0, num_bins=11)),
}
# An eps small beside the gradient (4e-3 a number), but not beside its rounding, of which AdamW else makes a step.
OPTIMIZER = {"lr": 3e-4, "eps": 1e-4}


def qwen3() -> Qwen3ForCausalLM:
    """Norms over heads."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True))


def qwen2(**options: object) -> PreTrainedModel:
    """Biases that are not 0. A key's hardly changes what attention does: all that it learns is rounding, so that from
    0 there would be nothing to compare."""
    model = qwen(**options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def window() -> PreTrainedModel:
    """A token sees seven back."""
    return qwen2(use_sliding_window=True, sliding_window=7, max_window_layers=0)


def deep() -> PreTrainedModel:
    """Three layers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | {"num_hidden_layers": 3}), tie_word_embeddings=True))


MODELS = {
    "llama": llama,
    "untied": lambda: llama(tied=False),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "window": window,
    "deep": deep,
}


@dataclass(frozen=True)
class Case:
    """What is trained, on which samples, laid out how."""

    kind: str = "actor"
    model: str = "llama"
    lengths: tuple[int, ...] = (12, 31, 20, 9, 40, 17, 25)
    budget: int = 64
    parallel: tuple[tuple[str, object], ...] = ()
    changes: tuple[tuple[str, object], ...] = ()
    packing: tuple[tuple[str, object], ...] = ()
    parks: bool = False  # after every call
    device: str = "cpu"
    megatron: tuple[tuple[str, object], ...] | None = None  # its sizes; None: the torch backend


@dataclass(frozen=True)
class Seen:
    """What one rank saw. Rows are its own; gradient and weights are whole; metrics are its share's."""

    rows: dict[int, Tensor]
    rows_after: dict[int, Tensor]
    gradient: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: Metrics


def join(parts: list[Seen]) -> Seen:
    """What the ranks saw together. No row may come from two ranks."""
    assert sum(len(part.rows) for part in parts) == len({key for part in parts for key in part.rows})
    return Seen(
        {key: row for part in parts for key, row in part.rows.items()},
        {key: row for part in parts for key, row in part.rows_after.items()},
        parts[0].gradient,
        parts[0].weights,
        merge(*(part.metrics for part in parts)),
    )


def backend_of(case: Case) -> TorchBackend:
    backend = {"name": "torch"} if case.megatron is None else {"name": "megatron", **dict(case.megatron)}
    config = settings(parallel=dict(case.parallel), optimizer=OPTIMIZER, backend=backend, **dict(case.changes))
    device = torch.device(case.device)
    if case.kind == "actor":
        return actor_backend(MODELS[case.model](), config, temperature=0.7, device=device)
    torch.manual_seed(1)
    support = (-2.0, 2.0, 11) if case.kind == "bins" else None
    return critic_backend(config, support=support, model=MODELS[case.model](), device=device)


def update(case: Case, load: Path | None = None, save: Path | None = None) -> Seen:
    """Infer, take the gradient, learn from it, infer again."""
    return asyncio.run(_update(case, load, save))


def updates(cases: dict[str, Case]) -> dict[str, Seen]:
    """Each from its own start."""
    return {name: update(case) for name, case in cases.items()}


async def _update(case: Case, load: Path | None, save: Path | None) -> Seen:
    batch, plane, backend = batch_of(list(case.lengths)), MemoryPlane(), backend_of(case)
    await plane.put(batch.keys, rows(list(case.lengths)))
    objective = OBJECTIVES[case.kind]
    model = worker(backend, plane, objective, case.budget, case.kind, **dict(case.packing))

    async def call(what: Awaitable[Metrics]) -> Metrics:
        metrics = await what
        if case.parks:
            await model.park()
        return metrics

    if load is not None:
        await model.load(load)
    metrics = await call(model.infer(batch, "first"))
    await model.forward_backward(batch, {})
    gradient = whole_gradient(backend)
    for _ in range(STEPS):
        metrics = merge(metrics, await call(model.forward_backward(batch, {})))
        metrics = merge(metrics, await call(model.optim_step(90.0)))
    await call(model.infer(batch, "second"))
    if save is not None:
        (await model.snapshot(copy=True))(save)
    weights = {name: tensor.clone().cpu() for name, tensor in model.export_weights()}
    await model.close()
    return Seen(await present(plane, batch, "first"), await present(plane, batch, "second"), gradient, weights, metrics)


def whole_gradient(backend: TorchBackend) -> dict[str, Tensor]:
    """Summed over the ranks and put together. The backend's own is cleared."""
    if not isinstance(backend, TorchBackend):
        optimizer = backend.optimizer
        optimizer.sum_gradients()
        found = {name: tensor.clone() for name, tensor in optimizer.whole(optimizer.gradient)}
        optimizer.clear()
        return found
    parts = backend._mesh.take_gradients(backend.parameters)
    return {name: whole_of(parts[name], parameter).clone().cpu() for name, parameter in backend.parameters.items()}


async def present(plane: MemoryPlane, batch: Batch, name: str) -> dict[int, Tensor]:
    """The rows of a column that this rank wrote."""
    found = {}
    for key in batch.keys:
        try:
            found[key] = (await plane.get([key], [name]))[name][0]
        except KeyError:
            continue
    return found
