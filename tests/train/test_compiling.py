"""Compiled layers: when they are, and that inference has the bits of the training pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tandem.train.torch.compiling import CompiledLayer, will_compile
from tandem.types import Mean
from tests.train.ranks import on_ranks
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


class Heads(nn.Module):
    """A layer with a size of the model as a number, and what transformers gives layers beside hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.head_size = 4

    def forward(self, hidden: Tensor, *, position_ids: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (x[:, :, None] for x in position_embeddings)
        heads = self.linear(hidden).view(*hidden.shape[:2], -1, self.head_size)
        turned = heads * cos + heads.flip(-1) * sin
        return hidden + turned.flatten(2) * position_ids[..., None]


def sizes_that_graphs_take(sharded: bool) -> list[set[str]]:
    """Of each graph that is made for packs of several lengths, with and without a graph for a backward pass."""
    found: list[set[str]] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes = [size for x in shapes for size in (x.shape if isinstance(x, Tensor) else [x])]
        found.append({str(size) for size in sizes if isinstance(size, torch.SymInt)})
        return graph.forward

    torch.manual_seed(0)
    layers = nn.Sequential(Heads(), Heads())
    if sharded:
        for layer in layers:
            fully_shard(layer)
    for layer in layers:
        layer.forward = CompiledLayer(torch.compile(layer.forward, fullgraph=True, backend=look), trained=True)
    for tokens in (12, 5, 12, 4, 31):  # some are sizes of the model too
        embeddings = torch.rand(1, tokens, 4), torch.rand(1, tokens, 4)
        hidden, context = torch.rand(1, tokens, 12), {"position_embeddings": embeddings}
        context["position_ids"] = torch.arange(tokens)[None]  # a view, as packs have it
        passes = []
        for has_graph in (True, False):
            with torch.set_grad_enabled(has_graph):
                x = hidden.clone().requires_grad_(has_graph)
                for layer in layers:
                    x = layer(x, **context)
                passes.append(x)
        assert torch.equal(*passes)
        passes[0].sum().backward()
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_one_graph_takes_packs_of_all_lengths_in_both_kinds_of_passes(tmp_path: Path, sharded: bool):
    """Sizes of the model stay numbers in it, in layers that FSDP manages too: as symbols they cost compile time."""
    (graphs,) = on_ranks(1, sizes_that_graphs_take, sharded, folder=tmp_path)
    assert len(graphs) == 1
    assert len(graphs[0]) == 1, "the number of tokens"


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
