"""Loading a config: recipe, what it inherits, overrides, interpolation, checks. Every mistake is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from tandem.config.errors import ConfigError
from tandem.config.loaded import Loaded, flat
from tandem.config.mistakes import Key, mistakes, must_be_given
from tandem.config.recipes import find_recipe
from tandem.config.rules import broken_rules
from tandem.config.run import Config
from tandem.config.schema import Plain, completed, section_at
from tandem.config.source import read_file, read_overrides, shown_path
from tandem.config.tree import DEFAULT, Node, Origin, merge, without_defaults


def load(recipe: str, overrides: Sequence[str] = ()) -> Loaded:
    """The config of a recipe (a shipped name or a path) under `key=value` overrides; ConfigError names all mistakes."""
    tree = read_recipe(find_recipe(recipe))
    tree = without_defaults(merge(tree, read_overrides(overrides), Config))
    values, wrong = _resolved(tree)
    config = _validated(values, tree, wrong)
    loaded = Loaded(config, _origins(config, tree)) if config is not None else None
    messages = [*wrong.values(), *(broken_rules(loaded) if loaded is not None else ())]
    if messages:
        raise ConfigError(messages)
    assert loaded is not None
    return loaded


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
    OmegaConf.register_new_resolver("mul", _product, replace=True)
    values = OmegaConf.create(completed(tree.plain(), Config))
    wrong: dict[Key, str] = {}
    for key, node in tree.walk():
        if node.value == "???":
            wrong[key] = _must_be_given(key, tree)
        elif isinstance(node.value, str | list) and "${" in str(node.value):
            try:
                OmegaConf.to_container(_parent(values, key), resolve=True)
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0]
                wrong[key] = f"{_place(tree)(key)}: {node.value} cannot be resolved: {reason}"
    return _plain_without(values, wrong), wrong
