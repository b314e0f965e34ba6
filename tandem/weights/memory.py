"""Weight sync inside one process: the engine copies the trainer's tensors, and both show the same fingerprint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import perf_counter

import torch

from tandem.fingerprint import fingerprint, first_difference
from tandem.roles import Engine, Fingerprint, Trainer
from tandem.types import Max, Metrics, Sum

log = logging.getLogger(__name__)


class MemorySync:
    """Publishes the actor's weights to every engine of this process."""

    def __init__(self, actor: Trainer, engines: Sequence[Engine], *, drain: bool, recompute_kv: bool) -> None:
        """`drain` lets running requests end first; else they go on, on a cache that `recompute_kv` makes new."""
        self._actor = actor
        self._engines = engines
        self._drain = drain
        self._recompute_kv = recompute_kv

    async def publish(self, version: int) -> Metrics:
        """Pause the engines, hand over the weights, compare fingerprints, resume. Nothing may train meanwhile.

        Raises RuntimeError naming the first tensor that differs: sampling from weights that are not the trainer's
        would spoil every later step in silence. After any error the engines stay paused: the run must end.
        """
        weights, ours = await asyncio.to_thread(self._export)  # before the pause: it takes no part of it
        began_s = perf_counter()
        try:
            await asyncio.gather(*(engine.pause(drain=self._drain) for engine in self._engines))
            for number, engine in enumerate(self._engines):
                await engine.load_weights(version, weights)
                different = first_difference(ours, await engine.fingerprint())
                if different:
                    raise RuntimeError(
                        f"after the sync to version {version} engine {number} holds other weights: {different}"
                    )
            await asyncio.gather(*(engine.resume(recompute_kv=self._recompute_kv) for engine in self._engines))
        except BaseException:
            log.error("publishing version %d failed: the engines stay paused, for their weights are unproven", version)
            raise
        return {
            "weights/bytes": Sum(sum(tensor.numel() * tensor.element_size() for _, tensor in weights)),
            "weights/pause_s": Max(perf_counter() - began_s),
        }

    def _export(self) -> tuple[list[tuple[str, torch.Tensor]], Fingerprint]:
        weights = list(self._actor.export_weights())
        return weights, fingerprint(weights)
