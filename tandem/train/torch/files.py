"""Weights and moments on disk: whole tensors by name in safetensors files, as many files as ranks wrote.

Ranks keep whole tensors by turns, so that no rank holds all and a rank's file needs no other. Nothing on disk says how
the model was cut: any number of ranks reads what any other wrote, each only its own part, and one process and `export`
read the same files. torch.distributed.checkpoint was not taken: its metadata is a pickle, and it wants collectives
while it writes, which a save in the background would mix with those of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def file_name(stem: str, rank: int, ranks: int) -> str:
    """The file of one rank; in Hugging Face's words when there are several."""
    return f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def held(tensors: Iterable[tuple[str, Tensor]], *, rank: int, ranks: int, copy: bool) -> dict[str, Tensor]:
    """Those that are this rank's turn, on the CPU; `copy` keeps them from what training does next."""
    kept = {}
    for turn, (name, tensor) in enumerate(tensors):
        if turn % ranks != rank:
            continue
        there = tensor.detach().to("cpu")
        kept[name] = (there.clone() if copy and there.data_ptr() == tensor.data_ptr() else there).contiguous()
    return kept


class SavedTensors:
    """The tensors of all files of one stem, read when asked for."""

    def __init__(self, directory: Path, stem: str) -> None:
        files = sorted(directory.glob(f"{stem}.safetensors")) or sorted(directory.glob(f"{stem}-*-of-*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{directory} holds no {stem}.safetensors")
        # a safe_open is no mapping: it has keys and cannot be walked
        opened = [safe_open(file, framework="pt") for file in files]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        """One tensor, or a region of it; the rest stays on disk.

        Contiguous: safetensors gives a strided view of columns, and fused AdamW reads its moments end to end.
        """
        file = self._file_of[name]
        return (file.get_slice(name)[region] if region else file.get_tensor(name)).contiguous()

    def names(self) -> Iterator[str]:
        """All names, in the order of the files."""
        yield from self._file_of

    def shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Each with an empty tensor of its shape."""
        for name, file in self._file_of.items():
            yield name, torch.empty(file.get_slice(name).get_shape(), device="meta")
