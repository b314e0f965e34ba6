"""One plane of each kind for the whole session: starting processes takes seconds."""

from __future__ import annotations

import importlib.util

import pytest

from tandem.roles import DataPlane
from tests.contracts.plane_kinds import KINDS, Kind

SMALL_BYTES = 4096


def plane_of(request: pytest.FixtureRequest, max_bytes: int | None) -> DataPlane:
    """A plane of the kind that is asked for. Only those of several processes need Ray, and are shared."""
    kind: Kind = request.param
    if kind.package is None:
        return kind.start(max_bytes)
    if importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"the {kind.name} plane needs the package {kind.package}, which is not installed here")
    return request.getfixturevalue("started")(kind, max_bytes)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def plane(request: pytest.FixtureRequest) -> DataPlane:
    return plane_of(request, None)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def small_plane(request: pytest.FixtureRequest) -> DataPlane:
    """Holds 4 KiB."""
    return plane_of(request, SMALL_BYTES)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def other_plane(request: pytest.FixtureRequest) -> DataPlane:
    """A second plane, of the same or another kind than `plane`."""
    return plane_of(request, SMALL_BYTES)
