"""One row of the table from NeMo-RL's keys to ours: a pattern of keys, what becomes of them, and the rule by value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args, get_origin

from tandem.config.nemo_rl.source import Source
from tandem.config.run import Config
from tandem.config.schema import Plain, sections_of
from tandem.config.section import Section
from tandem.config.show import shown

Fate = Literal["mapped", "implied", "not supported"]
# What a word in capitals stands for in a pattern. `*` is one name, `**` is any number of them.
WORDS = {
    "ALGO": ("ppo", "grpo"),
    "MODEL": ("policy", "value"),
    "ASYNC": ("async_ppo", "async_grpo"),
    "DTENSOR": ("dtensor_cfg", "automodel_cfg"),
    "SET": ("train", "validation", "default"),
}
OFF = (None, False, 0, "", [], {})


@dataclass(frozen=True)
class Outcome:
    """What becomes of one key with its value. `writes` are keys of ours; ALGO and MODEL in them are filled in later."""

    fate: Fate
    why: str
    writes: Mapping[str, Plain] = field(default_factory=dict)


Rule = Callable[[Source, str, Plain], Outcome]


@dataclass(frozen=True)
class Entry:
    """A row of the table. `fate` and `text` are what docs/migrate.md says of it; `rule` decides by value."""

    keys: tuple[str, ...]
    fate: Fate
    text: str
    rule: Rule

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(compiled, self.keys))

    def matches(self, key: str) -> bool:
        return any(pattern.fullmatch(key) for pattern in self.patterns)

    def is_below(self, key: str) -> bool:
        """Whether this entry speaks of keys inside of `key`."""
        depth = key.count(".") + 1
        heads = (pattern.split(".")[:depth] for pattern in self.keys if pattern.count(".") >= depth)
        return any(compiled(".".join(head)).fullmatch(key) for head in heads)


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(map(_part, pattern.split("."))))


def _part(part: str) -> str:
    if part in WORDS:
        return f"(?:{'|'.join(WORDS[part])})"
    return ".+" if part == "**" else re.escape(part).replace(r"\*", r"[^.]*")


def mapped(writes: Mapping[str, Plain], why: str = "") -> Outcome:
    return Outcome("mapped", why, writes)


def nothing(why: str) -> Outcome:
    """The key asks for nothing here."""
    return Outcome("implied", why)


def refused(why: str, writes: Mapping[str, Plain] | None = None) -> Outcome:
    return Outcome("not supported", why, writes or {})


def same(keys: str, text: str = "") -> Entry:
    """The value under the same key."""

    def rule(source: Source, found: str, value: Plain) -> Outcome:
        return _moved(found, value)

    return Entry(_split(keys), "mapped", f"the same{f', {text}' if text else ''}", rule)


def renamed(keys: str, ours: str, text: str = "") -> Entry:
    """The value under another key; `*` in it is the last name of the key that was found."""

    def rule(source: Source, found: str, value: Plain) -> Outcome:
        target = target_key(ours, source, found).replace("*", found.rpartition(".")[2])
        return _moved(target, value)

    return Entry(_split(keys), "mapped", f"`{ours}`{f': {text}' if text else ''}", rule)


def _moved(target: str, value: Plain) -> Outcome:
    return mapped({target: value}) if value is not None or takes_null(target) else nothing("null: the default stays")


def by(keys: str, ours: str, text: str, rule: Rule) -> Entry:
    """The value decides what is written."""
    targets = ", ".join(f"`{target}`" for target in _split(ours))
    return Entry(_split(keys), "mapped", f"{targets}{f': {text}' if text else ''}", rule)


def implied(keys: str, why: str) -> Entry:
    """Nothing to do, whatever the value."""
    return Entry(_split(keys), "implied", why, lambda source, key, value: nothing(why))


def implied_by(keys: str, text: str, rule: Rule) -> Entry:
    """Nothing to do as a rule; the value decides."""
    return Entry(_split(keys), "implied", text, rule)


def lacking(keys: str, why: str, off: tuple[Plain, ...] = OFF) -> Entry:
    """Not there in Tandem; a value that switches it off asks for nothing."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        return nothing(f"{shown(value)}: off") if any(is_same(value, quiet) for quiet in off) else refused(why)

    return Entry(_split(keys), "not supported", why, rule)


def is_same(value: Plain, other: Plain) -> bool:
    """Equal, and of one kind: 0 is not false, 1 is not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def target_key(target: str, source: Source, found: str) -> str:
    """ALGO and MODEL in a key of ours, filled in: the config's algorithm, and the model that the found key is of."""
    return target.replace("ALGO", source.algorithm).replace("MODEL", found.split(".")[0])


def takes_null(key: str) -> bool:
    """Whether a key of ours may be null."""
    return any(type(None) in get_args(annotation) for annotation in types_of(key))


def types_of(key: str) -> list[object]:
    """The types of a dotted key of ours, over all variants of the unions on its way."""
    sections: tuple[type[Section], ...] = (Config,)
    found: list[object] = []
    by_name = False  # the next part is a name that the user chose
    for part in key.split("."):
        if by_name:
            by_name = False
            continue
        found = [section.model_fields[part].annotation for section in sections if part in section.model_fields]
        sections = tuple(inner for annotation in found for inner in sections_of(annotation))
        by_name = bool(sections) and any(get_origin(annotation) is dict for annotation in found)
    return found


def _split(keys: str) -> tuple[str, ...]:
    return tuple(keys.split())
