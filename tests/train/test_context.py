"""Ranks that share a pack: together their queries see what those of one process see."""

import itertools

import pytest

from tandem.train.packs import pack_rows
from tandem.train.torch.attention import lay_out
from tandem.train.torch.context import Context
from tests.train.small_models import CPU, batch_of, rows


def visible(own) -> list[tuple[int, int]]:
    """Query and key of each pair, as the kernel counts them: of a sequence, the last query sees all its keys."""
    found = []
    queries, keys = itertools.pairwise(own.cu_queries.tolist()), itertools.pairwise(own.cu_keys.tolist())
    for (query, query_end), (key, key_end) in zip(queries, keys, strict=True):
        for back in range(query_end - query):
            at = own.part.start + query_end - 1 - back
            found += [(at, own.keys.start + seen) for seen in range(key, key_end - back)]
    return sorted(found)


@pytest.mark.parametrize("lengths", [(40,), (9, 12, 30), (16, 16, 32), (3, 60)])
@pytest.mark.parametrize("count", [2, 4])
def test_the_slices_see_together_what_the_whole_sees(lengths, count):
    pack = pack_rows(batch_of(list(lengths)), rows(list(lengths)), range(len(lengths)))
    slices = [lay_out(pack, CPU, "varlen", Context(index, count, None)).own for index in range(count)]
    wanted = [(q, k) for a, b in itertools.pairwise(pack.cu_seqlens) for q in range(a, b) for k in range(a, q + 1)]
    assert sorted(pair for own in slices for pair in visible(own)) == wanted
    for own in slices:
        assert own.max_queries == max(b - a for a, b in itertools.pairwise(own.cu_queries.tolist()))
        assert own.max_keys == max(b - a for a, b in itertools.pairwise(own.cu_keys.tolist()))
        assert own.keys.stop - own.keys.start == own.cu_keys[-1]
