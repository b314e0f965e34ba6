"""The varlen kernel on a slice of a pack: the queries of one rank against the keys of all."""

from __future__ import annotations

import pytest
import torch

from tandem.train.packs import pack_rows
from tandem.train.torch.attention import _varlen, lay_out
from tandem.train.torch.context import Context
from tests.train.small_models import batch_of, rows

pytestmark = pytest.mark.gpu
LENGTHS = [200, 37, 411, 64, 300]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("count", [2, 4])
def test_slices_attend_as_the_whole_does_and_their_gradients_add_up(count, window):
    device = torch.device("cuda")
    pack = pack_rows(batch_of(LENGTHS), rows(LENGTHS), range(len(LENGTHS)), multiple=64)
    generator = torch.Generator(device).manual_seed(0)
    tokens = len(pack.tokens_P)

    def heads(number: int) -> torch.Tensor:
        drawn = torch.randn(tokens, number, 64, device=device, dtype=torch.bfloat16, generator=generator)
        return drawn.requires_grad_()

    query, key, value, grad = heads(4), heads(2), heads(2), heads(4).detach()
    whole = _varlen(query, key, value, lay_out(pack, device, "varlen"), None, window)
    wanted = torch.autograd.grad(whole, (query, key, value), grad)
    layouts = [lay_out(pack, device, "varlen", Context(index, count, None)) for index in range(count)]
    parts = [_varlen(query[layout.own.part], key, value, layout, None, window) for layout in layouts]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0.02, atol=0.02)
    found = torch.autograd.grad(torch.cat(parts), (query, key, value), grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()
