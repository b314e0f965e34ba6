"""pass@k against its slow definition, the share of all choices of k answers that hold a right one; and its bounds."""

from itertools import combinations

import pytest

from tandem.metrics.pass_at_k import ks, pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_it_is_the_share_of_choices_with_a_right_answer(n):
    for c in range(n + 1):
        answers = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            chosen = list(combinations(answers, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-15)


def test_with_one_it_is_the_mean_and_it_grows_with_k():
    assert [pass_at_k(10, c, 1) for c in range(11)] == pytest.approx([c / 10 for c in range(11)])
    for c in range(1, 11):
        grows = [pass_at_k(10, c, k) for k in range(1, 11)]
        assert grows == sorted(grows)
        assert grows[-1] == 1


def test_many_answers_lose_no_precision():
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1, abs=1e-12)
    assert pass_at_k(1000, 0, 1000) == 0


def test_k_is_reported_at_powers_of_two_and_at_all():
    assert ks(1) == ()
    assert ks(4) == (2, 4)
    assert ks(6) == (2, 4, 6)
    assert ks(16) == (2, 4, 8, 16)
