"""Weights bucket by bucket: how they are cut, put into flat memory and read from it. How the bytes travel is a way.

Both sides cut alike, from names, types and shapes alone: nothing but bytes travels beside the announcement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

ALIGNMENT = 16  # bytes: a tensor in a bucket begins where every type may


class Spec(NamedTuple):
    """What a tensor is, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def room(self) -> int:
        """Bytes that it takes in a bucket."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    """Of a tensor that is there."""
    return Spec(name, tensor.dtype, tuple(tensor.shape))


class Outlet(Protocol):
    """The trainer's end of a way."""

    def send(self, flat: torch.Tensor) -> None:
        """Returns when nobody reads these bytes any more."""
        ...


class Inlet(Protocol):
    """An engine's end of a way."""

    def receive(self, size: int) -> torch.Tensor:
        """The next bucket's bytes, which are the caller's from now on."""
        ...


class Door(Protocol):
    """The way to the trainer, as an engine is told of it. It is sent to the engine's processes."""

    def enter(self, share: int) -> Inlet:
        """As which of the engine's processes: 0 for the first. The same door leads to the same inlet every time."""
        ...


def cut(specs: Iterable[Spec], limit: int) -> Iterator[list[Spec]]:
    """Buckets of at most `limit` bytes, in order; a tensor that is larger is one alone."""
    bucket: list[Spec] = []
    size = 0
    for spec in specs:
        if bucket and size + spec.room > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.room
    if bucket:
        yield bucket


def parts(flat: torch.Tensor, bucket: Sequence[Spec]) -> Iterator[torch.Tensor]:
    """The tensors of a bucket, as views of its bytes."""
    begin = 0
    for spec in bucket:
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        yield flat[begin : begin + size].view(spec.dtype).view(spec.shape)
        begin += spec.room


def send(
    weights: Iterable[tuple[str, torch.Tensor]], specs: Sequence[Spec], limit: int, outlet: Outlet, device: torch.device
) -> None:
    """Send all weights: no more than one bucket and one of them is held. ValueError: they are not the announced ones.

    A generator that gathers a tensor from many ranks does so when it is that tensor's turn.
    """
    coming = iter(weights)
    for bucket in cut(specs, limit):
        flat = torch.empty(sum(spec.room for spec in bucket), dtype=torch.uint8, device=device)
        for spec, part in zip(bucket, parts(flat, bucket), strict=True):
            name, tensor = next(coming)
            if spec_of(name, tensor) != spec:
                raise ValueError(f"announced was {spec}, but the trainer exports {spec_of(name, tensor)}")
            part.copy_(tensor)
            del tensor, part
        outlet.send(flat)
        del flat
    if next(coming, None) is not None:
        raise ValueError(f"announced were {len(specs)} weights, but the trainer exports more")


def receive(specs: Sequence[Spec], limit: int, inlet: Inlet) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of one bucket after the other. Who keeps none of them holds one bucket at a time."""
    for bucket in cut(specs, limit):
        flat = inlet.receive(sum(spec.room for spec in bucket))
        for spec, part in zip(bucket, parts(flat, bucket), strict=True):
            yield spec.name, part
            del part
        del flat


@dataclass(frozen=True)
class Announcement:
    """Weights that will come through a door. Plays the WeightStream; each of an engine's processes opens it itself."""

    specs: tuple[Spec, ...]
    limit: int
    door: Door

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """What will come, in order."""
        return [(spec.name, spec.shape) for spec in self.specs]

    def open(self, share: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Take part. All processes of all engines must, to the end."""
        return receive(self.specs, self.limit, self.door.enter(share))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.open(0)
