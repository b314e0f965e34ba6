"""A config that was loaded: what runs, and where every value of it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from tandem.config.run import Config
from tandem.config.schema import Plain
from tandem.config.section import Section
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
        if holds_sections(value):
            return f"{key} ({self.origins[key]})"
        return f"{key} = {shown(value)} ({self.origins.get(key, DEFAULT)})"


def flat(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Every dotted key below a section, sections before what they hold."""
    for name, value in section:
        yield prefix + name, value
        if isinstance(value, BaseModel):
            yield from flat(value, f"{prefix}{name}.")
        for entry, inner in named_sections(value):
            yield f"{prefix}{name}.{entry}", inner
            yield from flat(inner, f"{prefix}{name}.{entry}.")


def named_sections(value: Plain) -> Iterator[tuple[str, Section]]:
    """The sections of a mapping that holds some by name; of anything else none."""
    if isinstance(value, Mapping):
        yield from ((name, inner) for name, inner in value.items() if isinstance(inner, Section))


def holds_sections(value: Plain) -> bool:
    """Whether a value is a section, or sections by name: it has keys of its own."""
    return isinstance(value, BaseModel) or any(True for _ in named_sections(value))
