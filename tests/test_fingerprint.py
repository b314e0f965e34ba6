"""Fingerprints: equal weights agree, anything else differs and is named."""

import pytest
import torch

from tandem.fingerprint import digest, fingerprint, first_difference


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
