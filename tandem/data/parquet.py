"""Records of parquet files, through pyarrow: it comes with the extra `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tandem.data.rows import Fields, Record

BATCH = 1024  # rows that are Python objects at one time


def parquet_records(path: Path, fields: Fields) -> Iterator[Record]:
    """The rows of one file, counted from 1. Columns that `fields` has no use for are not read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs the extra `datasets`: uv sync --extra datasets") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(BATCH, columns=fields.columns(file.schema_arrow.names)):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", f"{path.name}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from error
