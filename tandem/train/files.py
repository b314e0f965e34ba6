"""Weights and moments on disk: whole tensors by name in safetensors files, as many files as ranks wrote.

Ranks keep whole tensors by turns, so that no rank holds all and a rank's file needs no other. Nothing on disk says how
the model was cut: any number of ranks reads what any other wrote, each only its own part, and one process and `export`
read the same files. torch.distributed.checkpoint was not taken: its metadata is a pickle, and it wants collectives
while it writes, which a save in the background would mix with those of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.roles import WriteFiles
from tandem.train.sharding import Shard

WEIGHTS, MOMENTS, COUNTS = "model", "optimizer", "optimizer.json"  # stems of files, and a file


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


def keep(
    tensors: Iterable[tuple[str, Tensor]],
    stem: str,
    shard: Shard,
    *,
    copy: bool,
    texts: Mapping[str, str] | None = None,
) -> WriteFiles:
    """Hold this rank's turns of the whole tensors. What is returned writes them, and on rank 0 the texts by file name.

    All ranks call it alike: putting a tensor together takes all of them.
    """
    kept = held(tensors, rank=shard.rank, ranks=shard.ranks, copy=copy)

    def write(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(kept, directory / file_name(stem, shard.rank, shard.ranks))
        for name, text in (texts or {}).items() if shard.rank == 0 else ():
            (directory / name).write_text(text)

    return write


def one_after_the_other(writes: Sequence[WriteFiles]) -> WriteFiles:
    """All of them into one directory."""

    def write(directory: Path) -> None:
        for part in writes:
            part(directory)

    return write


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


def first_mismatch(ours: Mapping[str, Tensor], theirs: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first tensor whose name or shape differs, in words; None when all fit."""
    found = {name: tuple(tensor.shape) for name, tensor in theirs}
    for name, tensor in ours.items():
        if name not in found:
            return f"{name} is missing there"
        if found[name] != tuple(tensor.shape):
            return f"{name} is {list(tensor.shape)} here and {list(found[name])} there"
    extra = [name for name in found if name not in ours]
    return f"{extra[0]} exists only there" if extra else None
