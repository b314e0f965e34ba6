"""The processes of a plane: Ray actors in a namespace of their own, with a deadline on every call."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

# Ray reads these once, as it is imported. A node whose address is 127.0.0.1 listens on loopback only, and Ray leaves
# that address as it is only where clusters are off, as they are on a Mac; what joins a running cluster is not touched.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Under `uv run` it would copy the working directory and build every worker an environment that may lack the extras.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray  # type: ignore  # an extra: not every checkout has it
    from ray.actor import ActorClass, ActorHandle  # type: ignore  # as above
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError  # type: ignore  # as above
except ImportError as error:
    raise ValueError(
        "cluster.launch=ray and data_plane.name=ray_actor or transfer_queue need the package ray: "
        "`uv sync --extra ray`, or set cluster.launch=local and data_plane.name=memory"
    ) from error

log = logging.getLogger(__name__)
START_S = 300.0  # an import of torch and more, beside others on a busy machine; what dies is noticed at once
CHECK_S = 1.0
CLOSE_S = 10.0
LOOPBACK = "127.0.0.1"


class RayProcesses:
    """Starts named actors and calls them. They take no CPU of the cluster, and end with close() or with this driver.

    Sent to another process it can call the same actors there, and its close() leaves them alone.
    """

    def __init__(self, deadline_s: float) -> None:
        """Joins the Ray that this process is connected to, or starts one here, on loopback, without a dashboard."""
        self.deadline_s = deadline_s
        self.namespace = f"tandem-plane-{uuid4().hex[:12]}"
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._owner = True
        self._started_ray = start_ray(num_cpus=1, num_gpus=0)  # the actors take none
        self._lost = ""  # what died; nothing is answered from what is left

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_owner": False, "_started_ray": False}

    def start(self, name: str, kind: type | ActorClass[Any], *arguments: object) -> None:
        """Start an actor. It is not restarted when it dies: what it held would be gone without an error."""
        actor_class = kind if isinstance(kind, ActorClass) else ray.remote(kind)
        options = actor_class.options(
            name=name,
            namespace=self.namespace,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._actors[name] = cast(ActorHandle[Any], options.remote(*arguments))

    def wait_until_up(self) -> None:
        """Return when all actors run. Starting a process and its imports may take longer than any call of it."""
        refs = {name: actor.__ray_ready__.remote() for name, actor in self._actors.items()}
        end = time.monotonic() + START_S
        for name, ref in refs.items():
            try:
                ray.get(ref, timeout=max(0.0, end - time.monotonic()))
            except RayError as error:
                raise RuntimeError(f"the data plane's process {name!r} did not start: {first_line(error)}") from error

    def call(self, name: str, method: str, *arguments: object) -> Any:
        """Call and wait; raises the callee's own error, or RuntimeError when it is gone or past the deadline."""
        self.demand_whole()
        try:
            return ray.get(getattr(self._actors[name], method).remote(*arguments), timeout=self.deadline_s)
        except RayTaskError as error:
            raise error.cause from None
        except GetTimeoutError as error:
            raise RuntimeError(
                f"the data plane's process {name!r} gave no answer to {method} within "
                f"data_plane.deadline_s={self.deadline_s:g}"
            ) from error
        except RayError as error:
            raise self._gone(name, first_line(error)) from error

    def check(self) -> None:
        """RuntimeError naming the first actor that is dead. One that does not answer soon may be busy: no error."""
        for name, actor in self._actors.items():
            self.demand_whole()
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=CHECK_S)
            except GetTimeoutError:
                continue
            except RayError as error:
                raise self._gone(name, first_line(error)) from error

    def demand_whole(self) -> None:
        """RuntimeError when an actor was found dead before: what remains may hold half of a row."""
        if not ray.is_initialized():  # a call would start another Ray, with everything on
            raise RuntimeError("the data plane's processes are gone: their Ray has ended")
        if self._lost:
            raise RuntimeError(self._lost)

    def _gone(self, name: str, why: str) -> RuntimeError:
        self._lost = f"the data plane's process {name!r} is gone: {why}; go on from the newest checkpoint"
        return RuntimeError(self._lost)

    def close(self) -> None:
        """Kill the actors and see them gone; end Ray if it was started here."""
        actors, self._actors = self._actors, {}
        if not self._owner or not ray.is_initialized():
            return
        for actor in actors.values():
            ray.kill(actor, no_restart=True)
        end = time.monotonic() + CLOSE_S
        for name, actor in actors.items():
            try:
                ray.get(actor.__ray_ready__.remote(), timeout=max(0.0, end - time.monotonic()))
            except GetTimeoutError:
                log.warning("the data plane's process %r was killed and still answers", name)
            except RayError:  # it is gone, as it should be
                continue
        if self._started_ray:
            ray.shutdown()


def start_ray(num_cpus: int, num_gpus: int, *, dashboard: bool = False) -> bool:
    """Whether a Ray was started here, on loopback; False where this process is connected to one.

    It ends with the thread that calls this: call it in the main one. ValueError when Ray would listen to the network.
    """
    if ray.is_initialized():
        return False
    if ray.util.get_node_ip_address() != LOOPBACK:
        raise ValueError(
            "Ray was told to run clusters before Tandem could say otherwise, and would listen on all interfaces; set "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment, or start a Ray of your own and join it"
        )
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=dashboard,
        dashboard_host=LOOPBACK,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _node_ip_address=LOOPBACK,
    )
    if sys.platform == "linux":
        watch_agents()
    return True


def watch_agents() -> None:
    """Let a watcher end Ray's agents should this process be killed.

    All else of Ray ends with it, but they would first spend a minute on telling a control store that is gone as well.
    """
    raylets = [pid for pid in children(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    agents = [str(pid) for raylet in raylets for pid in children(raylet)]
    watched, _held_until_the_end = os.pipe()
    script = Path(__file__).with_name("ray_watcher.py")
    command = [sys.executable, "-I", str(script), *agents]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, watched, 0)])
    os.close(watched)


def children(pid: int) -> list[int]:
    """The processes that a process has started, as Linux lists them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread may end at any time
            found += map(int, (task / "children").read_text().split())
    return found


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
