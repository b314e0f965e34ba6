r"""`dapo_math`: the answer on the last `Answer:` line, as the reward of DAPO reads it (arXiv:2503.14476, appendix).

Two answers are equal as exact numbers, or letter by letter once everything is gone that says nothing: dollars and
brackets of maths mode, `\boxed`, `\text`, emphasis, spacing commands, thousands commas, units, `x =` before a value.
"""

from __future__ import annotations

import re

from tandem.envs.numerals import reference_number
from tandem.types import Prompt, RolloutFailed, Score

ANSWER_LINE = re.compile(r"\banswer[\s*_]*+:\s*+(?P<rest>[^\n]*+)", re.IGNORECASE)
UNITS = (
    "degrees? cm mm km m meters? metres? feet foot inch(?:es)? miles? square cubic units? dollars? cents? percent "
    "hours? minutes? seconds? days? weeks? years? points? people students? ways"
)
REMOVED = re.compile(
    r"""\\[,;:! ] | \\(?:left|right|displaystyle|quad|qquad)\b | \\\$ | [$*] | \\[()\[\]] | \^\\circ | \^\{\\circ\}
      | \\?% | (?<=[0-9]),(?=[0-9]{3}(?![0-9]))""",
    re.VERBOSE,
)
WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\{(?P<inside>[^{}]*)\}")
TRAILING_UNIT = re.compile(rf"(?<=[0-9}})])\s*(?:\b(?:{'|'.join(UNITS.split())})\b[\s.^23]*)+$", re.IGNORECASE)
SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(?P<over>\d)\s*(?P<under>\d)(?!\d)")
FRACTION = re.compile(r"\\[dt]?frac\{(?P<over>[^{}]*)\}\{(?P<under>[^{}]*)\}")
LONGEST_ANSWER = 1_000  # characters; a longer line is no answer


def last_answer(response: str) -> str | None:
    """What follows the last `Answer:` on its line, or None."""
    rest = [found["rest"] for found in ANSWER_LINE.finditer(response)][-1:]
    return rest[0] if rest and len(rest[0]) <= LONGEST_ANSWER else None


def normalised(answer: str) -> str:
    """An answer with nothing left that says nothing."""
    text = REMOVED.sub("", answer.strip())
    for _ in range(4):  # one inside the other
        text = WRAPPED.sub(r"\g<inside>", text)
    text = TRAILING_UNIT.sub("", text.strip().rstrip(".")).rsplit("=", 1)[-1]
    text = SHORT_FRACTION.sub(r"\\frac{\g<over>}{\g<under>}", text)
    text = FRACTION.sub(r"(\g<over>)/(\g<under>)", text)
    return re.sub(r"\((\w+)\)/\((\w+)\)", r"\1/\2", "".join(text.split())).casefold()


class DapoMath:
    """1 if the last `Answer:` line holds the reference answer, else 0; DAPO's own -1 is `reward_scaling`'s affair."""

    async def score(self, prompt: Prompt, response: str) -> Score:
        wanted = normalised(prompt.answer)
        if not wanted:
            raise RolloutFailed(f"the reference answer of prompt {prompt.id!r} says nothing: {prompt.answer!r:.60}")
        given = last_answer(response)
        return Score(float(given is not None and same(normalised(given), wanted)))

    async def close(self) -> None:
        """It holds nothing."""


def same(given: str, wanted: str) -> bool:
    """Equal letter by letter, or as exact numbers."""
    number = reference_number(wanted)
    return given == wanted or (number is not None and reference_number(given) == number)
