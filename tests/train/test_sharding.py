"""Shares of data-parallel ranks: nothing lost, even in tokens, as many micro-batches everywhere."""

import pytest

from tandem.config.models import SequencePacking
from tandem.train.packing import plan_bins
from tandem.train.sharding import Shard, plan_shares
from tests.train.small_models import lengths_of

PACKING = SequencePacking()


@pytest.mark.parametrize("samples", [0, 1, 2, 3, 7, 64, 101])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 100])
def test_every_sample_is_in_one_share_and_every_share_has_as_many_bins(samples, shards, budget):
    lengths = lengths_of(samples, seed=samples)
    shares = plan_shares(lengths, PACKING, budget, shards)
    assert len(shares) == shards
    assert sorted(row for share in shares for row in share.rows) == list(range(samples))
    assert len({len(share.bins) for share in shares}) == 1
    for share in shares:
        assert sorted(row for rows in share.bins for row in rows) == list(range(len(share.rows)))
        widest = max([budget, *(lengths[row] for row in share.rows)])
        assert all(sum(lengths[share.rows[row]] for row in rows) <= widest for rows in share.bins)


def test_shares_are_even_in_tokens():
    lengths = lengths_of(64, low=1, high=1000)
    totals = [sum(lengths[row] for row in share.rows) for share in plan_shares(lengths, PACKING, 2000, 8)]
    assert max(totals) - min(totals) < 0.02 * sum(lengths) / 8


def test_without_packing_a_micro_batch_is_one_sample():
    lengths = lengths_of(7)
    shares = plan_shares(lengths, SequencePacking(enabled=False), 10_000, 2)
    assert sorted(row for share in shares for row in share.rows) == list(range(7))
    assert sorted(len(share.rows) for share in shares) == [3, 4]
    for share in shares:
        assert share.bins == [[row] for row in range(len(share.rows))] + [[]] * (4 - len(share.rows))


def test_one_shard_is_the_plain_plan_in_the_order_of_the_batch():
    lengths = lengths_of(40)
    (share,) = plan_shares(lengths, PACKING, 100, 1)
    assert share.rows == tuple(range(40))
    assert share.bins == plan_bins(lengths, 100)


def test_a_shard_with_too_few_samples_runs_dummies():
    long, short = plan_shares([90, 30, 30, 30], PACKING, 30, 2)
    assert (long.rows, long.bins) == ((0,), [[0], [], []])
    assert (short.rows, short.bins) == ((1, 2, 3), [[0], [1], [2]])
    (_, dummy) = sorted(plan_shares([9], PACKING, 30, 2), key=lambda share: -len(share.rows))
    assert (dummy.rows, dummy.bins) == ((), [[]])


def test_one_rank_speaks_for_a_shard_and_one_for_all():
    ranks = [Shard(index, 2, part, 2) for index in range(2) for part in range(2)]
    assert [rank.speaks for rank in ranks] == [True, False, True, False]
    assert [rank.leads for rank in ranks] == [True, False, False, False]
