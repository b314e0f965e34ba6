"""Weights bucket by bucket: every way brings the same bytes, and neither side holds more than one bucket."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tandem.fingerprint import fingerprint
from tandem.rollout.loading import load_weights
from tandem.weights.buckets import Announcement, Inlet, Outlet, Spec, cut, receive, send, spec_of
from tandem.weights.ways import CollectiveDoor, Gate, SharedDoor, host_store
from tests.rollout.tiny_models import tiny_model

CPU = torch.device("cpu")
NEW = 1  # the seed of the trainer's weights
LIMIT = 30_000  # bytes: the tiny model takes several buckets


def specs_of(model: torch.nn.Module) -> tuple[Spec, ...]:
    return tuple(spec_of(name, tensor) for name, tensor in model.named_parameters())


class Belt:
    """Both ends of a way in one thread: a bucket is taken when it is sent. Counts those that are alive."""

    def __init__(self) -> None:
        self.sent: list[StorageWeakRef] = []
        self.most_alive = 0
        self.sizes: list[int] = []

    def send(self, flat: torch.Tensor) -> None:
        self.sent.append(StorageWeakRef(flat.untyped_storage()))
        self.sizes.append(flat.nbytes)
        self.most_alive = max(self.most_alive, sum(not ref.expired() for ref in self.sent))

    def receive(self, size: int) -> torch.Tensor:
        alive = sum(not ref.expired() for ref in self.sent)
        flat = torch.zeros(size, dtype=torch.uint8)
        self.sent.append(StorageWeakRef(flat.untyped_storage()))
        self.most_alive = max(self.most_alive, alive + 1)
        return flat


def test_buckets_are_within_the_limit_and_hold_every_tensor_once_in_order():
    specs = specs_of(tiny_model())
    buckets = list(cut(specs, LIMIT))
    assert [spec for bucket in buckets for spec in bucket] == list(specs)
    assert all(len(bucket) == 1 or sum(spec.room for spec in bucket) <= LIMIT for bucket in buckets)
    assert len(buckets) > 3
    assert list(cut([], LIMIT)) == []


@pytest.mark.parametrize("limit", [1, LIMIT, 1 << 30], ids=["one by one", "several", "all in one"])
def test_tensors_of_mixed_types_arrive_to_the_bit(limit: int):
    torch.manual_seed(0)
    weights = {
        "half": torch.randn(3, 5).to(torch.bfloat16),  # 30 bytes: what follows is not aligned by itself
        "whole": torch.randn(7),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "cut": torch.randn(8, 8)[:, ::2],  # not contiguous
    }
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    kept: list[torch.Tensor] = []

    class Keeping:
        def send(self, flat: torch.Tensor) -> None:
            kept.append(flat.clone())

        def receive(self, size: int) -> torch.Tensor:
            assert kept[0].nbytes == size
            return kept.pop(0)

    send(weights.items(), specs, limit, Keeping(), CPU)
    first = len(kept)
    way = Keeping()
    arrived = {name: tensor.clone() for name, tensor in receive(specs, limit, way)}
    assert fingerprint(arrived.items()) == fingerprint(weights.items())
    assert first == len(list(cut(specs, limit)))


def test_neither_side_holds_more_than_one_bucket():
    model, source, target = tiny_model(), Belt(), Belt()
    specs = specs_of(model)
    send(model.named_parameters(), specs, LIMIT, source, CPU)
    assert source.most_alive == 1
    assert max(source.sizes) <= max(LIMIT, *(spec.room for spec in specs))

    class Door:
        def enter(self, share: int) -> Inlet:
            return target

    load_weights(tiny_model(), Announcement(specs, LIMIT, Door()))
    assert len(target.sent) == len(source.sent) > 3
    assert target.most_alive == 1
    hoarder = Belt()
    kept = list(receive(specs, LIMIT, hoarder))
    assert hoarder.most_alive == len(source.sent), "who keeps tensors is seen"
    del kept


def test_weights_that_are_not_the_announced_ones_are_an_error():
    model = tiny_model()
    specs = specs_of(model)
    with pytest.raises(ValueError, match=r"announced was .*other"):
        send(model.named_parameters(), [specs[0]._replace(name="other"), *specs[1:]], LIMIT, Belt(), CPU)
    with pytest.raises(ValueError, match=f"announced were {len(specs) - 1} weights"):
        send(model.named_parameters(), specs[:-1], LIMIT, Belt(), CPU)


def test_an_announcement_is_checked_before_the_first_bucket_comes():
    class Closed:
        def enter(self, share: int) -> Inlet:
            raise AssertionError("nothing may be read")

    model = tiny_model()
    before = fingerprint(model.named_parameters())
    short = tuple(spec for spec in specs_of(model) if spec.name != "model.norm.weight")
    with pytest.raises(ValueError, match=r"1 of \d+ weights are missing, first 'model.norm.weight'"):
        load_weights(model, Announcement(short, LIMIT, Closed()))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight' came twice"):
        load_weights(model, Announcement((specs_of(model)[0], *specs_of(model)), LIMIT, Closed()))
    assert fingerprint(model.named_parameters()) == before


def engine_process(door: CollectiveDoor | SharedDoor, syncs: int, answers: multiprocessing.Queue) -> None:
    """An engine: takes weights that come through its door, says what it holds."""
    torch.set_num_threads(1)
    model = tiny_model()
    for _ in range(syncs):
        load_weights(model, Announcement(specs_of(model), LIMIT, door))
        answers.put(fingerprint(model.named_parameters()))


def bring(outlets: Iterator[Outlet], syncs: int) -> dict[str, str]:
    """The trainer's part; the fingerprint of what it sent last."""
    model = tiny_model()
    for sync in range(syncs):
        model = tiny_model(seed=NEW + sync)
        send(model.named_parameters(), specs_of(model), LIMIT, next(outlets), CPU)
    return fingerprint(model.named_parameters())


def play(doors: list[CollectiveDoor | SharedDoor], outlets: Iterator[Outlet]) -> None:
    """Engines in processes of their own, the trainer in this one; two syncs over the same way."""
    spawn = multiprocessing.get_context("spawn")
    answers = [spawn.Queue() for _ in doors]
    processes = [
        spawn.Process(target=engine_process, args=(door, 2, queue), daemon=True)
        for door, queue in zip(doors, answers, strict=True)
    ]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(bring, outlets, 2).result(timeout=120)
    for queue in answers:
        first, second = queue.get(timeout=60), queue.get(timeout=60)
        assert first != second == sent
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0


@pytest.mark.parametrize("across", [False, True], ids=["one machine", "several"])
def test_a_collective_brings_every_engine_the_trainers_weights(
    across: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    meeting = host_store("127.0.0.1", 120.0) if across else str(tmp_path / "meeting")
    doors = [CollectiveDoor(meeting, rank, 3, "cpu", 120.0) for rank in range(3)]

    def outlets() -> Iterator[Outlet]:
        while True:
            yield doors[0].enter(0)

    play([doors[1], doors[2]], outlets())


def test_handles_of_shared_memory_bring_an_engine_the_trainers_weights():
    gate = Gate(120.0)

    def outlets() -> Iterator[Outlet]:
        while True:
            yield gate.outlet()

    play([gate.door], outlets())
    assert not Path(gate.door.path).exists(), "nobody else may come in"
    with pytest.raises((ConnectionError, BrokenPipeError)):
        gate.outlet().send(torch.zeros(4, dtype=torch.uint8))
    gate.close()


def test_an_engine_of_several_processes_takes_no_handles():
    with pytest.raises(ValueError, match="weight_transfer=collective"):
        SharedDoor("/nowhere", 1.0).enter(1)
