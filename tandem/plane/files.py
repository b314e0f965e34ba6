"""Rows on disk: one safetensors file, the same for every plane, so that a run may resume on another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.roles import WriteFiles

FILE = "rows.safetensors"
# Column -> the keys that have it, and their tensors.
Saved = dict[str, tuple[list[int], list[torch.Tensor]]]


def write_rows(rows: Mapping[int, Mapping[str, torch.Tensor]]) -> WriteFiles:
    """What writes these rows, later and in any thread. Tensors are kept as they are, so nobody may change them."""
    cells = {f"{key}/{name}": tensor.contiguous() for key, row in rows.items() for name, tensor in row.items()}

    def write(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(cells, directory / FILE)

    return write


def read_rows(directory: Path) -> Saved:
    """A saved file's rows, column by column."""
    saved: Saved = {}
    with safe_open(directory / FILE, framework="pt") as file:
        for cell in file.keys():  # noqa: SIM118  (safe_open is no mapping)
            key, name = cell.split("/", 1)
            keys, tensors = saved.setdefault(name, ([], []))
            keys.append(int(key))
            tensors.append(file.get_tensor(cell))
    return saved
