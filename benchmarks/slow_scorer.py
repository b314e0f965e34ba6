"""A scorer that answers late, as a remote judge does: it waits and computes nothing. For benchmarks/async_speedup.py.

env.verifier={name: python, target: "benchmarks.slow_scorer:score"}, with SLOW_SCORER=LAW:SECONDS[:SPREAD] in the
environment: `fixed:0.5`, or `lognormal:0.5:0.5` (mean, deviation of the logarithm). How long one answer takes depends
on nothing but its texts, so every side of a comparison waits alike for the same response.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

from tandem.envs.numerals import SENTENCE_MARKER, number_after_last, reference_number

LAW = "SLOW_SCORER"
WANTED = "wanted fixed:SECONDS or lognormal:MEAN_SECONDS:SPREAD, such as lognormal:0.5:0.5"
NORMAL = NormalDist()


async def score(question: str, answer: str, response: str) -> float:
    """1 if the number after the last `The answer is` is the reference's, else 0; told after a wait."""
    await asyncio.sleep(seconds_of(os.environ.get(LAW, ""))(question, response))
    number = number_after_last(SENTENCE_MARKER, response)
    return float(number is not None and number == reference_number(answer))


@cache
def seconds_of(law: str) -> Callable[..., float]:
    """The wait as a function of texts. ValueError for a law that cannot be read."""
    name, *numbers = law.split(":")
    try:
        mean, spread = float(numbers[0]), float((numbers[1:] or ["0"])[0])
    except (ValueError, IndexError):
        raise ValueError(f"{LAW}={law!r}: {WANTED}") from None
    counted = {"fixed": 1, "lognormal": 2}
    if counted.get(name) != len(numbers) or not (0 <= mean < math.inf and 0 <= spread < math.inf):
        raise ValueError(f"{LAW}={law!r}: {WANTED}")
    median = mean * math.exp(-(spread**2) / 2)
    return lambda *texts: median * math.exp(spread * NORMAL.inv_cdf(uniform(*texts)))


def uniform(*texts: str) -> float:
    """A number strictly between 0 and 1 that depends on nothing but the texts."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=6).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**48
