"""How golden files are read: nested lists to float64 tensors and back, and conventions shared by the adapters."""

from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.kl import KlOptions
from tandem.algorithms.layout import Layout

Case = dict[str, Any]
Outputs = dict[str, Any]


def real(rows: Any) -> Tensor:
    """Nested lists as float64; "NaN" and "Infinity" are strings in the files."""
    return torch.tensor(_numbers(rows), dtype=torch.float64)


def boolean(rows: Any) -> Tensor:
    return torch.tensor(rows) != 0


def verl_kl(kind: str) -> KlOptions:
    """verl clamps k3 only."""
    straight_through = "+" if kind.endswith("+") else ""
    kind = kind.removesuffix("+")
    kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind, kind)
    kind += "" if kind == "k2" else straight_through
    return KlOptions(kind, 20.0, 10.0) if kind == "k3" else KlOptions(kind, None, None)


def flat_layout(mask_NT: Tensor) -> Layout:
    """The tokens of padded rows in one row, masked slots included."""
    rows, length = mask_NT.shape
    return Layout(mask_NT.reshape(-1), torch.arange(rows).repeat_interleave(length), rows)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    return [plain(x) for x in value] if isinstance(value, list) else value


def _numbers(x: Any) -> Any:
    return [_numbers(y) for y in x] if isinstance(x, list) else float(x)
