"""A data plane in one Ray actor: every process of a cluster reads and writes the same rows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tandem.plane.cells import decode, encode
from tandem.plane.files import read_rows, write_rows
from tandem.plane.ray_processes import RayProcesses
from tandem.plane.row_server import RowServer
from tandem.plane.rows import check_columns
from tandem.plane.traffic import Traffic
from tandem.roles import WriteFiles
from tandem.types import Metrics

ACTOR = "rows"


class RayActorPlane:
    """Columns of ragged rows in an actor. A column travels as one numpy array; calls wait in threads, not in the loop.

    It can be sent to another process, which then uses the same rows.
    """

    def __init__(self, *, max_bytes: int | None, deadline_s: float) -> None:
        self._processes = RayProcesses(deadline_s)
        self._processes.start(ACTOR, RowServer, max_bytes)
        self._processes.wait_until_up()
        self._traffic = Traffic()

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Add columns to rows; see Rows."""
        check_columns(keys, columns)
        await asyncio.to_thread(self._put, list(keys), columns)
        self._traffic.put(columns)

    def _put(self, keys: list[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        cells = {name: encode(name, keys, tensors) for name, tensors in columns.items() if tensors}
        self._processes.call(ACTOR, "put", keys, cells)

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Rows in the order of `keys`."""
        columns = await asyncio.to_thread(self._get, list(keys), list(names))
        self._traffic.got(columns)
        return columns

    def _get(self, keys: list[int], names: list[str]) -> dict[str, list[torch.Tensor]]:
        columns = self._processes.call(ACTOR, "get", keys, names)
        return {name: decode(keys, column) for name, column in columns.items()}

    async def drop(self, keys: Sequence[int]) -> None:
        """Forget rows. Dropping what is not there is no error."""
        await asyncio.to_thread(self._processes.call, ACTOR, "drop", list(keys))

    async def snapshot(self, keys: Sequence[int]) -> WriteFiles:
        """These rows, all columns, as they are now."""
        return write_rows(await asyncio.to_thread(self._whole_rows, list(keys)))

    def _whole_rows(self, keys: list[int]) -> dict[int, dict[str, torch.Tensor]]:
        rows: dict[int, dict[str, torch.Tensor]] = {key: {} for key in keys}
        for name, (owners, column) in self._processes.call(ACTOR, "whole_rows", keys).items():
            for key, tensor in zip(owners, decode(owners, column), strict=True):
                rows[key][name] = tensor
        return rows

    async def load(self, directory: Path) -> None:
        """Take the rows of a saved file beside those that are here."""
        for name, (keys, tensors) in read_rows(directory).items():
            await asyncio.to_thread(self._put, keys, {name: tensors})

    def drain(self) -> Metrics:
        """The bytes that this process moved since the last drain."""
        return self._traffic.drain()

    async def close(self) -> None:
        """Nothing of it is left. Where it was sent to: nothing happens, the rows are not that process's to end."""
        await asyncio.to_thread(self._processes.close)
