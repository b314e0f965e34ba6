"""Every DataPlane keeps this contract: values, errors, bounds. One plane of a kind serves all scenes.

A column's dtype lasts as long as its plane: `x`, `y` and `z` are float32 everywhere, other dtypes have their own names.
"""

from __future__ import annotations

import math

import pytest
import torch

from tandem.roles import DataPlane
from tests.contracts.plane_kinds import filled, lists, play, rows

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_rows_come_back_in_the_order_asked(plane: DataPlane):
    async def scene():
        await plane.put([7, 3, 5], {"x": rows(2, 4, 1)})
        assert lists((await plane.get([5, 7], ["x"]))["x"]) == [[0.0], [0.0, 1.0]]

    play(scene, plane)


def test_many_rows_come_back_in_any_order(plane: DataPlane):
    async def scene():
        keys = torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()
        await plane.put(keys, {"x": [filled(key, 1 + key % 7) for key in keys]})
        asked = sorted(keys, key=lambda key: (key % 11, key))
        got = (await plane.get(asked, ["x"]))["x"]
        assert lists(got) == [[float(key)] * (1 + key % 7) for key in asked]

    play(scene, plane)


def test_a_row_asked_for_twice_comes_twice(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(1, 2)})
        assert lists((await plane.get([2, 1, 2], ["x"]))["x"]) == [[0.0, 1.0], [0.0], [0.0, 1.0]]

    play(scene, plane)


def test_asking_for_nothing_gives_nothing(plane: DataPlane):
    async def scene():
        await plane.put([], {"x": []})
        await plane.put([1], {})
        assert await plane.get([], ["x"]) == {"x": []}
        await plane.put([2], {"x": rows(1)})
        assert await plane.get([2], []) == {}

    play(scene, plane)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_shape_survive(plane: DataPlane, dtype: torch.dtype):
    async def scene():
        tensors = [torch.ones(shape, dtype=dtype) for shape in [(), (3,), (0,), (2, 3), (1, 0, 2)]]
        await plane.put(range(5), {f"x_{dtype}": tensors})
        got = (await plane.get(range(5), [f"x_{dtype}"]))[f"x_{dtype}"]
        assert [(t.dtype, t.shape) for t in got] == [(dtype, t.shape) for t in tensors]
        assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))

    play(scene, plane)


def test_bfloat16_keeps_every_bit(plane: DataPlane):
    async def scene():
        bits = torch.tensor([0, 1, -1, 0x7F80, -128, 0x7FC1, 0x3F81, 0x0001], dtype=torch.int16)
        await plane.put([1, 2], {"brain": [bits.view(torch.bfloat16), bits[:3].view(torch.bfloat16)]})
        got = (await plane.get([2, 1], ["brain"]))["brain"]
        assert [t.view(torch.int16).tolist() for t in got] == [bits[:3].tolist(), bits.tolist()]

    play(scene, plane)


def test_extremes_survive(plane: DataPlane):
    async def scene():
        info = torch.iinfo(torch.int64)
        await plane.put(
            [1], {"x": [torch.tensor([math.nan, math.inf, -0.0])], "ids": [torch.tensor([info.min, info.max])]}
        )
        got = await plane.get([1], ["x", "ids"])
        assert got["ids"][0].tolist() == [info.min, info.max]
        assert str(got["x"][0].tolist()) == "[nan, inf, -0.0]"

    play(scene, plane)


def test_a_column_of_numbers_stays_without_dimensions(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": [torch.tensor(0.5), torch.tensor(2.0)], "done": [torch.tensor(True)] * 2})
        got = await plane.get([2, 1], ["x", "done"])
        assert torch.stack(got["x"]).tolist() == [2.0, 0.5]
        assert torch.stack(got["done"]).tolist() == [True, True]

    play(scene, plane)


def test_a_dense_column_comes_back_whole(plane: DataPlane):
    async def scene():
        x_NT = torch.arange(12.0).view(3, 4)
        await plane.put([1, 2, 3], {"x": list(x_NT)})
        assert torch.equal(torch.stack((await plane.get([1, 2, 3], ["x"]))["x"]), x_NT)

    play(scene, plane)


def test_views_and_gradients_are_stored_by_value(plane: DataPlane):
    async def scene():
        x_NT = torch.arange(6.0).view(2, 3)
        await plane.put([1, 2, 3], {"x": [*x_NT.t()[:2], (x_NT[0, ::2] * 1.0)]})
        assert lists((await plane.get([1, 2, 3], ["x"]))["x"]) == [[0.0, 3.0], [1.0, 4.0], [0.0, 2.0]]

    play(scene, plane)


def test_columns_may_be_added_later(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(2, 3)})
        await plane.put([2, 1], {"y": rows(1, 2)})
        got = await plane.get([1, 2], ["x", "y"])
        assert [t.numel() for t in got["x"]] == [2, 3]
        assert [t.numel() for t in got["y"]] == [2, 1]

    play(scene, plane)


def test_only_the_columns_asked_for_come(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(2), "y": rows(1)})
        assert set(await plane.get([1], ["y"])) == {"y"}

    play(scene, plane)


def test_a_column_may_be_replaced_by_one_of_another_length(plane: DataPlane):
    async def scene():
        await plane.put([1, 2], {"x": rows(2, 3), "y": rows(1, 1)})
        await plane.put([2], {"x": [filled(9, 5)]})
        got = await plane.get([1, 2], ["x", "y"])
        assert lists(got["x"]) == [[0.0, 1.0], [9.0] * 5]
        assert lists(got["y"]) == [[0.0], [0.0]]

    play(scene, plane)


def test_a_name_may_hold_any_sign(plane: DataPlane):
    async def scene():
        await plane.put([1], {"reward/exact match (å)": [torch.tensor(1.0)]})
        assert (await plane.get([1], ["reward/exact match (å)"]))["reward/exact match (å)"][0] == 1.0

    play(scene, plane)


def test_a_missing_row_is_a_key_error_that_names_it(plane: DataPlane):
    async def scene():
        with pytest.raises(KeyError, match="no row 9"):
            await plane.get([9], ["x"])
        await plane.put([1, 3], {"x": rows(1, 2)})
        with pytest.raises(KeyError, match="no row 9"):
            await plane.get([1, 9, 3], ["x"])

    play(scene, plane)


def test_a_missing_column_is_a_key_error_that_names_it(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(1)})
        with pytest.raises(KeyError, match="row 1 has no column 'never_put'"):
            await plane.get([1], ["x", "never_put"])

    play(scene, plane)


def test_a_column_that_only_some_rows_have_is_a_key_error_for_the_others(plane: DataPlane):
    async def scene():
        await plane.put([1, 2, 3], {"x": rows(1, 2, 3)})
        await plane.put([1, 3], {"z": rows(1, 2)})
        assert [t.numel() for t in (await plane.get([3, 1], ["z"]))["z"]] == [2, 1]
        with pytest.raises(KeyError, match="row 2 has no column 'z'"):
            await plane.get([1, 2, 3], ["z"])

    play(scene, plane)


def test_a_wrong_number_of_rows_is_refused_and_writes_nothing(plane: DataPlane):
    async def scene():
        with pytest.raises(ValueError, match="2 rows for 1 keys"):
            await plane.put([1], {"x": rows(1), "y": rows(1, 2)})
        with pytest.raises(KeyError, match="no row 1"):
            await plane.get([1], ["x"])

    play(scene, plane)


def test_a_key_twice_is_refused_and_writes_nothing(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(3)})
        with pytest.raises(ValueError, match="distinct"):
            await plane.put([1, 1], {"x": rows(1, 2)})
        assert (await plane.get([1], ["x"]))["x"][0].numel() == 3

    play(scene, plane)


def test_another_dtype_is_refused_and_writes_nothing(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(2)})
        with pytest.raises(TypeError, match=r"column 'x' holds torch.float32, got torch.int64"):
            await plane.put([1, 2], {"y": rows(1, 1), "x": rows(1, 1, dtype=torch.int64)})
        got = await plane.get([1], ["x"])
        assert (got["x"][0].dtype, got["x"][0].numel()) == (torch.float32, 2)
        with pytest.raises(KeyError, match="no row 2"):
            await plane.get([2], ["y"])
        with pytest.raises(KeyError, match="no column 'y'"):
            await plane.get([1], ["y"])

    play(scene, plane)


def test_two_dtypes_in_one_put_are_refused(plane: DataPlane):
    async def scene():
        with pytest.raises(TypeError, match=r"column 'mixed' holds torch.float32, got torch.bfloat16"):
            await plane.put([1, 2], {"mixed": [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]})
        with pytest.raises(KeyError, match="no row 1"):
            await plane.get([1], ["mixed"])

    play(scene, plane)


def test_a_dtype_outlives_the_rows(plane: DataPlane):
    async def scene():
        await plane.put([1], {"x": rows(2)})
        await plane.drop([1])
        with pytest.raises(TypeError, match="one dtype for as long as the plane lives"):
            await plane.put([1], {"x": rows(2, dtype=torch.float64)})

    play(scene, plane)
