"""Rows -> packs: lays whole samples end to end, each token with its position, its sample and its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tandem.config.models import ALIGNMENT
from tandem.train.backend import Pack
from tandem.types import Batch

# A dummy has no row to take a column's type from; all others are float32.
DTYPES = {"tokens": torch.int64, "mask": torch.bool}


def pack_batch(
    batch: Batch,
    columns: Mapping[str, Sequence[Tensor]],
    bins: Sequence[Sequence[int]],
    multiple: int = ALIGNMENT,
) -> list[Pack]:
    """One pack for each bin of the batch's rows. An empty bin is a dummy: nothing but a tail."""
    return [pack_rows(batch, columns, rows, multiple) for rows in bins]


def pack_rows(
    batch: Batch, columns: Mapping[str, Sequence[Tensor]], rows: Sequence[int], multiple: int = ALIGNMENT
) -> Pack:
    """One pack of these rows of the batch, in this order, filled up to a `multiple` of tokens."""
    lengths = tuple(batch.lengths[row] for row in rows)
    tail = -sum(lengths) % multiple if rows else multiple
    sequences = [*lengths, tail] if tail else [*lengths]
    packed = {name: _lay(batch, name, column, rows, tail) for name, column in columns.items()}
    positions_P = torch.cat([torch.arange(length) for length in sequences])
    mask_P = packed.pop("mask")
    if (mask_P & (positions_P == 0)).any():
        bad = next(batch.keys[row] for row in rows if columns["mask"][row][0])
        raise ValueError(
            f"sample {bad}: mask is True at position 0, a token without context; it must be a prompt token"
        )
    return Pack(
        rows=tuple(rows),
        keys=tuple(batch.keys[row] for row in rows),
        lengths=lengths,
        cu_seqlens=tuple(torch.tensor([0, *sequences]).cumsum(0).tolist()),
        tokens_P=packed.pop("tokens"),
        positions_P=positions_P,
        sample_P=torch.repeat_interleave(torch.tensor(sequences)),
        mask_P=mask_P,
        wanted_R=mask_P.nonzero().squeeze(1),
        columns=packed,
    )


def _lay(batch: Batch, name: str, column: Sequence[Tensor], rows: Sequence[int], tail: int) -> Tensor:
    for row in rows:
        if column[row].shape != (batch.lengths[row],):
            raise ValueError(
                f"sample {batch.keys[row]}: column {name!r} has shape {tuple(column[row].shape)}, "
                f"the batch says {batch.lengths[row]} tokens"
            )
    dtype = column[rows[0]].dtype if rows else DTYPES.get(name, torch.float32)
    return torch.cat([column[row] for row in rows] + [torch.zeros(tail, dtype=dtype)])


def unpack_column(packs: Sequence[Pack], columns_P: Sequence[Tensor], samples: int) -> list[Tensor]:
    """Packed columns -> one row a sample, in the order of the batch."""
    rows: dict[int, Tensor] = {}
    for pack, column_P in zip(packs, columns_P, strict=True):
        for row, part in zip(pack.rows, column_P[: pack.tokens].split(pack.lengths), strict=True):
            rows[row] = part.clone()
    return [rows[row] for row in range(samples)]


def probe_pack(vocabulary: int) -> Pack:
    """One sequence of ALIGNMENT tokens, to try a model with."""
    tokens = torch.arange(ALIGNMENT) % vocabulary
    columns = {"tokens": [tokens], "mask": [torch.arange(ALIGNMENT) > 0]}
    return pack_rows(Batch((0,), (ALIGNMENT,), (0,)), columns, [0])
