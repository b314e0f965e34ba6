"""The data plane of one process: a dict of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tandem.plane.files import read_rows, write_rows
from tandem.plane.rows import Rows
from tandem.plane.traffic import Traffic
from tandem.roles import WriteFiles
from tandem.types import Metrics


class MemoryPlane:
    """Columns of ragged rows in this process's memory. Rows are stored and returned as they are, without copies."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._rows: Rows[torch.Tensor] = Rows(max_bytes)
        self._traffic = Traffic()

    def __iter__(self) -> Iterator[int]:
        """The keys of the rows there are, oldest first."""
        return iter(self._rows)

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Add columns to rows; see Rows."""
        self._rows.put(keys, columns)
        self._traffic.put(columns)

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Rows in the order of `keys`."""
        columns = self._rows.get(keys, names)
        self._traffic.got(columns)
        return columns

    async def drop(self, keys: Sequence[int]) -> None:
        """Forget rows. Dropping what is not there is no error."""
        self._rows.drop(keys)

    async def snapshot(self, keys: Sequence[int]) -> WriteFiles:
        """These rows, all columns. Rows are never changed, so none is copied."""
        return write_rows({key: self._rows.row(key) for key in keys})

    async def load(self, directory: Path) -> None:
        """Take the rows of a saved file beside those that are here."""
        for name, (keys, tensors) in read_rows(directory).items():
            self._rows.put(keys, {name: tensors})

    def drain(self) -> Metrics:
        """The bytes moved since the last drain."""
        return self._traffic.drain()

    async def close(self) -> None:
        """Nothing outlives the process."""
