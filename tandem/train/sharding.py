"""Which samples of a batch each data-parallel rank takes, and in which micro-batches: planned from lengths alone.

Every rank plans for all of them and comes to the same plan, so that nothing is sent. Plans do not change results: a
loss is a sum, and the one divisor is applied in the optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.models import SequencePacking
from tandem.train.packing import Plan, balance, plan_bins


@dataclass(frozen=True)
class Shard:
    """The share of every batch that a rank takes: number `index` of `count`. Its model may lie on `parts` ranks.

    Those hold a part of each layer, run the same packs and find the same results: part 0 speaks for them.
    """

    index: int = 0
    count: int = 1
    part: int = 0
    parts: int = 1

    @property
    def rank(self) -> int:
        """This rank's place among `ranks`."""
        return self.index * self.parts + self.part

    @property
    def ranks(self) -> int:
        """How many ranks hold the model together."""
        return self.count * self.parts

    @property
    def speaks(self) -> bool:
        """Whether this rank writes the rows of its share and reports its metrics."""
        return self.part == 0

    @property
    def leads(self) -> bool:
        """Whether this rank reports what is one thing for all ranks: one of them does."""
        return self.speaks and self.index == 0


@dataclass(frozen=True)
class Share:
    """One shard's samples by their places in the batch, and its micro-batches: places in `rows`. [] is a dummy."""

    rows: tuple[int, ...]
    bins: Plan


def plan_shares(lengths: Sequence[int], packing: SequencePacking, budget: int, shards: int) -> list[Share]:
    """Cut a batch into shares with as equal token counts as can be, and as many micro-batches each.

    A micro-batch holds at most `budget` tokens; a longer sample widens it for the shard that has it. Any number of
    samples is cut: a shard with too few splits its micro-batches, and then runs dummies.
    """
    taken = balance([*lengths, *[0] * max(0, shards - len(lengths))], shards)
    rows = [[row for row in part if row < len(lengths)] for part in taken]
    plans = [_bins([lengths[row] for row in part], packing, budget, 0) for part in rows]
    count = max(len(plan) for plan in plans)
    shares = []
    for part in rows:
        plan = _bins([lengths[row] for row in part], packing, budget, min(count, len(part)))
        shares.append(Share(tuple(part), plan + [[] for _ in range(count - len(plan))]))
    return shares


def _bins(lengths: Sequence[int], packing: SequencePacking, budget: int, least: int) -> Plan:
    if not packing.enabled:
        return [[row] for row in range(len(lengths))]
    return plan_bins(lengths, max(budget, *lengths, 0), packing.algorithm, min_bin_count=least)
