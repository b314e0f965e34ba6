"""Exact arithmetic on text, and nothing but arithmetic."""

import contextlib
import random

import pytest

from tandem.envs.calculator import LONGEST, calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("1,200 / 3", "400"),
        ("2^10", "1024"),
        ("2**-2", "0.25"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("1 / 3", "0.333333333333333"),
        ("-1/8", "-0.125"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1e3", "1000"),
        ("0**0", "1"),
        ("(-1)**99999999999", "-1"),
    ],
)
def test_arithmetic_is_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "1 +",
            "x + 1",
            "__import__('os').getcwd()",
            "(lambda: 1)()",
            "'a' * 9",
            "True + 1",
            "0x10",
            "1 if 2 else 3",
        ),
        *("[1, 2]", "1_000", "2j", "1 < 2", "~1", "1 << 9", "9**9**9", "2**0.5", "10**9999", "f'{1}'", "(" * 190),
        *("1" * (LONGEST + 1), "1e9999"),
    ],
)
def test_whatever_is_no_arithmetic_or_too_large_is_refused(expression):
    with pytest.raises(ValueError):  # noqa: PT011 - of the tool's own words
        calculator(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "1 // 0", "5 % 0", "0 ** -1"])
def test_division_by_zero_is_named(expression):
    with pytest.raises(ZeroDivisionError):
        calculator(expression)


def test_random_text_raises_nothing_but_errors_of_arithmetic():
    draw = random.Random(5)
    signs = [
        "1",
        "2.5",
        "+",
        "-",
        "*",
        "/",
        "//",
        "%",
        "**",
        "(",
        ")",
        "e",
        ".",
        ",",
        " ",
        "a",
        "9" * 60,
        "\x00",
        "\ud800",
    ]
    for _ in range(2000):
        text = "".join(draw.choice(signs) for _ in range(draw.randrange(15)))
        with contextlib.suppress(ValueError, ArithmeticError):
            assert calculator(text)
