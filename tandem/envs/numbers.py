"""Numbers as people and models write them, read exactly: `$1,200.50`, `**-3**`, `\\boxed{7}`, `3/4`, `2.0`.

The reading is strict where a guess could be gamed: the number must follow its marker at once, the last marker counts,
and what goes on as an expression (`5 + 3`), a list of digits (`1,23`) or a power of ten (`5e3`) is no number.
"""

from __future__ import annotations

import re
from fractions import Fraction

SENTENCE_MARKER = re.compile(r"\bthe\s+answer\s+is\b", re.IGNORECASE)
GSM8K_MARKER = re.compile(r"####|\bthe\s+answer\s+is\b", re.IGNORECASE)

# Minus signs and spaces that are typeset, as their plain forms.
PLAIN = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2010": "-", "\u2011": "-", "\uff0d": "-", "\u2044": "/"})
# Possessive (`*+`): a megabyte of spaces costs one pass. 40 digits bound the arithmetic.
NUMBER = re.compile(
    r"""
    (?: [\s:*_=("'\[{$€£¥₹] | \\boxed | \\text | \\[(\[$] )*+            # what may stand between marker and number
    (?P<sign> [-+] )? [\s$€£¥₹\\]*+
    (?P<whole> [0-9]{1,3} (?: [, \u00a0\u2009\u202f] [0-9]{3} )+ | [0-9]{1,40} )? (?P<decimals> \.[0-9]{1,40} )?
    (?: \s*+ / \s*+ (?P<under> [0-9]{1,40} ) )?
    (?! [0-9] | [.,:] [0-9] | [eE] [-+]? [0-9] | \s*+ [-+*/^=×÷·] [*\s$]*+ [0-9] )
    """,
    re.VERBOSE,
)
