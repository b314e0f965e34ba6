"""The built-in task: word problems of three terms, so that a newcomer can train with no download.

A problem is a pure function of (seed, index, split): no state, no order of calls, nothing to store for a resume.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "validation"]

SMALLEST, LARGEST = 2, 20
NAMES = ("Ana", "Ben", "Cara", "Dan", "Eva", "Finn", "Mia", "Tom")
THINGS = ("eggs", "pens", "cards", "coins", "books", "apples", "shells", "stones")
GAINS = ("finds {} more", "buys {} more", "gets {} more", "wins {} more")
LOSSES = ("gives away {}", "loses {}", "sells {}", "drops {}")
QUESTIONS = ("How many {}?", "How many {} now?")
VALIDATION_SHARE = 8


@dataclass(frozen=True)
class Problem:
    """One word problem: `17-12=5. 5+8=13. The answer is 13.` is `worked`, its last sentence alone is `bare`."""

    question: str
    answer: int
    worked: str

    @property
    def bare(self) -> str:
        """The answer without the work."""
        return f"The answer is {self.answer}."


def problem(seed: int, index: int, split: Split = "train") -> Problem:
    """Problem number `index` of a stream: the same on every machine, whatever was drawn before.

    The splits are disjoint for every seed: `split_of` hashes the sums and a draw from the other split is drawn again,
    so that no validation question, nor its sums under other names, is ever trained on.
    """
    random = Random(f"arithmetic-{split}-{seed}-{index}")
    return next(drawn for drawn in _draws(random) if split_of(drawn) == split)


def split_of(drawn: Problem) -> Split:
    """The split that owns a problem: one in `VALIDATION_SHARE` of all sums, by the hash of the worked answer."""
    digest = hashlib.sha256(drawn.worked.encode()).digest()
    return "validation" if digest[0] % VALIDATION_SHARE == 0 else "train"


def _draws(random: Random) -> Iterator[Problem]:
    """Endless problems whose running total never falls below zero."""
    while True:
        first, second, third = (random.randint(SMALLEST, LARGEST) for _ in range(3))
        signs = (random.choice((1, -1)), random.choice((1, -1)))
        middle = first + signs[0] * second
        answer = middle + signs[1] * third
        if min(middle, answer) < 0:
            continue
        worked = f"{_sum(first, signs[0], second, middle)} {_sum(middle, signs[1], third, answer)}"
        question = _question(random, first, (signs[0], second), (signs[1], third))
        yield Problem(question=question, answer=answer, worked=f"{worked} The answer is {answer}.")


def _sum(left: int, sign: int, right: int, total: int) -> str:
    return f"{left}{'+' if sign > 0 else '-'}{right}={total}."


def _question(random: Random, first: int, *changes: tuple[int, int]) -> str:
    """Words around the numbers; two gains or two losses in one question use different verbs."""
    name, thing = random.choice(NAMES), random.choice(THINGS)
    gains, losses = (iter(random.sample(verbs, len(changes))) for verbs in (GAINS, LOSSES))
    told = [next(gains if sign > 0 else losses).format(number) for sign, number in changes]
    return f"{name} has {first} {thing}, {', '.join(told)}. {random.choice(QUESTIONS).format(thing)}"
