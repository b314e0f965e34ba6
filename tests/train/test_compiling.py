"""Compiled layers: when they are, and that inference has the bits of the training pass."""

import pytest
import torch

from tandem.train.torch.compiling import CompiledLayer, will_compile
from tandem.types import Mean
from tests.train.small_models import CPU, actor_backend, gradients, lengths_of, packs_of, rows, settings


def test_layers_are_compiled_on_a_gpu_unless_ranks_share_them():
    gpu, shared = torch.device("cuda"), {"tensor_parallel_size": 2}
    assert will_compile(settings(), gpu, "varlen")
    assert not will_compile(settings(), gpu, "sdpa")
    assert not will_compile(settings(), CPU, "sdpa")
    assert not will_compile(settings(compile=False), gpu, "varlen")
    assert not will_compile(settings(parallel=shared), gpu, "varlen")
    assert not will_compile(settings(parallel={"context_parallel_size": 2}), gpu, "varlen")
    with pytest.raises(ValueError, match="set compile to auto"):
        will_compile(settings(compile=True, parallel=shared), gpu, "varlen")


def test_a_pass_without_a_graph_runs_the_one_with_a_graph_and_keeps_nothing():
    seen = []

    def run(hidden: torch.Tensor, *, factor: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), hidden.requires_grad))
        return hidden * factor

    hidden, factor = torch.ones(1, 4, 2), torch.full((2,), 3.0, requires_grad=True)
    for trained in (True, False):
        with torch.no_grad():
            assert not CompiledLayer(run, trained=trained)(hidden, factor=factor).requires_grad
    assert CompiledLayer(run, trained=True)(hidden, factor=factor).requires_grad
    assert seen == [(True, True), (False, False), (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_layers_learn_what_plain_ones_do_in_packs_of_all_lengths(mode):
    lengths = lengths_of(8)
    columns = {name: column for name, column in rows(lengths).items() if name in ("tokens", "mask")}
    plain = actor_backend()
    compiled = actor_backend(config=settings(compile=True, activation_checkpointing=mode))
    for budget in (256, 100, 48):
        packs, trained = packs_of(lengths, columns, budget), []

        def loss(output, pack, trained=trained):
            trained.append(output.column_P.detach().clone())
            return -output.column_P.sum(), {"loss": Mean(0.0, 1)}

        inferred = [output.column_P for output in compiled.infer(packs)]
        compiled.forward_backward(packs, loss)
        assert all(map(torch.equal, trained, inferred))
        plain.forward_backward(packs, loss)
    found, wanted = gradients(compiled), gradients(plain)
    assert found.keys() == wanted.keys()
    assert all((found[name] - b).norm() < 1e-5 * b.norm() for name, b in wanted.items())
