"""What has a ticket, in every order a sampler may ask for, kept up as entries come and go: no decision ever scans."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.types import Group


@dataclass
class Entry:
    """A prompt with a ticket: in flight while `group` is None, then finished and waiting for its step.

    `attempt` counts data failures (each draws other samples), `infra_attempt` failures of the machinery (same samples).
    """

    index: int
    admitted_version: int
    attempt: int = 0
    infra_attempt: int = 0
    group: Group | None = None


class ByVersion:
    """Entries in buckets of one version each; the few versions are sorted, a bucket keeps the order of arrival."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[int, Entry]] = {}
        self._versions: list[int] = []

    def add(self, version: int, entry: Entry) -> None:
        if version not in self._buckets:
            self._buckets[version] = OrderedDict()
            insort(self._versions, version)
        self._buckets[version][entry.index] = entry

    def remove(self, version: int, index: int) -> None:
        bucket = self._buckets[version]
        del bucket[index]
        if not bucket:
            del self._buckets[version]
            self._versions.remove(version)

    def oldest_first(self) -> Iterator[Entry]:
        for version in self._versions:
            yield from self._buckets[version].values()

    def newest_first(self) -> Iterator[Entry]:
        for version in reversed(self._versions):
            yield from self._buckets[version].values()

    def older_than(self, version: int) -> Iterator[Entry]:
        """Oldest first, up to but not including `version`."""
        for bucket in self._versions:
            if bucket >= version:
                return
            yield from self._buckets[bucket].values()


class Entries:
    """All entries by prompt; the finished by arrival and by the oldest version in them; those in flight by version."""

    def __init__(self) -> None:
        self.by_prompt: OrderedDict[int, Entry] = OrderedDict()
        self.by_arrival: OrderedDict[int, Entry] = OrderedDict()
        self.ready = ByVersion()
        self.in_flight = ByVersion()

    def __len__(self) -> int:
        return len(self.by_prompt)

    def __getitem__(self, index: int) -> Entry:
        return self.by_prompt[index]

    def __contains__(self, index: int) -> bool:
        return index in self.by_prompt

    @property
    def ready_count(self) -> int:
        return len(self.by_arrival)

    def add(self, entry: Entry) -> None:
        """Prompts are added in their order, so by_prompt is in it too."""
        self.by_prompt[entry.index] = entry
        if entry.group is None:
            self.in_flight.add(entry.admitted_version, entry)
        else:
            self._arrive(entry, entry.group)

    def finish(self, index: int, group: Group) -> None:
        entry = self.by_prompt[index]
        self.in_flight.remove(entry.admitted_version, index)
        entry.group = group
        self._arrive(entry, group)

    def restart(self, index: int, version: int) -> None:
        """A rollout begins again: its tokens will be of this version or later."""
        entry = self.by_prompt[index]
        self.in_flight.remove(entry.admitted_version, index)
        entry.admitted_version = version
        self.in_flight.add(version, entry)

    def remove(self, index: int) -> None:
        entry = self.by_prompt.pop(index)
        if entry.group is None:
            self.in_flight.remove(entry.admitted_version, index)
        else:
            del self.by_arrival[index]
            self.ready.remove(entry.group.oldest_version, index)

    def _arrive(self, entry: Entry, group: Group) -> None:
        self.by_arrival[entry.index] = entry
        self.ready.add(group.oldest_version, entry)
