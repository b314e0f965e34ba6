"""The order of prompts: which row stands at an index, as a pure function of (seed, index)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol, TypeVar

T = TypeVar("T")
KEPT_EPOCHS = 2  # a run that generates ahead reads from the end of one epoch and the start of the next


class Order(Protocol):
    """Deals row numbers. `len` is the prompts of an epoch."""

    def __len__(self) -> int: ...

    def at(self, index: int) -> int:
        """The number of the row at this place of the endless stream."""
        ...


class Permutation:
    """Every row once an epoch, in a new order each epoch if `shuffle`."""

    def __init__(self, count: int, *, seed: int | str, shuffle: bool) -> None:
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._count

    def at(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        return self._epoch(epoch)[place] if self._shuffle else place

    def _epoch(self, epoch: int) -> list[int]:
        """Seeding with a text is stable across Python versions and machines."""
        if epoch not in self._epochs:
            order = list(range(self._count))
            Random(f"{self._seed}/{epoch}").shuffle(order)
            keep(self._epochs, epoch, order)
        return self._epochs[epoch]


class Weighted:
    """Sources by weight: of each the same number of prompts every epoch, drawn through its own rows without repeats.

    An epoch is as long as all rows together. A source whose share is more than its rows begins again with them, in a
    new order; one whose share is less goes on in the next epoch where it stood.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[int]], weights: Mapping[str, float], *, seed: int, shuffle: bool
    ) -> None:
        """`rows`: the row numbers of each source. ValueError for a weight that comes to no prompt at all."""
        self._rows = list(rows.values())
        self._shares = shares([weights[name] for name in rows], sum(map(len, self._rows)))
        for name, share in zip(rows, self._shares, strict=True):
            if not share:
                raise ValueError(
                    f"data.train.weights.{name}={weights[name]:g} comes to no prompt in an epoch of {len(self)}:"
                    " raise it, or take the source out"
                )
        self._own = [Permutation(len(own), seed=f"{seed}/{name}", shuffle=shuffle) for name, own in rows.items()]
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows))

    def at(self, index: int) -> int:
        epoch, place = divmod(index, len(self))
        source, number = self._epoch(epoch)[place]
        drawn = self._own[source].at(epoch * self._shares[source] + number)
        return self._rows[source][drawn]

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """For each place the source, and how many prompts of it came before in this epoch."""
        if epoch not in self._epochs:
            order = interleaved(self._shares)
            if self._shuffle:
                Random(f"{self._seed}/{epoch}").shuffle(order)
            counts = [0] * len(self._shares)
            dealt = []
            for source in order:
                dealt.append((source, counts[source]))
                counts[source] += 1
            keep(self._epochs, epoch, dealt)
        return self._epochs[epoch]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`, nearest to the weights' proportions (largest remainders)."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: whole[i] - exact[i])
    for source in by_remainder[: total - sum(whole)]:
        whole[source] += 1
    return whole


def interleaved(counts: Sequence[int]) -> list[int]:
    """Sources spread evenly: each as often as its count, at even distances."""
    places = sorted(((number + 0.5) / count, source) for source, count in enumerate(counts) for number in range(count))
    return [source for _, source in places]


def keep(epochs: dict[int, T], epoch: int, order: T) -> None:
    """Remember an epoch, and forget the oldest."""
    while len(epochs) >= KEPT_EPOCHS:
        del epochs[next(iter(epochs))]
    epochs[epoch] = order
