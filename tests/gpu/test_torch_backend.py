"""The torch backend on a GPU: right and the same bits in both passes, in every mode; one graph for all packs."""

import pytest
import torch
from torch._dynamo.utils import counters

from tandem.train.heads import TokenLogprobs, ValueHead
from tandem.train.logprobs import compiled_arithmetic, token_logprobs
from tandem.train.torch.backend import build_torch_backend
from tandem.types import Mean
from tests.train.small_models import SHAPE, actor_backend, gradients, lengths_of, packs_of, qwen, rows, settings

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
LENGTHS = lengths_of(24, low=20, high=300)
COLUMNS = {name: column for name, column in rows(LENGTHS).items() if name in ("tokens", "mask")}
MODES = [
    {"precision": "float32"},
    {"precision": "float32", "activation_checkpointing": "full"},
    {"compile": False},
    {"compile": False, "activation_checkpointing": "selective"},
    {"compile": False, "activation_checkpointing": "full"},
    {"compile": True},
    {"compile": True, "activation_checkpointing": "selective"},
    {"compile": True, "activation_checkpointing": "full"},
    {"compile": True, "attention": "varlen"},
]
NAMES = ["-".join(map(str, mode.values())) for mode in MODES]


def backend_on_gpu(*, critic: bool = False, steps: int | None = 10, **changes):
    model = qwen()
    head = ValueHead(SHAPE["hidden_size"])
    if critic:
        torch.nn.init.normal_(head.linear.weight, std=0.2)
    else:
        head = TokenLogprobs(model.get_output_embeddings(), temperature=0.7, chunk_size=512)
    config = settings(**{"precision": "bfloat16"} | changes)
    return build_torch_backend(model, head, config, total_optimizer_steps=steps, device=GPU)


def columns_of(backend, packs):
    return torch.cat([output.column_P for output in backend.infer(packs)])


def likelihood(output, pack):
    return -output.column_P.sum(), {"loss": Mean(0.0, 1)}


def distance(found, wanted):
    return max(float((found[name].cpu() - b).norm() / b.norm()) for name, b in wanted.items())


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_both_passes_agree_to_the_bit_and_the_model_learns(mode, critic):
    backend = backend_on_gpu(critic=critic, **mode)
    for budget in (1024, 2048, 400):  # the first lengths are no others'
        packs = packs_of(LENGTHS, COLUMNS, budget)
        inferred = columns_of(backend, packs)
        trained = []

        def loss(output, pack, trained=trained):
            trained.append(output.column_P.detach().cpu())
            return likelihood(output, pack)

        backend.forward_backward(packs, loss)
        assert torch.equal(torch.cat(trained), inferred)
        assert not backend.optim_step(100.0).refused
        assert columns_of(backend, packs).sum() > inferred.sum()


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_logprobs_and_gradients_are_near_those_of_a_cpu_in_float32(mode):
    packs = packs_of(LENGTHS, COLUMNS, 1024)
    found, wanted = backend_on_gpu(**mode), actor_backend(qwen(), temperature=0.7)
    exact = mode.get("precision") == "float32"
    error = (columns_of(found, packs) - columns_of(wanted, packs)).abs().mean()
    assert error < (1e-5 if exact else 0.05)
    for backend in (found, wanted):
        backend.forward_backward(packs, likelihood)
    assert distance(gradients(found), gradients(wanted)) < (1e-4 if exact else 0.1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packs_follow_each_other_without_waiting_for_the_device(compiled):
    backend = backend_on_gpu(compile=compiled)
    packs = packs_of(LENGTHS, COLUMNS, 1024)
    backend.forward_backward(packs, likelihood)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.forward_backward(packs, likelihood)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["auto", "varlen"])
def test_packs_of_all_lengths_share_the_graphs_of_the_first(attention):
    torch._dynamo.reset()
    backend = backend_on_gpu(compile=True, attention=attention)
    graphs = []
    for budget in (1024, 400, 3000, 300):
        packs = packs_of(LENGTHS, COLUMNS, budget)
        columns_of(backend, packs)
        backend.forward_backward(packs, likelihood)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_compiled_log_probs_are_those_of_the_definition(precision, temperature):
    torch.manual_seed(0)
    weight = (torch.randn(5000, 64, device=GPU) * 0.3).to(precision).requires_grad_()
    arithmetic = compiled_arithmetic()
    for count in (32, 112, 528):
        hidden = torch.randn(count, 64, device=GPU).to(precision).requires_grad_()
        tokens = torch.randint(5000, (count,), device=GPU)
        out = token_logprobs(
            *(hidden, weight, tokens), temperature=temperature, chunk_size=64, dtype=precision, arithmetic=arithmetic
        )
        (out.logprobs_R.sum() + 0.3 * out.entropy_R.sum()).backward()
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        l_RV = (exact[0] @ exact[1].t() / temperature).log_softmax(-1)
        wanted = l_RV.gather(1, tokens[:, None]).squeeze(1), -(l_RV.exp() * l_RV).sum(-1)
        (wanted[0].sum() + 0.3 * wanted[1].sum()).backward()
        for ours, theirs in zip(out, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
        near = 1e-4 if precision == torch.float32 else 0.02
        for ours, theirs in zip((hidden, weight), exact, strict=True):
            assert (ours.grad.double() - theirs.grad).norm() < near * theirs.grad.norm()
        weight.grad = None


def test_a_frozen_model_holds_half_the_bytes():
    held = sum(p.nbytes for p in backend_on_gpu(steps=None).parameters.values())
    assert held * 2 == sum(p.nbytes for p in backend_on_gpu().parameters.values())
