"""Which groups the next step trains on: one pure function a sampler.

A sampler looks at the entries in an order that is already kept and stops after as many as it wants: what a decision
costs does not depend on how much is buffered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import assert_never

from tandem.config.asynchrony import Custom, InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from tandem.control.entries import Entries, Entry
from tandem.types import Group


@dataclass(frozen=True)
class Choice:
    """Groups to train on now; groups that no step may use any more; prompts in flight that can never be used.

    `take` is empty or whole. Dropping without taking is a choice too: the tickets return and the buffer asks again.
    """

    take: tuple[Group, ...]
    drop: tuple[Group, ...] = ()
    cancel: tuple[int, ...] = ()


# (entries, the version that would train them, groups wanted) -> a choice, or None: nothing to do yet.
Choose = Callable[[Entries, int, int], Choice | None]


def in_order(entries: Entries, version: int, want: int) -> Choice | None:
    """The next `want` prompts, all finished. A failed prompt has left the entries: the next one is in its place."""
    return whole(islice(entries.by_prompt.values(), want), want)


def ready_first(entries: Entries, version: int, want: int) -> Choice | None:
    """Whatever has finished first. Nothing is discarded: a straggler may be older than the lead when it trains."""
    return whole(islice(entries.by_arrival.values(), want), want)


def weight_fifo(entries: Entries, version: int, want: int, *, max_staleness_versions: int) -> Choice | None:
    """The oldest version first; what is too old is dropped, and cancelled where it is still in flight."""
    return within(entries, version, want, max_staleness_versions, entries.ready.oldest_first())


def windowed(
    entries: Entries, version: int, want: int, *, max_staleness_versions: int, sample_freshest_first: bool
) -> Choice | None:
    """Any group of the last versions, freshest or oldest first; what is too old is dropped or cancelled."""
    order = entries.ready.newest_first() if sample_freshest_first else entries.ready.oldest_first()
    return within(entries, version, want, max_staleness_versions, order)


def within(
    entries: Entries, version: int, want: int, max_staleness_versions: int, order: Iterable[Entry]
) -> Choice | None:
    """Drop what is older than the window, then take from `order`, if that makes a whole step."""
    oldest = version - max_staleness_versions
    drop = groups_of(entries.ready.older_than(oldest))
    cancel = tuple(entry.index for entry in entries.in_flight.older_than(oldest))
    fresh = (entry for entry in order if entry.group is not None and entry.group.oldest_version >= oldest)
    choice = whole(islice(fresh, want), want)
    if choice is None:
        return Choice((), drop, cancel) if drop or cancel else None
    return Choice(choice.take, drop, cancel)


def whole(entries: Iterable[Entry], want: int) -> Choice | None:
    """All of these, if they are `want` finished ones."""
    chosen = list(entries)
    groups = groups_of(chosen)
    return Choice(groups) if len(groups) == len(chosen) == want else None


def groups_of(entries: Iterable[Entry]) -> tuple[Group, ...]:
    return tuple(entry.group for entry in entries if entry.group is not None)


def build_sampler(config: Sampler) -> Choose:
    """The sampler of a recipe. A custom one is imported here, and refused when it is not there or not a function."""
    match config:
        case InOrder():
            return in_order
        case ReadyFirst():
            return ready_first
        case WeightFifo():
            return partial(weight_fifo, max_staleness_versions=config.max_staleness_versions)
        case Windowed():
            return partial(
                windowed,
                max_staleness_versions=config.max_staleness_versions,
                sample_freshest_first=config.sample_freshest_first,
            )
        case Custom(target=target):
            return load_custom(target)
    assert_never(config)


def load_custom(target: str) -> Choose:
    """`module:name` -> the function. ValueError says which part is missing."""
    module, _, name = target.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"async_rl.sampler.target={target}: {error}; wanted module:name of a function "
            "(entries, version, want) -> tandem.control.samplers.Choice or None"
        ) from error
    if not callable(found):
        raise ValueError(f"async_rl.sampler.target={target} is a {type(found).__name__}, wanted a function")
    return found
