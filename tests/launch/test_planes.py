"""The plane that a recipe names is the plane that is built."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from tandem.config.data_plane import MemoryDataPlane, RayActorDataPlane
from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.launch.planes import build_plane


def test_the_bound_of_the_recipe_is_the_bound_of_the_plane():
    plane = build_plane(MemoryDataPlane(max_bytes=100))
    with pytest.raises(RuntimeError, match=r"data_plane.max_bytes=100"):
        asyncio.run(plane.put([1], {"x": [torch.ones(26)]}))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed here")
def test_a_plane_whose_package_is_missing_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="uv sync --extra ray"):
        build_plane(RayActorDataPlane(name="ray_actor"))


@pytest.mark.parametrize("name", ["memory", "ray_actor", "transfer_queue"])
def test_every_plane_can_be_chosen_on_the_command_line(name: str):
    chosen = load("quickstart", [f"data_plane.name={name}", "data_plane.max_bytes=1000"]).config.data_plane
    assert (chosen.name, chosen.max_bytes) == (name, 1000)


def test_a_knob_of_another_plane_is_refused():
    with pytest.raises(ConfigError, match="num_storage_units"):
        load("quickstart", ["data_plane.name=ray_actor", "data_plane.num_storage_units=3"])
