"""Megatron-Core is the torch backend: log-probs, values, gradients, three updates, metrics, files, on one rank and two.

Runs where the extra is installed, on CPUs, through tests/megatron_shim.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron_shim import INSTALLED, WANTED
from tests.train.ranks import on_ranks
from tests.train.small_models import packs_of, rows
from tests.train.test_torch_ranks import assert_equal, contents, distance, pass_on
from tests.train.updates import MODELS, Case, Seen, backend_of, join, update

pytestmark = pytest.mark.skipif(not INSTALLED, reason=WANTED)
ONE = ()
TENSOR = (("tensor_model_parallel_size", 2),)
PIPELINE = (("pipeline_model_parallel_size", 2),)
CONTEXT = (("context_parallel_size", 2),)
SEQUENCE = (*TENSOR, ("sequence_parallel", True))
LAYOUTS = {"data": ONE, "tensor": TENSOR, "pipeline": PIPELINE, "context": CONTEXT, "sequence": SEQUENCE}


def case(layout: tuple[tuple[str, object], ...], kind: str = "actor", model: str = "llama", **more: object) -> Case:
    return Case(kind, model, megatron=layout, **more)


CHECKPOINTED = (("activation_checkpointing", "full"),)
PARKED = {"parks": True, "changes": (("offload", "all"),)}
ALONE = {
    **{f"{kind}-{model}": case(ONE, kind, model) for kind in ("actor", "critic") for model in MODELS},
    "actor-unpacked": case(ONE, budget=1),
    "actor-checkpointed": case(ONE, changes=CHECKPOINTED),
    "actor-parked": case(ONE, **PARKED),
    "critic-parked": case(ONE, "critic", parks=True, changes=(("offload", "optimizer"),)),
}
ON_TWO = {
    **{
        f"{name}-{kind}-{model}": case(layout, kind, model)
        for name, layout in LAYOUTS.items()
        for kind in ("actor", "critic")
        for model in ("llama", "qwen2")
    },
    **{
        f"{name}-{kind}-unpacked": case(layout, kind, budget=1)
        for name, layout in LAYOUTS.items()
        for kind in ("actor", "critic")
    },
    "sequence-bins": case(SEQUENCE, "bins"),
    "context-bins": case(CONTEXT, "bins"),
    "tensor-qwen3": case(TENSOR, model="qwen3"),
    "sequence-qwen3": case(SEQUENCE, model="qwen3"),
    "pipeline-untied": case(PIPELINE, model="untied"),
    "context-one-sample": case(CONTEXT, lengths=(23,)),
    "sequence-checkpointed": case(SEQUENCE, changes=CHECKPOINTED),
    "data-parked": case(ONE, **PARKED),
    "pipeline-parked": case(PIPELINE, "critic", **PARKED),
    "context-of-24": case(CONTEXT, packing=(("make_sequence_length_divisible_by", 3),)),
    "tensor-one-a-micro-batch": case(TENSOR, packing=(("enabled", False),)),
    "pipeline-checkpointed": case(PIPELINE, "critic", changes=CHECKPOINTED),
}
ON_FOUR = {
    "tensor-x-pipeline": case((*TENSOR, *PIPELINE)),
    "sequence-x-context-critic": case((*SEQUENCE, *CONTEXT), "critic"),
    "pipeline-x-context-qwen2": case((*PIPELINE, *CONTEXT), model="qwen2"),
    "sequence-x-data-qwen3": case(SEQUENCE, model="qwen3"),
}


def on_torch(case: Case) -> Case:
    return replace(case, megatron=None)


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE.keys())
def test_one_rank_is_the_torch_backend(case: Case, tmp_path: Path):
    assert_equal(join(on_ranks(1, update, case, folder=tmp_path)), update(on_torch(case)))


@pytest.mark.parametrize("case", ON_TWO.values(), ids=ON_TWO.keys())
def test_two_ranks_are_the_torch_backend(case: Case, tmp_path: Path):
    assert_equal(join(on_ranks(2, update, case, folder=tmp_path)), update(on_torch(case)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_FOUR.values(), ids=ON_FOUR.keys())
def test_four_ranks_are_the_torch_backend(case: Case, tmp_path: Path):
    assert_equal(join(on_ranks(4, update, case, folder=tmp_path)), update(on_torch(case)))


@pytest.mark.parametrize("name", ["tensor-actor-llama", "pipeline-actor-llama", "data-critic-qwen2"])
def test_any_layout_and_either_backend_read_what_the_other_wrote(name: str, tmp_path: Path):
    case, two, one, again = ON_TWO[name], tmp_path / "two", tmp_path / "one", tmp_path / "again"
    on_ranks(2, update, case, None, two, folder=tmp_path / "a")
    pass_on(on_torch(case), two, one)
    on_ranks(2, pass_on, case, one, again, folder=tmp_path / "b")
    wanted = contents(two)
    for folder in (one, again):
        found = contents(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted)
        assert (folder / "optimizer.json").read_text() == (two / "optimizer.json").read_text()
    other = replace(case, megatron=LAYOUTS["sequence" if name.startswith("pipeline") else "pipeline"])
    continued = update(on_torch(case), two)
    assert_equal(join(on_ranks(2, update, case, one, folder=tmp_path / "c")), continued)
    assert_equal(join(on_ranks(2, update, other, two, folder=tmp_path / "d")), continued)


def uneven(first: int | None, last: int | None) -> Case:
    sizes = (("num_layers_in_first_pipeline_stage", first), ("num_layers_in_last_pipeline_stage", last))
    return case((*PIPELINE, *(size for size in sizes if size[1])), model="deep")


@pytest.mark.parametrize(("first", "last"), [(1, None), (None, 1), (1, 2)])
def test_first_and_last_stage_may_be_of_other_sizes(first: int | None, last: int | None, tmp_path: Path):
    case = uneven(first, last)
    assert_equal(join(on_ranks(2, update, case, folder=tmp_path)), update(on_torch(case)))


def test_layers_that_cannot_be_shared_out_are_refused(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"pipeline_model_parallel_size=2 .* cannot share out the model's 3 layers"):
        on_ranks(2, backend_of, uneven(None, None), folder=tmp_path)


def test_ranks_that_the_sizes_do_not_divide_are_refused(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"tensor_model_parallel_size=2 .* does not divide the number of ranks, 1"):
        on_ranks(1, backend_of, case(TENSOR), folder=tmp_path)


def bfloat16_update(fp32: bool) -> tuple[Seen, set[torch.dtype]]:
    case = Case(megatron=(("grad_reduce_in_fp32", fp32),), changes=(("precision", "bfloat16"),))
    return update(case), {buffer.grad_data.dtype for buffer in backend_of(case)._model.buffers}


@pytest.mark.parametrize("fp32", [True, False])
def test_a_bfloat16_gradient_is_added_up_in_float32_unless_asked(fp32: bool, tmp_path: Path):
    parts = on_ranks(2, bfloat16_update, fp32, folder=tmp_path)
    assert {dtype for _, dtypes in parts for dtype in dtypes} == {torch.float32 if fp32 else torch.bfloat16}
    found, wanted = join([seen for seen, _ in parts]), update(Case(changes=(("precision", "bfloat16"),)))
    assert distance(found.rows, wanted.rows) < 0.03
    assert distance(found.rows_after, wanted.rows_after) < 0.03
    assert found.metrics["actor/grad_norm"].value == pytest.approx(wanted.metrics["actor/grad_norm"].value, rel=0.05)


def moments_there(offload: str) -> list[bool]:
    """Whether moments and float32 weights have bytes: after a step, while it infers, after the next step."""
    backend = backend_of(Case(megatron=ONE, changes=(("precision", "bfloat16"), ("offload", offload))))
    packs = packs_of([12, 31], rows([12, 31]), 64)
    found = []

    def look() -> None:
        states = backend.optimizer._adamw.state.items()
        tensors = [tensor for master, state in states for tensor in (master, *state.values())]
        found.append(all(tensor.untyped_storage().nbytes() for tensor in tensors))

    for _ in range(2):
        backend.forward_backward(packs, lambda output, pack: (output.column_P.sum(), {}))
        backend.optim_step(50.0)
        look()
        if len(found) == 1:
            list(backend.infer(packs))
            look()
    return found


def read_while_parked(precision: str, folder: str) -> tuple[bool, bool]:
    """Whether export and snapshot of a parked model give what they give of one that is not; and leave it parked."""
    found = []
    for offload in ("none", "all"):
        backend = backend_of(Case(megatron=ONE, changes=(("precision", precision), ("offload", offload))))
        packs = packs_of([12, 31], rows([12, 31]), 64)
        backend.forward_backward(packs, lambda output, pack: (output.column_P.sum(), {}))
        backend.optim_step(50.0)
        backend.park()
        held = sum(p.untyped_storage().nbytes() for p in backend.parameters.values())
        weights = {name: tensor.clone() for name, tensor in backend.export_weights()}
        backend.snapshot(copy=False)(Path(folder) / f"{precision}-{offload}")
        after = sum(p.untyped_storage().nbytes() for p in backend.parameters.values())
        saved = {p.name: p.read_bytes() for p in (Path(folder) / f"{precision}-{offload}").iterdir()}
        found.append((weights, saved, held, after))
    (weights, saved, _, _), (parked, parked_saved, held, after) = found
    same = all(torch.equal(weights[name], parked[name]) for name in weights) and saved == parked_saved
    return same, held == after == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_parked_model_is_read_where_it_is(precision: str, tmp_path: Path):
    (found,) = on_ranks(1, read_while_parked, precision, str(tmp_path), folder=tmp_path)
    assert found == (True, True)


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_moments_and_float32_weights_stay_away_while_a_model_infers(offload: str, tmp_path: Path):
    (found,) = on_ranks(1, moments_there, offload, folder=tmp_path)
    assert found == [True, offload == "none", True]
