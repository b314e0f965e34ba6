"""Ranks that share a pack: together their queries see what those of one process see."""

import itertools

import pytest

from tandem.train.packs import pack_rows
from tandem.train.torch.attention import lay_out
from tandem.train.torch.context import Context
from tests.train.small_models import CPU, batch_of, rows


def visible(layout) -> list[tuple[int, int]]:
    """Query and key of each pair, as the kernel counts them: of a sequence, the last query sees all its keys."""
    found = []
    queries, keys = itertools.pairwise(layout.cu_queries.tolist()), itertools.pairwise(layout.cu_keys.tolist())
    for (query, query_end), (key, key_end) in zip(queries, keys, strict=True):
        for back in range(query_end - query):
            at = layout.part.start + query_end - 1 - back
            found += [(at, layout.keys.start + seen) for seen in range(key, key_end - back)]
    return sorted(found)


@pytest.mark.parametrize("lengths", [(40,), (9, 12, 30), (16, 16, 32), (3, 60)])
@pytest.mark.parametrize("count", [2, 4])
def test_the_slices_see_together_what_the_whole_sees(lengths, count):
    pack = pack_rows(batch_of(list(lengths)), rows(list(lengths)), range(len(lengths)))
    whole = lay_out(pack, CPU, "varlen")
    slices = [lay_out(pack, CPU, "varlen", Context(index, count, None)) for index in range(count)]
    wanted = [(q, k) for a, b in itertools.pairwise(pack.cu_seqlens) for q in range(a, b) for k in range(a, q + 1)]
    assert visible(whole) == wanted
    assert sorted(pair for layout in slices for pair in visible(layout)) == wanted
    for layout in (whole, *slices):
        assert layout.max_queries == max(b - a for a, b in itertools.pairwise(layout.cu_queries.tolist()))
        assert layout.max_keys == max(b - a for a, b in itertools.pairwise(layout.cu_keys.tolist()))
        assert layout.keys.stop - layout.keys.start == layout.cu_keys[-1]
