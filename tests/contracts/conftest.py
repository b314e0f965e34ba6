"""One plane of each kind for the whole session: starting processes takes seconds."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

import pytest

from tandem.roles import DataPlane
from tests.contracts.plane_kinds import KINDS, Kind

SMALL_BYTES = 4096


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[Kind, int | None], DataPlane]]:
    """Starts a plane, or gives the one that was started with the same bound; all are closed in the end."""
    planes: dict[tuple[str, int | None], DataPlane] = {}

    def start(kind: Kind, max_bytes: int | None) -> DataPlane:
        if importlib.util.find_spec(kind.package) is None:
            pytest.skip(f"the {kind.name} plane needs the package {kind.package}, which is not installed here")
        if kind.name != "memory":
            request.getfixturevalue("ray_here")
        if (kind.name, max_bytes) not in planes:
            planes[kind.name, max_bytes] = kind.start(max_bytes)
        return planes[kind.name, max_bytes]

    yield start
    for plane in planes.values():
        asyncio.run(plane.close())


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def plane(request: pytest.FixtureRequest, started: Callable[[Kind, int | None], DataPlane]) -> DataPlane:
    return started(request.param, None)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def small_plane(request: pytest.FixtureRequest, started: Callable[[Kind, int | None], DataPlane]) -> DataPlane:
    """Holds 4 KiB."""
    return started(request.param, SMALL_BYTES)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def other_plane(request: pytest.FixtureRequest, started: Callable[[Kind, int | None], DataPlane]) -> DataPlane:
    """A second plane, of the same or another kind than `plane`."""
    return started(request.param, SMALL_BYTES)
