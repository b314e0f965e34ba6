"""pass@k: how likely one of k answers to a prompt is right, estimated from n answers."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate from n answers, c of them right (arXiv:2107.03374 eq. 1): 1 - C(n - c, k) / C(n, k).

    It is the share of all choices of k among the n answers that hold a right one. 1 <= k <= n.
    """
    assert 0 <= c <= n, (c, n)
    assert 1 <= k <= n, (k, n)
    return 1.0 - comb(n - c, k) / comb(n, k)  # whole numbers, so that nothing is lost before the one division


def ks(n: int) -> tuple[int, ...]:
    """The k that n answers are reported at: powers of two above 1, and n."""
    powers = [2**power for power in range(1, n.bit_length())]
    return tuple(sorted({*powers, n} - {1}))
