"""The sampled law against its slow definition, and the randomness against published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.rollout.law import Law, draw, inverse_cdf, keep_likely, law_logprobs, splitmix64, uniform
from tandem.types import Sampling

V = 37
CPU = torch.device("cpu")


def sampling(temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling(8, temperature, seed, (), top_k, top_p)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def slow_law(row: list[float], law: Sampling) -> list[float]:
    """Log-probs in float64, one token at a time; the rank of equal logits is the order of their ids."""
    if law.temperature == 0:
        law = sampling()
    scaled = [value / law.temperature for value in row]
    ranked = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    kth = scaled[ranked[min(law.top_k or V, V) - 1]]
    kept = [i for i in ranked if scaled[i] >= kth]
    total = sum(math.exp(scaled[i]) for i in kept)
    mass, nucleus = 0.0, []
    for i in kept:
        if mass >= law.top_p and law.top_p < 1:
            break
        nucleus.append(i)
        mass += math.exp(scaled[i]) / total
    log_total = math.log(sum(math.exp(scaled[i]) for i in nucleus))
    return [scaled[i] - log_total if i in nucleus else -math.inf for i in range(len(row))]


def test_each_row_has_its_own_law():
    laws = [
        sampling(),
        sampling(0.7),
        sampling(1.4, top_k=5),
        sampling(top_p=0.6),
        sampling(0.8, top_k=9, top_p=0.7),
        sampling(0.0, top_k=2, top_p=0.1),
        sampling(top_k=1),
        sampling(top_p=1e-9),
    ]
    logits_NV = logits(len(laws))
    wanted = torch.tensor([slow_law(row, law) for row, law in zip(logits_NV.tolist(), laws, strict=True)])
    torch.testing.assert_close(law_logprobs(logits_NV, Law.of(laws, V, CPU)), wanted, atol=2e-6, rtol=1e-6)


def test_equal_logits_at_the_kth_place_all_stay():
    tied = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = keep_likely(tied, torch.tensor([2]), torch.tensor([1.0]))
    assert kept.isfinite().tolist() == [[False, True, True, True, False]]


def test_equal_logits_in_a_nucleus_stay_in_the_order_of_their_ids():
    flat = torch.zeros(1, 8)
    kept = keep_likely(flat, torch.tensor([8]), torch.tensor([0.5]))
    assert kept.isfinite().tolist() == [[True] * 4 + [False] * 4]


def test_neighbours_change_no_bit():
    logits_NV = logits(16)
    plain = law_logprobs(logits_NV, Law.of([sampling()] * 16, V, CPU))
    mixed = law_logprobs(logits_NV, Law.of([sampling(), sampling(0.5, 3, 0.5)] * 8, V, CPU))
    assert torch.equal(plain[::2], mixed[::2])


def test_greedy_takes_the_largest_logit_with_its_logprob_at_temperature_1():
    logits_NV = logits(16)
    tokens, logprobs = draw(logits_NV, Law.of([sampling(0.0), sampling()] * 8, V, CPU), torch.arange(16))
    assert torch.equal(tokens[::2], logits_NV.argmax(-1)[::2])
    assert torch.equal(logprobs, logits_NV.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1))


def test_drawn_tokens_follow_the_law():
    rows = 40_000
    laws = [sampling(0.9, top_k=10, top_p=0.9)] * rows
    logits_NV = logits(1).expand(rows, V)
    tokens, _ = draw(logits_NV, Law.of(laws, V, CPU), torch.arange(rows))
    wanted = torch.tensor(slow_law(logits_NV[0].tolist(), laws[0])).exp()
    counts = torch.bincount(tokens, minlength=V)
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_square = ((counts - rows * wanted)[kept] ** 2 / (rows * wanted[kept])).sum()
    assert chi_square < 30  # at most 9 degrees of freedom: p < 0.001


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-52])
def test_the_ends_of_the_inverse_cdf_have_probability(value: float):
    logprobs = torch.tensor([[-math.inf, math.log(0.3), math.log(0.7), -math.inf]])
    token = inverse_cdf(logprobs, torch.tensor([value], dtype=torch.float64))
    assert token.item() == (1 if value == 0 else 2)


def test_nan_logits_give_a_nan_logprob_and_a_token_of_the_vocabulary():
    for broken in (math.nan, math.inf):
        for law in (sampling(), sampling(0.0), sampling(0.7, 5, 0.5)):
            logits_NV = logits(2)
            logits_NV[0, 3] = broken
            tokens, logprobs = draw(logits_NV, Law.of([law, law], V, CPU), torch.arange(2))
            assert logprobs[0].isnan()
            assert logprobs[1].isfinite()
            assert 0 <= tokens[0] < V


def test_splitmix64_gives_the_published_words():
    """First outputs of the reference generator (Vigna's splitmix64.c) for the states 0 and 1234567."""
    words = splitmix64(torch.tensor([0, 1234567])).tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_uniforms_are_uniform_and_a_function_of_seed_and_position():
    streams = splitmix64(torch.arange(400)).repeat_interleave(100)
    positions = torch.arange(100).repeat(400)
    numbers = uniform(streams, positions)
    assert numbers.dtype == torch.float64
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers.float(), 50, 0, 1)
    assert ((counts - 800) ** 2 / 800).sum() < 85  # 49 degrees of freedom: p = 0.001
    grid = numbers.view(400, 100) - 0.5
    assert (grid[1:] * grid[:-1]).mean().abs() < 0.002  # neighbours in seed
    assert (grid[:, 1:] * grid[:, :-1]).mean().abs() < 0.002  # neighbours in position
    assert torch.equal(numbers[1234:1235], uniform(streams[1234:1235], positions[1234:1235]))
