"""The attention of a decode step: equal to sdpa in value, and to itself in any company and thread bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tandem.rollout.attention import attend

ROWS, SIZE = 32, 16


def scene(key_heads: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as a model and the slot cache give them, and the length of each row."""
    dice = torch.Generator().manual_seed(key_heads * 10 + group)
    query = torch.randn(ROWS, 1, key_heads * group, SIZE, generator=dice).transpose(1, 2)
    state = torch.randn(2, ROWS, key_heads, 256, SIZE, generator=dice)
    return query, state[0], state[1], torch.randint(1, 60, (ROWS,), generator=dice)


def decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, seen: int
) -> torch.Tensor:
    mask = torch.where(torch.arange(seen) < lengths[:, None], 0.0, -torch.inf)[:, None, None]
    return attend(nn.Module(), query, key[:, :, :seen], value[:, :, :seen], mask, scaling=SIZE**-0.5)[0]


# Queries of one key head: 1 is multi-head attention, 3 is SmolLM2's, 7 is Qwen2.5-0.5B's.
@pytest.mark.parametrize(("key_heads", "group"), [(4, 1), (2, 2), (3, 3), (2, 7)])
def test_threads_rows_and_seen_length_change_no_bit(key_heads: int, group: int):
    query, key, value, lengths = scene(key_heads, group)
    wanted = decode(query, key, value, lengths, seen=64)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (16, 32):
            for seen in (64, 80, 96, 112, 176, 256):
                got = decode(query[:rows], key[:rows], value[:rows], lengths[:rows], seen)
                assert torch.equal(got, wanted[:rows])


@pytest.mark.parametrize(("key_heads", "group"), [(4, 1), (2, 2), (3, 3)])
def test_it_is_attention(key_heads: int, group: int):
    query, key, value, lengths = scene(key_heads, group)
    got = decode(query, key, value, lengths, seen=128)
    for row, length in enumerate(lengths.tolist()):
        part = [tensor[row, :, :length].repeat_interleave(group, 0) for tensor in (key, value)]
        wanted = scaled_dot_product_attention(query[row], *part)
        torch.testing.assert_close(got[row, 0], wanted[:, 0])


def test_whatever_lies_beyond_a_row_changes_no_bit():
    query, key, value, lengths = scene(2, 2)
    wanted = decode(query, key, value, lengths, seen=64)
    beyond = torch.arange(256) >= lengths[:, None]
    for tensor in (key, value):
        tensor[beyond[:, None].expand(-1, 2, -1)] = 1e6
    assert torch.equal(decode(query, key, value, lengths, seen=64), wanted)
