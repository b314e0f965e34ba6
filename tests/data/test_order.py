"""The order of prompts: pure in (seed, index), every row once an epoch, and sources by weight without repeats."""

from collections import Counter
from fractions import Fraction

import pytest

from tandem.data.order import Permutation, Weighted, interleaved, shares

ROWS = {"a": list(range(0, 10)), "b": list(range(10, 40))}


def weighted(weights, *, seed=0, shuffle=True, rows=ROWS):
    return Weighted(rows, weights, seed=seed, shuffle=shuffle)


def test_an_index_decides_whatever_was_asked_before():
    forwards, backwards = weighted({"a": 1, "b": 1}), weighted({"a": 1, "b": 1})
    there = [forwards.at(index) for index in range(200)]
    assert there == [backwards.at(index) for index in reversed(range(200))][::-1]
    assert there != [weighted({"a": 1, "b": 1}, seed=1).at(index) for index in range(200)]


@pytest.mark.parametrize(("weights", "wanted"), [((1, 1), (20, 20)), ((1, 3), (10, 30)), ((7, 1), (35, 5))])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_the_sources_by_weight(weights, wanted, shuffle):
    order = weighted(dict(zip("ab", weights, strict=True)), shuffle=shuffle)
    assert len(order) == 40
    for epoch in range(5):
        counts = Counter("a" if order.at(epoch * 40 + place) < 10 else "b" for place in range(40))
        assert (counts["a"], counts["b"]) == wanted


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_repeats_no_row_before_all_were_dealt(shuffle):
    order = weighted({"a": 1, "b": 1}, shuffle=shuffle)
    dealt = [order.at(index) for index in range(400)]
    for rows in ROWS.values():
        own = [row for row in dealt if row in rows]
        rounds = [own[start : start + len(rows)] for start in range(0, len(own), len(rows))]
        assert all(sorted(one) == rows for one in rounds if len(one) == len(rows))
        if shuffle:
            assert len({tuple(one) for one in rounds}) == len(rounds)


def test_without_shuffle_sources_alternate_evenly_and_rows_keep_their_order():
    order = weighted({"a": 1, "b": 3}, shuffle=False)
    assert [order.at(index) for index in range(8)] == [10, 0, 11, 12, 13, 1, 14, 15]


def test_a_mixed_order_never_changes_between_releases():
    # A resumed run must go on with the order it began with.
    order = weighted({"a": 1, "b": 1}, seed=42)
    assert [order.at(index) for index in range(12)] == [27, 18, 9, 6, 5, 39, 38, 21, 22, 0, 32, 7]


def test_a_weight_that_comes_to_no_prompt_is_refused():
    with pytest.raises(ValueError, match=r"data\.train\.weights\.a=0\.001 comes to no prompt in an epoch of 40"):
        weighted({"a": 0.001, "b": 1})


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.1, 0.2, 0.7), (5, 1, 3), (1e-3, 1, 1e3)])
@pytest.mark.parametrize("total", [1, 7, 100, 7473])
def test_shares_add_up_and_are_nearest(weights, total):
    found = shares(weights, total)
    assert sum(found) == total
    for share, weight in zip(found, weights, strict=True):
        exact = Fraction(total) * Fraction(weight) / sum(map(Fraction, weights))
        assert abs(share - exact) < 1


def test_interleaving_spreads_evenly():
    order = interleaved([3, 9])
    assert order.count(0) == 3
    for start in range(0, 12, 4):
        assert order[start : start + 4].count(0) == 1


def test_a_permutation_that_does_not_shuffle_counts():
    order = Permutation(5, seed=0, shuffle=False)
    assert [order.at(index) for index in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
