"""Every DataPlane keeps this contract: what drops, writers side by side, bounds and snapshots leave behind.

A column's dtype lasts as long as its plane: `x`, `y` and `z` are float32 everywhere, other dtypes have their own names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tandem.roles import DataPlane
from tests.contracts.plane_kinds import filled, lists, play, rows


def test_drop_forgets_rows_and_may_be_repeated(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(1, 2)})
        await plane.drop([1])
        await plane.drop([1, 77])
        await plane.drop([])
        with pytest.raises(KeyError, match="no row 1"):
            await plane.get([1], ["x"])
        assert (await plane.get([2], ["x"]))["x"][0].numel() == 2

    play(scene, plane)


def test_a_late_read_never_gives_the_data_of_another_sample(plane: DataPlane):
    async def scene():
        await plane.put(range(8), {"x": [filled(key, 3) for key in range(8)]})
        await plane.drop(range(8))
        await plane.put(range(100, 108), {"x": [filled(key, 3) for key in range(100, 108)]})
        with pytest.raises(KeyError, match="no row 3"):
            await plane.get([3], ["x"])
        assert (await plane.get([103], ["x"]))["x"][0].tolist() == [103.0] * 3

    play(scene, plane)


def test_a_row_put_again_after_drop_has_only_what_is_new(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(2, 2), "y": rows(3, 3)})
        await plane.drop([1, 2])
        await plane.put([2, 1], {"x": [filled(2, 1), filled(1, 1)]})
        assert lists((await plane.get([1, 2], ["x"]))["x"]) == [[1.0], [2.0]]
        with pytest.raises(KeyError, match="no column 'y'"):
            await plane.get([1], ["y"])

    play(scene, plane)


def test_reads_beside_drops_and_puts_give_the_right_sample_or_a_key_error(plane: DataPlane):
    async def read(keys: range) -> int:
        try:
            got = (await plane.get(keys, ["x"]))["x"]
        except KeyError:
            return 0
        assert lists(got) == [[float(key)] * 4 for key in keys]
        return 1

    async def turn(number: int) -> None:
        keys = range(8 * number, 8 * number + 8)
        await plane.put(keys, {"x": [filled(key, 4) for key in keys]})
        assert await read(keys)
        await asyncio.gather(read(keys), plane.drop(keys), read(keys))
        assert not await read(keys)

    async def scene():
        await asyncio.gather(*(turn(number) for number in range(12)))

    play(scene, plane)


def test_writers_of_different_rows_do_not_meet(plane: DataPlane):
    async def write(number: int) -> None:
        keys = range(8 * number, 8 * number + 8)
        await plane.put(keys, {"x": [filled(key, 2) for key in keys], "y": [filled(-key, 1) for key in keys]})

    async def scene():
        await asyncio.gather(*(write(number) for number in range(16)))
        got = await plane.get(range(128), ["x", "y"])
        assert lists(got["x"]) == [[float(key)] * 2 for key in range(128)]
        assert lists(got["y"]) == [[float(-key)] for key in range(128)]

    play(scene, plane)


def test_writers_of_different_columns_of_the_same_rows_do_not_meet(plane: DataPlane):
    async def scene():
        keys = range(16)
        columns = {name: [filled(key + shift, 2) for key in keys] for shift, name in enumerate("xyz")}
        await asyncio.gather(*(plane.put(keys, {name: tensors}) for name, tensors in columns.items()))
        got = await plane.get(keys, ["x", "y", "z"])
        assert {name: lists(tensors) for name, tensors in got.items()} == {n: lists(t) for n, t in columns.items()}

    play(scene, plane)


def test_a_full_plane_refuses_by_name_and_writes_nothing(small_plane: DataPlane):
    async def scene():
        await small_plane.put([1, 2], {"x": [filled(1, 400), filled(2, 400)]})
        with pytest.raises(RuntimeError, match=r"data_plane.max_bytes=4096"):
            await small_plane.put([3], {"x": [filled(3, 400)]})
        with pytest.raises(KeyError, match="no row 3"):
            await small_plane.get([3], ["x"])
        await small_plane.drop([1])
        await small_plane.put([3], {"x": [filled(3, 400)]})
        assert (await small_plane.get([3], ["x"]))["x"][0].sum() == 1200

    play(scene, small_plane)


def test_a_replaced_column_counts_once(small_plane: DataPlane):
    async def scene():
        for value in range(5):
            await small_plane.put([1], {"x": [filled(value, 600)]})
        await small_plane.put([2], {"x": [filled(2, 200)]})
        assert (await small_plane.get([1], ["x"]))["x"][0][0] == 4.0

    play(scene, small_plane)


def test_planes_do_not_see_each_other(plane: DataPlane, other_plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(1)})
        with pytest.raises(KeyError, match="no row 1"):
            await other_plane.get([1], ["x"])
        await other_plane.put([1], {"x": rows(2)})
        await other_plane.drop([1])
        assert (await plane.get([1], ["x"]))["x"][0].numel() == 1

    play(scene, plane, other_plane)


def test_saved_rows_load_into_any_plane(plane: DataPlane, other_plane: DataPlane, tmp_path: Path):
    async def scene():
        brain = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
        await plane.put(
            [1, 2, 3], {"x": rows(1, 2, 0), "reward": [torch.tensor(0.5), torch.tensor(1.0), torch.tensor(2.0)]}
        )
        await plane.put([2], {"brain": [brain]})
        (await plane.snapshot([3, 2]))(tmp_path)
        await other_plane.put([4], {"x": rows(3)})
        await other_plane.load(tmp_path)
        got = await other_plane.get([2, 3, 4], ["x"])
        assert lists(got["x"]) == [[0.0, 1.0], [], [0.0, 1.0, 2.0]]
        assert lists((await other_plane.get([2, 3], ["reward"]))["reward"]) == [1.0, 2.0]
        assert torch.equal((await other_plane.get([2], ["brain"]))["brain"][0], brain)
        with pytest.raises(KeyError, match="no row 1"):
            await other_plane.get([1], ["x"])

    play(scene, plane, other_plane)


def test_a_snapshot_is_of_its_moment(plane: DataPlane, tmp_path: Path):
    async def scene():
        await plane.put([1], {"x": [filled(1, 2)]})
        write = await plane.snapshot([1])
        await plane.put([1], {"x": [filled(5, 3)], "y": rows(1)})
        await plane.drop([1])
        write(tmp_path)
        await plane.load(tmp_path)
        assert (await plane.get([1], ["x"]))["x"][0].tolist() == [1.0, 1.0]
        with pytest.raises(KeyError, match="no column 'y'"):
            await plane.get([1], ["y"])

    play(scene, plane)


def test_saving_a_missing_row_is_a_key_error(plane: DataPlane):
    async def scene():
        with pytest.raises(KeyError, match="no row 5"):
            await plane.snapshot([5])

    play(scene, plane)


def test_saving_nothing_loads_as_nothing(plane: DataPlane, tmp_path: Path):
    async def scene():
        (await plane.snapshot([]))(tmp_path)
        await plane.load(tmp_path)

    play(scene, plane)


def test_the_bytes_moved_are_counted_until_they_are_drained(plane: DataPlane, tmp_path: Path):
    async def scene():
        plane.drain()
        await plane.put([1, 2], {"x": rows(2, 3), "y": [torch.tensor(0.5), torch.tensor(1.0)]})
        await plane.get([2], ["x"])
        await plane.get([2, 1, 2], ["y"])
        (await plane.snapshot([1]))(tmp_path)
        await plane.load(tmp_path)
        moved = plane.drain()
        assert {name: metric.value for name, metric in moved.items()} == {"plane/bytes_put": 28, "plane/bytes_get": 24}
        assert {metric.value for metric in plane.drain().values()} == {0}

    play(scene, plane)
