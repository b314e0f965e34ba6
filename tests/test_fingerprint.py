"""Fingerprints: equal weights agree, anything else differs and is named."""

import pytest
import torch

from tandem.fingerprint import describe, digest, fingerprint, first_difference, weigh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_equal_bytes_have_equal_digests(dtype: torch.dtype):
    weight = torch.arange(24).reshape(4, 6).to(dtype)
    assert digest(weight) == digest(weight.clone())
    assert digest(weight.t().contiguous().t()) == digest(weight)


def test_one_bit_two_swapped_elements_shape_and_dtype_all_matter():
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    swapped = weight.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    flipped = weight.clone()
    flipped.view(torch.int32)[3, 3] ^= 1
    others = [swapped, flipped, weight.reshape(4, 16), weight.to(torch.bfloat16), torch.zeros(8, 8)]
    assert len({digest(w) for w in [weight, *others]}) == 6


def test_zeros_of_different_length_differ_beyond_a_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.fingerprint.CHUNK", 5)
    weight = torch.arange(23, dtype=torch.float32)
    in_chunks = digest(weight)
    monkeypatch.undo()
    assert in_chunks == digest(weight)


def test_the_first_difference_is_named():
    ours = fingerprint([("a", torch.ones(2)), ("b", torch.ones(3))])
    assert first_difference(ours, ours) is None
    assert "a is" in (first_difference(ours, fingerprint([("a", torch.zeros(2)), ("b", torch.ones(3))])) or "")
    assert "b is missing" in (first_difference(ours, {"a": ours["a"]}) or "")
    assert "c exists only" in (first_difference(ours, {**ours, "c": "x"}) or "")


@pytest.mark.parametrize("chunk", [5, 1 << 22])
@pytest.mark.parametrize("shape", [(6, 10), (12,), (4, 3, 5)])
def test_what_the_blocks_of_a_tensor_weigh_adds_up(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], chunk: int):
    monkeypatch.setattr("tandem.fingerprint.CHUNK", chunk)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    cuts = [(axis, size // 2) for axis, size in enumerate(shape[:2]) if axis == 0 or len(shape) == 2]
    for axis, cut in cuts:
        first, rest = whole.narrow(axis, 0, cut), whole.narrow(axis, cut, shape[axis] - cut)
        start = [0] * len(shape)
        total = int(weigh(first, shape, start))
        start[axis] = cut
        assert describe(whole.dtype, shape, total + int(weigh(rest, shape, start))) == digest(whole)
        start[axis] = 0
        assert describe(whole.dtype, shape, total + int(weigh(rest, shape, start))) != digest(whole), "a place matters"


def test_the_two_zeros_are_one_number():
    assert digest(torch.tensor([0.0, 1.0])) == digest(torch.tensor([-0.0, 1.0]))
    assert digest(torch.tensor([-1.0, 1.0])) != digest(torch.tensor([1.0, 1.0]))
