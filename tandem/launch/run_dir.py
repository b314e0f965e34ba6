"""The run directory: where it is, who holds it, and the log file in it."""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

CONFIG, LOG, LOCK = "config.yaml", "tandem.log", "lock"
UNTRAINED, HEALTH, FLIGHT = "untrained.jsonl", "health.jsonl", "flight"


def choose_run_dir(run_dir: str | None, name: str) -> Path:
    """The directory asked for, or a new runs/<name>-<time>."""
    if run_dir is not None:
        return Path(run_dir).expanduser()
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (stem if number == 0 else stem.with_name(f"{stem.name}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """Add one JSON line to a file of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def keep_records(path: Path, keep: Callable[[Mapping[str, object]], bool]) -> None:
    """Drop the JSON lines that a resumed run will write again, and a last line that a kill has torn."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("}\n") and keep(json.loads(line))]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


@contextmanager
def hold(run_dir: Path) -> Generator[None]:
    """Make the directory and keep other runs out of it until the end of the block, or of the process."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK).open("w")
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir} cannot be written ({error.strerror}); choose another with run_dir=PATH"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run_dir={run_dir} is in use by another run; wait for it, or set run_dir=PATH") from None
        yield


@contextmanager
def logging_to(run_dir: Path, console: Console) -> Generator[None]:
    """Everything from INFO up goes to tandem.log, warnings to the terminal too."""
    file = logging.FileHandler(run_dir / LOG, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = RichHandler(console=console, level=logging.WARNING, show_path=False, show_time=False)
    root = logging.getLogger("tandem")
    root.setLevel(logging.INFO)
    for handler in (file, screen):
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, screen):
            root.removeHandler(handler)
            handler.close()
