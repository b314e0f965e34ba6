"""oneDNN's products are products, forward and backward, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tandem import onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
SHAPES = [(64, 128), (128, 384), (384, 128), (96, 64)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_and_its_gradients_are_torchs_own(bias: bool):
    plain, ours = nn.Linear(48, 96, bias=bias), nn.Linear(48, 96, bias=bias)
    ours.load_state_dict(plain.state_dict())
    onednn.use(ours)
    results = []
    for module in (plain, ours):
        x = drawn(1, 80, 48).requires_grad_()
        out = module(x)
        (out * drawn(1, 80, 96, seed=1)).sum().backward()
        results.append([out, x.grad, *(parameter.grad for parameter in module.parameters())])
    for theirs, own in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)


def test_what_needs_no_gradient_gets_none():
    module = nn.Linear(48, 96, bias=False).requires_grad_(False)
    onednn.use(module)
    assert not module(drawn(16, 48)).requires_grad
    x = drawn(16, 48).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@pytest.mark.skipif(not onednn.is_amd_with_avx512(), reason="measured where it is used")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_any_pack_and_with_any_threads(outputs: int, inputs: int):
    weight, x = drawn(outputs, inputs), drawn(2048, inputs, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = onednn.linear(x, weight, None)
        torch.set_num_threads(1)
        for rows in (16, 48, 64, 112, 256, 1008, 2048):
            assert torch.equal(onednn.linear(x[:rows], weight, None), whole[:rows])
    finally:
        torch.set_num_threads(threads)


def test_it_is_taken_in_float32_on_a_cpu_only():
    assert onednn.pays(torch.device("cpu"), torch.float32) == onednn.is_amd_with_avx512()
    assert not onednn.pays(torch.device("cpu"), torch.bfloat16)
    assert not onednn.pays(torch.device("cuda"), torch.float32)
