"""Two GPUs over NCCL are one: log-probs, values, gradients, an update; and their first ratio is 1 too."""

from dataclasses import replace

import pytest
import torch

from tandem.types import Mean
from tests.train.ranks import on_ranks
from tests.train.small_models import lengths_of, packs_of, rows
from tests.train.updates import Case, Seen, backend_of, join, update

pytestmark = pytest.mark.gpu(devices=2)
SHARD = (("data_parallel", "shard"),)
KEPT = (*SHARD, ("keep_gathered", True))
REPLICATE = (("data_parallel", "replicate"),)
TENSOR = (("tensor_parallel_size", 2),)
CASES = {
    "shard": Case(parallel=SHARD, device="cuda"),
    "shard-critic": Case("critic", parallel=SHARD, device="cuda"),
    "shard-kept": Case(parallel=KEPT, device="cuda"),
    "replicate": Case(parallel=REPLICATE, device="cuda"),
    "tensor": Case(parallel=TENSOR, device="cuda"),
    "sequence": Case(parallel=(*TENSOR, ("sequence_parallel", True)), device="cuda"),
}
HALF = (("precision", "bfloat16"),)
IN_BFLOAT16 = {
    "shard": Case(parallel=SHARD, changes=HALF, device="cuda"),
    "shard-critic": Case("critic", parallel=SHARD, changes=HALF, device="cuda"),
    "shard-full": Case(parallel=SHARD, changes=(*HALF, ("activation_checkpointing", "full")), device="cuda"),
    "shard-kept": Case(parallel=KEPT, changes=(*HALF, ("activation_checkpointing", "selective")), device="cuda"),
    "replicate": Case(parallel=REPLICATE, changes=HALF, device="cuda"),
    "tensor": Case(parallel=TENSOR, changes=HALF, device="cuda"),
}


def distance(found: dict, wanted: dict) -> float:
    """The largest |a - b| / |b| of the tensors of two tables, which must have the same names."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - b).norm() / b.norm().clamp(min=1e-12)) for name, b in wanted.items())


def updates() -> dict[str, Seen]:
    return {name: update(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict[str, Seen]]:
    """All cases on one pair of processes: to start them takes longer than they do."""
    return on_ranks(2, updates, folder=tmp_path_factory.mktemp("updates"), timeout_s=150, backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_are_one(name, on_two):
    found, wanted = join([seen[name] for seen in on_two]), update(replace(CASES[name], parallel=()))
    assert distance(found.rows, wanted.rows) < 1e-5
    assert distance(found.gradient, wanted.gradient) < 1e-5
    assert distance(found.weights, wanted.weights) < 1e-4
    assert distance(found.rows_after, wanted.rows_after) < 1e-4


def agreements() -> dict[str, list[bool]]:
    return {name: both_passes_agree(case) for name, case in IN_BFLOAT16.items()}


def both_passes_agree(case: Case) -> list[bool]:
    """Before and after a step, in packs of two sizes."""
    backend, lengths = backend_of(case), lengths_of(12, low=20, high=90)
    columns = {name: column for name, column in rows(lengths).items() if name in ("tokens", "mask")}
    found = []
    for budget in (512, 256):
        packs, trained = packs_of(lengths, columns, budget), []
        inferred = [output.column_P for output in backend.infer(packs)]

        def loss(output, pack, trained=trained):
            trained.append(output.column_P.detach().cpu())
            return output.column_P.sum(), {"loss": Mean(0.0, 1)}

        backend.forward_backward(packs, loss)
        found.append(all(map(torch.equal, trained, inferred)) and not backend.optim_step(50.0).refused)
    return found


def test_both_passes_agree_to_the_bit_on_every_gpu(tmp_path):
    wanted = {name: [True, True] for name in IN_BFLOAT16}
    assert on_ranks(2, agreements, folder=tmp_path, timeout_s=150, backend="nccl") == [wanted] * 2
