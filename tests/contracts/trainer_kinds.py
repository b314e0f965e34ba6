"""The backends that the contract of the Trainer role runs on, under the one Worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tandem.config.algorithm import MseValueLoss, PolicyLoss
from tandem.plane.memory import MemoryPlane
from tandem.train.backend import Backend
from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.objectives import PolicyObjective, ValueObjective
from tandem.train.worker import Worker
from tests.train.small_models import SHAPE, backend_on, batch_of, lengths_of, llama, rows, settings, worker

LENGTHS = lengths_of(6, low=12)
BATCH = batch_of(LENGTHS)
COLUMNS = rows(LENGTHS)
DIVISOR = 90.0


@dataclass(frozen=True)
class TrainerKind:
    """A backend by its name in a recipe, and the package that it needs."""

    name: str
    package: str

    def backend(
        self, model: PreTrainedModel, head: TokenLogprobs | ValueHead, steps: int | None, **changes: object
    ) -> Backend:
        return backend_on(model, head, settings(backend={"name": self.name}, **changes), steps)

    def actor(self, model: PreTrainedModel | None = None, steps: int | None = 10, **changes: object) -> Backend:
        model = model or llama()
        head = TokenLogprobs(model.get_output_embeddings(), temperature=0.7, chunk_size=32)
        return self.backend(model, head, steps, **changes)

    def critic(self, support: tuple[float, float, int] | None = None, zero: bool = False, **changes: object) -> Backend:
        head = ValueHead(SHAPE["hidden_size"], support=support)
        if not zero:
            torch.manual_seed(3)
            torch.nn.init.normal_(head.linear.weight, std=0.2)
        return self.backend(llama(), head, 10, **changes)


KINDS = [TrainerKind("torch", "torch"), TrainerKind("megatron", "megatron")]
ROLES = ["actor", "critic"]


async def trainer_of(backend: Backend, role: str, budget: int = 256) -> tuple[Worker, MemoryPlane]:
    """A Worker with a plane that holds every column."""
    plane = MemoryPlane()
    await plane.put(BATCH.keys, COLUMNS)
    objective = PolicyObjective(PolicyLoss()) if role == "actor" else ValueObjective(MseValueLoss())
    return worker(backend, plane, objective, budget, role), plane


def weights_of(model: Worker | Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.export_weights()}


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest |a - b| / |b|; NaN is far."""
    assert found.keys() == wanted.keys()
    distances = [float((found[name] - b).norm() / b.norm().clamp(min=1e-12)) for name, b in wanted.items()]
    return max(distance if distance == distance else float("inf") for distance in distances)
