"""Checkpoints: directories that are whole or not there. JSON and safetensors only, no pickle."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.roles import DataPlane, Trainer

if TYPE_CHECKING:
    from tandem.control.controller import Controller

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
LATEST = "latest"
STATE = "state.json"


class Checkpoints:
    """Saves and restores a run in one directory of step_N folders."""

    def __init__(
        self,
        directory: Path,
        *,
        models: Mapping[str, Trainer],
        plane: DataPlane,
        identity: Mapping[str, Any],
        keep_last_n: int,
    ) -> None:
        """`models` are saved in this order, critic first; `identity` must be equal in a run that resumes."""
        self._directory = directory
        self._models = models
        self._plane = plane
        self._identity = dict(identity)
        self._keep_last_n = keep_last_n

    async def save(self, controller: Controller) -> Path:
        """Write step_N under a temporary name, flush, rename, mark; then forget the oldest beyond keep_last_n."""
        target = self._directory / f"step_{controller.step:06d}"
        partial = target.with_suffix(".partial")
        for stale in (partial, target):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        state = controller.state()
        groups = controller.buffer.finished()
        await self._plane.save([key for group in groups for key in group.keys], partial / "plane")
        for name, model in self._models.items():
            await model.save(partial / name)
        save_rng(partial)
        (partial / STATE).write_text(json.dumps({"identity": self._identity, "controller": state}, indent=1))
        await asyncio.to_thread(flush, partial)
        partial.rename(target)
        write_flushed(target / MARKER, f"{controller.step}\n")
        write_flushed(self._directory / LATEST, f"{target.name}\n")
        self._forget_old()
        return target

    def _forget_old(self) -> None:
        for old in complete_checkpoints(self._directory)[: -self._keep_last_n]:
            shutil.rmtree(old)

    async def restore(self, controller: Controller, checkpoint: Path) -> None:
        """Put a saved run back into these roles. Raises ValueError when it is another run's or not whole."""
        if not (checkpoint / MARKER).is_file():
            raise ValueError(f"{checkpoint} is no whole checkpoint: it has no file {MARKER}; give a step_N folder")
        saved = json.loads((checkpoint / STATE).read_text())
        for key, ours in self._identity.items():
            theirs = saved["identity"].get(key)
            if theirs != ours:
                raise ValueError(
                    f"{checkpoint} was written with {key}={theirs}, this run has {key}={ours}: "
                    f"set {key}={theirs} to go on, or start anew with checkpointing.resume=never and another run_dir"
                )
        await self._plane.load(checkpoint / "plane")
        for name, model in self._models.items():
            await model.load(checkpoint / name)
        load_rng(checkpoint)
        controller.restore(saved["controller"])
        log.info("resumed from %s at step %d", checkpoint, controller.step)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step_*/{MARKER}"))


def find_checkpoint(resume: str, directory: Path) -> Path | None:
    """The checkpoint that `checkpointing.resume` asks for: auto takes the newest whole one, if there is any."""
    if resume == "never":
        return None
    if resume == "auto":
        return next(reversed(complete_checkpoints(directory)), None)
    path = Path(resume)
    if not path.is_dir():
        raise ValueError(f"checkpointing.resume={resume}: no such directory; give auto, never, or a step_N folder")
    return path


def save_rng(directory: Path) -> None:
    """The global random states of torch, numpy and Python. Tandem itself draws by counters, user code may not."""
    save_file({"torch": torch.get_rng_state()}, directory / "rng.safetensors")
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    rest = {"numpy": numpy, "python": random.getstate()}
    (directory / "rng.json").write_text(json.dumps(rest))


def load_rng(directory: Path) -> None:
    """Put the random states back."""
    tensors, rest = load_file(directory / "rng.safetensors"), json.loads((directory / "rng.json").read_text())
    torch.set_rng_state(tensors["torch"])
    rest["numpy"]["state"]["key"] = np.array(rest["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(rest["numpy"])
    version, internal, following = rest["python"]
    random.setstate((version, tuple(internal), following))


def flush(directory: Path) -> None:
    """Force every file below, and the directories, to disk."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_flushed(path: Path, text: str) -> None:
    """Write a small file so that it is whole or the old one remains."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    with partial.open() as file:
        os.fsync(file.fileno())
    partial.replace(path)
