"""A GPU's digests are the CPU's: the fused kernel, in chunks, of whole tensors and of blocks."""

import pytest
import torch

from tandem.fingerprint import CHUNK, digest, weigh

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("chunk", [CHUNK + 7, 1 << 28])
def test_digests_agree_with_a_cpu(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.fingerprint.COMPILED_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 5), (CHUNK + 1,), (4099, 2053)):
        tensor = (100 * torch.randn(shape, generator=generator)).abs().to(dtype)
        tensor.view(-1)[0] = 0
        assert digest(tensor.cuda()) == digest(tensor)
        assert digest(-tensor.cuda()) == digest(-tensor)


def test_blocks_of_a_matrix_add_up():
    whole = torch.randn(4099, 4098, generator=torch.Generator().manual_seed(0)).bfloat16()
    left, right = whole[:, :2048].cuda(), whole[:, 2048:].cuda()
    total = weigh(left, whole.shape, (0, 0)) + weigh(right, whole.shape, (0, 2048))
    assert total.item() == weigh(whole, whole.shape, (0, 0)).item()
