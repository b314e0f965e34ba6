"""`${mul:a,b}` and its like in a YAML file: sums of numbers, and nothing that reads more than its arguments."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import OmegaConf

from tandem.config.schema import Plain
from tandem.config.show import shown

Number = int | float

RESOLVERS: dict[str, Callable[[Number, Number], Number]] = {
    "add": lambda left, right: left + right,
    "sub": lambda left, right: left - right,
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left / right,
    "max": lambda left, right: max(left, right),
}


def register_resolvers() -> None:
    """Make OmegaConf know them. It keeps resolvers for the whole process; to register again changes nothing."""
    for name, compute in RESOLVERS.items():
        OmegaConf.register_resolver(name, _of_two_numbers(name, compute), replace=True)


def _of_two_numbers(name: str, compute: Callable[[Number, Number], Number]) -> Callable[[Plain, Plain], Number]:
    def resolve(left: Plain, right: Plain) -> Number:
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise ValueError(f"{name} takes two numbers, got {shown(left)} and {shown(right)}")
        return compute(left, right)

    return resolve
