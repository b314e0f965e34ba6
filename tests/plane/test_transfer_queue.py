"""What a plane in TransferQueue adds to the contract: faults end as errors, jobs do not meet, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (extra `transferqueue`)")

from tandem.plane.transfer_queue import CONTROLLER, TransferQueuePlane  # noqa: E402
from tests.plane.processes import ends, pid_of  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]
DEADLINE_S = 4.0


def start(num_storage_units: int) -> TransferQueuePlane:
    """A plane with rows 0 to 3."""
    plane = TransferQueuePlane(max_bytes=None, deadline_s=DEADLINE_S, num_storage_units=num_storage_units)
    asyncio.run(plane.put(range(4), {"x": [torch.arange(n + 1.0) for n in range(4)]}))
    return plane


@pytest.fixture(scope="module")
def plane(ray_here: None) -> Iterator[TransferQueuePlane]:
    """One for all tests that leave it whole: starting its processes takes many seconds."""
    plane = start(1)
    yield plane
    asyncio.run(plane.close())


@pytest.mark.parametrize(("victim", "units"), [(CONTROLLER, 1), ("storage unit 1", 2)])
def test_a_killed_process_is_a_runtime_error_within_seconds(victim: str, units: int):
    plane = start(units)
    calls = {
        "get": lambda: plane.get(range(4), ["x"]),
        "put": lambda: plane.put([4, 5], {"x": [torch.ones(2)] * 2}),
        "drop": lambda: plane.drop(range(4)),
        "snapshot": lambda: plane.snapshot([0, 1]),
    }
    namespace = plane._processes.namespace
    try:
        os.kill(pid_of(plane._processes, victim), signal.SIGKILL)
        for call in calls.values():
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match=f"process '{victim}' is gone"):
                asyncio.run(call())
            assert time.monotonic() - begin < DEADLINE_S
    finally:
        asyncio.run(plane.close())
    assert namespace not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}


@pytest.mark.parametrize("victim", [CONTROLLER, "storage unit 0"])
def test_a_process_that_does_not_answer_is_a_runtime_error_at_the_deadline(plane: TransferQueuePlane, victim: str):
    pid = pid_of(plane._processes, victim)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"no answer to get within data_plane.deadline_s=4"):
            asyncio.run(plane.get([1], ["x"]))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - begin < 2 * DEADLINE_S
    assert asyncio.run(plane.get([1], ["x"]))["x"][0].tolist() == [0.0, 1.0]


def test_a_cell_that_was_written_late_into_a_place_of_another_row_is_not_taken_for_its_own(plane: TransferQueuePlane):
    async def late_write_by_someone_who_does_not_know_of_the_drop() -> None:
        meta = await plane._meta([10])
        await plane._drop([10])
        await plane._put([11], {"x": [torch.ones(2)]})
        assert (await plane._meta([11])).global_indexes == meta.global_indexes  # the place is given again
        stray = await plane._client.storage_manager.get_data(await plane._meta([0]))
        await plane._client.storage_manager.put_data(stray, meta)

    async def scene() -> None:
        await plane.put([10], {"x": [torch.ones(2)]})
        await plane._run(late_write_by_someone_who_does_not_know_of_the_drop(), "test")
        with pytest.raises(KeyError, match="its place holds row 0"):
            await plane.get([11], ["x"])
        await plane.drop([11])

    asyncio.run(scene())


def test_the_torch_threads_of_this_process_are_left_alone(plane: TransferQueuePlane):
    torch.set_num_threads(2)
    asyncio.run(plane.put([20], {"x": [torch.ones(3)]}))
    asyncio.run(plane.get([20], ["x"]))
    assert torch.get_num_threads() == 2


def test_another_process_shares_the_rows_and_cannot_end_them(plane: TransferQueuePlane):
    @ray.remote(num_cpus=0)
    def elsewhere(plane: TransferQueuePlane) -> int:
        async def scene() -> int:
            (x,) = (await plane.get([2], ["x"]))["x"]
            await plane.put([2], {"y": [x * 2]})
            with pytest.raises(TypeError, match=r"column 'x' holds torch.float32"):
                await plane.put([2], {"x": [x.long()]})
            await plane.close()
            return os.getpid()

        return asyncio.run(scene())

    assert ray.get(elsewhere.remote(plane), timeout=100) != os.getpid()
    assert asyncio.run(plane.get([2], ["y"]))["y"][0].tolist() == [0.0, 2.0, 4.0]


def test_nothing_is_left_after_close(plane: TransferQueuePlane):
    other = start(1)
    pids = [pid_of(other._processes, name) for name in (CONTROLLER, "storage unit 0")]
    asyncio.run(other.close())
    asyncio.run(other.close())
    assert all(ends(pid) for pid in pids)
    assert asyncio.run(plane.get([1], ["x"]))["x"][0].tolist() == [0.0, 1.0]  # a job that ends takes no other along
