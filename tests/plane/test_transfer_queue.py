"""What a plane in TransferQueue adds to the contract: faults end as errors, jobs do not meet, nothing is left."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (extra `transferqueue`)")

from tandem.plane.transfer_queue import CONTROLLER, TransferQueuePlane  # noqa: E402
from tests.contracts.plane_kinds import QUEUE, Started  # noqa: E402
from tests.plane.processes import ends, pid_of  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]
DEADLINE_S = 4.0
KEYS = range(1000, 1004)  # the contract's scenes, which share the processes, use the keys below 600


def start(num_storage_units: int) -> TransferQueuePlane:
    return TransferQueuePlane(max_bytes=None, deadline_s=DEADLINE_S, num_storage_units=num_storage_units)


def fill(plane: TransferQueuePlane) -> None:
    """A row a key, of 1, 2, 3 and 4 numbers."""
    asyncio.run(plane.put(KEYS, {"x": [torch.arange(n + 1.0) for n in range(len(KEYS))]}))


def another_handle(plane: TransferQueuePlane) -> TransferQueuePlane:
    """What another process would have: its own client and its own knowledge of what has died."""
    other = pickle.loads(pickle.dumps(plane))
    other._processes.deadline_s = DEADLINE_S  # which a test can wait for
    return other


@pytest.fixture(scope="module")
def plane(started: Started) -> Iterator[TransferQueuePlane]:
    """That of the contract: starting its processes takes many seconds. No test here breaks it."""
    plane = started(QUEUE, None)
    assert isinstance(plane, TransferQueuePlane)
    fill(plane)
    yield plane
    asyncio.run(plane.drop(KEYS))


def test_a_killed_process_is_a_runtime_error_within_seconds():
    plane = start(2)
    fill(plane)
    other = another_handle(plane)
    namespace = plane._processes.namespace
    try:
        for handle, victim in [(plane, "storage unit 1"), (other, CONTROLLER)]:
            os.kill(pid_of(handle._processes, victim), signal.SIGKILL)
            for call in calls(handle):
                begin = time.monotonic()
                with pytest.raises(RuntimeError, match=f"process '{victim}' is gone"):
                    asyncio.run(call())
                assert time.monotonic() - begin < DEADLINE_S
    finally:
        asyncio.run(other.close())
        asyncio.run(plane.close())
    assert namespace not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def calls(plane: TransferQueuePlane) -> list[Callable[[], Coroutine[None, None, object]]]:
    return [
        lambda: plane.get(KEYS, ["x"]),
        lambda: plane.put([1010, 1011], {"x": [torch.ones(2)] * 2}),
        lambda: plane.drop(KEYS),
        lambda: plane.snapshot(KEYS[:2]),
    ]


def test_the_processes_take_no_cpu_of_the_cluster(plane: TransferQueuePlane):
    """TransferQueue's own init wants three, and waits for ever on a Ray that has fewer. All are free here."""
    all_of_them = ray.cluster_resources()["CPU"]
    assert ray.get(ray.remote(num_cpus=all_of_them)(lambda: 7).remote(), timeout=100) == 7


def test_rows_are_put_and_got_as_one_message_not_one_by_one(plane: TransferQueuePlane):
    """A round costs milliseconds whatever is in it, so a put of 128 rows must not cost as much as 128 puts."""
    keys = range(2000, 2128)
    columns = {"x": [torch.ones(4)] * len(keys)}

    async def seconds(part: range) -> float:
        begin = time.perf_counter()
        await plane.put(part, {"x": columns["x"][: len(part)]})
        await plane.get(part, ["x"])
        return time.perf_counter() - begin

    async def scene() -> tuple[float, float]:
        together = [await seconds(keys) for _ in range(5)]
        apart = [await seconds(range(key, key + 1)) for key in keys[:20]]
        await plane.drop(keys)
        return statistics.median(together), statistics.median(apart)

    together, apart = asyncio.run(scene())
    assert together < len(keys) / 8 * apart


@pytest.mark.parametrize("victim", [CONTROLLER, "storage unit 0"])
def test_a_process_that_does_not_answer_is_a_runtime_error_at_the_deadline(plane: TransferQueuePlane, victim: str):
    hasty = another_handle(plane)
    pid = pid_of(plane._processes, victim)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match=r"no answer to get within data_plane.deadline_s=4"):
            asyncio.run(hasty.get(KEYS, ["x"]))
        assert time.monotonic() - begin < 2 * DEADLINE_S
    finally:
        os.kill(pid, signal.SIGCONT)
        asyncio.run(hasty.close())
    assert asyncio.run(plane.get(KEYS[1:2], ["x"]))["x"][0].tolist() == [0.0, 1.0]


def test_a_cell_that_was_written_late_into_a_place_of_another_row_is_not_taken_for_its_own(plane: TransferQueuePlane):
    others = range(3000, 4000)  # more than places were ever given: one of them gets the place that is dropped

    async def late_write_by_someone_who_does_not_know_of_the_drop() -> int:
        meta = await plane._meta([1010])
        await plane._drop([1010])
        await plane._put(others, {"x": [torch.ones(2)] * len(others)})
        heir = (await plane._meta(others)).global_indexes.index(meta.global_indexes[0])
        stray = await plane._client.storage_manager.get_data(await plane._meta(KEYS[:1]))
        await plane._client.storage_manager.put_data(stray, meta)
        return others[heir]

    async def scene() -> None:
        await plane.put([1010], {"x": [torch.ones(2)]})
        heir = await plane._run(late_write_by_someone_who_does_not_know_of_the_drop(), "test")
        with pytest.raises(KeyError, match="its place holds row 1000"):
            await plane.get([heir], ["x"])
        await plane.drop(others)

    asyncio.run(scene())


def test_the_torch_threads_of_this_process_are_left_alone(plane: TransferQueuePlane):
    torch.set_num_threads(2)
    asyncio.run(plane.put([1020], {"x": [torch.ones(3)]}))
    asyncio.run(plane.get([1020], ["x"]))
    assert torch.get_num_threads() == 2


def test_another_process_shares_the_rows_and_cannot_end_them(plane: TransferQueuePlane):
    @ray.remote(num_cpus=0)
    def elsewhere(plane: TransferQueuePlane) -> int:
        async def scene() -> int:
            (x,) = (await plane.get([1002], ["x"]))["x"]
            await plane.put([1002], {"y": [x * 2]})
            with pytest.raises(TypeError, match=r"column 'x' holds torch.float32"):
                await plane.put([1002], {"x": [x.long()]})
            await plane.close()
            return os.getpid()

        return asyncio.run(scene())

    assert ray.get(elsewhere.remote(plane), timeout=100) != os.getpid()
    assert asyncio.run(plane.get([1002], ["y"]))["y"][0].tolist() == [0.0, 2.0, 4.0]


SECOND_JOB = """
import asyncio, sys
import ray, torch
from tandem.plane.transfer_queue import CONTROLLER, TransferQueuePlane
from tests.plane.processes import pid_of

ray.init(address=sys.argv[1], log_to_driver=False)
plane = TransferQueuePlane(max_bytes=None, deadline_s=60.0, num_storage_units=1)
asyncio.run(plane.put([1001], {"x": [torch.ones(1, dtype=torch.int64)]}))
print(*(pid_of(plane._processes, name) for name in (CONTROLLER, "storage unit 0")), flush=True)
sys.stdin.readline()
asyncio.run(plane.drop([1001]))
asyncio.run(plane.close())
asyncio.run(plane.close())
"""


def test_a_second_job_has_a_queue_of_its_own_and_leaves_nothing_behind(plane: TransferQueuePlane):
    """TransferQueue's own interface would give it the first one's, and its close() would end that."""
    with pytest.raises(ValueError, match="TransferQueueController"):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")  # what init() looks for
    address = ray.get_runtime_context().gcs_address
    job = [sys.executable, "-c", SECOND_JOB, address]
    root = Path(__file__).parents[2]
    with subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        pids = [int(pid) for pid in second.stdout.readline().split()]
        assert len(pids) == 2
        assert asyncio.run(plane.get([1001], ["x"]))["x"][0].tolist() == [0.0, 1.0]
        second.stdin.write("close\n")
        second.stdin.flush()
        assert second.wait(100) == 0
    assert all(ends(pid) for pid in pids)
    assert asyncio.run(plane.get([1001], ["x"]))["x"][0].tolist() == [0.0, 1.0]
