"""From keys of ours to a recipe: only what differs from the defaults, as YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from omegaconf import OmegaConf

from tandem.config.check import escaped
from tandem.config.nemo_rl.entry import types_of
from tandem.config.nemo_rl.source import MISSING
from tandem.config.run import Config
from tandem.config.schema import Plain, chosen, plain
from tandem.config.section import Section

STAND_IN = "{question}?"  # text that every key which takes text takes, and that is no default


def tree_of(writes: Mapping[str, Plain]) -> dict[str, Plain]:
    """Dotted keys as a tree; `{}` says that a section is there."""
    tree: dict[str, Plain] = {}
    for key, value in writes.items():
        *parents, name = key.split(".")
        inside = tree
        for part in parents:
            inside = inside.setdefault(part, {})
        if value == {}:
            inside.setdefault(name, {})
        else:
            inside[name] = value
    return tree


def differences(values: Mapping[str, Plain], section: type[Section] = Config) -> dict[str, Plain]:
    """What is not the section's default. Optional sections stay; a choice that is not the default keeps its name."""
    kept: dict[str, Plain] = {}
    for name, field in section.model_fields.items():
        if name not in values:
            continue
        value, default = values[name], plain(field.get_default(call_default_factory=True))
        inner = chosen(field, value.get("name")) if isinstance(value, Mapping) else None
        if isinstance(inner, type):
            differing = differences(value, inner)
            if "name" in value and (default is None or field.is_required() or default["name"] != value["name"]):
                differing = {"name": value["name"], **differing}
            if differing or field.is_required() or default is None:
                kept[name] = differing
        elif field.is_required() or value != default or isinstance(value, bool) != isinstance(default, bool):
            kept[name] = value
    return kept | {name: value for name, value in values.items() if name not in section.model_fields}


def open_keys(tree: Mapping[str, Plain], prefix: str = "") -> Iterator[str]:
    """The keys that are still to be given."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from open_keys(value, f"{prefix}{name}.")
        elif value == MISSING:
            yield prefix + name


def stand_in(key: str) -> str | int:
    """A value that an open key would take, so that all else can be checked."""
    return STAND_IN if any("str" in str(annotation) for annotation in types_of(key)) else 1


def filled(tree: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """The tree with a stand-in for each open key."""
    whole: dict[str, Plain] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            whole[name] = filled(value, f"{prefix}{name}.")
        else:
            whole[name] = stand_in(prefix + name) if value == MISSING else value
    return whole


def to_yaml(tree: Mapping[str, Plain], remark: str) -> str:
    """The recipe as a file."""
    return f"# {remark}\n{OmegaConf.to_yaml(OmegaConf.create(escaped(tree)))}"
