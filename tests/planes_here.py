"""One plane of each kind and bound for the test session, for whoever needs it: starting processes takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tandem.roles import DataPlane
from tests.contracts.plane_kinds import Kind, Started


@pytest.fixture(scope="session")
def started(ray_here: None) -> Iterator[Started]:
    """Starts a plane, or gives the one that was started with the same bound; all are closed in the end."""
    planes: dict[tuple[str, int | None], DataPlane] = {}

    def start(kind: Kind, max_bytes: int | None) -> DataPlane:
        if (kind.name, max_bytes) not in planes:
            planes[kind.name, max_bytes] = kind.start(max_bytes)
        return planes[kind.name, max_bytes]

    yield start
    for plane in planes.values():
        asyncio.run(plane.close())
