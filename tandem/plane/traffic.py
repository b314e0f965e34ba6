"""How many bytes go into a plane and come out of it: a metric of every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tandem.plane.rows import Cell
from tandem.types import Metrics, Sum

Columns = Mapping[str, Sequence[Cell]]


class Traffic:
    """Counts what one process moves through a plane, by the size of the tensors."""

    def __init__(self) -> None:
        self._put = 0
        self._got = 0

    def put(self, columns: Columns) -> None:
        self._put += nbytes(columns.values())

    def got(self, columns: Columns) -> None:
        self._got += nbytes(columns.values())

    def drain(self) -> Metrics:
        """The counts since the last drain."""
        put, got, self._put, self._got = self._put, self._got, 0, 0
        return {"plane/bytes_put": Sum(put), "plane/bytes_get": Sum(got)}


def nbytes(columns: Iterable[Sequence[Cell]]) -> int:
    return sum(cell.nbytes for cells in columns for cell in cells)
