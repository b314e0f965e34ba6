"""The plane that a recipe names is the plane that is built."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from tandem.config.data_plane import DataPlane, MemoryDataPlane, RayActorDataPlane, TransferQueueDataPlane
from tandem.config.errors import ConfigError
from tandem.config.load import load
from tandem.launch.planes import build_plane


def test_the_bound_of_the_recipe_is_the_bound_of_the_plane():
    plane = build_plane(MemoryDataPlane(max_bytes=100))
    with pytest.raises(RuntimeError, match=r"data_plane.max_bytes=100"):
        asyncio.run(plane.put([1], {"x": [torch.ones(26)]}))


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        (RayActorDataPlane(name="ray_actor"), "ray", "ray"),
        (TransferQueueDataPlane(name="transfer_queue"), "transfer_queue", "transferqueue"),
    ],
)
def test_a_plane_whose_package_is_missing_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, settings: DataPlane, package: str, extra: str
):
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("ray_processes", "ray_actor", "transfer_queue"):
        monkeypatch.delitem(sys.modules, f"tandem.plane.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # Python's own way to say that it cannot be imported
    with pytest.raises(ValueError, match=f"uv sync --extra {extra}"):
        build_plane(settings)


@pytest.mark.parametrize("name", ["memory", "ray_actor", "transfer_queue"])
def test_every_plane_can_be_chosen_on_the_command_line(name: str):
    chosen = load("quickstart", [f"data_plane.name={name}", "data_plane.max_bytes=1000"]).config.data_plane
    assert (chosen.name, chosen.max_bytes) == (name, 1000)


def test_a_knob_of_another_plane_is_refused():
    with pytest.raises(ConfigError, match="num_storage_units"):
        load("quickstart", ["data_plane.name=ray_actor", "data_plane.num_storage_units=3"])
