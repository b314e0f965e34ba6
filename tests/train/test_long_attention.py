"""Which sequences of a pack go to which kernel. The kernels themselves: tests/gpu/test_long_attention.py."""

import itertools
import random

from tandem.train.torch.long_attention import LONG, Run, runs_of


def test_long_sequences_stand_alone_and_short_ones_together():
    borders = [0, 10, 30, 30 + LONG, 30 + 2 * LONG, 40 + 2 * LONG]
    assert list(runs_of(borders)) == [Run(0, 2, 20), Run(2, 3, LONG), Run(3, 4, LONG), Run(4, 5, 10)]


def test_runs_cover_every_sequence_once():
    dice = random.Random(0)
    for _ in range(100):
        lengths = [dice.choice([1, 7, LONG - 1, LONG, 3 * LONG]) for _ in range(dice.randint(1, 9))]
        found = list(runs_of([0, *itertools.accumulate(lengths)]))
        assert [place for run in found for place in range(run.first, run.last)] == list(range(len(lengths)))
        assert all(run.longest == max(lengths[run.first : run.last]) for run in found)
        assert all(run.last - run.first == 1 for run in found if run.longest >= LONG)
