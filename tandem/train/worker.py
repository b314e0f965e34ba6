"""The one Trainer: fetches rows, cuts them into packs, runs a backend, puts results back. Backend-blind.

On several ranks each holds a Worker and makes the same calls. A Worker fetches, runs and stores the share of the batch
that its backend's shard names, and reports that share's metrics: `merge` over the ranks gives those of one process.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tandem.config.models import SequencePacking
from tandem.roles import DataPlane, WriteFiles
from tandem.train.backend import Backend, Output, Pack
from tandem.train.flops import flops_of, speed_metrics
from tandem.train.objectives import Objective
from tandem.train.packs import pack_batch, unpack_column
from tandem.train.sharding import Shard, plan_shares
from tandem.types import Batch, Mean, Metrics, Sum, Trace

log = logging.getLogger(__name__)
Result = TypeVar("Result")
INFER_COLUMNS = ("tokens", "mask")


class Worker:
    """Actor, critic and reference are Workers. All that computes runs in one thread, call after call."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        plane: DataPlane,
        packing: SequencePacking,
        objective: Objective | None,
        clock: Callable[[], float],
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`name` is the metrics' room; `objective` None is a model that only infers; `clock` gives seconds.

        Workers that take turns may share a `thread`, which is then not theirs to end.
        """
        self._name = name
        self._backend = backend
        self._plane = plane
        self._packing = packing
        self._objective = objective
        self._clock = clock
        self._has_own_thread = thread is None
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"train-{name}")
        self._in_gradient: list[int] = []  # the samples since the last step
        self._suspects: list[int] = []  # those of packs whose loss was not finite

    async def infer(self, batch: Batch, out: str) -> Metrics:
        """One row a sample into column `out`: log-probs where the policy wrote, 0 elsewhere; or values everywhere.

        A critic also writes `<out>_after`, one number a sample: the value of the state after its last token.
        """
        budget = self._packing.logprob_mb_tokens or self._packing.train_mb_tokens
        own, packs, read = await self._packs(batch, INFER_COLUMNS, budget)
        outputs, speed = await self._run(self._infer, packs)
        rows = {out: unpack_column(packs, [output.column_P for output in outputs], len(own))}
        after = [output.after_P for output in outputs if output.after_P is not None]
        if after:
            rows[f"{out}_after"] = [row[-1] for row in unpack_column(packs, after, len(own))]
        if self._backend.shard.speaks and own.keys:
            await self._plane.put(own.keys, rows)
        return self._of_share(token_metrics(packs) | speed | read)

    def _infer(self, packs: Sequence[Pack]) -> tuple[list[Output], Metrics]:
        begin = self._clock()
        outputs = list(self._backend.infer(packs))
        return outputs, self._speed(packs, self._clock() - begin, backward=False)

    def _speed(self, packs: Sequence[Pack], seconds: float, *, backward: bool) -> Metrics:
        machine = self._backend.machine
        if machine.shape is None:
            return {}
        tflop = flops_of(machine.shape, packs, backward=backward) / self._backend.shard.parts / 1e12
        return speed_metrics(machine, tflop, seconds)

    async def _packs(self, batch: Batch, names: Sequence[str], budget: int) -> tuple[Batch, list[Pack], Metrics]:
        """This rank's share of the batch, its packs, and what was fetched for them. No other row is fetched."""
        shard = self._backend.shard
        shares = await self._run(plan_shares, batch.lengths, self._packing, budget, shard.count)
        own = batch.pick(shares[shard.index].rows)
        columns = await self._plane.get(own.keys, names)
        packs = await self._run(pack_batch, own, columns, shares[shard.index].bins, self._packing.multiple)
        return own, packs, bytes_read(columns)

    async def forward_backward(self, batch: Batch, scale: Mapping[str, float]) -> Metrics:
        """Add the gradient of the SUM of the batch's losses; see the objective for the names in `scale`."""
        if self._objective is None:
            raise RuntimeError(f"{self._name} has no objective: it only infers")
        own, packs, read = await self._packs(batch, self._objective.columns, self._packing.train_mb_tokens)
        self._in_gradient.extend(batch.keys)
        seen: dict[tuple[int, ...], dict[str, Tensor]] | None = None if batch.trace is None else {}
        metrics = await self._run(self._forward_backward, self._objective, packs, scale, seen)
        if batch.trace is not None and seen and self._backend.shard.speaks:
            rows = trace_rows(packs, seen, len(own), self._backend.shard, batch.trace)
            await self._plane.put(own.keys, {batch.trace.column(self._name, name): x for name, x in rows.items()})
        return self._of_share(metrics | read)

    def _forward_backward(
        self,
        objective: Objective,
        packs: Sequence[Pack],
        scale: Mapping[str, float],
        seen: dict[tuple[int, ...], dict[str, Tensor]] | None,
    ) -> Metrics:
        """`seen` takes what each pack was learned from, by its keys, where it is wanted."""

        def loss(output: Output, pack: Pack) -> tuple[Tensor, Metrics]:
            total, metrics = objective(output, pack, scale)
            if seen is not None and pack.keys:
                seen[pack.keys] = {name: x.cpu() for name, x in objective.trace(output, pack).items()}
            if is_finite(metrics):
                return total, metrics
            self._suspects.extend(pack.keys)
            return total, {}  # one NaN would hide the figures of all other packs

        begin = self._clock()
        metrics = self._backend.forward_backward(packs, loss)
        return metrics | token_metrics(packs) | self._speed(packs, self._clock() - begin, backward=True)

    async def optim_step(self, divisor: float) -> Metrics:
        """Divide, clip, step, clear. A refused step is logged with its samples; too many are a RuntimeError."""
        report = await self._run(self._backend.optim_step, divisor)
        samples, self._in_gradient = self._in_gradient, []
        suspects, self._suspects = self._suspects, []
        if report.refused and (suspects or self._backend.shard.leads):
            log.warning(
                "%s: optimizer step refused, NaN or Inf in %s; samples %s; %d more refusals end the run",
                self._name,
                "the loss" if suspects else "the gradient",
                suspects or samples,
                max(0, report.refusals_left + 1),
            )
        if report.refusals_left < 0:
            raise RuntimeError(
                f"{self._name}: a step was refused for NaN or Inf once more than max_skipped_optimizer_steps "
                f"allows; the last one held samples {suspects or samples}"
            )
        figures: Metrics = {"steps_skipped": Sum(float(report.refused)), "lr": Mean(report.lr, 1)}
        if not report.refused:
            figures["grad_norm"] = Mean(report.grad_norm, 1)
        return self._named(figures) if self._backend.shard.leads else {}

    async def park(self) -> None:
        """Leave the device as far as the recipe says, until the next call."""
        await self._run(self._backend.park)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See the backend: tensors may be live, so copy them before the next step."""
        return self._backend.export_weights()

    async def snapshot(self, *, copy: bool) -> WriteFiles:
        """Weights, optimizer and counts, at a step's end: an accumulated gradient is not kept."""
        return await self._run(self._backend.snapshot, copy)

    async def load(self, directory: Path) -> None:
        """Continue from a snapshot."""
        await self._run(self._backend.load, directory)

    async def load_weights(self, directory: Path) -> None:
        """Start from a snapshot's weights, with a fresh optimizer."""
        await self._run(self._backend.load_weights, directory)

    async def close(self) -> None:
        """Waits for what computes, then frees a thread of its own."""
        await self._run(self._backend.close)
        if self._has_own_thread:
            self._thread.shutdown()

    async def _run(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*arguments))

    def _of_share(self, metrics: Metrics) -> Metrics:
        return self._named(metrics) if self._backend.shard.speaks else {}

    def _named(self, metrics: Metrics) -> Metrics:
        return {f"{self._name}/{key}": metric for key, metric in metrics.items()}


def is_finite(metrics: Metrics) -> bool:
    """Whether a pack's means may be merged with those of others."""
    return all(math.isfinite(metric.total) for metric in metrics.values() if isinstance(metric, Mean))


def trace_rows(
    packs: Sequence[Pack],
    seen: Mapping[tuple[int, ...], Mapping[str, Tensor]],
    samples: int,
    shard: Shard,
    trace: Trace,
) -> dict[str, list[Tensor]]:
    """What each sample was learned from, and where: mini-batch, micro-batch of all ranks, place of its first token."""
    filled = [pack for pack in packs if pack.keys]
    rows = {
        name: unpack_column(filled, [seen[pack.keys][name] for pack in filled], samples)
        for name in seen[filled[0].keys]
    }
    places: dict[int, tuple[int, int]] = {}
    for number, pack in enumerate(packs):
        for row, offset in zip(pack.rows, pack.cu_seqlens, strict=False):
            places[row] = (number * shard.count + shard.index, offset)
    rows["mini_batch"] = [torch.tensor(trace.mini_batch) for _ in range(samples)]
    rows["micro_batch"] = [torch.tensor(places[row][0]) for row in range(samples)]
    rows["offset"] = [torch.tensor(places[row][1]) for row in range(samples)]
    return rows


def token_metrics(packs: Sequence[Pack]) -> Metrics:
    """What was run, and how much of it was padding."""
    tokens = sum(pack.tokens for pack in packs)
    slots = sum(len(pack.tokens_P) for pack in packs)
    return {"tokens": Sum(tokens), "pad_fraction": Mean(slots - tokens, slots)}


def bytes_read(columns: Mapping[str, Sequence[Tensor]]) -> Metrics:
    """What was fetched from the plane for it."""
    return {"bytes_read": Sum(sum(row.nbytes for rows in columns.values() for row in rows))}
