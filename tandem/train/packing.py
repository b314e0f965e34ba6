"""Plans that pack sequences into bins of bounded length: pure arithmetic on lengths, no tensors.

A plan is a list of bins, a bin a list of indices into `lengths`; every index appears in exactly one bin.
"""

import heapq
from bisect import insort_left
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

Plan = list[list[int]]
_Tree = int | tuple["_Tree", ...]
_Part = tuple[int, int, _Tree]  # a bin of `balance`: tokens, sequences, which ones
_SIZE = itemgetter(0, 1)  # tokens, then sequences
PackingAlgorithm = Literal["first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"]


def plan_bins(
    lengths: Sequence[int],
    capacity: int,
    algorithm: PackingAlgorithm = "first_fit_decreasing",
    *,
    min_bin_count: int = 0,
    bin_count_multiple: int = 1,
) -> Plan:
    """Pack with the named algorithm; then split bins until there are at least `min_bin_count`, in whole multiples.

    So every data-parallel rank gets as many micro-batches. Raises where a sequence is longer than a bin, or where there
    are fewer sequences than bins.
    """
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(
                f"Sequence {index} has {length} tokens and a bin holds {capacity}: raise the token budget of a "
                "micro-batch or shorten the sequence."
            )
    match algorithm:
        case "first_fit_decreasing":
            plan = first_fit_decreasing(lengths, capacity)
        case "modified_first_fit_decreasing":
            plan = modified_first_fit_decreasing(lengths, capacity)
        case "concatenative":
            plan = concatenative(lengths, capacity)
    count = max(len(plan), min_bin_count)
    return split_to_count(plan, lengths, -(-count // bin_count_multiple) * bin_count_multiple)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Plan:
    """Longest first, each into the first bin with room (Johnson 1973): at most 11/9 of the best number, plus 1.

    The first bin with room is found in a tree of maxima over the bins' room: n log n.
    """
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * size)
    plan: Plan = []
    for index in _longest_first(lengths):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        if node - size == len(plan):
            plan.append([])
        plan[node - size].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return plan


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Plan:
    """Johnson & Garey 1985: a bin per large sequence (> 1/2), then one medium (> 1/3) or two small (> 1/6) beside it.

    What is left fills those bins greedily, longest first, and then new bins, each time the emptiest. Not always better
    than `first_fit_decreasing`.
    """
    order = _longest_first(lengths)
    large = [i for i in order if 2 * lengths[i] > capacity]
    medium = [i for i in order if 2 * lengths[i] <= capacity < 3 * lengths[i]]
    small = [i for i in order if 3 * lengths[i] <= capacity < 6 * lengths[i]]
    tiny = [i for i in order if 6 * lengths[i] <= capacity]
    plan = [[i] for i in large]
    alone = []
    for bin_ in plan:
        if not _take_longest(bin_, medium, lengths, capacity):
            alone.append(bin_)
    for bin_ in reversed(alone):
        room = capacity - _total(bin_, lengths)
        if len(small) >= 2 and lengths[small[-1]] + lengths[small[-2]] <= room:
            bin_.append(small.pop())
            _take_longest(bin_, small, lengths, capacity)
    rest = sorted(medium + small + tiny, key=lambda i: -lengths[i])
    for bin_ in plan:
        while _take_longest(bin_, rest, lengths, capacity):
            pass
    return plan + _emptiest_first(rest, lengths, capacity)


def concatenative(lengths: Sequence[int], capacity: int) -> Plan:
    """In order: each sequence joins the last bin if it fits, else opens the next one."""
    plan: Plan = []
    room = -1
    for index, length in enumerate(lengths):
        if length > room:
            plan.append([])
            room = capacity
        plan[-1].append(index)
        room -= length
    return plan


def balance(lengths: Sequence[int], bins: int) -> Plan:
    """Exactly `bins` bins with totals as equal as can be (Karmarkar & Karp 1983, largest differencing, k-way).

    Partial partitions are merged, the two most uneven first, largest bin onto smallest. No bin stays empty. Bins that
    are still empty are not written down, and a bin is a tree of what was merged into it, since lists would be copied at
    each merge: about n log n for n sequences, where it would be n times the bins.
    """
    if not 1 <= bins <= len(lengths):
        raise ValueError(f"balance: {len(lengths)} sequences cannot fill {bins} bins.")
    partitions: list[tuple[int, int, list[_Part]]] = [
        (-length, index, [(length, 1, index)]) for index, length in enumerate(lengths)
    ]
    heapq.heapify(partitions)
    while len(partitions) > 1:
        (_, order, uneven), (_, _, other) = heapq.heappop(partitions), heapq.heappop(partitions)
        merged = _merged(uneven, other, bins)
        least = merged[0][0] if len(merged) == bins else 0
        heapq.heappush(partitions, (least - merged[-1][0], order, merged))
    return [sorted(_leaves(tree)) for _, _, tree in partitions[0][2]]


def split_to_count(plan: Plan, lengths: Sequence[int], count: int) -> Plan:
    """Split the fullest bins in two until there are `count`; a plan with that many is returned as it is."""
    if count > len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences cannot fill {count} bins: ask for fewer bins or give more sequences."
        )
    plan = list(plan)
    splittable = [(-_total(bin_, lengths), i) for i, bin_ in enumerate(plan) if len(bin_) > 1]
    heapq.heapify(splittable)
    while len(plan) < count:
        _, i = heapq.heappop(splittable)
        halves = balance([lengths[j] for j in plan[i]], 2)
        plan[i], half = ([plan[i][j] for j in part] for part in halves)
        plan.append(half)
        for j in (i, len(plan) - 1):
            if len(plan[j]) > 1:
                heapq.heappush(splittable, (-_total(plan[j], lengths), j))
    return plan


def _merged(uneven: list[_Part], other: list[_Part], bins: int) -> list[_Part]:
    """Largest onto smallest, empty bins first; both and the result hold their filled bins, smallest first."""
    if len(other) == 1 and len(uneven) < bins:  # nearly all merges: a partition stays the most uneven until it is full
        insort_left(uneven, other[0], key=_SIZE)
        return uneven
    falling = other[::-1]
    alone = len(other) - max(0, len(uneven) + len(other) - bins)  # so many meet empty bins
    pairs = zip(falling[alone:], uneven, strict=False)
    joined = [(a + b, m + n, (y, x)) for (b, n, x), (a, m, y) in pairs]
    merged = falling[:alone] + joined + uneven[len(joined) :]
    merged.sort(key=_SIZE)
    return merged


def _leaves(tree: _Tree) -> Iterator[int]:
    """The sequences of a bin, in no order. Not by recursion: a tree may be as deep as it has sequences."""
    left = [tree]
    while left:
        match left.pop():
            case int(index):
                yield index
            case branches:
                left.extend(branches)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def _total(bin_: list[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in bin_)


def _take_longest(bin_: list[int], candidates: list[int], lengths: Sequence[int], capacity: int) -> bool:
    """Move the longest candidate that fits (candidates are longest first) into the bin."""
    room = capacity - _total(bin_, lengths)
    for place, index in enumerate(candidates):
        if lengths[index] <= room:
            bin_.append(candidates.pop(place))
            return True
    return False


def _emptiest_first(indices: list[int], lengths: Sequence[int], capacity: int) -> Plan:
    """Each into the emptiest bin if it fits there, else into a new bin."""
    bins: list[tuple[int, list[int]]] = []
    for index in indices:
        if not bins or bins[0][0] + lengths[index] > capacity:
            heapq.heappush(bins, (lengths[index], [index]))
        else:
            total, bin_ = bins[0]
            heapq.heapreplace(bins, (total + lengths[index], [*bin_, index]))
    return [bin_ for _, bin_ in bins]
