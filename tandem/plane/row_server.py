"""Rows as bytes, and the object that keeps them in its own process. Free of torch and Ray: it starts in a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.plane.rows import Rows


@dataclass(frozen=True)
class Column:
    """Cells of one column end to end, as plane/cells.py encodes them: one array travels, not one a row."""

    dtype: str
    sizes: tuple[int, ...]
    flat: np.ndarray

    def split(self) -> list[np.ndarray]:
        """The cells, as views."""
        return np.split(self.flat, np.cumsum(self.sizes)[:-1]) if self.sizes else []


@dataclass(frozen=True)
class StoredCell:
    """One cell as bytes that are its own: dropping it frees them."""

    dtype: str
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class RowServer:
    """The rows of a plane, behind whatever carries its calls. One call at a time."""

    def __init__(self, max_bytes: int | None) -> None:
        self._rows: Rows[StoredCell] = Rows(max_bytes)

    def put(self, keys: Sequence[int], columns: Mapping[str, Column]) -> None:
        """See Rows.put."""
        self._rows.put(keys, {name: stored(column) for name, column in columns.items()})

    def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, Column]:
        """See Rows.get."""
        return {name: joined(cells) for name, cells in self._rows.get(keys, names).items()}

    def whole_rows(self, keys: Sequence[int]) -> dict[str, tuple[list[int], Column]]:
        """Every column that any of these rows has: which of them have it, and their cells."""
        found: dict[str, tuple[list[int], list[StoredCell]]] = {}
        for key in keys:
            for name, cell in self._rows.row(key).items():
                owners, cells = found.setdefault(name, ([], []))
                owners.append(key)
                cells.append(cell)
        return {name: (owners, joined(cells)) for name, (owners, cells) in found.items()}

    def drop(self, keys: Sequence[int]) -> None:
        """See Rows.drop."""
        self._rows.drop(keys)


def stored(column: Column) -> list[StoredCell]:
    """Cells copied out of the message that brought them, which may then be freed."""
    return [StoredCell(column.dtype, cell.copy()) for cell in column.split()]


def joined(cells: Sequence[StoredCell]) -> Column:
    """Cells of one column as one message."""
    if not cells:
        return Column("", (), np.empty(0, np.uint8))
    return Column(cells[0].dtype, tuple(cell.nbytes for cell in cells), np.concatenate([cell.data for cell in cells]))
