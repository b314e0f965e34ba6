"""The Ray of a run: joined or started here; the slots that the recipe wants on it; processes in them, and their end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray  # type: ignore  # an extra: not every checkout has it
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError  # type: ignore  # as above
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # type: ignore  # as above
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # type: ignore  # as above

from tandem.config import Config
from tandem.config.placement import Slot, bundles_of, placement_of
from tandem.plane.ray_processes import first_line, start_ray
from tandem.types import EngineDied, RolloutFailed

log = logging.getLogger(__name__)
ASKED_AT_ONE_TIME = 100_000  # calls of one process: each of an engine's requests is one
KNOCK_S = 10.0
GRACE_S = 2.0  # after an error of one rank: long enough to see that another has died, which is then the cause
TAIL_LINES = 12


@dataclass(frozen=True)
class Process:
    """A Ray actor of the run."""

    label: str  # `actor rank 1`
    log_file: Path  # all that it prints and logs
    handle: Any
    life: Any  # a reference that is never answered: it fails when the process dies
    vital: bool  # the run ends with it


class Cluster:
    """Starts processes, calls them with a deadline, and ends the run with the first that dies."""

    def __init__(self, config: Config, logs: Path) -> None:
        """Join or start Ray, and take the slots. ValueError when they cannot be had."""
        self._settings = config.cluster.ray
        self._logs = logs
        self._processes: list[Process] = []
        self._nodes: list[PlacementGroup] = []
        self._silent: list[Process] = []  # those that have let a deadline pass
        self._lost: RuntimeError | None = None
        self._listeners: asyncio.TaskGroup | None = None  # while there is a guard
        self.bucket_bytes = self._settings.weight_bucket_bytes
        self._connected = not ray.is_initialized()
        self.namespace = f"tandem-{uuid4().hex[:12]}"
        placement = placement_of(config)
        self._bundles = bundles_of(config)
        self._bundle_at = {
            slot: (n, i) for n, node in enumerate(self._bundles) for i, slots in enumerate(node) for slot in slots
        }
        self._users = {slot: sum(slot in slots for slots in placement.values()) for slot in union(placement)}
        try:
            self._connect(config)
            self.on_gpus = config.cluster.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
            if config.cluster.device == "cuda" and not self.on_gpus:
                raise ValueError("cluster.device=cuda, but this Ray has no GPU; set cluster.device=cpu")
            self._take_slots(config)
        except BaseException:
            self.close()
            raise

    def _connect(self, config: Config) -> None:
        if not self._connected:
            return
        address = self._settings.address
        if address is None:
            gpus = 0 if config.cluster.device == "cpu" else torch.cuda.device_count()
            start_ray(len(self._users), gpus, dashboard=self._settings.dashboard)
            return
        try:
            knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"cluster.ray.address={address}: no Ray could be joined there ({first_line(error)}); start one with "
                "`ray start --head`, or set cluster.ray.address=null to start one for this run; one that asks for a "
                "token wants RAY_AUTH_MODE=token in the environment"
            ) from error

    def _take_slots(self, config: Config) -> None:
        """One placement group a node, a bundle for what one process has at most: who shares a slot shares its GPU."""
        nodes, places = config.cluster.num_nodes, config.cluster.gpus_per_node
        had = ray.cluster_resources()
        unit = "GPU" if self.on_gpus else "CPU"
        wanted = f"cluster.num_nodes={nodes} x cluster.gpus_per_node={places}"
        if self._connected and self._settings.address is None and had.get(unit, 0) < nodes * places:
            raise ValueError(
                f"{wanted}, but this machine has {had.get(unit, 0):g} {unit}s: lower the recipe's, or join"
            )
        units = ("CPU", "GPU") if self.on_gpus else ("CPU",)
        self._nodes = [
            placement_group([dict.fromkeys(units, float(len(slots))) for slots in node], strategy="STRICT_PACK")
            for node in self._bundles
        ]
        try:
            ray.get([node.ready() for node in self._nodes], timeout=self._settings.start_timeout_s)
        except GetTimeoutError as error:
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ValueError(
                f"{wanted} {unit}s could not be had within cluster.ray.start_timeout_s="
                f"{self._settings.start_timeout_s:g}: free of this Ray now is {free}"
            ) from error

    def start(self, label: str, kind: type, slots: Sequence[Slot], *, vital: bool) -> Process:
        """Start a process in a slot, or in several that it has alone.

        Ray never restarts it or calls it twice: what it held would be gone in silence.
        """
        node, bundle = self._bundle_at[slots[0]]
        share = len(slots) if len(slots) > 1 else int(1e4 / self._users[slots[0]]) / 1e4
        strategy = PlacementGroupSchedulingStrategy(self._nodes[node], placement_group_bundle_index=bundle)
        actor = ray.remote(kind).options(
            name=label,
            namespace=self.namespace,
            num_cpus=share,
            num_gpus=share if self.on_gpus else 0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=ASKED_AT_ONE_TIME,
            scheduling_strategy=strategy,
        )
        log_file = self._logs / f"{label.replace(' ', '-')}.log"
        handle = actor.remote(log_file)
        process = Process(label, log_file, handle, handle.stay.remote(), vital)
        self._processes.append(process)
        if self._listeners is not None:
            self._listeners.create_task(self._listen_to(process))
        return process

    async def call(self, processes: Sequence[Process], method: str, *arguments: object) -> list[Any]:
        """Call all of them at one time, and wait for all. Raises the first one's own error, or that it has died."""
        if self._lost:
            raise self._lost
        refs = [getattr(process.handle, method).remote(*arguments) for process in processes]
        answers = [self._answer(process, method, ref) for process, ref in zip(processes, refs, strict=True)]
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                return await asyncio.gather(*answers)
        except TimeoutError as error:
            silent = EngineDied if not any(process.vital for process in processes) else RuntimeError
            raise silent(  # an engine that answers nothing is as good as dead: the router goes on without it
                f"{', '.join(process.label for process in processes)}: no answer to {method} within "
                f"cluster.ray.deadline_s={self._settings.deadline_s:g}{await self._where_they_stand(processes)}"
            ) from error
        except asyncio.CancelledError:
            for ref in refs:
                ray.cancel(ref)
            raise
        except (RolloutFailed, EngineDied):
            raise
        except Exception:
            await self._look_for_dead(processes)
            raise

    async def _where_they_stand(self, processes: Sequence[Process]) -> str:
        """Has each write its stacks into its log, once: an engine may owe hundreds of answers. '' if none can.

        All ranks that were called do: who waits in a collective is not who is to blame.
        """
        silent = [process for process in processes if process not in self._silent]
        self._silent += silent
        if not silent:
            return ""
        asked = [asyncio.ensure_future(process.handle.write_stacks.remote()) for process in silent]
        await asyncio.wait(asked, timeout=GRACE_S)
        able = [process for process, ask in zip(silent, asked, strict=True) if ask.done() and not ask.exception()]
        for ask in asked:
            ask.cancel()
        logs = ", ".join(str(process.log_file) for process in able)
        return f"; where it stands is at the end of {logs}" if able else ""

    async def _answer(self, process: Process, method: str, ref: Any) -> Any:
        try:
            return await ref
        except RayTaskError as error:
            if not isinstance(error.cause, RolloutFailed):
                log.info("%s failed in %s: %s", process.label, method, error)
            raise (error.cause or error) from None
        except RayError as error:
            raise self._gone(process, error) from error

    async def _look_for_dead(self, processes: Sequence[Process]) -> None:
        """Where one rank died the others fail in a collective, often before Ray tells: its end is the cause."""
        if len(processes) > 1 and not self._lost:
            ends = [asyncio.ensure_future(self.end_of(process)) for process in processes]
            await asyncio.wait(ends, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        if self._lost:
            raise self._lost

    async def end_of(self, process: Process) -> None:
        """Waits for its death: EngineDied, or RuntimeError where the run ends with it."""
        try:
            await process.life
        except RayError as error:
            raise self._gone(process, error) from error

    async def guard(self) -> None:
        """Logs what processes warn of. When a vital one dies: RuntimeError with the end of its log."""
        async with asyncio.TaskGroup() as self._listeners:
            for process in self._processes:
                self._listeners.create_task(self._listen_to(process))

    async def _listen_to(self, process: Process) -> None:
        while True:
            try:
                warnings = await process.handle.warnings.remote()
            except RayError as error:
                if process.vital:
                    raise self._gone(process, error) from error
                return  # who asks it next is told
            for name, level, text in warnings:
                logging.getLogger(name).log(level, "%s: %s", process.label, text)

    def _gone(self, process: Process, error: Exception) -> Exception:
        tail = "\n".join(f"    {line}" for line in tail_of(process.log_file)) or "    (empty)"
        what = f"the process `{process.label}` died: {first_line(error)}\n  the end of {process.log_file}:\n{tail}"
        if not process.vital:
            return EngineDied(what)
        self._lost = self._lost or RuntimeError(what)
        return self._lost

    def end(self, process: Process) -> None:
        """End one process, at once. A second time is no error."""
        if process in self._processes:
            self._processes.remove(process)
            ray.kill(process.handle, no_restart=True)

    def close(self) -> None:
        """Nothing of it is left: processes, slots, and Ray where it was not there before."""
        for process in list(self._processes):
            self.end(process)
        for node in self._nodes:
            remove_placement_group(node)
        if self._connected:
            ray.shutdown()


def knock(address: str) -> None:
    """OSError when nothing listens at host:port: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


def union(placement: Mapping[str, Sequence[Slot]]) -> list[Slot]:
    """Every slot of the run, once."""
    return sorted({slot for slots in placement.values() for slot in slots})


def tail_of(path: Path) -> list[str]:
    """The last lines of a log; none where the file is out of reach."""
    try:
        return path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
