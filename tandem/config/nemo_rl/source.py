"""A NeMo-RL config as its own trainer would see it: inheritance merged, `${...}` resolved, every leaf with its line.

The file is data from somewhere. Nothing of it is run: an interpolation may name another key or one of the five sums of
`tandem.config.resolvers`. Whatever else stands in `${...}` (the environment, a file, a resolver whose name is put
together) is left unread and named as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.errors import ConfigError
from tandem.config.resolvers import RESOLVERS, register_resolvers
from tandem.config.schema import Plain
from tandem.config.source import read_file, shown_path
from tandem.config.tree import Node, Origin, merge

MISSING = "???"  # a value that is still to be given, in OmegaConf's word
OVERRIDE = "_override_"  # of a section: what `defaults` wrote there is gone
_ALLOWED = re.compile(r"\$\{\s*(?:(?:" + "|".join(RESOLVERS) + r")\s*:|[\w.\[\]-]+\s*\})")
_ANY = re.compile(r"(?<!\\)\$\{")


@dataclass(frozen=True)
class Leaf:
    """A value that holds no further keys. `problem` says why it could not be read, "" where it could."""

    path: tuple[str, ...]
    value: Plain
    origin: Origin
    problem: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class Source:
    """All leaves in the order of the file, and the values as a tree."""

    name: str
    algorithm: str  # ppo or grpo
    leaves: tuple[Leaf, ...]
    values: Mapping[str, Plain]

    def get(self, key: str, default: Plain = None) -> Plain:
        """The value of a dotted key; `default` where it is not there or null."""
        value: Plain = self.values
        for part in key.split("."):
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                return default
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the file gives this key, be it as null."""
        parent, _, name = key.rpartition(".")
        section = self.get(parent) if parent else self.values
        return isinstance(section, Mapping) and name in section


def read(path: Path) -> Source:
    """Read a file and what it inherits. ConfigError where that is not to be had, or trains by neither PPO nor GRPO."""
    tree = _inherited(path.expanduser(), ())
    register_resolvers()
    leaves = tuple(_resolved(tree))
    values: dict[str, Plain] = {}
    for key, node in tree.walk():
        if isinstance(node.value, dict):
            _put(values, key, {})
    for leaf in leaves:
        _put(values, leaf.path, leaf.value)
    return Source(path.stem, _algorithm(values, shown_path(path)), leaves, _with_lists(values))


def _inherited(path: Path, heirs: tuple[Path, ...]) -> Node:
    """A file over its `defaults`, as NeMo-RL merges: a path is relative to the file that names it."""
    path = path.resolve()
    if path in heirs:
        circle = " -> ".join(shown_path(member) for member in (*heirs[heirs.index(path) :], path))
        raise ConfigError(f"files inherit in a circle: {circle}: remove one `defaults`")
    own = read_file(path)
    if "defaults" not in own.children:
        return own
    defaults = own.children["defaults"]
    names = [defaults.value] if isinstance(defaults.value, str) else defaults.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"defaults ({defaults.origin}): wanted the path of a file, or a list of paths")
    below = Node({}, own.origin)
    for name in names:
        parent = path.parent / str(name)
        if not parent.is_file():
            raise ConfigError(
                f"defaults ({defaults.origin}): there is no file {shown_path(parent)}; put the file that this one "
                "inherits from where it is named (in NeMo-RL: examples/configs/)"
            )
        below = _over(below, _inherited(parent, (*heirs, path)))
    return _over(below, own)


def _over(below: Node, above: Node) -> Node:
    """One file over another; a section with `_override_: true` replaces what lies below it."""
    replaced = {
        key
        for key, child in above.children.items()
        if OVERRIDE in child.children and child.children[OVERRIDE].value is True
    }
    kept = {key: child for key, child in below.children.items() if key not in replaced and key != "defaults"}
    return merge(Node(kept, below.origin), above, None)


def _resolved(tree: Node) -> Iterator[Leaf]:
    raw = list(_leaves(tree))
    strange = {leaf.path for leaf in raw if _is_strange(leaf.value)}
    plain: dict[str, Plain] = tree.plain()
    for path in strange:  # nothing may be read through it
        _put(plain, path, MISSING)
    whole = OmegaConf.create(plain)
    for leaf in raw:
        if leaf.path in strange:
            why = f"{leaf.value} asks for more than another key or a sum ({', '.join(RESOLVERS)}): write the value"
            yield Leaf(leaf.path, MISSING, leaf.origin, why)
        elif "${" in str(leaf.value):
            yield _interpolated(leaf, whole)
        else:
            yield leaf


def _interpolated(leaf: Leaf, whole: Plain) -> Leaf:
    try:
        value: Plain = whole
        for part in leaf.path:
            value = value[int(part) if OmegaConf.is_list(value) else part]
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        return Leaf(leaf.path, plain, leaf.origin)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return Leaf(leaf.path, MISSING, leaf.origin, f"{leaf.value} cannot be resolved: {reason}")


def _leaves(node: Node, above: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """What holds no further keys: a scalar, an empty section, a list without sections in it."""
    for name, child in node.children.items():
        if child.children:
            yield from _leaves(child, (*above, name))
        else:
            yield from _items((*above, name), child.value, child.origin)


def _items(path: tuple[str, ...], value: Plain, origin: Origin) -> Iterator[Leaf]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _items((*path, str(name)), inner, origin)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _items((*path, str(i)), item, origin)
    else:
        yield Leaf(path, value, origin)


def _is_strange(value: Plain) -> bool:
    """Whether a `${` opens anything but a key or a known sum."""
    if isinstance(value, list):
        return any(map(_is_strange, value))
    if not isinstance(value, str):
        return False
    return any(not _ALLOWED.match(value, found.start()) for found in _ANY.finditer(value))


def _put(values: Plain, key: tuple[str, ...], value: Plain) -> None:
    """Set a place of a tree; numbers index the lists that are there."""
    for part in key[:-1]:
        values = values[int(part)] if isinstance(values, list) else values.setdefault(part, {})
    if isinstance(values, list):
        values[int(key[-1])] = value
    else:
        values[key[-1]] = value


def _with_lists(values: Plain) -> Plain:
    """Sections whose keys are 0, 1, ... were lists."""
    if not isinstance(values, dict):
        return values
    inner = {key: _with_lists(value) for key, value in values.items()}
    if inner and list(inner) == [str(i) for i in range(len(inner))]:
        return list(inner.values())
    return inner


def _algorithm(values: Mapping[str, Plain], place: str) -> str:
    given = [name for name in ("ppo", "grpo") if isinstance(values.get(name), Mapping)]
    if len(given) == 1:
        return given[0]
    if given:
        raise ConfigError(f"{place} has both a section ppo and a section grpo: set one to null")
    others = ", ".join(name for name in values if isinstance(values[name], Mapping)) or "none"
    raise ConfigError(
        f"{place} is no PPO or GRPO config of NeMo-RL: it has neither a section ppo nor grpo (sections: {others}). "
        "Tandem trains by these two alone"
    )
