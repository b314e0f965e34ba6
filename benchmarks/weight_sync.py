"""Weights from trainers to engines, and what the links between them can do: `python -m benchmarks.weight_sync`.

    python -m benchmarks.weight_sync --way collective --trainers 4 --engines 4    # on 8 GPUs
    python -m benchmarks.weight_sync --way ipc --trainers 1                       # an engine beside each rank

Random weights. A trainer's ranks hold them in float32, sharded; an engine is a transformers model in bfloat16. No Ray:
ranks and engines are processes of this file, bytes go as in a run (`tandem/weights`), every engine's fingerprint must
be the trainer's. `collective`: the first rank broadcasts to engines on GPUs of their own. `ipc`: each rank hands its
buckets to the engine on its own GPU. The limit is the same bytes in one piece by the same way, without anything that
puts them together or takes them apart: an NCCL broadcast, or a copy within the GPU. Seconds are medians, without the
first sync, until the last engine holds all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import PreTrainedModel

from benchmarks.shapes import SHAPES
from benchmarks.trained_model import Job, free_port, fresh_model, our_backend, parse
from tandem.fingerprint import fingerprint, first_difference
from tandem.launch import stacks
from tandem.rollout.loading import load_weights
from tandem.train.backend import Backend
from tandem.weights.buckets import Announcement, Door, Inlet, Outlet, Spec, send, spec_of
from tandem.weights.ways import CollectiveDoor, Gate

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """What all processes know."""

    shapes: tuple[str, ...]
    way: str
    trainers: int
    engines: int
    bucket_bytes: int
    rounds: int
    device: str
    meeting: str
    port: int
    kept: Path | None
    patience_s: float | None

    def job(self, shape: str) -> Job:
        return Job(shape, 0, 0, "bfloat16", steps=0, warmup=0, device=self.device)

    def collective(self, member: int) -> CollectiveDoor:
        return CollectiveDoor(self.meeting, member, 1 + self.engines, self.device, TIMEOUT_S)


@dataclass(frozen=True)
class Between:
    """What the processes meet at and tell each other."""

    barrier: Any
    doors: Any  # a queue for each engine
    fingerprints: Any  # of engines


def sit_on(plan: Plan, gpu: int) -> torch.device:
    """This process's device."""
    torch.set_num_threads(1)
    if plan.patience_s is not None:
        stacks.write_after(plan.patience_s)
    if plan.device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def timed(between: Between, work: Callable[[], None]) -> float:
    """Seconds from when all processes begin until the last has done its work."""
    between.barrier.wait(TIMEOUT_S)
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    between.barrier.wait(TIMEOUT_S)
    return time.perf_counter() - begin


def again(plan: Plan, between: Between, work: Callable[[], None]) -> float:
    """The median, without the first."""
    return statistics.median([timed(between, work) for _ in range(plan.rounds + 1)][1:])


def nothing() -> None:
    """Others work."""


def trainer(rank: int, plan: Plan, between: Between) -> None:
    """A rank: puts the weights together with the others; sends them where its way begins here."""
    device = sit_on(plan, rank)
    if plan.trainers > 1:
        backend = "nccl" if plan.device == "cuda" else "gloo"
        where = f"tcp://127.0.0.1:{plan.port}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=plan.trainers)
    gate = None
    if plan.way == "ipc":
        gate = Gate(TIMEOUT_S)
        between.doors[rank].put(gate.door)
    elif rank == 0:
        for engine in range(plan.engines):
            between.doors[engine].put(plan.collective(1 + engine))
    outlet = None
    for shape in plan.shapes:
        backend, _ = our_backend(plan.job(shape), parse("actor"))
        specs = [spec_of(name, tensor) for name, tensor in backend.export_weights()]
        between.barrier.wait(TIMEOUT_S)
        if outlet is None:
            outlet = gate.outlet() if gate else plan.collective(0).enter(0) if rank == 0 else None
        seconds = sync(plan, between, backend, specs, outlet, device, checks=rank == 0)
        if rank == 0:
            show(plan, shape, bytes_of(specs) / 1e9, seconds)
        del backend
        if plan.device == "cuda":
            torch.cuda.empty_cache()
    if gate is not None:
        gate.close()
    if plan.trainers > 1:
        dist.destroy_process_group()


def bytes_of(specs: Sequence[Spec]) -> int:
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)


def sync(
    plan: Plan,
    between: Between,
    backend: Backend,
    specs: Sequence[Spec],
    outlet: Outlet | None,
    device: torch.device,
    *,
    checks: bool,
) -> dict[str, float]:
    """The trainer's side of all that is timed. `outlet`: None where a rank sends nothing."""
    ours: dict[str, str] = {}

    def survey() -> None:
        ours.update(fingerprint(backend.export_weights()))

    def deliver() -> None:
        if outlet is None:
            for _ in backend.export_weights():
                continue
        else:
            send(backend.export_weights(), specs, plan.bucket_bytes, outlet, device)

    seconds = {"survey_s": again(plan, between, survey), "sync_s": again(plan, between, deliver)}
    seconds["fingerprint_s"] = again(plan, between, nothing)
    for _ in range(plan.engines if checks else 0):
        different = first_difference(ours, between.fingerprints.get(timeout=TIMEOUT_S))
        if different:
            raise RuntimeError(f"an engine holds other weights than the trainer: {different}")
    if outlet is None:
        return seconds | {"limit_s": again(plan, between, nothing)}
    flat = torch.zeros(bytes_of(specs), dtype=torch.uint8, device=device)
    return seconds | {"limit_s": again(plan, between, lambda: outlet.send(flat))}


def engine(number: int, plan: Plan, between: Between) -> None:
    """An engine: takes weights as they come, and weighs what it holds."""
    sit_on(plan, number if plan.way == "ipc" else plan.trainers + number)
    door: Door = between.doors[number].get(timeout=TIMEOUT_S)
    for shape in plan.shapes:
        take(plan, between, fresh_model(plan.job(shape), torch.bfloat16), door)
        if plan.device == "cuda":
            torch.cuda.empty_cache()


def take(plan: Plan, between: Between, model: PreTrainedModel, door: Door) -> None:
    """The engine's side of `sync`."""
    specs = tuple(spec_of(name, parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():  # they would be the trainer's own: both draw with one seed
            parameter.zero_()
    between.barrier.wait(TIMEOUT_S)
    inlet = door.enter(0)
    held: dict[str, str] = {}
    again(plan, between, nothing)
    again(plan, between, lambda: load_weights(model, Announcement(specs, plan.bucket_bytes, door)))
    again(plan, between, lambda: held.update(fingerprint(model.named_parameters())))
    between.fingerprints.put(held)
    again(plan, between, lambda: take_plain(inlet, bytes_of(specs)))


def take_plain(inlet: Inlet, size: int) -> None:
    """Bytes that are nobody's weights."""
    inlet.receive(size)


def show(plan: Plan, shape: str, gbytes: float, seconds: dict[str, float]) -> None:
    """A line of the table, and of the file."""
    rate, limit = gbytes / seconds["sync_s"], gbytes / seconds["limit_s"]
    cells = [shape, plan.way, f"{plan.trainers} -> {plan.engines}", f"{gbytes:.2f}"]
    cells += [f"{seconds['sync_s']:.3f}", f"{rate:.1f}", f"{limit:.1f}", f"{rate / limit:.2f}"]
    cells += [f"{seconds['survey_s']:.3f}", f"{seconds['fingerprint_s']:.3f}"]
    print("| " + " | ".join(cells) + " |", flush=True)
    if plan.kept is not None:
        row = {"shape": shape, "way": plan.way, "trainers": plan.trainers, "engines": plan.engines, "gbytes": gbytes}
        with plan.kept.open("a", encoding="utf-8") as file:
            print(json.dumps(row | seconds), file=file)


def wait_for(processes: Sequence[BaseProcess]) -> int:
    """Until all have ended, or one has failed: nobody waits for it then. The exit code."""
    while living := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in living])
        if any(process.exitcode for process in processes):
            for process in living:
                process.kill()
    return int(any(process.exitcode for process in processes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2-1.5b", "qwen2-7b"])
    parser.add_argument("--way", choices=("collective", "ipc"), default="collective")
    parser.add_argument("--trainers", type=int, default=1, help="ranks that hold the weights together")
    parser.add_argument("--engines", type=int, default=1, help="of collective; ipc has one beside each rank")
    parser.add_argument("--bucket-bytes", type=int, default=1 << 28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--patience", type=float, help="seconds until each process writes where it stands, and goes on")
    parser.add_argument("--json", type=Path, help="a file that each row is appended to as a JSON object")
    asked = parser.parse_args()
    engines = asked.trainers if asked.way == "ipc" else asked.engines
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn" if asked.device == "cuda" else "fork")  # CUDA has begun here
    with tempfile.TemporaryDirectory() as directory:
        plan = Plan(
            tuple(asked.shapes),
            asked.way,
            asked.trainers,
            engines,
            asked.bucket_bytes,
            asked.rounds,
            asked.device,
            f"{directory}/meeting",
            free_port(),
            asked.json,
            asked.patience,
        )
        between = Between(
            context.Barrier(asked.trainers + engines), [context.Queue() for _ in range(engines)], context.Queue()
        )
        print(
            "| weights | way | ranks -> engines | GB | sync s | GB/s | limit GB/s | of it | survey s | fingerprint s |"
        )
        print("|---" * 10 + "|", flush=True)
        workers = [(trainer, rank) for rank in range(asked.trainers)] + [(engine, n) for n in range(engines)]
        processes = [context.Process(target=work, args=(n, plan, between), daemon=True) for work, n in workers]
        for process in processes:
            process.start()
        return wait_for(processes)


if __name__ == "__main__":
    raise SystemExit(main())
