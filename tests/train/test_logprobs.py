"""Chunked log-probs against the plain ones: values, gradients, entropy."""

import pytest
import torch

from tandem.train.logprobs import token_logprobs


def plain(hidden, weight, tokens, temperature):
    logprobs = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk_size", [16, 48, 1000])
@pytest.mark.parametrize("entropy_weight", [None, 0.5])
def test_chunked_logprobs_and_entropy_equal_plain_log_softmax_with_gradients(temperature, chunk_size, entropy_weight):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (96,))
    pull = torch.randn(96)
    found = []
    for function in (
        lambda h, w: token_logprobs(h, w, tokens, temperature=temperature, chunk_size=chunk_size, dtype=torch.float32),
        lambda h, w: plain(h.double(), w.double(), tokens, temperature),
    ):
        torch.manual_seed(1)
        hidden = torch.randn(96, 24, requires_grad=True)
        weight = torch.randn(50, 24, requires_grad=True)
        logprobs, entropy = function(hidden, weight)
        bonus = 0.0 if entropy_weight is None else entropy_weight * (entropy * pull.flip(0)).sum()
        ((logprobs * pull).sum() + bonus).backward()
        found.append((logprobs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), true.double(), rtol=2e-5, atol=2e-5)


def test_chunks_do_not_change_a_bit_of_logprobs():
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(160, 32), torch.randn(77, 32), torch.randint(0, 77, (160,))
    found = [
        token_logprobs(hidden, weight, tokens, temperature=0.7, chunk_size=c, dtype=torch.float32).logprobs_R
        for c in (16, 64, 160)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_full_logits_never_exist():
    """Of 4096 x 512 logits only one chunk of 64 rows may be alive, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = torch.randn(4096, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    with Watch():
        out = token_logprobs(
            hidden, weight, torch.zeros(4096, dtype=torch.int64), temperature=1.0, chunk_size=64, dtype=torch.float32
        )
        (out.logprobs_R.sum() + out.entropy_R.sum()).backward()
    assert largest == 64 * 512


def test_bfloat16_products_stay_close():
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(64, 32), 0.2 * torch.randn(40, 32), torch.randint(0, 40, (64,))
    exact = plain(hidden, weight, tokens, 1.0)
    near = token_logprobs(hidden, weight, tokens, temperature=1.0, chunk_size=16, dtype=torch.bfloat16)
    torch.testing.assert_close(near.logprobs_R, exact[0], rtol=0, atol=0.05)
    torch.testing.assert_close(near.entropy_R, exact[1], rtol=0, atol=0.05)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"hidden \[R, H\]"):
        token_logprobs(
            torch.ones(4, 3),
            torch.ones(5, 2),
            torch.zeros(4, dtype=torch.int64),
            temperature=1.0,
            chunk_size=16,
            dtype=torch.float32,
        )
