"""Weights in Ray's object store, as numpy arrays: processes of a node share those without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray  # type: ignore  # an extra: only a run under Ray comes here
import torch


class Parcel(NamedTuple):
    """One tensor: its bytes, and what they are."""

    name: str
    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]


def pack(name: str, tensor: torch.Tensor) -> Parcel:
    """numpy knows no bfloat16, and bytes are bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Parcel(name, flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack(parcel: Parcel) -> tuple[str, torch.Tensor]:
    """A tensor over the same bytes. Those are shared between processes: it is for copying from."""
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # torch knows no read-only tensor
        flat = torch.from_numpy(parcel.data)
    return parcel.name, flat.view(getattr(torch, parcel.dtype)).view(parcel.shape)


@dataclass(frozen=True)
class Stored:
    """Named tensors in the object store: references, which any process of the run reads at its own node."""

    buckets: list[Any]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.buckets:
            yield from map(unpack, ray.get(bucket))


def store(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Stored:
    """Put weights into the object store, a bucket at a time: no more than one is in this process's memory."""
    buckets, bucket, size = [], [], 0
    for name, tensor in weights:
        bucket.append(pack(name, tensor))
        size += tensor.nbytes
        if size >= bucket_bytes:
            buckets.append(ray.put(bucket))
            bucket, size = [], 0
    return Stored([*buckets, *([ray.put(bucket)] if bucket else [])])
