"""Rows -> packs and back."""

import pytest
import torch

from tandem.config.models import SequencePacking
from tandem.train.packs import ALIGNMENT, pack_rows, unpack_column
from tests.train.small_models import batch_of, lengths_of, packs_of, rows


def test_rows_go_into_packs_and_come_back():
    lengths = lengths_of(17)
    columns = rows(lengths)
    packs = packs_of(lengths, columns, 100)
    assert len(packs) > 1
    assert all(pack.tokens <= 100 for pack in packs)
    back = unpack_column(packs, [pack.columns["advantages"] for pack in packs], 17)
    assert all(torch.equal(a, b) for a, b in zip(back, columns["advantages"], strict=True))


def test_the_tail_is_a_sequence_of_its_own_outside_every_loss():
    lengths = [9, 12]
    pack = pack_rows(batch_of(lengths), rows(lengths), [1, 0])
    assert pack.tokens == 21
    assert len(pack.tokens_P) == 32
    assert len(pack.tokens_P) % ALIGNMENT == 0
    assert pack.cu_seqlens == (0, 12, 21, 32)
    assert pack.sample_P.tolist() == [0] * 12 + [1] * 9 + [2] * 11
    assert pack.positions_P.tolist() == [*range(12), *range(9), *range(11)]
    assert not pack.mask_P[21:].any()
    assert not pack.columns["weights"][21:].any()
    assert pack.keys == (1, 0)


def test_a_sample_longer_than_the_budget_gets_a_pack_of_its_own():
    lengths = [50, 10, 10]
    packs = packs_of(lengths, rows(lengths), 32)
    assert sorted(sorted(pack.rows) for pack in packs) == [[0], [1, 2]]


def test_packs_are_filled_up_to_what_the_recipe_asks_and_to_the_alignment():
    lengths = [9, 12]
    packing = SequencePacking(make_sequence_length_divisible_by=24)
    pack = pack_rows(batch_of(lengths), rows(lengths), [1, 0], packing.multiple)
    assert packing.multiple == len(pack.tokens_P) == 48
    assert len(pack_rows(batch_of(lengths), rows(lengths), [], packing.multiple).tokens_P) == 48
    assert SequencePacking(make_sequence_length_divisible_by=8).multiple == ALIGNMENT


def test_a_mask_that_holds_the_first_token_is_refused_with_its_sample():
    lengths = [10, 11]
    columns = rows(lengths)
    columns["mask"][1][0] = True
    with pytest.raises(ValueError, match="sample 1: mask is True at position 0"):
        pack_rows(batch_of(lengths), columns, [0, 1])


def test_a_column_of_another_length_is_refused_with_its_name():
    lengths = [10, 11]
    columns = rows(lengths)
    columns["returns"][0] = torch.zeros(9)
    with pytest.raises(ValueError, match="sample 0: column 'returns' has shape"):
        pack_rows(batch_of(lengths), columns, [0, 1])


def test_a_dummy_holds_nothing_and_gives_no_row():
    lengths = [9, 12]
    columns = rows(lengths)
    dummy = pack_rows(batch_of(lengths), columns, [])
    assert (dummy.keys, dummy.tokens, dummy.cu_seqlens) == ((), 0, (0, ALIGNMENT))
    assert not dummy.mask_P.any()
    assert not any(column.any() for column in dummy.columns.values())
    assert (dummy.tokens_P.dtype, dummy.mask_P.dtype) == (torch.int64, torch.bool)
    real = pack_rows(batch_of(lengths), columns, [0, 1])
    back = unpack_column([dummy, real], [pack.columns["weights"] for pack in (dummy, real)], 2)
    assert all(torch.equal(a, b) for a, b in zip(back, columns["weights"], strict=True))
