"""Long sequences of a pack through cuDNN: result and gradients of plain attention, whatever lies beside them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tandem.train.torch.long_attention import LONG, attend_in_pack, is_available

pytestmark = pytest.mark.gpu
HEADS, KEY_HEADS, SIZE = 4, 2, 128
PACKS = [[LONG], [LONG + 300, 50, 700], [16, 33], [100, 2 * LONG - 1, 8, LONG + 512, 5]]


def drawn(lengths: list[int]) -> list[Tensor]:
    """Query, key, value and a gradient of the result."""
    draw = torch.Generator("cuda").manual_seed(0)
    shape = {"device": "cuda", "dtype": torch.bfloat16, "generator": draw}
    return [torch.randn(sum(lengths), heads, SIZE, **shape) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def ours(lengths: list[int], query: Tensor, key: Tensor, value: Tensor, attend=attend_in_pack) -> Tensor:
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return attend(query, key, value, borders, borders.cuda(), SIZE**-0.5)[0]


def plain(lengths: list[int], *inputs: Tensor) -> Tensor:
    """Sequence by sequence in float32."""
    parts = []
    for part in zip(*(x.float().split(lengths) for x in inputs), strict=True):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            rows = [x.transpose(0, 1)[None] for x in part]
            rows[1:] = [x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in rows[1:]]
            parts.append(scaled_dot_product_attention(*rows, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def needs_cudnn():
    if not is_available(torch.device("cuda")):
        pytest.skip("needs cuDNN's attention: a GPU of compute capability 9.0 or more")


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_results_and_gradients_are_those_of_plain_attention(lengths: list[int], compiled: bool):
    *inputs, grad = drawn(lengths)
    attend = torch.compile(attend_in_pack, dynamic=True, fullgraph=True) if compiled else attend_in_pack
    inputs = [x.requires_grad_() for x in inputs]
    found = ours(lengths, *inputs, attend=attend)
    wanted = plain(lengths, *inputs)
    pairs = [(found, wanted)]
    pairs += zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True)
    for mine, right in pairs:
        for a, b in zip(mine.float().split(lengths), right.float().split(lengths), strict=True):
            assert (a - b).norm() < 0.01 * b.norm()


def test_a_sequence_has_the_same_bits_in_any_pack():
    lengths = PACKS[-1]
    *inputs, _ = drawn(lengths)
    whole = ours(lengths, *inputs).split(lengths)
    for place, parts in enumerate(zip(*(x.split(lengths) for x in inputs), strict=True)):
        assert torch.equal(ours([lengths[place]], *parts), whole[place])


def test_the_operator_is_what_it_says_to_compilers():
    lengths = PACKS[1]
    *inputs, _ = drawn(lengths)
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    arguments = [*(x.requires_grad_() for x in inputs), borders, borders.cuda(), SIZE**-0.5]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(attend_in_pack, arguments, test_utils=checks, rtol=0.02, atol=0.02)
