"""What a plane in an actor adds to the contract: faults end as errors, other processes share it, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")

from tandem.plane.ray_actor import ACTOR, RayActorPlane  # noqa: E402
from tests.plane.processes import ends, pid_of  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(120)]


@pytest.fixture
def plane(ray_here: None) -> Iterator[RayActorPlane]:
    plane = RayActorPlane(max_bytes=None, deadline_s=2.0)
    asyncio.run(plane.put([1, 2], {"x": [torch.arange(3.0), torch.arange(4.0)]}))
    yield plane
    asyncio.run(plane.close())


@pytest.mark.parametrize("call", ["put", "get", "drop", "snapshot"])
def test_a_killed_actor_is_a_runtime_error_within_seconds(plane: RayActorPlane, call: str):
    os.kill(pid_of(plane._processes, ACTOR), signal.SIGKILL)
    calls = {
        "put": lambda: plane.put([1], {"x": [torch.ones(2)]}),
        "get": lambda: plane.get([1], ["x"]),
        "drop": lambda: plane.drop([1]),
        "snapshot": lambda: plane.snapshot([1]),
    }
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="process 'rows'"):
        asyncio.run(calls[call]())
    assert time.monotonic() - begin < 10


def test_an_actor_killed_during_a_call_is_a_runtime_error(plane: RayActorPlane):
    async def scene() -> None:
        pid = pid_of(plane._processes, ACTOR)
        os.kill(pid, signal.SIGSTOP)  # the call is under way and will not be answered
        reading = asyncio.ensure_future(plane.get([1], ["x"]))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="process 'rows'"):
            await asyncio.wait_for(reading, timeout=10)

    asyncio.run(scene())


def test_an_actor_that_does_not_answer_is_a_runtime_error_at_the_deadline(plane: RayActorPlane):
    pid = pid_of(plane._processes, ACTOR)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"'rows' gave no answer to get within data_plane.deadline_s=2"):
            asyncio.run(plane.get([1], ["x"]))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 1.5 < time.monotonic() - begin < 8


def test_a_waiting_call_does_not_hold_up_the_loop(plane: RayActorPlane):
    async def scene() -> int:
        reading = asyncio.ensure_future(plane.get([1], ["x"]))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(scene()) > 1


def test_another_process_shares_the_rows_and_cannot_end_them(plane: RayActorPlane):
    @ray.remote(num_cpus=0)
    def elsewhere(plane: RayActorPlane) -> int:
        async def scene() -> int:
            (x,) = (await plane.get([2], ["x"]))["x"]
            await plane.put([2], {"y": [x * 2]})
            await plane.close()
            return os.getpid()

        return asyncio.run(scene())

    assert ray.get(elsewhere.remote(plane), timeout=60) != os.getpid()
    assert asyncio.run(plane.get([2], ["y"]))["y"][0].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_nothing_is_left_after_close():
    plane = RayActorPlane(max_bytes=None, deadline_s=10.0)
    namespace, pid = plane._processes.namespace, pid_of(plane._processes, ACTOR)
    assert {"name": ACTOR, "namespace": namespace} in ray.util.list_named_actors(all_namespaces=True)
    asyncio.run(plane.close())
    asyncio.run(plane.close())
    assert namespace not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert ends(pid)
