"""Packing plans: nothing lost, nothing over capacity, as few bins as the slow definition, as even as can be."""

import random
import time

import pytest

from tandem.train.packing import balance, plan_bins

ALGORITHMS = ("first_fit_decreasing", "modified_first_fit_decreasing", "concatenative")


def lengths_of(count: int, seed: int, longest: int = 100) -> list[int]:
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


def slow_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for bin_ in plan:
            if sum(lengths[i] for i in bin_) + lengths[index] <= capacity:
                bin_.append(index)
                break
        else:
            plan.append([index])
    return plan


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_decreasing_equals_its_definition(seed: int) -> None:
    lengths = lengths_of(seed * 7, seed)
    assert plan_bins(lengths, 120) == slow_first_fit_decreasing(lengths, 120)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(10))
def test_every_sequence_is_in_one_bin_and_no_bin_is_too_full(algorithm: str, seed: int) -> None:
    lengths = lengths_of(50, seed)
    plan = plan_bins(lengths, 130, algorithm, min_bin_count=seed, bin_count_multiple=1 + seed % 4)
    assert sorted(i for bin_ in plan for i in bin_) == list(range(50))
    assert all(bin_ and sum(lengths[i] for i in bin_) <= 130 for bin_ in plan)
    assert len(plan) >= seed
    assert len(plan) % (1 + seed % 4) == 0


def test_concatenative_keeps_the_order() -> None:
    assert plan_bins([5, 5, 6, 3, 10, 1], 10, "concatenative") == [[0, 1], [2, 3], [4], [5]]


def test_a_count_is_reached_by_splitting_the_fullest_bins() -> None:
    plan = plan_bins([10] * 8 + [1], 40, min_bin_count=4)
    assert sorted(sum(([10] * 8 + [1])[i] for i in bin_) for bin_ in plan) == [1, 20, 20, 40]
    with pytest.raises(ValueError, match="3 sequences cannot fill 4 bins"):
        plan_bins([10, 10, 10], 40, min_bin_count=4)


def test_a_sequence_longer_than_a_bin_is_named() -> None:
    with pytest.raises(ValueError, match="Sequence 1 has 101 tokens and a bin holds 100"):
        plan_bins([10, 101], 100)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequence_makes_no_bin(algorithm: str) -> None:
    assert plan_bins([], 10, algorithm) == []


def test_ten_thousand_sequences_are_planned_at_once() -> None:
    lengths = lengths_of(10_000, 0, longest=4096)
    start = time.perf_counter()
    plan = plan_bins(lengths, 8192)
    assert time.perf_counter() - start < 5.0
    assert len(plan) <= 1.02 * sum(lengths) / 8192 + 1


@pytest.mark.parametrize("bins", [1, 2, 4, 7])
def test_balanced_bins_are_as_even_as_the_sequences_allow(bins: int) -> None:
    lengths = lengths_of(64, bins, longest=1000)
    plan = balance(lengths, bins)
    assert sorted(i for bin_ in plan for i in bin_) == list(range(64))
    totals = [sum(lengths[i] for i in bin_) for bin_ in plan]
    assert len(totals) == bins
    assert max(totals) - min(totals) <= 0.01 * sum(lengths) / bins


def test_balance_finds_what_greedy_misses_and_leaves_no_bin_empty() -> None:
    lengths = [8, 7, 6, 5, 4]  # greedy, longest first: 17 and 13
    assert sorted(sum(lengths[i] for i in bin_) for bin_ in balance(lengths, 2)) == [14, 16]
    assert sorted(map(len, balance([100, 1, 1], 3))) == [1, 1, 1]
    with pytest.raises(ValueError, match="2 sequences cannot fill 3 bins"):
        balance([1, 2], 3)


def balance_by_lists(lengths: list[int], bins: int) -> list[list[int]]:
    """The definition of `balance`, with a list for each bin."""
    partitions = [(-n, i, [(0, [])] * (bins - 1) + [(n, [i])]) for i, n in enumerate(lengths)]
    while len(partitions) > 1:
        partitions.sort(key=lambda partition: partition[:2])
        (_, order, uneven), (_, _, other), *rest = partitions
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(uneven, reversed(other), strict=True)]
        merged.sort(key=lambda part: (part[0], len(part[1])))
        partitions = [*rest, (merged[0][0] - merged[-1][0], order, merged)]
    return [sorted(indices) for _, indices in partitions[0][2]]


@pytest.mark.parametrize("bins", [1, 2, 7, 60])
def test_balance_is_its_definition_to_the_last_index(bins: int) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 5, draw.randint(1, 100)]) for _ in range(60)]
        assert balance(lengths, bins) == balance_by_lists(lengths, bins)


@pytest.mark.parametrize("bins", [1, 8])
def test_balance_reads_bins_that_were_merged_thousands_of_times(bins: int) -> None:
    lengths = [random.Random(0).randint(1, 4000) for _ in range(20_000)]
    assert sorted(index for bin_ in balance(lengths, bins) for index in bin_) == list(range(20_000))
