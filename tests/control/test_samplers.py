"""Samplers as tables of hand-worked cases. An entry is index:admitted, then /oldest once it has finished."""

from __future__ import annotations

from functools import partial

import pytest

from tandem.config.asynchrony import Custom, InOrder, ReadyFirst, WeightFifo, Windowed
from tandem.control.entries import Entries, Entry
from tandem.control.samplers import Choose, build_sampler, in_order, ready_first, weight_fifo, windowed
from tandem.types import Group


def group(index: int, oldest: int) -> Group:
    return Group(index, f"p{index}", (index,), (4,), (3,), (1.0,), (False,), {}, oldest, oldest)


def entries_of(text: str) -> Entries:
    """`0:0/0 1:0 2:1/2`: prompt 1 is in flight since version 0; they finish in the order in which they are written."""
    parsed = []
    for word in text.split():
        index, _, rest = word.partition(":")
        admitted, _, oldest = rest.partition("/")
        parsed.append((int(index), int(admitted), int(oldest) if oldest else None))
    entries = Entries()
    for index, admitted, _ in sorted(parsed):
        entries.add(Entry(index, admitted))
    for index, _, oldest in parsed:
        if oldest is not None:
            entries.finish(index, group(index, oldest))
    return entries


# sampler, entries, version, want -> take, drop, cancel; None: wait
CASES: list[tuple[Choose, str, int, int, tuple[list[int], list[int], list[int]] | None]] = [
    (in_order, "0:0/0 1:0/0 2:0", 0, 2, ([0, 1], [], [])),
    (in_order, "1:0/0 0:0/0", 0, 2, ([0, 1], [], [])),  # finished the other way round
    (in_order, "0:0 1:0/0 2:0/0", 0, 2, None),  # prompt 0 is the straggler
    (in_order, "0:0/0 2:0/0", 0, 2, ([0, 2], [], [])),  # prompt 1 failed: the next one is in its place
    (in_order, "0:0/0", 0, 2, None),
    (in_order, "0:0/0 1:0/0", 9, 2, ([0, 1], [], [])),  # nothing is dropped for its age: the lead bounds it
    (in_order, "", 0, 0, ([], [], [])),  # the data has ended
    (ready_first, "0:0 1:0/0 2:0/0", 0, 2, ([1, 2], [], [])),
    (ready_first, "2:0/0 1:0/0 0:0/0", 0, 2, ([2, 1], [], [])),
    (ready_first, "0:0 1:0/0", 0, 2, None),
    (ready_first, "0:0/0 1:5/5", 9, 2, ([0, 1], [], [])),
    (partial(weight_fifo, max_staleness_versions=1), "0:1/1 1:2/2 2:1/1", 2, 2, ([0, 2], [], [])),
    (partial(weight_fifo, max_staleness_versions=1), "0:0/0 1:2/2 2:1/1", 2, 2, ([2, 1], [0], [])),
    (partial(weight_fifo, max_staleness_versions=1), "0:0/0 1:2/2 2:2", 2, 2, ([], [0], [])),
    (partial(weight_fifo, max_staleness_versions=1), "0:0 1:1/1 2:2/2", 2, 2, ([1, 2], [], [0])),
    (partial(weight_fifo, max_staleness_versions=1), "0:1 1:2/2", 2, 2, None),
    (partial(weight_fifo, max_staleness_versions=0), "0:0/0 1:1/1", 1, 1, ([1], [0], [])),
    (
        partial(windowed, max_staleness_versions=2, sample_freshest_first=False),
        "0:3/3 1:1/1 2:2/2 3:0/0",
        3,
        2,
        ([1, 2], [3], []),
    ),
    (
        partial(windowed, max_staleness_versions=2, sample_freshest_first=True),
        "0:3/3 1:1/1 2:2/2 3:0/0",
        3,
        2,
        ([0, 2], [3], []),
    ),
    (partial(windowed, max_staleness_versions=1, sample_freshest_first=True), "0:0 1:1 2:2/2", 2, 2, ([], [], [0])),
    (partial(windowed, max_staleness_versions=1, sample_freshest_first=True), "1:1 2:2/2", 2, 2, None),
    # finished with tokens that are older than its admission can not be: the oldest token counts
    (partial(windowed, max_staleness_versions=1, sample_freshest_first=False), "0:0/2 1:2/2", 3, 2, ([0, 1], [], [])),
]


@pytest.mark.parametrize(("choose", "text", "version", "want", "expected"), CASES)
def test_a_hand_worked_case(choose: Choose, text: str, version: int, want: int, expected):
    choice = choose(entries_of(text), version, want)
    if expected is None:
        assert choice is None
        return
    take, drop, cancel = expected
    assert choice is not None
    assert [g.index for g in choice.take] == take
    assert [g.index for g in choice.drop] == drop
    assert list(choice.cancel) == cancel


def take_newest_prompt(entries: Entries, version: int, want: int):
    """A custom sampler for the tests."""
    from tandem.control.samplers import whole

    return whole(list(reversed(entries.by_arrival.values()))[:want], want)


@pytest.mark.parametrize(
    "config",
    [
        InOrder(),
        ReadyFirst(name="ready_first"),
        WeightFifo(name="weight_fifo"),
        Windowed(name="windowed", buffer_capacity_groups=4),
        Custom(name="custom", target="tests.control.test_samplers:take_newest_prompt"),
    ],
    ids=lambda config: config.name,
)
def test_every_sampler_is_built_from_its_config(config):
    choice = build_sampler(config)(entries_of("0:0/0 1:0/0"), 0, 2)
    assert choice is not None
    assert sorted(g.index for g in choice.take) == [0, 1]


@pytest.mark.parametrize(
    ("target", "complaint"),
    [("nowhere:f", "nowhere"), ("tests.control.test_samplers:no", "no"), ("tests.control.test_samplers:CASES", "list")],
)
def test_a_custom_sampler_that_cannot_be_had_is_refused(target: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        build_sampler(Custom(name="custom", target=target))


def test_the_orders_follow_as_entries_come_and_go():
    entries = entries_of("0:0/0 1:0/1 2:1 3:1/0")
    assert list(entries.by_prompt) == [0, 1, 2, 3]
    assert list(entries.by_arrival) == [0, 1, 3]
    assert [e.index for e in entries.ready.oldest_first()] == [0, 3, 1]
    assert [e.index for e in entries.ready.newest_first()] == [1, 0, 3]
    entries.restart(2, 5)
    assert [e.index for e in entries.in_flight.older_than(5)] == []
    for index in (0, 2, 3):
        entries.remove(index)
    assert [e.index for e in entries.ready.oldest_first()] == [1]
    assert len(entries) == 1
    assert 0 not in entries
