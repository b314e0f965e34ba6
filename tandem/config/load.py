"""Loading a config: recipe, what it inherits, overrides, interpolation, checks. Every mistake is reported at once.

How layers meet (a recipe over its `defaults`, the command line over all):
    mappings merge key by key, anything else is replaced; `key: null` removes an optional section;
    another `name` in a union drops what the layer below wrote for its variant;
    `key: default` takes back what the layer below wrote, as if it had never been set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tandem.config.errors import ConfigError
from tandem.config.loaded import Loaded, named_sections
from tandem.config.mistakes import Key, mistakes, must_be_given
from tandem.config.recipes import find_recipe
from tandem.config.resolvers import register_resolvers
from tandem.config.rules import broken_rules
from tandem.config.run import Config
from tandem.config.schema import Plain, completed, field_of, frozen, shape_at
from tandem.config.section import Section
from tandem.config.source import read_file, read_overrides, shown_path
from tandem.config.tree import DEFAULT, Node, Origin, merge, without_defaults


def load(recipe: str, overrides: Sequence[str] = (), *, forget: str | None = None) -> Loaded:
    """The config of a recipe (a shipped name or a path) under `key=value` overrides; ConfigError names all mistakes.

    What the recipe writes at the key `forget`, and below it, is left out: the overrides begin anew there.
    """
    tree = read_recipe(find_recipe(recipe))
    if forget is not None:
        tree = forgotten(tree, forget.split("."))
    tree = without_defaults(merge(tree, read_overrides(overrides), Config))
    values, unresolved = _resolved(tree)
    config, wrong = _validated(values, _place(tree))
    loaded = Loaded(config, dict(_origins(config, tree))) if config is not None else None
    messages = [*(wrong | unresolved).values(), *(broken_rules(loaded) if loaded is not None else ())]
    if loaded is None or messages:
        raise ConfigError(messages)
    return loaded


def algorithm_of(recipe: str, overrides: Sequence[str]) -> str:
    """`ppo` or `grpo`: which of them a recipe has, whatever else is right or wrong with it."""
    tree = merge(read_recipe(find_recipe(recipe)), read_overrides(overrides), Config)
    return "grpo" if "grpo" in tree.children and tree.children["grpo"].value is not None else "ppo"


def forgotten(tree: Node, key: Sequence[str]) -> Node:
    """The tree without what stands at a key."""
    first, *rest = key
    if first not in tree.children:
        return tree
    children = {name: child for name, child in tree.children.items() if name != first}
    return Node({**children, first: forgotten(tree.children[first], rest)} if rest else children, tree.origin)


def read_recipe(path: Path, heirs: tuple[Path, ...] = ()) -> Node:
    """A recipe over its `defaults`, depth first: a later entry goes over an earlier one, the recipe over all."""
    path = path.resolve()
    if path in heirs:
        circle = " -> ".join(shown_path(member) for member in (*heirs[heirs.index(path) :], path))
        raise ConfigError(f"recipes inherit in a circle: {circle}: remove one `defaults`")
    tree = read_file(path)
    below = Node({}, tree.origin)
    if "defaults" not in tree.children:
        return tree
    defaults = tree.children["defaults"]
    names = [defaults.value] if isinstance(defaults.value, str) else defaults.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"defaults ({defaults.origin}): wanted a recipe's name or path, or a list of them")
    for name in names:
        try:
            parent = find_recipe(str(name), beside=path.parent)
        except ConfigError as error:
            raise ConfigError(f"defaults ({defaults.origin}): {error}") from error
        below = merge(below, read_recipe(parent, (*heirs, path)), Config)
    own = Node({key: child for key, child in tree.children.items() if key != "defaults"}, tree.origin)
    return merge(below, own, Config)


def _resolved(tree: Node) -> tuple[dict[str, Plain], dict[Key, str]]:
    """The values with defaults completed and `${...}` resolved, and what could not be; those keys are left out."""
    values = completed(tree.plain(), Config)
    wrong: dict[Key, str] = {}
    for key, node in tree.walk():
        if node.value == "???":
            wrong[key] = must_be_given(key, field_of(shape_at(key[:-1], values), key[-1]))
    tangled = {key: node for key, node in tree.walk() if not node.children and "${" in str(node.value)}
    if tangled:
        wrong |= _untangle(values, tangled)
    for key in wrong:
        del _inside(values, key)[key[-1]]
    return values, wrong


def _untangle(values: dict[str, Plain], tangled: dict[Key, Node]) -> dict[Key, str]:
    """Resolve these keys in place, seeing all others, defaults included. Returns what is wrong with which."""
    register_resolvers()
    whole, wrong = OmegaConf.create(values), {}
    for key, node in tangled.items():
        try:
            value: Plain = whole
            for part in key:
                value = value[part]
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            _inside(values, key)[key[-1]] = plain
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            place = f"{'.'.join(key)} ({node.origin})"
            wrong[key] = f"{place}: {node.value} cannot be resolved: {reason}; write \\${{ for the text itself"
    return wrong


def _validated(values: dict[str, Plain], place: Callable[[Sequence[str]], str]) -> tuple[Config | None, dict[Key, str]]:
    """The config, and what is wrong. Where only unknown keys are wrong there are both, so that the rules can run."""
    try:
        return Config.model_validate(frozen(values), strict=True), {}
    except ValidationError as error:
        wrong = mistakes(error, values, place)
        if any(detail["type"] != "extra_forbidden" for detail in error.errors()):
            return None, wrong
    for key in wrong:
        del _inside(values, key)[key[-1]]
    return Config.model_validate(frozen(values), strict=True), wrong


def _inside(values: dict[str, Plain], key: Key) -> dict[str, Plain]:
    """The mapping that holds the last part of a key."""
    for part in key[:-1]:
        values = values[part]
    return values


def _place(tree: Node) -> Callable[[Sequence[str]], str]:
    """How messages name a key: with where it, or the section around it, was written."""

    def place(key: Sequence[str]) -> str:
        node = tree
        for part in key:
            node = node.children.get(part, node)
        return f"{'.'.join(key)} ({node.origin})"

    return place


def _origins(section: Section, node: Node, prefix: str = "") -> Iterator[tuple[str, Origin]]:
    """Every key below a section and where it was written.

    Of a section that is copied by `${...}` what differs from the defaults counts as written there.
    """
    copied = not isinstance(node.value, dict)
    for name, value in section:
        child = node.children.get(name)
        if child is None:
            differs = copied and value != type(section).model_fields[name].get_default(call_default_factory=True)
            child = Node(node.value if copied else {}, node.origin if differs else DEFAULT)
        yield prefix + name, child.origin
        if isinstance(value, Section):
            yield from _origins(value, child, f"{prefix}{name}.")
        for entry, inner in named_sections(value):
            below = child.children.get(entry, Node(child.value, child.origin))
            yield f"{prefix}{name}.{entry}", below.origin
            yield from _origins(inner, below, f"{prefix}{name}.{entry}.")
