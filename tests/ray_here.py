"""One Ray for the test session, for whoever needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """A Ray on loopback, with as many CPUs as any test wants."""
    ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
    from tandem.plane.ray_processes import start_ray

    start_ray(num_cpus=8, num_gpus=0)
    yield
    ray.shutdown()
