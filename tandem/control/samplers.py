"""Which groups the next step trains on: one pure function a sampler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from tandem.types import Group


@dataclass
class Entry:
    """A prompt with a ticket: in flight while `group` is None, then finished and waiting for its step."""

    index: int
    admitted_version: int
    attempt: int
    group: Group | None = None


@dataclass(frozen=True)
class Choice:
    """Groups to train on now, and groups that no step may use any more."""

    take: tuple[Group, ...]
    drop: tuple[Group, ...] = ()


class Sampler(Protocol):
    """`entries` come in the order of their prompts; `want` groups make a step. None: not yet."""

    def __call__(self, entries: Iterable[Entry], version: int, want: int) -> Choice | None: ...


def in_order(entries: Iterable[Entry], version: int, want: int) -> Choice | None:
    """The next `want` prompts, all finished. A failed prompt has left the entries: the next one is in its place.

    Looks at `want` entries, however many are buffered.
    """
    groups = [entry.group for entry in islice(entries, want)]
    if len(groups) < want or any(group is None for group in groups):
        return None
    return Choice(tuple(group for group in groups if group is not None))
