"""Buckets between processes on GPUs: handles of one GPU's memory, NCCL between two. Nothing of them stays behind."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.fingerprint import fingerprint
from tandem.rollout.loading import load_weights
from tandem.weights.buckets import Announcement, Outlet, Spec, send, spec_of
from tandem.weights.ways import CollectiveDoor, Gate, SharedDoor, leave_collectives
from tests.rollout.tiny_models import tiny_model

LIMIT = 30_000
SYNCS = 20


def specs_of(model: torch.nn.Module) -> tuple[Spec, ...]:
    return tuple(spec_of(name, tensor) for name, tensor in model.named_parameters())


def engine_process(
    door: CollectiveDoor | SharedDoor, device: int, answers: multiprocessing.Queue, syncs: int = SYNCS
) -> None:
    """An engine on a GPU: takes weights, says what it holds and how much memory it has allocated."""
    torch.cuda.set_device(device)
    model = tiny_model().to("cuda")
    for _ in range(syncs):
        load_weights(model, Announcement(specs_of(model), LIMIT, door))
        answers.put((fingerprint(model.named_parameters()), torch.cuda.memory_allocated()))


def play(door: CollectiveDoor | SharedDoor, outlet: Outlet | None, device: int) -> None:
    """The trainer on GPU 0 sends other weights at every sync."""
    torch.cuda.set_device(0)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    process = spawn.Process(target=engine_process, args=(door, device, answers), daemon=True)
    process.start()
    way = outlet or CollectiveDoor(door.meeting, 0, 2, "cuda", 120.0).enter(0)
    allocated: list[tuple[int, int]] = []
    for sync in range(SYNCS):
        model = tiny_model(seed=sync + 1).to("cuda")
        send(model.named_parameters(), specs_of(model), LIMIT, way, torch.device("cuda", 0))
        theirs, engine_bytes = answers.get(timeout=60)
        assert theirs == fingerprint(model.named_parameters())
        allocated.append((torch.cuda.memory_allocated(), engine_bytes))
    process.join(timeout=60)
    assert process.exitcode == 0
    assert allocated[-1] == allocated[2], "nothing stays behind at either end"


@pytest.mark.gpu
def test_handles_bring_an_engine_of_the_same_gpu_the_trainers_weights():
    gate = Gate(120.0)

    class AtTheGate:
        """The engine comes in when the first bucket is there."""

        def send(self, flat: torch.Tensor) -> None:
            gate.outlet().send(flat)

    play(gate.door, AtTheGate(), device=0)
    gate.close()


@pytest.mark.gpu(devices=2)
def test_a_collective_brings_an_engine_on_another_gpu_the_trainers_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    play(CollectiveDoor(str(tmp_path / "meeting"), 1, 2, "cuda", 120.0), None, device=1)


def engine_that_stays(door: CollectiveDoor, device: int, answers: multiprocessing.Queue) -> None:
    """One sync, and then it is there until it is killed."""
    engine_process(door, device, answers, syncs=1)
    threading.Event().wait()


def engine_that_ends(door: CollectiveDoor, device: int, answers: multiprocessing.Queue) -> None:
    """One sync."""
    engine_process(door, device, answers, syncs=1)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("engine", [engine_that_ends, engine_that_stays])
def test_a_group_is_left_at_once_however_its_other_member_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., None]
):
    """As when an engine is started again, and when a trainer ends: a trainer that waits for who is gone is lost."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    here, there = (CollectiveDoor(str(tmp_path / "meeting"), member, 2, "cuda", 120.0) for member in (0, 1))
    process = spawn.Process(target=engine, args=(there, 1, answers), daemon=True)
    process.start()
    model = tiny_model(seed=1).to("cuda")
    way = here.enter(0)
    send(model.named_parameters(), specs_of(model), LIMIT, way, torch.device("cuda", 0))
    answers.get(timeout=60)
    if engine is engine_that_stays:
        process.kill()
    process.join(timeout=30)
    assert process.exitcode is not None
    del way
    leaves = threading.Thread(target=leave_collectives, daemon=True)
    leaves.start()
    leaves.join(timeout=20)
    assert not leaves.is_alive()
