"""Weights inside one process: the engines copy the trainer's tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from tandem.fingerprint import fingerprint
from tandem.roles import Delivery, Engine


class Exports(Protocol):
    """A trainer whose weights can be read here."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by Hugging Face name, in the precision that engines run."""
        ...


class MemoryCarrier:
    """From an actor to the engines of this process."""

    def __init__(self, actor: Exports, engines: Sequence[Engine]) -> None:
        self._actor = actor
        self._engines = engines
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._delivery = Delivery({}, 0)

    async def prepare(self) -> None:
        """Export, and take the fingerprint."""
        await asyncio.to_thread(self._export)

    def _export(self) -> None:
        self._weights = list(self._actor.export_weights())
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in self._weights)
        self._delivery = Delivery(fingerprint(self._weights), size)

    async def deliver(self, version: int) -> Delivery:
        """Every engine takes them."""
        weights, self._weights = self._weights, []
        for engine in self._engines:
            await engine.load_weights(version, weights)
        return self._delivery
