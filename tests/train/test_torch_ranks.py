"""Many ranks are one process: log-probs, values, gradients, an update, metrics, files, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2Model

from tandem.train.backend import Output, Pack
from tandem.train.files import SavedTensors
from tandem.train.torch.mesh import add_up, buckets
from tandem.train.torch.parallel import check_divisible
from tandem.types import Metrics
from tests.train.ranks import on_ranks
from tests.train.small_models import packs_of, rows
from tests.train.updates import MODELS, Case, Seen, backend_of, join, update, updates

TOLERANCE = 1e-5
SHARD = (("data_parallel", "shard"),)
REPLICATE = (("data_parallel", "replicate"),)
TENSOR = (("tensor_parallel_size", 2),)
SEQUENCE = (*TENSOR, ("sequence_parallel", True))
CHECKPOINTED = (("activation_checkpointing", "full"),)
CONTEXT = (("context_parallel_size", 2),)
UNPACKED = (("enabled", False),)
CASES = {
    "shard": Case(parallel=SHARD),
    "shard-critic": Case("critic", parallel=SHARD),
    "shard-untied-checkpointed": Case(model="untied", parallel=SHARD, changes=CHECKPOINTED),
    "shard-kept": Case(parallel=(*SHARD, ("keep_gathered", True))),
    "shard-one-sample": Case(lengths=(23,), parallel=SHARD),
    "replicate": Case(parallel=REPLICATE),
    "replicate-critic": Case("critic", parallel=REPLICATE),
    "shard-unpacked": Case(packing=UNPACKED, parallel=SHARD),
    "replicate-unpacked-critic": Case("critic", packing=UNPACKED, parallel=REPLICATE),
    "tensor-unpacked": Case(packing=UNPACKED, parallel=TENSOR),
    "tensor": Case(parallel=TENSOR),
    "tensor-critic": Case("critic", parallel=TENSOR),
    "tensor-qwen2-untied": Case(model="qwen2", parallel=TENSOR),
    "tensor-qwen3": Case(model="qwen3", parallel=TENSOR),
    "context": Case(parallel=CONTEXT),
    "context-critic": Case("critic", parallel=CONTEXT),
    "context-replicate-checkpointed": Case(parallel=(*CONTEXT, *REPLICATE), changes=CHECKPOINTED),
    "context-one-short-sample": Case(lengths=(9,), model="qwen2", parallel=CONTEXT),
    "context-unpacked": Case(packing=UNPACKED, parallel=CONTEXT),
    "context-window": Case(model="window", parallel=CONTEXT),
    "sequence": Case(parallel=SEQUENCE),
    "sequence-critic": Case("critic", parallel=SEQUENCE),
    "sequence-qwen3": Case(model="qwen3", parallel=SEQUENCE),
}
ON_FOUR = {
    "tensor-x-shard": Case(parallel=TENSOR),
    "tensor-x-shard-critic": Case("critic", parallel=TENSOR),
    "tensor-x-replicate": Case(parallel=(*TENSOR, *REPLICATE)),
    "sequence-x-shard-qwen3": Case(model="qwen3", parallel=SEQUENCE),
    "context-x-shard-critic": Case("critic", parallel=CONTEXT, lengths=(30, 12, 9)),
    "tensor-x-context": Case(parallel=(*TENSOR, *CONTEXT)),
    "sequence-x-context-replicate-qwen3": Case(model="qwen3", parallel=(*SEQUENCE, *CONTEXT, *REPLICATE)),
    "context-of-four": Case(parallel=(("context_parallel_size", 4),)),
    "one-sample-on-four": Case(parallel=SHARD, lengths=(23,)),
    "context-x-shard-bins": Case("bins", parallel=CONTEXT),
    "shard-of-four": Case(parallel=SHARD, lengths=(30, 12, 9)),
}


def alone(case: Case) -> Case:
    return replace(case, parallel=())


def distance(found: dict, wanted: dict) -> float:
    """The largest |a - b| / |b| of the tensors of two tables, which must have the same names. NaN is far."""
    assert found.keys() == wanted.keys()
    distances = [float((found[name] - b).norm() / b.norm().clamp(min=1e-12)) for name, b in wanted.items()]
    return max(distance if distance == distance else float("inf") for distance in distances)


def assert_equal(found: Seen, wanted: Seen) -> None:
    assert distance(found.rows, wanted.rows) < TOLERANCE
    assert distance(found.gradient, wanted.gradient) < TOLERANCE
    assert distance(found.weights, wanted.weights) < TOLERANCE
    assert distance(found.rows_after, wanted.rows_after) < TOLERANCE
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, metric in wanted.metrics.items():
        # The relative error of a ratio is the absolute one of a log-prob, which reaches -12 in this model.
        near = TOLERANCE * 10 if "/ratio_" in name else TOLERANCE
        if "pad_fraction" not in name and "tflops" not in name:
            assert found.metrics[name].value == pytest.approx(metric.value, rel=near, abs=1e-7), name


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> dict[str, Seen]:
    return together(2, CASES, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_four(tmp_path_factory) -> dict[str, Seen]:
    return together(4, ON_FOUR, tmp_path_factory.mktemp("four"))


def together(ranks: int, cases: dict[str, Case], folder: Path) -> dict[str, Seen]:
    """All cases, one after the other on the same ranks: starting them takes longer than an update."""
    seen = on_ranks(ranks, updates, cases, folder=folder, timeout_s=240)
    return {name: join([parts[name] for parts in seen]) for name in cases}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(name, on_two):
    assert_equal(on_two[name], update(alone(CASES[name])))


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize(
    "packing", [UNPACKED, (("make_sequence_length_divisible_by", 56),)], ids=["unpacked", "filled"]
)
def test_packing_changes_nothing(kind, packing):
    assert_equal(update(Case(kind, packing=packing)), update(Case(kind)))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_are_one_process(name, on_four):
    assert_equal(on_four[name], update(alone(ON_FOUR[name])))


def pass_on(case: Case, source: Path, target: Path) -> None:
    """Load and save."""
    backend = backend_of(case)
    backend.load(source)
    backend.snapshot(copy=False)(target)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    saved = {stem: SavedTensors(folder, stem) for stem in ("model", "optimizer")}
    return {f"{stem}/{name}": file.read(name) for stem, file in saved.items() for name in file.names()}


@pytest.mark.parametrize("name", ["shard", "tensor", "shard-critic"])
def test_any_number_of_ranks_reads_what_any_other_wrote(name, tmp_path):
    case, two, one, again = CASES[name], tmp_path / "two", tmp_path / "one", tmp_path / "again"
    on_ranks(2, update, case, None, two, folder=tmp_path / "a")
    files = [f"{stem}-0000{k}-of-00002.safetensors" for stem in ("model", "optimizer") for k in (1, 2)]
    assert sorted(path.name for path in two.iterdir()) == sorted([*files, "optimizer.json"])
    pass_on(alone(case), two, one)
    on_ranks(2, pass_on, case, one, again, folder=tmp_path / "b")
    wanted = contents(two)
    for folder in (one, again):
        found = contents(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert (folder / "optimizer.json").read_text() == (two / "optimizer.json").read_text()
    assert_equal(join(on_ranks(2, update, case, one, folder=tmp_path / "c")), update(alone(case), two))


def spoil_one_rank() -> list[bool]:
    """A loss that is not finite, with a gradient that is, on the last rank alone; then an update of all."""
    backend = backend_of(Case(parallel=SHARD))
    before = {name: tensor.clone() for name, tensor in backend.export_weights()}
    packs, refused = packs_of([20, 30], rows([20, 30]), 64), []
    for more in (float("inf") if backend.shard.index == 1 else 0.0, 0.0):

        def loss(output: Output, pack: Pack, more: float = more) -> tuple[torch.Tensor, Metrics]:
            return output.column_P.sum() + more, {}

        backend.forward_backward(packs, loss)
        refused.append(backend.optim_step(50.0).refused)
        moved = max(float((tensor - before[name]).abs().max()) for name, tensor in backend.export_weights())
        refused.append(moved == 0)
    return refused


def test_one_rank_that_is_not_finite_refuses_the_step_of_all(tmp_path):
    assert on_ranks(2, spoil_one_rank, folder=tmp_path) == [[True, True, False, False]] * 2


def infer_around_a_load(saved: Path) -> list[bool]:
    backend = backend_of(Case(parallel=SHARD))
    packs = packs_of([20, 30], rows([20, 30]), 64)
    found = []
    for _ in range(2):
        found.append([output.column_P for output in backend.infer(packs)])
        backend.load_weights(saved)
    fresh = backend_of(Case(parallel=SHARD))
    fresh.load_weights(saved)
    wanted = [output.column_P for output in fresh.infer(packs)]
    return [all(map(torch.equal, columns, wanted)) for columns in found]


def test_weights_that_were_gathered_to_infer_do_not_outlive_a_load(tmp_path):
    update(Case(), None, tmp_path / "saved")
    assert on_ranks(2, infer_around_a_load, tmp_path / "saved", folder=tmp_path) == [[False, True]] * 2


def bfloat16_log_probs(parallel: tuple[tuple[str, object], ...]) -> tuple[Seen, set[torch.dtype]]:
    case = Case(parallel=parallel, changes=(("precision", "bfloat16"),))
    backend = backend_of(case)
    seen = update(case)
    return seen, {parameter.dtype for parameter in backend.parameters.values()}


@pytest.mark.parametrize("parallel", [SHARD, TENSOR], ids=["shard", "tensor"])
def test_bfloat16_keeps_float32_weights_and_stays_near_one_process(parallel, tmp_path):
    parts = on_ranks(2, bfloat16_log_probs, parallel, folder=tmp_path)
    wanted, _ = bfloat16_log_probs(())
    found = join([seen for seen, _ in parts])
    assert distance(found.rows, wanted.rows) < 0.02
    assert {dtype for _, dtypes in parts for dtype in dtypes} == {torch.float32}
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.weights.values())


def add_up_in_buckets(sizes: list[int], limit: int) -> list[torch.Tensor]:
    tensors = [torch.arange(size, dtype=torch.float32).view(-1, 2) + dist.get_rank() for size in sizes]
    add_up(tensors, dist.group.WORLD, limit)
    return tensors


def test_gradients_of_replicas_are_added_in_buckets(tmp_path):
    sizes, limit = [4, 6, 8, 2, 40, 2, 8], 10
    cut = buckets([torch.zeros(size) for size in sizes], limit)
    assert [[len(tensor) for tensor in bucket] for bucket in cut] == [[4, 6], [8, 2], [40], [2, 8]]
    for found in on_ranks(2, add_up_in_buckets, sizes, limit, folder=tmp_path):
        assert all(torch.equal(x.flatten(), 2.0 * torch.arange(n) + 1) for n, x in zip(sizes, found, strict=True))


def test_a_layout_of_replicas_without_any_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data_parallel=shard .*tensor_parallel_size=1, 1 in all\): set it to null"):
        backend_of(Case(parallel=SHARD))
    with pytest.raises(RuntimeError, match=r"data_parallel=replicate .*tensor_parallel_size=2, 2 in all"):
        on_ranks(2, backend_of, Case(parallel=(*TENSOR, *REPLICATE)), folder=tmp_path)


def test_one_rank_gathers_nothing_that_could_be_kept():
    with pytest.raises(ValueError, match=r"keep_gathered=true .* each part is on one rank .* set it to false"):
        backend_of(Case(parallel=(("keep_gathered", True),)))


def test_the_first_error_of_a_rank_ends_all_and_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size=3 x .* does not divide the number of ranks, 2"):
        on_ranks(2, backend_of, Case(parallel=(("tensor_parallel_size", 3),)), folder=tmp_path)


def test_sizes_that_cannot_be_cut_are_refused():
    backbone = MODELS["llama"]().model
    with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide the model's num_key_value_heads, 2"):
        check_divisible(backbone, 4)
    with pytest.raises(ValueError, match="knows the layers of llama, qwen2, qwen3; this model is gpt2"):
        check_divisible(GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)), 2)
