"""The sampled law: what tokens are drawn from, with which randomness, and the log-probs of exactly that law.

Shapes: N rows of a decode batch, V vocabulary. Every row is computed from its own logits and numbers only, so a row's
draw does not depend on its neighbours; the fast paths skip operations that change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.types import Sampling

# Odd constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers.
GAMMA, MIX_1, MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
WORD = 1 << 64
UNIFORM_BITS = 52  # so that uniform * total < total in float64: the inverse CDF never runs past the last token


@dataclass(frozen=True)
class Law:
    """The laws of N rows as vectors [N], and which operations any row needs."""

    stream: torch.Tensor  # splitmix64 of the seed
    temperature: torch.Tensor  # 1 where greedy
    greedy: torch.Tensor
    top_k: torch.Tensor  # V where there is none
    top_p: torch.Tensor
    is_tempered: bool
    is_filtered: bool
    is_any_greedy: bool

    @staticmethod
    def of(rows: Sequence[Sampling | None], vocabulary: int, device: torch.device) -> Law:
        """The vectors of these rows. None is a row of padding: drawn, and read by nobody."""
        greedy = [row is not None and row.temperature == 0 for row in rows]
        temperature = [1.0 if row is None or row.temperature == 0 else row.temperature for row in rows]
        # Greedy log-probs are those of the whole vocabulary at temperature 1: filters do not touch greedy rows.
        filtered = [None if row is None or row.temperature == 0 else row for row in rows]
        top_k = [vocabulary if row is None or row.top_k is None else min(row.top_k, vocabulary) for row in filtered]
        top_p = [1.0 if row is None else row.top_p for row in filtered]
        seed = [0 if row is None else as_signed(row.seed) for row in rows]
        return Law(
            stream=splitmix64(torch.tensor(seed, dtype=torch.int64, device=device)),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            greedy=torch.tensor(greedy, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            is_tempered=any(value != 1 for value in temperature),
            is_filtered=any(k < vocabulary for k in top_k) or any(p < 1 for p in top_p),
            is_any_greedy=any(greedy),
        )


def draw(logits_NV: torch.Tensor, law: Law, position_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob under the sampled law (float32). NaN or +inf logits give a NaN log-prob."""
    logprobs_NV = law_logprobs(logits_NV, law)
    token_N = inverse_cdf(logprobs_NV, uniform(law.stream, position_N))
    if law.is_any_greedy:
        token_N = torch.where(law.greedy, logits_NV.argmax(-1), token_N)
    return token_N, logprobs_NV.gather(-1, token_N[:, None]).squeeze(-1)


def law_logprobs(logits_NV: torch.Tensor, law: Law) -> torch.Tensor:
    """float32 log-probs of the sampled law: log softmax(filtered(logits / temperature)); -inf where filtered out."""
    scaled_NV = logits_NV.float()
    if law.is_tempered:
        scaled_NV = scaled_NV / law.temperature[:, None]
    if law.is_filtered:
        scaled_NV = keep_likely(scaled_NV, law.top_k, law.top_p)
    return scaled_NV.log_softmax(-1)


def keep_likely(scaled_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """Top-k, then top-p on what is left, renormalised; the rest becomes -inf.

    top-k keeps every token not below the k-th largest (ties stay); top-p (arXiv:1904.09751) keeps the smallest set of
    most likely tokens whose probability reaches p, equal ones in the order of their ids. The likeliest always stays.
    """
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    kth_N1 = sorted_NV.gather(-1, top_k_N[:, None] - 1)
    sorted_NV = sorted_NV.masked_fill(sorted_NV < kth_N1, -torch.inf)
    probs_NV = sorted_NV.softmax(-1, dtype=torch.float64)
    before_NV = probs_NV.cumsum(-1) - probs_NV
    # p = 1 keeps all by definition: the rounded sum may reach 1 before the last token.
    is_cut_NV = (before_NV >= top_p_N[:, None]) & (top_p_N < 1)[:, None]
    sorted_NV = sorted_NV.masked_fill(is_cut_NV, -torch.inf)
    return torch.empty_like(scaled_NV).scatter_(-1, order_NV, sorted_NV)


def inverse_cdf(logprobs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds uniform * total: never one of probability 0."""
    cumulative_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    target_N1 = (uniform_N * cumulative_NV[:, -1])[:, None]
    token_N = torch.searchsorted(cumulative_NV, target_N1, right=True).squeeze(-1)
    return token_N.clamp_(max=logprobs_NV.shape[-1] - 1)  # only rows of NaN get there; their log-prob says so


def uniform(stream_N: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """Counter-based randomness in [0, 1), float64: a pure function of (seed, position). A stream is a hashed seed."""
    word_N = splitmix64(stream_N + position_N * GAMMA)
    return shift_right(word_N, 64 - UNIFORM_BITS).double() * 2.0**-UNIFORM_BITS


def splitmix64(word_N: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64 on int64 words (products wrap)."""
    word_N = word_N + GAMMA
    word_N = (word_N ^ shift_right(word_N, 30)) * MIX_1
    word_N = (word_N ^ shift_right(word_N, 27)) * MIX_2
    return word_N ^ shift_right(word_N, 31)


def shift_right(word_N: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 arithmetically."""
    return (word_N >> bits) & ((1 << (64 - bits)) - 1)


def as_signed(seed: int) -> int:
    """Any whole number as a signed 64-bit word."""
    word = seed % WORD
    return word - WORD if word >= WORD // 2 else word
