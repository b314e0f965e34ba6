"""The data plane of one process: a dict of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.roles import WriteFiles

FILE = "rows.safetensors"


class MemoryPlane:
    """Columns of ragged rows in this process's memory. Rows are stored and returned as they are, without copies."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Add columns to rows; a row that is new begins here. A column that is already there is replaced."""
        if len(set(keys)) != len(keys):
            raise ValueError(f"put wants distinct keys, got {len(keys)} of which {len(set(keys))} differ")
        for name, tensors in columns.items():
            if len(tensors) != len(keys):
                raise ValueError(f"column {name!r} has {len(tensors)} rows for {len(keys)} keys")
        for name, tensors in columns.items():
            for key, tensor in zip(keys, tensors, strict=True):
                self._rows.setdefault(key, {})[name] = tensor

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Rows in the order of `keys`. A missing row or column is a KeyError that names it."""
        return {name: [self._cell(key, name) for key in keys] for name in names}

    def _cell(self, key: int, name: str) -> torch.Tensor:
        row = self._rows.get(key)
        if row is None:
            raise KeyError(f"the plane has no row {key}; it holds {len(self._rows)} rows")
        if name not in row:
            raise KeyError(f"row {key} has no column {name!r}; it has {sorted(row)}")
        return row[name]

    async def drop(self, keys: Sequence[int]) -> None:
        """Forget rows. Dropping what is not there is no error."""
        for key in keys:
            self._rows.pop(key, None)

    async def snapshot(self, keys: Sequence[int]) -> WriteFiles:
        """These rows, all columns, to be written as one safetensors file. Rows are never changed, so none is copied."""
        cells = {f"{key}/{name}": tensor.contiguous() for key in keys for name, tensor in self._row(key).items()}

        def write(directory: Path) -> None:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(cells, directory / FILE)

        return write

    def _row(self, key: int) -> dict[str, torch.Tensor]:
        if key not in self._rows:
            raise KeyError(f"the plane has no row {key} to save; it holds {len(self._rows)} rows")
        return self._rows[key]

    async def load(self, directory: Path) -> None:
        """Take the rows of a saved file beside those that are here."""
        with safe_open(directory / FILE, framework="pt") as file:
            for cell in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                key, name = cell.split("/", 1)
                self._rows.setdefault(int(key), {})[name] = file.get_tensor(cell)
