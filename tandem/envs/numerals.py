r"""Numbers as people and models write them, read exactly: `$1,200.50`, `**-3**`, `\boxed{7}`, `\frac{3}{4}`, `2.0`.

The reading is strict where a guess could be gamed: the number must follow its marker at once, the last marker counts,
and what goes on as an expression (`5 + 3`), a list of digits (`1,23`) or a power of ten (`5e3`) is no number.
"""

from __future__ import annotations

import re
from fractions import Fraction

SENTENCE_MARKER = re.compile(r"\bthe\s+answer\s+is\b", re.IGNORECASE)
GSM8K_MARKER = re.compile(r"####|\bthe\s+answer\s+is\b", re.IGNORECASE)

# Typeset minus signs and the fraction slash, as their plain forms.
PLAIN = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\uff0d": "-", "\u2044": "/"})
# Possessive (`*+`): a megabyte of spaces costs one pass. The limits of digits bound the arithmetic.
NUMBER = re.compile(
    r"""
    (?: [\s:*_=("'\[{$€£¥₹] | \\boxed | \\text | \\[(\[$]        # what may stand between a marker and its number
      | (?:US|CA|AU)(?=\$) | (?:USD|EUR|GBP|Rs\.?)(?=\s*+[0-9]) )*+
    (?P<sign> [-+] )? (?: [\s*$€£¥₹] | \\\$ )*+
    (?: (?P<units> [0-9]{1,40} ) [ ]++ (?= [0-9]{1,40} / ) )?       # the 1 of 1 3/4
    (?P<figure> [0-9]{1,3} (?: [, \u00a0\u2009\u202f] [0-9]{3} ){1,12} (?: \.[0-9]{1,40} )?
              | [0-9]{1,40} (?: \.[0-9]{1,40} )?
              | \.[0-9]{1,40} )
    (?: [ ]*+ / [ ]*+ (?P<under> [0-9]{1,40} ) )?
    (?! [0-9] | [.,:][0-9] | [eE][-+]?[0-9] | \*\*[0-9] | [ ]*+ [-+*/^=×÷·] [ $]*+ [0-9] )
    """,
    re.VERBOSE,
)
FRACTION = re.compile(r"\\[dt]?frac\{\s*+([0-9]{1,40})\s*+\}\{\s*+([0-9]{1,40})\s*+\}")
DECORATION = re.compile(r"""[\s.%*_)"'\]}$€£¥₹]*+""")


def number_after_last(marker: re.Pattern[str], text: str) -> Fraction | None:
    """The number right after the last marker, or None: no marker, or no clear number after it."""
    plain = _plain(text)
    ends = [found.end() for found in marker.finditer(plain)]
    found = NUMBER.match(plain, ends[-1]) if ends else None
    return _value(found) if found else None


def reference_number(answer: str) -> Fraction | None:
    """The number of a reference answer: after its last marker if it has one (GSM8K), else the whole text."""
    plain = _plain(answer)
    if GSM8K_MARKER.search(plain):
        return number_after_last(GSM8K_MARKER, plain)
    found = NUMBER.match(plain)
    return _value(found) if found and DECORATION.fullmatch(plain, found.end()) else None


def _plain(text: str) -> str:
    r"""With plain signs, and `1\frac{1}{2}` as 1 1/2."""
    return FRACTION.sub(r" \1/\2", text.translate(PLAIN))


def _value(found: re.Match[str]) -> Fraction | None:
    figure = Fraction(re.sub(r"[^0-9.]", "", found["figure"]))
    under = int(found["under"] or 1)
    if under == 0:
        return None
    amount = int(found["units"] or 0) + figure / under
    return -amount if found["sign"] == "-" else amount
