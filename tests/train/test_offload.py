"""Leaving the device between calls changes no bit, and gives the memory back."""

import asyncio

import pytest
import torch

from tandem.config.algorithm import PolicyLoss
from tandem.plane.memory import MemoryPlane
from tandem.train.objectives import PolicyObjective
from tandem.train.torch.backend import TorchBackend
from tandem.train.torch.placement import part_of
from tests.train.ranks import on_ranks
from tests.train.small_models import actor_backend, batch_of, lengths_of, packs_of, rows, settings, worker
from tests.train.updates import Case, Seen, update

LENGTHS = lengths_of(6, low=12)
BATCH, COLUMNS = batch_of(LENGTHS), rows(LENGTHS)
TENSOR = ("tensor_parallel_size", 2)
PARALLEL = {
    "shard": (("data_parallel", "shard"),),
    "replicate": (("data_parallel", "replicate"),),
    "tensor": (TENSOR,),
    "sequence": (TENSOR, ("sequence_parallel", True)),
}


def bytes_of(tensors) -> int:
    return sum(part_of(tensor).untyped_storage().nbytes() for tensor in tensors)


def moments(backend: TorchBackend) -> list[torch.Tensor]:
    return [value for state in backend.optimizer._adamw.state.values() for value in state.values()]


def weights_and_gradient(backend: TorchBackend) -> list[torch.Tensor]:
    return [t for p in backend.parameters.values() for t in (p, p.grad) if t is not None]


def stay_and_leave(case: Case) -> tuple[Seen, Seen]:
    """The same update, without and with a park after every call."""
    leaving = Case(**(vars(case) | {"parks": True, "changes": (*case.changes, ("offload", "all"))}))
    return update(case), update(leaving)


def assert_same_bits(stayed: Seen, left: Seen) -> None:
    for name in ("rows", "rows_after", "gradient", "weights"):
        ours, theirs = getattr(stayed, name), getattr(left, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items()), name
    assert stayed.metrics == left.metrics


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_an_update_that_leaves_after_every_call_has_the_same_bits(kind):
    assert_same_bits(*stay_and_leave(Case(kind)))


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL.keys())
def test_so_it_has_on_many_ranks(parallel, tmp_path):
    for stayed, left in on_ranks(2, stay_and_leave, Case(parallel=parallel), folder=tmp_path):
        assert_same_bits(stayed, left)


async def learned(offload: str, look=lambda backend: None) -> TorchBackend:
    """Two updates whose gradients are added in two chunks; the worker parks after every call, and is looked at."""
    plane, backend = MemoryPlane(), actor_backend(config=settings(offload=offload))
    await plane.put(BATCH.keys, COLUMNS)
    actor = worker(backend, plane, PolicyObjective(PolicyLoss()))
    for _ in range(2):
        for part in (range(3), range(3, 6)):
            await actor.infer(BATCH.pick(part), "again")
            await actor.forward_backward(BATCH.pick(part), {})
            await actor.park()
            look(backend)
        await actor.optim_step(90.0)
        await actor.park()
        look(backend)
    await actor.infer(BATCH, "again")
    await actor.close()
    return backend


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_a_gradient_of_several_chunks_survives_the_turns_of_others(offload):
    stayed, left = asyncio.run(learned("none")), asyncio.run(learned(offload))
    assert all(torch.equal(p, left.parameters[name]) for name, p in stayed.parameters.items())


def test_what_the_recipe_names_leaves_the_device():
    def everything(backend):
        assert bytes_of(weights_and_gradient(backend)) == bytes_of(moments(backend)) == 0

    def only_moments(backend):
        assert bytes_of(moments(backend)) == 0
        assert bytes_of(weights_and_gradient(backend)) > 0

    def nothing(backend):
        assert bytes_of(weights_and_gradient(backend)) > 0

    for offload, look in (("all", everything), ("optimizer", only_moments), ("none", nothing)):
        backend = asyncio.run(learned(offload, look))
        assert bytes_of(backend.parameters.values()) > 0, "inference came back"
        assert (bytes_of(moments(backend)) > 0) == (offload == "none"), "moments stay away while it infers"


def test_a_model_that_leaves_is_away_as_soon_as_it_is_built():
    backend = actor_backend(config=settings(offload="all"))
    assert bytes_of(weights_and_gradient(backend)) == 0
    packs = packs_of(LENGTHS, COLUMNS, 256)
    found, wanted = (next(model.infer(packs)).column_P for model in (backend, actor_backend()))
    assert torch.equal(found, wanted)


def test_weights_are_exported_and_saved_from_where_they_are(tmp_path):
    stayed, left = asyncio.run(learned("none")), asyncio.run(learned("all"))
    left.park()
    for (name, ours), (_, theirs) in zip(stayed.export_weights(), left.export_weights(), strict=True):
        assert torch.equal(ours, theirs), name
    for folder, backend in (("stayed", stayed), ("left", left)):
        backend.snapshot(copy=True)(tmp_path / folder)
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (tmp_path / "stayed" / file).read_bytes() == (tmp_path / "left" / file).read_bytes()
    assert bytes_of(weights_and_gradient(left)) == 0, "they did not come back for it"


def test_a_snapshot_is_loaded_into_a_model_that_is_away(tmp_path):
    saved = asyncio.run(learned("none"))
    saved.snapshot(copy=False)(tmp_path)
    away = asyncio.run(learned("all"))
    away.optim_step(0.0)
    away.park()
    away.load(tmp_path)
    packs = packs_of(LENGTHS, COLUMNS, 256)
    for backend in (saved, away):
        backend.forward_backward(packs, lambda output, pack: (output.column_P.sum(), {}))
        backend.optim_step(50.0)
        backend.park()
    assert dict(saved.parameters).keys() == dict(away.parameters).keys()
    for (name, ours), (_, theirs) in zip(saved.export_weights(), away.export_weights(), strict=True):
        assert torch.equal(ours, theirs), name
