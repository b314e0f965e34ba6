"""The contract of the DataPlane role, run on every implementation."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.plane.memory import MemoryPlane
from tandem.roles import DataPlane


@pytest.fixture(params=[MemoryPlane])
def plane(request: pytest.FixtureRequest) -> DataPlane:
    return request.param()


def rows(*lengths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.arange(n).to(dtype) for n in lengths]


def test_rows_come_back_in_the_order_asked(plane: DataPlane):
    async def scene():
        await plane.put([7, 3, 5], {"x": rows(2, 4, 1)})
        got = await plane.get([5, 7], ["x"])
        assert [t.tolist() for t in got["x"]] == [[0.0], [0.0, 1.0]]

    asyncio.run(scene())


def test_columns_may_be_added_later(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(2, 3)})
        await plane.put([2, 1], {"y": rows(1, 2)})
        got = await plane.get([1, 2], ["x", "y"])
        assert [t.numel() for t in got["y"]] == [2, 1]

    asyncio.run(scene())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_dtype_and_shape_survive(plane: DataPlane, dtype: torch.dtype):
    async def scene():
        scalar, vector, empty = torch.ones((), dtype=dtype), torch.ones(3, dtype=dtype), torch.ones(0, dtype=dtype)
        await plane.put([1, 2, 3], {"x": [scalar, vector, empty]})
        got = (await plane.get([1, 2, 3], ["x"]))["x"]
        assert [(t.dtype, t.shape) for t in got] == [(dtype, t.shape) for t in (scalar, vector, empty)]

    asyncio.run(scene())


def test_a_missing_row_is_a_key_error_that_names_it(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(1)})
        with pytest.raises(KeyError, match="row 9"):
            await plane.get([1, 9], ["x"])

    asyncio.run(scene())


def test_a_missing_column_is_a_key_error_that_names_it(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(1)})
        with pytest.raises(KeyError, match="'values'"):
            await plane.get([1], ["values"])

    asyncio.run(scene())


def test_a_wrong_number_of_rows_is_refused_and_writes_nothing(plane: DataPlane):
    async def scene():
        with pytest.raises(ValueError, match="2 rows for 1 keys"):
            await plane.put([1], {"ok": rows(1), "x": rows(1, 2)})
        with pytest.raises(KeyError):
            await plane.get([1], ["ok"])

    asyncio.run(scene())


def test_a_key_twice_is_refused(plane: DataPlane):
    async def scene():
        with pytest.raises(ValueError, match="distinct"):
            await plane.put([1, 1], {"x": rows(1, 2)})

    asyncio.run(scene())


def test_drop_forgets_rows_and_may_be_repeated(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(1, 2)})
        await plane.drop([1])
        await plane.drop([1, 77])
        with pytest.raises(KeyError):
            await plane.get([1], ["x"])
        assert (await plane.get([2], ["x"]))["x"][0].numel() == 2

    asyncio.run(scene())


def test_saved_rows_load_into_another_plane(plane: DataPlane, tmp_path: Path):
    async def scene():
        await plane.put([1, 2], {"x": rows(1, 2), "reward": [torch.tensor(0.5), torch.tensor(1.0)]})
        (await plane.snapshot([2]))(tmp_path)
        other = type(plane)()
        await other.load(tmp_path)
        got = await other.get([2], ["x", "reward"])
        assert got["x"][0].tolist() == [0.0, 1.0]
        assert got["reward"][0].item() == 1.0
        with pytest.raises(KeyError):
            await other.get([1], ["x"])

    asyncio.run(scene())


def test_saving_nothing_loads_as_nothing(plane: DataPlane, tmp_path: Path):
    async def scene():
        (await plane.snapshot([]))(tmp_path)
        await type(plane)().load(tmp_path)

    asyncio.run(scene())
