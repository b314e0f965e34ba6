"""Whole steps of the real algorithm over trainers of this room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.algorithms.ppo import PPO
from tandem.config.algorithm import Gae, MseValueLoss, PolicyLoss, Ppo
from tandem.plane.memory import MemoryPlane
from tandem.roles import Trainer
from tandem.train.objectives import Objective, PolicyObjective, ValueObjective
from tandem.types import Batch
from tests.train.small_models import batch_of, rows

LENGTHS = (12, 31, 20, 9, 40, 17, 25, 14)
BATCH = batch_of(list(LENGTHS))
LOSS, VALUE_LOSS = PolicyLoss(reference_policy_kl_penalty=0.05), MseValueLoss()
OBJECTIVES: dict[str, Objective | None] = {
    "critic": ValueObjective(VALUE_LOSS),
    "actor": PolicyObjective(LOSS),
    "reference": None,
}


async def plane_of_rollouts() -> MemoryPlane:
    """Only what rollouts write."""
    columns = rows(list(LENGTHS))
    generator = torch.Generator().manual_seed(3)
    plane = MemoryPlane()
    await plane.put(
        BATCH.keys,
        {name: columns[name] for name in ("tokens", "mask", "gen_logprobs")}
        | {
            "reward": list(torch.rand(len(LENGTHS), generator=generator)),
            "truncated": [torch.tensor(length > 30) for length in LENGTHS],
            "trained": [torch.tensor(True) for _ in LENGTHS],
        },
    )
    return plane


def algorithm_of(
    plane: MemoryPlane,
    models: dict[str, Trainer],
    *,
    span: Callable[[str], AbstractContextManager[None]] = nullcontext,
    mini_batch: int = 4,
    streaming: bool = False,
    **changes: object,
) -> PPO:
    """Actor, critic and reference; two mini-batches an epoch."""
    estimator = Gae(gae_lambda=0.95, bootstrap_truncated=True)
    settings = Ppo(num_prompts_per_step=4, num_generations_per_prompt=2, adv_estimator=estimator)
    return PPO(
        settings.model_copy(update=changes),
        LOSS,
        mini_batch=mini_batch,
        max_new_tokens=64,
        seed=0,
        plane=plane,
        actor=models["actor"],
        critic=models["critic"],
        reference=models["reference"],
        span=span,
        streaming=streaming,
    )


async def chunks(size: int) -> AsyncIterator[Batch]:
    """The step's samples, so many at a time."""
    for start in range(0, len(LENGTHS), size):
        yield BATCH.pick(range(start, start + size))
