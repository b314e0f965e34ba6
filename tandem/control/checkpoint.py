"""Saving and restoring a run: models, optimizers, random states, buffered samples and counters, at one moment."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tandem.config.run import Checkpointing
from tandem.control import vault
from tandem.roles import DataPlane, Trainer, WriteFiles

if TYPE_CHECKING:
    from tandem.control.controller import Controller

log = logging.getLogger(__name__)

STATE, CONFIG = "state.json", "config.yaml"


@dataclass(frozen=True)
class Identity:
    """What makes a checkpoint this run's: `exact` must be equal; `free` may change, and a change is logged."""

    exact: Mapping[str, Any]
    free: Mapping[str, Any]


class Checkpoints:
    """Saves and restores a run in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        models: Mapping[str, Trainer],
        plane: DataPlane,
        identity: Identity,
        settings: Checkpointing,
        config_yaml: str,
    ) -> None:
        """`models` are saved in this order, critic first, all or none."""
        self._directory = directory
        self._models = models
        self._plane = plane
        self._identity = identity
        self._settings = settings
        self._config_yaml = config_yaml
        self._writing: asyncio.Task[None] | None = None

    async def save(self, controller: Controller) -> None:
        """Write the run as it is now; with `async_save` a copy of it, beside training, one at a time."""
        if self._writing is not None:
            await self._writing
        write = await self._snapshot(controller)
        if self._settings.async_save:
            self._writing = controller.beside(asyncio.to_thread(write))
        else:
            await asyncio.to_thread(write)

    async def _snapshot(self, controller: Controller) -> Callable[[], None]:
        copy = self._settings.async_save
        parts: dict[str, WriteFiles] = {}
        state = controller.state()  # first: groups that finish while models are copied belong to the next checkpoint
        keys = [key for group in controller.buffer.finished() for key in group.keys]
        parts["plane"] = await self._plane.snapshot(keys)
        for name, model in self._models.items():
            parts[name] = await model.snapshot(copy=copy)
        identity = {"exact": dict(self._identity.exact), "free": dict(self._identity.free)}
        texts = {STATE: json.dumps({"identity": identity, "controller": state}, indent=1), CONFIG: self._config_yaml}
        return partial(self._write, controller.step, controller.score(self._settings.metric_name), parts, texts, rng())

    def _write(
        self,
        step: int,
        score: float | None,
        parts: Mapping[str, WriteFiles],
        texts: Mapping[str, str],
        random_states: tuple[torch.Tensor, str],
    ) -> None:
        """Write one checkpoint. An OSError becomes a RuntimeError that names the file; older ones are intact."""
        settings = self._settings
        try:
            folder = vault.begin(self._directory, step)
            for name, write in parts.items():
                write(folder / name)
            for name, text in texts.items():
                (folder / name).write_text(text)
            save_file({"torch": random_states[0]}, folder / "rng.safetensors")
            (folder / "rng.json").write_text(random_states[1])
            vault.commit(folder, score=score)
            vault.prune(
                self._directory,
                keep_last_n=settings.keep_last_n,
                keep_top_k=settings.keep_top_k,
                higher_is_better=settings.higher_is_better,
            )
        except (OSError, SafetensorError) as error:  # safetensors wraps what the disk says
            raise RuntimeError(
                f"the checkpoint of step {step} could not be written to {self._directory}: {error}; earlier ones are "
                "intact. Free space or mend the permission, then start the same command again"
            ) from error

    async def restore(self, controller: Controller, checkpoint: Path) -> None:
        """Put a saved run back into these roles. ValueError when it is another run's, or not as it was written."""
        await asyncio.to_thread(vault.verified, checkpoint)
        saved = json.loads((checkpoint / STATE).read_text())
        self._check_identity(checkpoint, saved["identity"])
        await self._plane.load(checkpoint / "plane")
        for name, model in self._models.items():
            await model.load(checkpoint / name)
        load_rng(checkpoint)
        controller.restore(saved["controller"])
        log.info("resumed from %s at step %d", checkpoint, controller.step)

    def _check_identity(self, checkpoint: Path, saved: Mapping[str, Mapping[str, Any]]) -> None:
        theirs = saved["exact"]
        wrong = [
            f"{key} was {theirs.get(key)!r} and is {ours!r}: set it back, or start anew in another run_dir"
            for key, ours in self._identity.exact.items()
            if theirs.get(key) != ours
        ]
        if wrong:
            raise ValueError(f"{checkpoint} is another run's: " + "; ".join(wrong))
        for key, ours in self._identity.free.items():
            if saved["free"].get(key) != ours:
                log.warning("resumed with another %s: it was %s and is %s", key, saved["free"].get(key), ours)


def find_checkpoint(resume: str, directory: Path) -> Path | None:
    """The checkpoint that `checkpointing.resume` asks for: auto takes the newest that is as it was written."""
    if resume == "never":
        return None
    if resume == "auto":
        return vault.newest_verified(directory)
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ValueError(f"checkpointing.resume={resume}: no such directory; give auto, never, or a step_N folder")
    return path


def rng() -> tuple[torch.Tensor, str]:
    """The global random states of torch, numpy and Python. Tandem itself draws by counters, user code may not."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return torch.get_rng_state(), json.dumps({"numpy": numpy, "python": random.getstate()})


def load_rng(directory: Path) -> None:
    """Put the random states back."""
    tensors, rest = load_file(directory / "rng.safetensors"), json.loads((directory / "rng.json").read_text())
    torch.set_rng_state(tensors["torch"])
    rest["numpy"]["state"]["key"] = np.array(rest["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(rest["numpy"])
    version, internal, following = rest["python"]
    random.setstate((version, tuple(internal), following))
