"""The parts of benchmarks/scaling.py that hold tensors: plane, packs, advantages, a whole PPO step, ranks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.trained_model import Job, Variant, free_port, our_backend, rows, work_of
from tandem.algorithms.estimate import Columns, estimate
from tandem.algorithms.ppo import PPO
from tandem.config.algorithm import PolicyLoss, Ppo
from tandem.config.models import SequencePacking
from tandem.plane.memory import MemoryPlane
from tandem.train.packs import pack_batch
from tandem.train.sharding import plan_shares
from tandem.train.worker import Worker
from tandem.types import Batch

Round = Callable[[], float | None]
VOCABULARY = 512  # of the tiny shape
BUDGET = 4_096  # tokens of a micro-batch
RANK_TOKENS = 8_192  # of a step, for each rank: with few, what is measured is gloo
GROUP = 8
UPDATES = 3  # of a rank
TINY = Job("tiny", BUDGET, 128, "float32", steps=1, warmup=0, device="cpu")


def lengths_of(samples: int, tokens: int) -> tuple[int, ...]:
    """Between half of `tokens` and all of them."""
    draw = random.Random(samples)
    return tuple(draw.randint(tokens // 2, tokens) for _ in range(samples))


def batch_of(samples: int, tokens: int) -> Batch:
    return Batch(tuple(range(samples)), lengths_of(samples, tokens), tuple(index // GROUP for index in range(samples)))


def rows_of(batch: Batch) -> dict[str, list[Tensor]]:
    """What a rollout writes: a prompt of a quarter, then a response."""
    draw = torch.Generator().manual_seed(0)
    return {
        "tokens": [torch.randint(VOCABULARY, (n,), generator=draw) for n in batch.lengths],
        "mask": [torch.arange(n) >= n // 4 for n in batch.lengths],
        "gen_logprobs": [-6 - torch.rand(n, generator=draw) for n in batch.lengths],
        "versions": [torch.zeros(n, dtype=torch.int32) for n in batch.lengths],
        "reward": [torch.tensor(float(key % 3 == 0)) for key in batch.keys],
        "truncated": [torch.tensor(False) for _ in batch.keys],
        "trained": [torch.tensor(True) for _ in batch.keys],
    }


def plane(samples: int) -> Round:
    """Rows of a group put into the plane as rollouts do, got as trainers do, and dropped."""
    batch, held = batch_of(samples, 64), MemoryPlane()
    columns = rows_of(batch)

    async def cycle() -> None:
        for start in range(0, samples, GROUP):
            part = {name: column[start : start + GROUP] for name, column in columns.items()}
            await held.put(batch.keys[start : start + GROUP], part)
        await held.get(batch.keys, ["tokens", "mask", "reward"])
        await held.drop(batch.keys)

    return lambda: asyncio.run(cycle())


def plan(samples: int, shards: int) -> Round:
    """Which rank takes which samples, in which micro-batches."""
    lengths, packing = lengths_of(samples, 2_048), SequencePacking()

    def cut() -> None:
        plan_shares(lengths, packing, 8_192, shards)

    return cut


def packs(samples: int, tokens: int) -> Round:
    """Planned, and laid end to end."""
    batch, packing = batch_of(samples, tokens), SequencePacking()
    columns = {name: column for name, column in rows_of(batch).items() if column[0].dim()}

    def lay() -> None:
        (share,) = plan_shares(batch.lengths, packing, max(8_192, tokens), 1)
        pack_batch(batch.pick(share.rows), {k: [x[row] for row in share.rows] for k, x in columns.items()}, share.bins)

    return lay


def advantages(samples: int, tokens: int) -> Round:
    """GAE, whitening, corrections and metrics on padded columns."""
    draw, shape = torch.Generator().manual_seed(0), (samples, tokens)
    columns = Columns(
        reward_N=torch.rand(samples, generator=draw),
        components={},
        truncated_N=torch.zeros(samples, dtype=torch.bool),
        trained_N=torch.ones(samples, dtype=torch.bool),
        group_N=torch.arange(samples) // GROUP,
        mask_NT=torch.arange(tokens).expand(shape) >= tokens // 4,
        gen_logprobs_NT=-torch.rand(shape, generator=draw),
        old_logprobs_NT=-torch.rand(shape, generator=draw),
        ref_logprobs_NT=None,
        values_NT=torch.randn(shape, generator=draw),
        bootstrap_N=None,
    )

    def learn() -> None:
        estimate(columns, Ppo(), PolicyLoss(), 0.0)

    return learn


def trainer(name: str, held: MemoryPlane) -> Worker:
    """An actor or a critic of two layers of 64."""
    backend, objective = our_backend(TINY, Variant(name))
    packing = SequencePacking(train_mb_tokens=BUDGET)
    return Worker(name, backend, plane=held, packing=packing, objective=objective, clock=time.perf_counter)


def ppo_step(samples: int, tokens: int) -> Round:
    """Actor and critic of two layers: infer, advantages, two updates each, as the loop does it; rows come and go."""
    batch, held = batch_of(samples, tokens), MemoryPlane()
    algorithm = PPO(
        Ppo(num_prompts_per_step=samples // GROUP, num_generations_per_prompt=GROUP),
        PolicyLoss(),
        mini_batch=samples // 2,
        max_new_tokens=tokens,
        seed=0,
        plane=held,
        actor=trainer("actor", held),
        critic=trainer("critic", held),
        reference=None,
        span=lambda name: nullcontext(),
        streaming=False,
    )
    columns = rows_of(batch)

    async def step() -> None:
        await held.put(batch.keys, columns)
        await algorithm.step(one_chunk(batch), step=0, train_policy=True)
        await held.drop(batch.keys)

    return lambda: asyncio.run(step())


async def one_chunk(batch: Batch) -> AsyncIterator[Batch]:
    yield batch


def flops(samples: int, tokens: int) -> float:
    """Of the same lengths in that step, in proportion: actor and critic differ by their heads only."""
    job = Job("tiny", 0, 0, "float32", steps=1, warmup=0, device="cpu")
    each = (Job(**(vars(job) | {"tokens": n, "length": n})) for n in lengths_of(samples, tokens))
    return sum(work_of(one, Variant("actor")) + work_of(one, Variant("critic")) for one in each)


def ranks(count: int) -> Round:
    """An update of an actor whose weights lie on `count` processes, each with as many samples: CPU seconds of all."""

    def updates() -> float:
        context = multiprocessing.get_context("spawn")
        told = context.SimpleQueue()
        multiprocessing.spawn(rank, args=(count, free_port(), told), nprocs=count)
        found = sum(told.get() for _ in range(count))
        told.close()
        return found

    return updates


def rank(index: int, count: int, port: int, told: object) -> None:
    """One of them; it tells its CPU seconds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=count)
    backend, objective = our_backend(TINY, Variant("actor"))
    share = count * RANK_TOKENS // TINY.length
    batch, columns = rows(TINY, share)
    own = plan_shares(batch.lengths, SequencePacking(), BUDGET, count)[index]
    packed = pack_batch(batch.pick(own.rows), {k: [x[row] for row in own.rows] for k, x in columns.items()}, own.bins)
    began = 0.0
    for step in range(1 + UPDATES):
        if step == 1:
            began = time.process_time()
        backend.forward_backward(packed, lambda output, pack: objective(output, pack, {}))
        backend.optim_step(float(sum(batch.lengths)))
    told.put((time.process_time() - began) / UPDATES)
    dist.destroy_process_group()
