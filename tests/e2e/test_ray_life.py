"""How runs with processes of their own end: killed, interrupted, or inside a Ray that others use. Nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
pytest.importorskip("psutil", reason="the package psutil, which Ray brings along, is not installed here")

import ray
import torch

from tandem import cores
from tandem.config.load import load
from tandem.config.placement import Slot
from tandem.launch.process import prepare
from tandem.launch.ray.cluster import Cluster
from tandem.launch.ray.machinery import RayMachinery
from tandem.types import EngineDied
from tests.e2e import kills
from tests.e2e.ray_members import Deaf, Shivers, Stuck
from tests.e2e.whole_runs import ENDLESS, GONE_S, SIZE, Begin, alive_as, assert_gone, runs_in

pytestmark = pytest.mark.timeout(600)
PLANE = ("data_plane.name=ray_actor",)
UNDER_RAY = ("cluster.launch=ray", "cluster.device=cpu", "cluster.num_threads=1")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with runs_in(tmp_path) as start:
        yield start


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=lambda end: end.name)
@pytest.mark.parametrize("how", [PLANE, UNDER_RAY], ids=["plane", "launch"])
def test_nothing_is_left_of_a_run_that_is_killed_or_interrupted(
    tmp_path: Path, begin: Begin, how: tuple[str, ...], end: signal.Signals
):
    run = begin([*ENDLESS, *how, f"run_dir={tmp_path / 'run'}"])
    run.trained(tmp_path / "run", steps=1)
    if how is UNDER_RAY:
        names = [alive_as(process) for process in run.started]
        assert len([name for name in names if name.startswith(("ray::TrainerRank", "ray::EngineProcess"))]) == 3
    assert run.process.pid is not None
    os.kill(run.process.pid, end)
    run.wait(run.ended)
    assert run.process.exitcode == (-signal.SIGKILL if end == signal.SIGKILL else 130)
    assert_gone(run)


def test_a_run_under_ray_ends_by_itself_and_leaves_what_one_process_would(tmp_path: Path, begin: Begin):
    run = begin([*SIZE, *UNDER_RAY, f"run_dir={tmp_path / 'run'}"])
    run.wait(run.ended)
    assert run.process.exitcode == 0, (tmp_path / "said").read_text()
    assert_gone(run)
    kills.run_to_the_end([*SIZE, f"run_dir={tmp_path / 'alone'}"])
    assert kills.ended_with(tmp_path / "run") == kills.ended_with(tmp_path / "alone")


def test_a_run_gives_its_slots_back_to_the_ray_that_it_joined(tmp_path: Path, begin: Begin, ray_here: None):
    def free() -> float:
        return ray.available_resources().get("CPU", 0.0)

    before, address = free(), ray.get_runtime_context().gcs_address
    there = (f"cluster.ray.address={address}", f"run_dir={tmp_path / 'run'}")
    run = begin([*ENDLESS, *UNDER_RAY, *there], RAY_AUTH_MODE="token")  # which Ray asks of who joins by address
    run.trained(tmp_path / "run", steps=1)
    assert free() == before - 1
    run.process.kill()
    run.wait(run.ended)
    run.wait(lambda: free() == before, within_s=GONE_S)


def test_the_driver_computes_alone_while_others_have_the_cores(tmp_path: Path, ray_here: None):
    before = torch.get_num_threads()
    config = load("quickstart", [*UNDER_RAY, "cluster.num_threads=2"]).config
    prepare(config.cluster)
    machinery = RayMachinery(config, tmp_path)
    there = torch.get_num_threads()
    asyncio.run(machinery.close())
    after = torch.get_num_threads()
    cores.give(before)
    torch.set_num_threads(before)
    assert (there, after) == (1, 2)


def test_what_any_process_warns_of_is_logged_by_the_driver(
    tmp_path: Path, ray_here: None, caplog: pytest.LogCaptureFixture
):
    cluster = Cluster(load("quickstart", UNDER_RAY).config, tmp_path)

    async def hear() -> None:
        before = cluster.start("actor rank 0", Shivers, (Slot(0, 0),), vital=True)
        guard = asyncio.create_task(cluster.guard())
        await cluster.call([before], "shiver")
        later = cluster.start("engine 0", Shivers, (Slot(0, 0),), vital=False)
        await cluster.call([later], "shiver")
        async with asyncio.timeout(60):
            while len(caplog.messages) < 2:
                await asyncio.sleep(0.01)
        guard.cancel()
        await asyncio.gather(guard, return_exceptions=True)

    try:
        asyncio.run(hear())
    finally:
        cluster.close()
    assert sorted(caplog.messages) == ["actor rank 0: it is cold", "engine 0: it is cold"]


@pytest.mark.parametrize(("kind", "vital", "error"), [(Stuck, False, EngineDied), (Deaf, True, RuntimeError)])
def test_a_process_that_answers_nothing_within_the_deadline_counts_as_dead(
    tmp_path: Path, ray_here: None, kind: type, vital: bool, error: type[Exception]
):
    cluster = Cluster(load("quickstart", [*UNDER_RAY, "cluster.ray.deadline_s=2.0"]).config, tmp_path)
    try:
        process = cluster.start("engine 0", kind, (Slot(0, 0),), vital=vital)
        ray.get(process.handle.pid.remote())  # it has started: only its silence is measured
        with pytest.raises(error, match=r"engine 0: no answer to generate within cluster\.ray\.deadline_s=2") as caught:
            asyncio.run(cluster.call([process], "generate"))
        assert isinstance(caught.value, EngineDied) != vital
        told = "where it stands is at the end of" in str(caught.value)
        assert told == (kind is Stuck)
        if told:
            with pytest.raises(error, match=r"within cluster\.ray\.deadline_s=2$"):
                asyncio.run(cluster.call([process], "generate"))
            assert process.log_file.read_text().count("in wait_for_what_never_comes") == 1
    finally:
        cluster.close()


def test_a_signal_makes_any_process_write_where_it_stands(tmp_path: Path, ray_here: None):
    cluster = Cluster(load("quickstart", UNDER_RAY).config, tmp_path)
    try:
        process = cluster.start("engine 0", Stuck, (Slot(0, 0),), vital=False)
        (pid,) = asyncio.run(cluster.call([process], "pid"))
        os.kill(pid, signal.SIGUSR1)
        for _ in range(1000):  # a thread of it writes: it answers meanwhile
            asyncio.run(cluster.call([process], "pid"))
            if "Current thread" in process.log_file.read_text():
                break
        else:
            pytest.fail(process.log_file.read_text())
    finally:
        cluster.close()
