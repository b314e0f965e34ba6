"""The varlen kernel on a GPU: right, equal in both passes, and no dependence on neighbours beyond bfloat16."""

import pytest
import torch

from tandem.train.heads import TokenLogprobs
from tandem.train.torch.backend import build_torch_backend
from tandem.types import Mean
from tests.train.small_models import actor_backend, lengths_of, llama, packs_of, rows, settings

pytestmark = pytest.mark.gpu
LENGTHS = lengths_of(24, low=20, high=300)
COLUMNS = {name: column for name, column in rows(LENGTHS).items() if name in ("tokens", "mask")}


def backend_on_gpu(**changes):
    model = llama()
    head = TokenLogprobs(model.get_output_embeddings(), temperature=0.7, chunk_size=512)
    return build_torch_backend(model, head, settings(**changes), total_optimizer_steps=10, device=torch.device("cuda"))


def columns_of(backend, packs):
    return torch.cat([output.column_P for output in backend.infer(packs)])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gpu_logprobs_are_near_the_cpu_and_both_passes_agree_to_the_bit(precision, checkpointing):
    packs = packs_of(LENGTHS, COLUMNS, 1024)
    backend = backend_on_gpu(precision=precision, activation_checkpointing=checkpointing)
    inferred = columns_of(backend, packs)
    trained = []

    def loss(output, pack):
        trained.append(output.column_P.detach().cpu())
        return -output.column_P.sum(), {"loss": Mean(0.0, 1)}

    backend.forward_backward(packs, loss)
    assert torch.equal(torch.cat(trained), inferred)
    error = (inferred - columns_of(actor_backend(temperature=0.7), packs)).abs().mean()
    assert error < {"float32": 1e-5, "bfloat16": 0.05}[precision]
    assert not backend.optim_step(100.0).refused
    assert columns_of(backend, packs).sum() > inferred.sum()
