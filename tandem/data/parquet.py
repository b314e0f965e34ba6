"""Records of parquet files, through pyarrow: it comes with the extra `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.data.rows import Record

BATCH = 1024  # rows that are Python objects at one time


def parquet_records(path: Path, columns: Iterable[str]) -> Iterator[Record]:
    """The rows of one file. Only `columns` are read where the file has them all. Rows are counted from 1."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs the extra `datasets`: uv sync --extra datasets") from error
    try:
        with parquet.ParquetFile(path) as file:
            wanted = set(columns) & set(file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(BATCH, columns=sorted(wanted) if wanted >= set(columns) else None):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}, row {number}", f"{path.name}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {' '.join(str(error).split())}") from error
