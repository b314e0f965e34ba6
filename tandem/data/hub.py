"""Records of a data set that the library `datasets` loads: from a hub, or from a folder of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tandem.config.data import HubData
from tandem.data.rows import Fields, Record

BATCH = 1024  # rows that are Python objects at one time
# Files that `save_to_disk` of the library writes: of one split, and of several.
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"


def hub_records(config: HubData, fields: Fields, way_out: str) -> Iterator[Record]:
    """The rows of one split, counted from 1. `way_out` is the key that reads a local copy of them instead.

    ValueError saying what to do when the data set cannot be had: no package, no network, no such name or split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data set {config.dataset} needs the package datasets: install the extra (uv sync --extra datasets),"
            f" or download its rows and set {way_out}"
        ) from error
    table = load(datasets, config, way_out).with_format("arrow")
    if (columns := fields.columns(table.column_names)) is not None:
        table = table.select_columns(columns)
    number = 0
    for batch in table.iter(batch_size=BATCH):
        for value in batch.to_pylist():
            number += 1
            yield Record(f"{config.dataset} ({config.split}), row {number}", f"{config.split}:{number}", value)


def load(datasets: ModuleType, config: HubData, way_out: str):
    """One split of the data set, by the library."""
    folder = Path(config.dataset).expanduser()
    if config.dataset.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"data set {config.dataset}: no such folder; give one, or a hub name as openai/gsm8k")
    saved = next((name for name in (SAVED_SPLITS, SAVED_SPLIT) if (folder / name).is_file()), None)
    idle = [name for name in ("subset", "revision") if config.model_dump()[name] is not None]
    if idle and (saved or (folder.is_dir() and config.revision)):
        raise ValueError(f"`{idle[-1]}` has no effect on {config.dataset}, a folder of this machine: take it out")
    try:
        if saved:
            table = datasets.load_from_disk(str(folder))
            if saved == SAVED_SPLIT and table.split is not None and str(table.split) != config.split:
                raise ValueError(f"it holds the split {table.split}")
            return table[config.split] if saved == SAVED_SPLITS else table
        name = str(folder) if folder.is_dir() else config.dataset
        return datasets.load_dataset(name, config.subset, split=config.split, revision=config.revision)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"data set {config.dataset} (split {config.split}) could not be loaded ({reason}): check its name,"
            f" subset and split; without a network, download its rows and set {way_out}"
        ) from error
