"""The built-in tool: exact arithmetic on a text, which is parsed and never run as code."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

LONGEST = 200  # characters of an expression
MOST_BITS = 2048  # of a numerator or a denominator
DIGITS = 15  # of a result that no short decimal ends
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression, exactly.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as (12 + 3) * 4
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, at most {LONGEST} are allowed")
    text = THOUSANDS.sub("", expression)
    for spelling, sign in SPELLINGS.items():
        text = text.replace(spelling, sign)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    return shown(value_of(tree.body, text.strip()))


def value_of(node: ast.expr, text: str) -> Fraction:
    """The value of a parsed expression; `text` is what it was parsed from. ValueError for whatever is no arithmetic."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return small(Fraction(number(ast.get_source_segment(text, node) or "")))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return value_of(operand, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand, text)
        case ast.BinOp(left=left, op=op, right=right):
            return small(result_of(op, value_of(left, text), value_of(right, text)))
        case _:
            raise ValueError(f"only numbers, + - * / // % ** and parentheses are allowed, not {type(node).__name__}")


def number(segment: str) -> str:
    """A literal as Fraction reads it: `0.1` is a tenth, and not what a float makes of it."""
    if not re.fullmatch(r"\d*\.?\d*(e[+-]?\d{1,3})?", segment, re.IGNORECASE):
        raise ValueError(f"{segment!r} is no decimal number")
    return segment


def result_of(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    """One operation."""
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() | ast.FloorDiv() | ast.Mod() if right == 0:
            raise ZeroDivisionError("division by zero")
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return power(left, right)
    raise ValueError(f"the operator {type(op).__name__} is not allowed")


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """A whole power, no larger than what may be shown."""
    if exponent.denominator != 1:
        raise ValueError(f"only whole exponents are allowed, not {shown(exponent)}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and abs(exponent) * (size - 1) > MOST_BITS:
        raise ValueError("the number is too large")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    return Fraction(base ** int(exponent % 2 if size <= 1 and base else exponent))


def small(value: Fraction) -> Fraction:
    """The value, or a ValueError when it is too large to go on with."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("the number is too large")
    return value


def shown(value: Fraction) -> str:
    """A whole number, an exact decimal where there is a short one, else the first digits."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, DIGITS):
        scaled = value * 10**places
        if scaled.denominator == 1:
            whole = str(abs(scaled.numerator)).rjust(places + 1, "0")
            return f"{'-' if value < 0 else ''}{whole[:-places]}.{whole[-places:]}"
    return f"{float(value):.{DIGITS}g}"
