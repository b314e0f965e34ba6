"""A config before it is checked: values that know where they were written, and how one layer goes over another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from tandem.config.run import Config
from tandem.config.schema import Named, Plain, Shape, chosen, field_of, sections_of, shape_of


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the default of its class, a line of a file, or the command line."""

    place: str
    line: int | None = None

    def __str__(self) -> str:
        return self.place if self.line is None else f"{self.place}:{self.line}"


DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line")


@dataclass(frozen=True)
class Node:
    """A value and where its key was written. A mapping holds nodes; anything else is a leaf."""

    value: dict[str, Node] | str | int | float | bool | list[Plain] | None
    origin: Origin

    @property
    def children(self) -> dict[str, Node]:
        return self.value if isinstance(self.value, dict) else {}

    @property
    def name(self) -> Plain:
        """The `name` that is written in this mapping, if any."""
        return self.children["name"].value if "name" in self.children else None

    def plain(self) -> Plain:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return self.value

    def walk(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
        """Every node below this one with its key, mappings before what they hold."""
        for key, child in self.children.items():
            yield (*prefix, key), child
            yield from child.walk((*prefix, key))


def merge(below: Node, above: Node, section: Shape | None) -> Node:
    """One layer over another: mappings merge, else `above` replaces `below`. `section` is the class of both, if known.

    Where `above` chooses another variant of a union (`name: grpo` over a `name: gae`), what `below` wrote for its own
    variant goes: those keys mean nothing in the new one.
    """
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    children = dict(below.children)
    for key, child in above.children.items():
        if key not in children:
            children[key] = child
            continue
        field = field_of(section, key)
        old = chosen(field, children[key].name) if field is not None else None
        children[key] = child if _other_variant(field, old, child) else merge(children[key], child, old)
    return Node(children, below.origin)


def without_defaults(tree: Node, section: Shape | None = Config) -> Node:
    """Take back every key whose value is the word `default`, where the section has a default for it.

    Of sections that stand by names, null takes one out too: there it can mean nothing else.
    """
    kept: dict[str, Node] = {}
    for key, child in tree.children.items():
        field = field_of(section, key)
        if isinstance(section, Named) and child.value in (None, "default"):
            continue
        if field is not None and child.value == "default" and not field.is_required():
            continue
        inner = chosen(field, child.name) if field is not None else None
        kept[key] = without_defaults(child, inner) if child.children else child
    return Node(kept, tree.origin)


def _other_variant(field: FieldInfo | None, old: Shape | None, above: Node) -> bool:
    if field is None or above.name is None or shape_of(field) or len(sections_of(field.annotation)) < 2:
        return False
    return chosen(field, above.name) is not old
