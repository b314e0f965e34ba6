"""A config that was loaded: what runs, and where every value of it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from tandem.config.run import Config
from tandem.config.schema import Plain
from tandem.config.show import shown
from tandem.config.tree import DEFAULT, Origin


@dataclass(frozen=True)
class Loaded:
    """`origins` names every key of the config, dotted, sections included."""

    config: Config
    origins: Mapping[str, Origin]

    @cached_property
    def values(self) -> Mapping[str, Plain]:
        """Every key of the config, dotted, and its value; a section is its model."""
        return dict(flat(self.config))

    @cached_property
    def written(self) -> frozenset[str]:
        """The keys that a recipe or the command line sets."""
        return frozenset(key for key, origin in self.origins.items() if origin is not DEFAULT)

    @property
    def algorithm(self) -> str:
        """`ppo` or `grpo`: the name of the section that is set."""
        return "grpo" if self.config.grpo else "ppo"

    def at(self, key: str) -> str:
        """`key = value (origin)`, as messages name it."""
        value = self.values.get(key)
        if isinstance(value, BaseModel):
            return f"{key} ({self.origins[key]})"
        return f"{key} = {shown(value)} ({self.origins.get(key, DEFAULT)})"


def flat(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Every dotted key below a section, sections before what they hold."""
    for name, value in section:
        yield prefix + name, value
        if isinstance(value, BaseModel):
            yield from flat(value, f"{prefix}{name}.")
