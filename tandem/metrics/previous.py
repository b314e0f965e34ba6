"""What an earlier run left under the name of our file: moved aside, never overwritten."""

from __future__ import annotations

from itertools import count
from pathlib import Path


def set_aside(path: Path) -> Path | None:
    """Rename `path`, if it exists, to the first free `<stem>-<n><suffix>` beside it; the new path, or None."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    return aside
