"""The directory of checkpoints: each is whole or not there, every file is hashed, JSON and safetensors only.

checkpoints/
  latest, best           names of checkpoints, plain text
  step_000010/
    COMPLETE             written last, the hash of manifest.json; without it nothing below counts
    manifest.json        package version, step, metrics, and size and hash of every file
    state.json config.yaml rng.json rng.safetensors  critic/ actor/ plane/
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tandem import __version__

log = logging.getLogger(__name__)

MARKER, MANIFEST, LATEST, BEST = "COMPLETE", "manifest.json", "latest", "best"
PARTIAL = ".partial"
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file as it was written; of a safetensors file also each tensor's dtype and shape."""

    bytes: int
    blake2b: str
    tensors: dict[str, str] | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `score` ranks it; None: not ranked."""

    package: str
    step: int
    score: float | None
    files: dict[str, FileRecord]


def begin(directory: Path, step: int) -> Path:
    """An empty folder under a temporary name for the files of a step."""
    partial = directory / f"step_{step:06d}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, *, score: float | None) -> Path:
    """Hash and flush every file, rename the folder, mark it as whole, point `latest` at it."""
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    step = int(target.name.removeprefix("step_"))
    files = {
        path.relative_to(partial).as_posix(): replace(record_of(path), tensors=tensors_of(path))
        for path in sorted(files_of(partial))
    }
    manifest = Manifest(f"tandem-rl {__version__}", step, score, files)
    (partial / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    write_whole(target / MARKER, f"{record_of(target / MANIFEST).blake2b}\n")
    write_whole(target.parent / LATEST, f"{target.name}\n")
    return target


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def record_of(path: Path) -> FileRecord:
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def tensors_of(path: Path) -> dict[str, str] | None:
    """Name -> `F32[2, 3]` from the header of a safetensors file; None for other files."""
    if path.suffix != ".safetensors":
        return None
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: f"{entry['dtype']}{entry['shape']}" for name, entry in header.items() if name != "__metadata__"}


def flush(path: Path) -> None:
    """Force a file or a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a small file such that it is whole or the old one remains, whatever happens."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(text)
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def marked(directory: Path) -> list[Path]:
    """Checkpoints that were written to their end, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step_*/{MARKER}"))


def verified(checkpoint: Path) -> Manifest:
    """The manifest, after every file has been found as it was written. ValueError names the first that is not.

    A file that the manifest does not name is refused too: nothing in a checkpoint is read that was not written by us.
    """
    if not (checkpoint / MARKER).is_file():
        raise ValueError(f"{checkpoint} is no whole checkpoint: it has no file {MARKER}; give a step_N folder")
    try:
        if record_of(checkpoint / MANIFEST).blake2b != (checkpoint / MARKER).read_text().strip():
            raise ValueError(f"{checkpoint / MANIFEST} is not what was written: {MARKER} holds another hash")
        manifest = TypeAdapter(Manifest).validate_json((checkpoint / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{checkpoint / MANIFEST} cannot be read: {error}") from error
    for name, expected in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, the manifest names it")
        found = record_of(path)
        if (found.bytes, found.blake2b) != (expected.bytes, expected.blake2b):
            raise ValueError(
                f"{path} is torn: {found.bytes} bytes of {expected.bytes}, or other ones than were written"
            )
    known = {*manifest.files, MANIFEST, MARKER}
    extra = [path for path in files_of(checkpoint) if path.relative_to(checkpoint).as_posix() not in known]
    if extra:
        raise ValueError(
            f"{extra[0]} is not in the manifest: it was not written by a run; remove it if you trust the rest"
        )
    return manifest


def newest_verified(directory: Path) -> Path | None:
    """The newest checkpoint that is as it was written, if there is any; says which ones it passes over, and why."""
    checkpoints = marked(directory)
    for checkpoint in reversed(checkpoints):
        try:
            verified(checkpoint)
        except ValueError as error:
            log.warning("%s is passed over: %s", checkpoint.name, error)
        else:
            return checkpoint
    if checkpoints:
        raise ValueError(
            f"none of the {len(checkpoints)} checkpoints in {directory} is as it was written (the log says why); "
            "give a sound one with checkpointing.resume=PATH, or start anew with checkpointing.resume=never"
        )
    return None


def prune(directory: Path, *, keep_last_n: int, keep_top_k: int, higher_is_better: bool) -> None:
    """Keep the newest n and the best k; point `best` at the best; remove what a killed run left half-written."""
    for partial in directory.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(partial)
    checkpoints = marked(directory)
    scores = {path: score_of(path) for path in checkpoints}
    ranked = sorted(
        (path for path in checkpoints if scores[path] is not None),
        key=lambda path: (scores[path] or 0.0, path.name) if higher_is_better else (-(scores[path] or 0.0), path.name),
    )
    if ranked:
        write_whole(directory / BEST, f"{ranked[-1].name}\n")
    else:
        (directory / BEST).unlink(missing_ok=True)
    best = ranked[len(ranked) - keep_top_k :] if keep_top_k else []
    kept = {*checkpoints[-keep_last_n:], *best}
    for path in checkpoints:
        if path not in kept:
            (path / MARKER).unlink()  # from now on it does not count, wherever the removal stops
            shutil.rmtree(path)


def score_of(checkpoint: Path) -> float | None:
    """The metric that a checkpoint is ranked by."""
    return json.loads((checkpoint / MANIFEST).read_text())["score"]
