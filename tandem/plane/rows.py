"""The rules of a plane's rows, whatever their cells are made of. Free of torch: a plane's server starts without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class Cell(Protocol):
    """One row's value in one column: a tensor, or its bytes."""

    @property
    def dtype(self) -> object: ...

    @property
    def nbytes(self) -> int: ...


CellT = TypeVar("CellT", bound=Cell)


class Rows(Generic[CellT]):
    """Rows by key, of at most `max_bytes` together. A column has one dtype for as long as the plane lives."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[int, dict[str, CellT]] = {}
        self._dtypes: dict[str, object] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[CellT]]) -> None:
        """Add columns to rows, whole or not at all; a row that is new begins here, a column that is there is replaced.

        ValueError: a key twice, or a column of another length. TypeError: another dtype. RuntimeError: no room.
        """
        check_columns(keys, columns)
        dtypes = {name: dtype_of(name, cells) for name, cells in columns.items() if cells}
        for name, dtype in dtypes.items():
            check_dtype(name, self._dtypes.get(name, dtype), dtype)
        total = self.nbytes + sum(
            cell.nbytes - self._bytes_at(key, name)
            for name, cells in columns.items()
            for key, cell in zip(keys, cells, strict=True)
        )
        check_room(self.nbytes, total, self._max_bytes, rows=len(self._rows))
        for name, cells in columns.items():
            for key, cell in zip(keys, cells, strict=True):
                self._rows.setdefault(key, {})[name] = cell
        self._dtypes |= dtypes
        self.nbytes = total

    def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[CellT]]:
        """Rows in the order of `keys`. A missing row or column is a KeyError that names it."""
        return {name: [self._cell(key, name) for key in keys] for name in names}

    def __iter__(self) -> Iterator[int]:
        """The keys of the rows there are, oldest first."""
        return iter(self._rows)

    def row(self, key: int) -> Mapping[str, CellT]:
        """All columns of a row."""
        if key not in self._rows:
            raise missing_row(key, len(self._rows))
        return self._rows[key]

    def drop(self, keys: Sequence[int]) -> None:
        """Forget rows. Dropping what is not there is no error."""
        for key in keys:
            self.nbytes -= sum(cell.nbytes for cell in self._rows.pop(key, {}).values())

    def _cell(self, key: int, name: str) -> CellT:
        row = self.row(key)
        if name not in row:
            raise missing_column(key, name, row)
        return row[name]

    def _bytes_at(self, key: int, name: str) -> int:
        row = self._rows.get(key)
        return row[name].nbytes if row and name in row else 0


def check_columns(keys: Sequence[int], columns: Mapping[str, Sequence[object]]) -> None:
    """ValueError unless the keys differ and every column has one cell a key."""
    if len(set(keys)) != len(keys):
        raise ValueError(f"put wants distinct keys, got {len(keys)} of which {len(set(keys))} differ")
    for name, cells in columns.items():
        if len(cells) != len(keys):
            raise ValueError(f"column {name!r} has {len(cells)} rows for {len(keys)} keys")


def dtype_of(name: str, cells: Sequence[Cell]) -> object:
    """The one dtype of a column's cells, of which there is at least one."""
    for cell in cells:
        check_dtype(name, cells[0].dtype, cell.dtype)
    return cells[0].dtype


def check_dtype(name: str, held: object, got: object) -> None:
    """TypeError when a column that holds one dtype is given another."""
    if held != got:
        raise TypeError(
            f"column {name!r} holds {held}, got {got}; a column has one dtype for as long as the plane lives"
        )


def check_room(held: int, wanted: int, max_bytes: int | None, *, rows: int) -> None:
    """RuntimeError when `wanted` bytes are more than may be held. What makes a plane smaller is always allowed."""
    if max_bytes is not None and wanted > max(max_bytes, held):
        raise RuntimeError(
            f"the data plane is full: {rows} rows hold {held} bytes, this put would make it {wanted}, more than "
            f"data_plane.max_bytes={max_bytes}; raise it, or let fewer groups wait (async_rl.sampler)"
        )


def missing_row(key: int, rows: int) -> KeyError:
    return KeyError(f"the plane has no row {key}; it holds {rows} rows")


def missing_column(key: int, name: str, columns: Sequence[str] | Mapping[str, object]) -> KeyError:
    return KeyError(f"row {key} has no column {name!r}; it has {sorted(columns)}")
