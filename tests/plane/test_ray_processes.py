"""The Ray that a plane starts: on loopback, with what was asked for, and its errors name the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the package ray is not installed here (extra `ray`)")
psutil = pytest.importorskip("psutil", reason="the package psutil, which Ray brings along, is not installed here")

from tandem.plane.ray_processes import RayProcesses, start_ray  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ray_here"), pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]


class Listens:
    def ready(self) -> bool:
        return True


class Breaks:
    def __init__(self) -> None:
        raise OSError("no room")


def test_every_port_of_ray_and_its_actors_is_on_loopback():
    processes = RayProcesses(deadline_s=60.0)
    processes.start("listens", Listens)
    processes.wait_until_up()
    this = psutil.Process()
    ports = {
        (each.name(), port.laddr.ip.removeprefix("::ffff:"))
        for each in [this, *this.children(recursive=True)]
        if each.status() != psutil.STATUS_ZOMBIE
        for port in each.net_connections(kind="inet")
        if port.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)  # of UDP there is no state
    }
    processes.close()
    assert {"gcs_server", "raylet", "ray::DashboardAgent", "ray::Listens"} <= {name for name, _ in ports}
    assert {address for _, address in ports} == {"127.0.0.1"}


def test_a_ray_that_is_there_is_joined():
    had = ray.cluster_resources()["CPU"]
    assert not start_ray(num_cpus=int(had) + 7, num_gpus=0)
    assert ray.cluster_resources()["CPU"] == had


def test_a_process_that_does_not_start_is_named_with_its_cause():
    processes = RayProcesses(deadline_s=60.0)
    processes.start("broken", Breaks)
    with pytest.raises(RuntimeError, match=r"(?s)process 'broken' did not start: .*"):
        processes.wait_until_up()
    processes.close()


def test_a_ray_that_would_listen_to_the_network_is_refused():
    script = "from tandem.plane.ray_processes import start_ray; start_ray(1, 0)"
    environment = {"PATH": "/usr/bin", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in ended.stderr
