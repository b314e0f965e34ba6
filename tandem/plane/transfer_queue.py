"""A data plane in TransferQueue: rows spread over storage units, found through its controller. Its only home.

What 0.1.11 does not do is done here: it leaves out unknown rows and columns in silence, gives the place of a cleared
row to another one, mixes dtypes, waits for ever for a dead process, and shares one queue between a cluster's jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

try:
    from tensordict import TensorDict  # type: ignore  # an extra: not every checkout has it
    from transfer_queue.client import AsyncTransferQueueClient  # type: ignore  # as above
    from transfer_queue.controller import TransferQueueController  # type: ignore  # as above
    from transfer_queue.metadata import BatchMeta  # type: ignore  # as above
    from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError  # type: ignore  # as above
except ImportError as error:
    raise ValueError(
        "data_plane.name=transfer_queue needs the package TransferQueue: `uv sync --extra transferqueue --extra ray`, "
        "or set data_plane.name=ray_actor"
    ) from error

from tandem.plane.cells import decode_cell, encode
from tandem.plane.files import read_rows, write_rows
from tandem.plane.loop_thread import LoopThread
from tandem.plane.ray_processes import RayProcesses
from tandem.plane.row_server import Column
from tandem.plane.rows import check_columns, check_dtype, check_room, missing_column, missing_row
from tandem.plane.traffic import Traffic
from tandem.roles import WriteFiles
from tandem.types import Metrics

CONTROLLER = "controller"
ROWS, DTYPES = "rows", "dtypes"  # partitions: the rows, and one key "dtype name" a column, the first of which counts
Result = TypeVar("Result")


class TransferQueuePlane:
    """Columns of ragged rows in TransferQueue's storage units.

    Its controller and units are this plane's own. A cell carries its row's key, which every read compares. `max_bytes`
    is counted by each process from what it put and dropped itself, and read from the controller before it refuses.
    It can be sent to another process, which then uses the same rows; rows are dropped by one process only.
    """

    def __init__(self, *, max_bytes: int | None, deadline_s: float, num_storage_units: int) -> None:
        self._max_bytes = max_bytes
        self._processes = RayProcesses(deadline_s)
        self._processes.start(CONTROLLER, TransferQueueController)
        self._units = [f"storage unit {number}" for number in range(num_storage_units)]
        for unit in self._units:
            self._processes.start(unit, SimpleStorageUnit, {"num_data_storage_units": num_storage_units})
        self._processes.wait_until_up()
        self._connect()

    def _connect(self) -> None:
        address = {name: self._processes.call(name, "get_zmq_server_info") for name in [CONTROLLER, *self._units]}
        controller = address.pop(CONTROLLER)
        self._client = AsyncTransferQueueClient(f"tandem-{uuid4().hex[:8]}", controller, zmq_io_threads=2)
        self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": address})
        self._thread = LoopThread("transfer-queue")
        self._changes = asyncio.Lock()  # a key's place is neither given nor taken while the other goes on
        self._dtypes: dict[str, str] = {}
        self._traffic = Traffic()
        self._held = 0  # bytes, as far as this process knows

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in ("_max_bytes", "_processes", "_units")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__ |= state
        self._connect()

    async def put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Add columns to rows; see Rows. The whole put travels as one message to each unit."""
        check_columns(keys, columns)
        if keys and columns:
            await self._run(self._put(keys, columns), "put")
            self._traffic.put(columns)

    async def get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Rows in the order of `keys`."""
        if not keys or not names:
            return {name: [] for name in names}
        columns = await self._run(self._get(keys, names), "get")
        self._traffic.got(columns)
        return columns

    async def drop(self, keys: Sequence[int]) -> None:
        """Forget rows. Dropping what is not there is no error."""
        if keys:
            await self._run(self._drop(list(dict.fromkeys(keys))), "drop")

    async def snapshot(self, keys: Sequence[int]) -> WriteFiles:
        """These rows, all columns, as they are now."""
        return write_rows(await self._run(self._whole_rows(keys), "snapshot") if keys else {})

    async def load(self, directory: Path) -> None:
        """Take the rows of a saved file beside those that are here."""
        for name, (keys, tensors) in read_rows(directory).items():
            await self._run(self._put(keys, {name: tensors}), "load")

    def drain(self) -> Metrics:
        """The bytes that this process moved since the last drain."""
        return self._traffic.drain()

    async def close(self) -> None:
        """Nothing of it is left. Where it was sent to: only this process's connections end."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.close()
        self._client.close()
        self._processes.close()

    async def _run(self, work: Coroutine[Any, Any, Result], what: str) -> Result:
        processes = self._processes
        return await self._thread.run(self._whole(work), what, deadline_s=processes.deadline_s, check=processes.check)

    async def _whole(self, work: Coroutine[Any, Any, Result]) -> Result:
        """A queue that lost a process answers nothing more: parts of its rows are gone."""
        try:
            self._processes.demand_whole()
        except RuntimeError:
            work.close()
            raise
        return await work

    async def _put(self, keys: Sequence[int], columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        cells = {name: encode(name, keys, tensors) for name, tensors in columns.items()}
        await self._check_dtypes({name: column.dtype for name, column in cells.items()})
        async with self._changes:
            await self._check_room(keys, cells)
            meta = await self._meta(keys, create=True)
            before = meta.get_all_custom_meta()
            sizes = [{name: column.sizes[at] for name, column in cells.items()} for at in range(len(keys))]
            after = [old | new for old, new in zip(before, sizes, strict=True)]
            self._held += total(after) - total(before)
            meta.update_custom_meta(after)
            await self._client.async_set_custom_meta(meta)
        fields = {name: nested(column) for name, column in cells.items()}
        # The manager itself: the client around it would set the number of torch threads of this process.
        await self._client.storage_manager.put_data(TensorDict(fields, batch_size=[len(keys)]), meta)

    async def _get(self, keys: Sequence[int], names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        meta = await self._meta(keys)
        if meta.size < len(keys):
            raise await self._missing_row(keys)
        if absent := [name for name in names if name not in meta.field_names]:
            raise await self._missing_column(keys, meta, absent[0])
        wanted = BatchMeta(meta.global_indexes, meta.partition_ids, {name: {} for name in names})
        try:
            data = await self._client.storage_manager.get_data(wanted)
        except StorageKeyNotFoundError as error:
            raise KeyError(
                f"the plane has no more all of the rows {list(keys)}: some were dropped during a read"
            ) from error
        return {
            name: [decode_cell(key, cell.numpy()) for key, cell in zip(keys, data[name].unbind(), strict=True)]
            for name in names
        }

    async def _drop(self, keys: Sequence[int]) -> None:
        async with self._changes:
            meta = await self._meta(keys)
            if meta.size:
                self._held -= total(meta.custom_meta)
                await self._client.async_clear_samples(meta)

    async def _whole_rows(self, keys: Sequence[int]) -> dict[int, dict[str, torch.Tensor]]:
        meta = await self._meta(keys)
        if meta.size < len(keys):
            raise await self._missing_row(keys)
        rows: dict[int, dict[str, torch.Tensor]] = {key: {} for key in keys}
        for name in await self._column_names():
            have = await self._places_with(name)
            owners = [key for key, place in zip(keys, meta.global_indexes, strict=True) if place in have]
            if owners:
                for key, tensor in zip(owners, (await self._get(owners, [name]))[name], strict=True):
                    rows[key][name] = tensor
        return rows

    async def _meta(self, keys: Sequence[int], *, create: bool = False) -> BatchMeta:
        """Where these rows are. The controller leaves out those that it does not know."""
        return await self._client.async_kv_retrieve_meta([str(key) for key in keys], ROWS, create=create)

    async def _sizes(self) -> dict[str, dict[str, int]]:
        """Of every row there is: the bytes of its columns."""
        return (await self._client.async_kv_list(ROWS)).get(ROWS, {})

    async def _check_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """The controller keeps keys in the order in which they came: the first dtype of a column is the column's."""
        for name, dtype in dtypes.items():
            check_dtype(name, self._dtypes.get(name, dtype), dtype)
        if new := [f"{dtype} {name}" for name, dtype in dtypes.items() if name not in self._dtypes]:
            await self._client.async_kv_retrieve_meta(new, DTYPES, create=True)
            await self._column_names()
            for name, dtype in dtypes.items():
                check_dtype(name, self._dtypes[name], dtype)

    async def _column_names(self) -> list[str]:
        """The columns that any process has put; their dtypes are known from here on."""
        for entry in (await self._client.async_kv_list(DTYPES)).get(DTYPES, {}):
            dtype, name = entry.split(" ", 1)
            self._dtypes.setdefault(name, dtype)
        return list(self._dtypes)

    async def _check_room(self, keys: Sequence[int], cells: Mapping[str, Column]) -> None:
        added = sum(sum(column.sizes) for column in cells.values())
        if self._max_bytes is None or self._held + added <= self._max_bytes:
            return
        sizes = await self._sizes()
        self._held = total(sizes.values())
        replaced = sum(sizes.get(str(key), {}).get(name, 0) for key in keys for name in cells)
        check_room(self._held, self._held + added - replaced, self._max_bytes, rows=len(sizes))

    async def _places_with(self, name: str) -> set[int]:
        """The places whose rows have this column."""
        places, status = await self._client.async_get_production_status([name], ROWS)
        if places is None or status is None:
            return set()
        return {place for place, there in zip(places.tolist(), status.flatten().tolist(), strict=True) if there}

    async def _missing_row(self, keys: Sequence[int]) -> KeyError:
        there = await self._sizes()
        return missing_row(next((key for key in keys if str(key) not in there), keys[0]), len(there))

    async def _missing_column(self, keys: Sequence[int], meta: BatchMeta, name: str) -> KeyError:
        have = await self._places_with(name)
        lacking = [at for at, place in enumerate(meta.global_indexes) if place not in have]
        at = lacking[0] if lacking else 0
        return missing_column(keys[at], name, meta.custom_meta[at])


def nested(column: Column) -> torch.Tensor:
    """A column's cells as TransferQueue takes ragged rows, without a copy."""
    offsets = torch.tensor([0, *column.sizes]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(column.flat), offsets)


def total(rows: Iterable[Mapping[str, int]]) -> int:
    """The bytes of these rows."""
    return sum(sum(row.values()) for row in rows)
