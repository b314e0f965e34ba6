"""How long responses are: three laws of one mean, drawn from a seed and a name: order and timing do not matter."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

LAWS = ("fixed", "lognormal", "heavy")
SPREAD = 0.7  # lognormal: the deviation of the logarithm; one response in a hundred is 4 times as long as the mean
TAIL = 1.5  # heavy: Pareto's exponent; the mean is finite, the variance without `longest` is not
HALVINGS = 60  # of the search for a law's scale: a float's precision
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """`law` with this mean once every length is cut at `longest`, as max_new_tokens cuts responses."""

    law: str
    mean: float
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ValueError(f"a length law {self.law!r} is not known: give {', '.join(LAWS)}")
        if not 1 <= self.mean <= self.longest:
            raise ValueError(f"a mean length of {self.mean:g} is not between 1 and the longest, {self.longest} tokens")

    def draw(self) -> Callable[..., int]:
        """A function (name, ...) -> tokens: always the same for the same name."""
        inverse = self._inverse()

        def length(*name: int) -> int:
            return max(1, min(self.longest, round(inverse(uniform(self.seed, *name)))))

        return length

    def _inverse(self) -> Callable[[float], float]:
        """Probability -> length, before it is cut and rounded."""
        if self.law == "fixed" or self.mean > 0.99 * self.longest:
            return lambda p: self.mean
        if self.law == "lognormal":
            median = scale_for(self.mean, lambda m: mean_of_cut_lognormal(m, self.longest), 10 * self.longest)
            return lambda p: median * math.exp(SPREAD * NORMAL.inv_cdf(p))
        shortest = scale_for(self.mean, lambda m: mean_of_cut_pareto(m, self.longest), self.longest)
        return lambda p: shortest * (1 - p) ** (-1 / TAIL)


def uniform(*name: int) -> float:
    """A number strictly between 0 and 1 that depends on nothing but the name."""
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64 * (1 - 2**-50)


def scale_for(mean: float, mean_of: Callable[[float], float], high: float) -> float:
    """The scale whose law has this mean; `mean_of` grows with the scale."""
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    return high


def mean_of_cut_lognormal(median: float, longest: int) -> float:
    """E[min(X, longest)] = m exp(s^2/2) Phi(z - s) + longest (1 - Phi(z)), z = ln(longest / m) / s."""
    z = math.log(longest / median) / SPREAD
    return median * math.exp(SPREAD**2 / 2) * NORMAL.cdf(z - SPREAD) + longest * (1 - NORMAL.cdf(z))


def mean_of_cut_pareto(shortest: float, longest: int) -> float:
    """E[min(X, longest)] = (a x - x^a longest^(1-a)) / (a - 1), x the shortest length, a the exponent."""
    return (TAIL * shortest - shortest**TAIL * longest ** (1 - TAIL)) / (TAIL - 1)
