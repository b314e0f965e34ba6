"""Length laws: the mean that was asked for once cut, seeds that depend on names alone, wrong numbers refused."""

from __future__ import annotations

import pytest

from tandem.simulation.lengths import LAWS, Lengths, mean_of_cut_lognormal, mean_of_cut_pareto


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("mean", "longest"), [(1000, 16_000), (7, 28), (60, 100)])
def test_the_mean_is_the_one_asked_for_though_long_responses_are_cut(law: str, mean: float, longest: int):
    length = Lengths(law, mean, longest, seed=1).draw()
    drawn = [length(index, sample) for index in range(5000) for sample in range(4)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.04)
    assert min(drawn) >= 1
    assert max(drawn) <= longest


def test_the_tail_of_heavy_is_longer_than_that_of_lognormal():
    shares = {}
    for law in LAWS:
        length = Lengths(law, 1000, 100_000).draw()
        shares[law] = sum(length(index) > 10_000 for index in range(20_000)) / 20_000
    assert shares["fixed"] == 0
    assert shares["lognormal"] < 0.001 < 0.004 < shares["heavy"]


def test_a_length_depends_on_its_name_and_the_seed_alone():
    forwards, backwards = Lengths("heavy", 50, 1000, seed=3).draw(), Lengths("heavy", 50, 1000, seed=3).draw()
    names = [(index, sample, attempt) for index in range(20) for sample in range(2) for attempt in range(2)]
    there = {name: forwards(*name) for name in names}
    back = {name: backwards(*name) for name in reversed(names)}
    other = Lengths("heavy", 50, 1000, seed=4).draw()
    assert there == back
    assert there != {name: other(*name) for name in names}


@pytest.mark.parametrize("mean_of", [mean_of_cut_lognormal, mean_of_cut_pareto])
def test_the_mean_of_a_cut_law_grows_with_its_scale_up_to_the_longest(mean_of):
    means = [mean_of(scale, 100) for scale in (1, 5, 20, 60, 99)]
    assert means == sorted(means)
    assert means[-1] <= 100


@pytest.mark.parametrize(
    ("law", "mean", "complaint"),
    [("flat", 5, "'flat' is not known: give fixed"), ("fixed", 0, "between 1 and"), ("heavy", 200, "the longest, 100")],
)
def test_wrong_numbers_are_refused_in_words(law: str, mean: float, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        Lengths(law, mean, 100)
