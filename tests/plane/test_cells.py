"""Cells: tensors as bytes and back, each with the key of its row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.plane.cells import DTYPES, decode, encode
from tandem.plane.row_server import RowServer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    wide = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    tensors = [wide[:n] for n in (0, 1, 3, 8)] + [wide[:8].view(2, 4), wide[0]]
    keys = [5, -1, 2**62, 0, 7, 8]
    got = decode(keys, encode("x", keys, tensors))
    assert [(t.dtype, t.shape) for t in got] == [(dtype, t.shape) for t in tensors]
    assert [t.reshape(-1).view(torch.uint8).tolist() for t in got] == [
        t.reshape(-1).view(torch.uint8).tolist() for t in tensors
    ]


def test_a_cell_of_another_row_is_a_key_error():
    column = encode("x", [1, 2], [torch.ones(2), torch.ones(3)])
    with pytest.raises(KeyError, match="no row 3: it was dropped while it was read, and its place holds row 2"):
        decode([1, 3], column)


def test_what_comes_back_may_be_written_to_and_shares_nothing():
    column = encode("x", [1], [torch.ones(2)])
    (first,), (second,) = decode([1], column), decode([1], column)
    first += 1
    assert second.tolist() == [1.0, 1.0]


def test_a_dtype_that_does_not_travel_is_refused_by_name():
    with pytest.raises(TypeError, match=r"column 'x' holds torch.complex64"):
        encode("x", [1], [torch.ones(2, dtype=torch.complex64)])


def test_the_server_keeps_no_message_alive():
    server = RowServer(None)
    column = encode("x", [1, 2], [torch.ones(4), torch.ones(4)])
    server.put([1, 2], {"x": column})
    column.flat[:] = 0
    assert decode([2], server.get([2], ["x"])["x"])[0].tolist() == [1.0] * 4
    owners, whole = server.whole_rows([2, 1])["x"]
    assert (owners, whole.flat.dtype) == ([2, 1], np.uint8)
