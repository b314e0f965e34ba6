"""Weight sync inside one process: the engine copies the trainer's tensors, and both show the same fingerprint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from tandem.fingerprint import fingerprint, first_difference
from tandem.roles import Engine, Trainer
from tandem.types import Metrics, Sum


class MemorySync:
    """Publishes the actor's weights to every engine of this process."""

    def __init__(self, actor: Trainer, engines: Sequence[Engine]) -> None:
        self._actor = actor
        self._engines = engines

    async def publish(self, version: int) -> Metrics:
        """Drain the engines, hand over the weights, compare fingerprints, resume.

        Raises RuntimeError naming the first tensor that differs: sampling from weights that are not the trainer's
        would spoil every later step in silence.
        """
        weights, ours = await asyncio.to_thread(self._export)
        await asyncio.gather(*(engine.pause() for engine in self._engines))
        for number, engine in enumerate(self._engines):
            await engine.load_weights(version, weights)
            different = first_difference(ours, await engine.fingerprint())
            if different:
                raise RuntimeError(
                    f"after the sync to version {version} engine {number} holds other weights: {different}"
                )
        for engine in self._engines:
            await engine.resume()
        return {"weights/bytes": Sum(sum(t.numel() * t.element_size() for _, t in weights))}

    def _export(self) -> tuple[list[tuple[str, torch.Tensor]], dict[str, str]]:
        weights = list(self._actor.export_weights())
        return weights, fingerprint(weights)
