"""Finding a recipe: one that ships with Tandem by its name, any other by its path."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from tandem.config.errors import ConfigError


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe that ships: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def run_config(name_or_path: str) -> Path | None:
    """The config that a run keeps in its directory, if this names such a directory and no shipped recipe."""
    folder = Path(name_or_path).expanduser()
    is_run = (folder / "config.yaml").is_file() and not (folder / "manifest.json").is_file()  # a checkpoint has both
    return folder / "config.yaml" if is_run and name_or_path not in shipped_recipes() else None


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """`quickstart` is the shipped recipe, anything else a path, first from the folder `beside`, then from here.

    A run's directory stands for the config in it.
    """
    shipped = shipped_recipes()
    if (kept := run_config(name_or_path)) is not None:
        return kept
    if name_or_path in shipped:
        return shipped[name_or_path]
    places = [Path(name_or_path).expanduser()]
    if beside is not None:
        places.insert(0, beside / places[0])
    for path in places:
        if path.is_file():
            return path
    raise ConfigError(_not_found(name_or_path, places[-1], sorted(shipped)))


def _not_found(name_or_path: str, path: Path, shipped: list[str]) -> str:
    if path.is_dir():
        return f"recipe {name_or_path!r} is a folder, and no run's directory: give the YAML file"
    names = [*shipped, *(f"{name}.yaml" for name in shipped)]
    near = [name.removesuffix(".yaml") for name in get_close_matches(path.name, names, n=1, cutoff=0.5)]
    hint = f"; did you mean {near[0]}?" if near else "."
    listing = ", ".join(shipped) or "none"
    return f"no recipe {name_or_path!r}{hint} Shipped recipes: {listing}; or give the path of a YAML file"
