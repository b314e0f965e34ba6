"""One Ray for the test session, for whoever needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A Ray of one CPU on loopback. Its memory monitor would judge the machine, not the test."""
    ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  (Ray's own spelling)
    from tandem.plane.ray_processes import start_ray

    start_ray()
    yield
    ray.shutdown()
