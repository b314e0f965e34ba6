"""`tandem import-config`: a recipe for Tandem from a config of NeMo-RL, and what became of each of its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.config.nemo_rl.entry import Fate
from tandem.config.nemo_rl.importing import Imported, Row, import_config
from tandem.config.nemo_rl.recipe import stand_in, to_yaml
from tandem.config.show import shown

# What asks for attention is printed last, where it is seen.
FATES: Mapping[Fate | Literal["unknown"], str] = {
    "implied": "dim",
    "mapped": "green",
    "not supported": "yellow",
    "unknown": "red",
}
WIDEST = 28  # characters of a value


def import_file(file: Path, output: Path | None, overwrite: bool) -> bool:
    """Write the recipe to `output`, or print it, beside the table. Returns whether the recipe passes the check.

    Without `output` the recipe alone goes to standard output, the rest to standard error. ValueError where `output`
    is there already.
    """
    if output is not None and output.exists() and not overwrite:
        raise ValueError(f"{output} is there already: give another file, or --overwrite")
    imported = import_config(file)
    text = to_yaml(imported.recipe, f"From {file.name}, written for NeMo-RL, by tandem import-config.")
    console = Console(stderr=output is None, markup=False, emoji=False, highlight=False)
    if output is None:
        Console(markup=False, emoji=False, highlight=False).print(text, end="", soft_wrap=True)
    else:
        output.write_text(text, encoding="utf-8")
    for table in tables_of(imported.rows):
        console.print(table)
    mistakes = mistakes_of(text, imported)
    for line in summary(imported, output, mistakes):
        console.print(line, soft_wrap=True)
    return not mistakes


def tables_of(rows: Sequence[Row]) -> Iterator[Table]:
    """Every key of the file once, by what became of it."""
    for fate, style in FATES.items():
        chosen = [row for row in rows if row.fate == fate]
        if not chosen:
            continue
        table = Table(box=None, pad_edge=False, title=f"\n{fate}", title_justify="left", title_style=f"bold {style}")
        for name in ("NeMo-RL", "value", "Tandem"):
            table.add_column(name, overflow="fold", max_width=WIDEST if name == "value" else None)
        for row in chosen:
            value = shown(row.value) if row.given else f"{shown(row.value)} (NeMo-RL's default)"
            table.add_row(row.key, value, row.text)
        yield table


def mistakes_of(text: str, imported: Imported) -> tuple[str, ...]:
    """What `tandem check` would say of the recipe once its open keys are filled in."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load(str(path), [f"{key}={shown(stand_in(key))}" for key in imported.open])
        except ConfigError as error:
            return tuple(message.replace(str(path), "recipe") for message in error.messages)
    return ()


def summary(imported: Imported, output: Path | None, mistakes: Sequence[str]) -> Iterator[RenderableType]:
    """How many keys went where, what is to be filled in, and what the check says."""
    counts = Counter(row.fate for row in imported.rows if row.given)
    parts = ", ".join(f"{counts[fate]} {fate}" for fate in FATES if counts[fate])
    yield Text(f"\n{sum(counts.values())} keys: {parts}", style="bold")
    if imported.open:
        yield Text(f"to be filled in (written as ???): {', '.join(imported.open)}")
    for message in mistakes:
        yield Text(f"the check refuses: {message}", style="red")
    if not mistakes:
        name = output or "the recipe"
        yield Text(f"{name} passes the check{' once that is done' if imported.open else ''}")
