"""What leaves a GPU frees its memory there, and comes back with the same bits."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.train.heads import TokenLogprobs
from tandem.train.torch.backend import TorchBackend, build_torch_backend
from tests.train.small_models import SHAPE, lengths_of, packs_of, rows, settings

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LENGTHS = lengths_of(16, low=20, high=300)
COLUMNS = {name: column for name, column in rows(LENGTHS).items() if name in ("tokens", "mask")}
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 32768}
SLACK = 72 * 2**20  # cuBLAS's workspaces, 32 MiB on Hopper for the forward and for the backward thread, and buffers


def built(offload: str) -> TorchBackend:
    """About 130 million weights: 0.5 GB, and as much for the gradient and for each moment."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | SIZES, tie_word_embeddings=True))
    head = TokenLogprobs(model.get_output_embeddings(), temperature=1.0, chunk_size=512)
    config = settings(precision="bfloat16", offload=offload)
    return build_torch_backend(model, head, config, total_optimizer_steps=10, device=GPU)


def learn(backend: TorchBackend) -> None:
    backend.forward_backward(packs_of(LENGTHS, COLUMNS, 1024), lambda output, pack: (-output.column_P.sum(), {}))


def state(backend: TorchBackend) -> list[torch.Tensor]:
    optimizer = backend.optimizer._adamw.state.values()
    tensors = [t for p in backend.parameters.values() for t in (p.detach(), p.grad)]
    return [tensor.cpu().clone() for tensor in [*tensors, *(v for s in optimizer for v in s.values())]]


@pytest.fixture
def before() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_everything_leaves_and_comes_back_with_its_bits(before):
    backend = built("all")
    size = 4 * sum(parameter.numel() for parameter in backend.parameters.values())
    assert torch.cuda.memory_allocated() - before < SLACK, "away as soon as it is built"
    learn(backend)
    backend.optim_step(1000.0)
    learn(backend)  # a gradient that must survive
    wanted = state(backend)
    there = torch.cuda.memory_allocated() - before
    assert there > 4 * size - SLACK
    reserved = torch.cuda.memory_reserved()
    backend.park()
    assert torch.cuda.memory_allocated() - before < SLACK
    assert reserved - torch.cuda.memory_reserved() > 3 * size, "other processes can have it"
    backend._away.give_back()
    back = torch.cuda.memory_allocated() - before
    assert abs(back - 2 * size - size // 2) < SLACK, "weights, their copy and the gradient: moments only for the step"
    backend.optimizer._away.give_back()
    assert all(map(torch.equal, state(backend), wanted))
    assert not backend.optim_step(1000.0).refused


def test_moments_stay_away_while_a_model_infers(before):
    backend = built("optimizer")
    size = 4 * sum(parameter.numel() for parameter in backend.parameters.values())
    learn(backend)
    backend.optim_step(1000.0)
    assert torch.cuda.memory_allocated() - before > 3 * size - SLACK
    list(backend.infer(packs_of(LENGTHS, COLUMNS, 1024)))
    assert torch.cuda.memory_allocated() - before < size + size // 2 + SLACK, "weights and their copy"
    learn(backend)
    assert not backend.optim_step(1000.0).refused
