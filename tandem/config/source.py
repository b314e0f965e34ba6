"""Reading what was written: one YAML file, or the overrides of a command line, as nodes that know their lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.errors import ConfigError
from tandem.config.recipes import shipped_recipes
from tandem.config.schema import Plain
from tandem.config.tree import COMMAND_LINE, Node, Origin, merge


def read_file(path: Path) -> Node:
    """One YAML file, without what it inherits."""
    place = shown_path(path)
    text = _read_text(path, place)
    root: yaml.Node | None = None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ConfigError(f"{place} is empty: a recipe is a mapping of keys, for example `defaults: quickstart`")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{place}:1: a recipe is a mapping of keys, this is a list or a single value")
        if duplicates := list(_duplicates(root, place, set())):
            raise ConfigError(duplicates)
        values = OmegaConf.to_container(OmegaConf.create(text))
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(f"{place}:{line}: not readable as YAML: {error.reason}: {error.character!r}") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{place}{_line_of(error)}: not readable as YAML: {_problem(error)}") from error
    except OmegaConfBaseException as error:
        line = _find_line(root, (error.full_key or "").split("."))
        raise ConfigError(f"{place}:{line}: {error.full_key}: {_first_line(error)}") from error
    return Node(_children(root, values, place), Origin(place, 1))


def read_overrides(overrides: Sequence[str]) -> Node:
    """`key=value` arguments; keys are dotted, values are YAML; a later one wins over an earlier one."""
    tree, wrong = Node({}, COMMAND_LINE), []
    for override in overrides:
        try:
            tree = merge(tree, _read_override(override), None)
        except ConfigError as error:
            wrong.extend(error.messages)
    if wrong:
        raise ConfigError(wrong)
    return tree


def shown_path(path: Path) -> str:
    """A path as messages show it: `recipes/x.yaml` for what ships, else from here when it lies below."""
    resolved = path.resolve()
    if resolved in [shipped.resolve() for shipped in shipped_recipes().values()]:
        return f"recipes/{path.name}"
    here = Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


def _read_text(path: Path, place: str) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        came = f"byte 0x{content[error.start]:02x}"
        raise ConfigError(f"{place}:{line}: {came} is not UTF-8: save the recipe in UTF-8") from error


def _read_override(text: str) -> Node:
    key, equals, value = text.partition("=")
    key = key.strip()
    if key.startswith(("+", "~", "-")):
        bare = key.lstrip("+~-")
        raise ConfigError(
            f"override {text!r}: no sign before a key; write {bare}=VALUE, or {bare}=null to switch it off"
        )
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r}: wanted key=value, for example ppo.max_num_steps=10")
    if parts[0] == "defaults":
        raise ConfigError(f"override {text!r}: only a recipe file inherits; name the recipe instead")
    node = Node(_read_value(key, value.strip()), COMMAND_LINE)
    for part in reversed(parts):
        node = Node({part: node}, COMMAND_LINE)
    return node


def _read_value(key: str, text: str) -> Plain:
    if not text:
        raise ConfigError(f"override '{key}=': no value; write {key}=null for none, {key}='\"\"' for empty text")
    if " #" in text and text[0] not in "'\"[{":
        raise ConfigError(f"override {key}: YAML takes what follows ' #' for a comment; write {key}='\"{text}\"'")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"override {key}={text}: not readable as YAML: {_problem(error)}; quote text") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {key}={text}: {_first_line(error)}") from error
    assert isinstance(value, dict)
    return _nodes(value["value"], COMMAND_LINE, key)


def _nodes(value: Plain, origin: Origin, key: str) -> Plain:
    """A value of the command line: mappings become nodes."""
    if not isinstance(value, dict):
        return value
    if odd := [inner for inner in value if not isinstance(inner, str)]:
        raise ConfigError(f"{key} ({origin}): the key {odd[0]!r} is not text: put it in quotes")
    return {inner: Node(_nodes(value[inner], origin, f"{key}.{inner}"), origin) for inner in value}


def _children(node: yaml.Node, values: Plain, place: str) -> dict[str, Node]:
    """The mapping `values` as nodes; `node` is the YAML it was read from and knows the lines."""
    written = dict(_entries(node))
    children: dict[str, Node] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            line = node.start_mark.line + 1
            raise ConfigError(f"{place}:{line}: the key {key!r} of this section is not text: put it in quotes")
        line, inner = written[key]
        children[key] = Node(_children(inner, value, place) if isinstance(value, dict) else value, Origin(place, line))
    return children


def _entries(node: yaml.Node) -> Iterator[tuple[str, tuple[int, yaml.Node]]]:
    """Key -> (line, node) of a mapping, merge keys (`<<`) first so that the mapping's own keys win."""
    own = [(key, value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"]
    for key, merged in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            for source in reversed(merged.value) if isinstance(merged, yaml.SequenceNode) else [merged]:
                yield from _entries(source)
    for key, value in own:
        yield str(key.value), (key.start_mark.line + 1, value)


def _duplicates(node: yaml.Node, place: str, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item, place, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in lines and isinstance(key, yaml.ScalarNode):
            yield f"{place}:{line}: the key {key.value!r} is given twice, first in line {lines[key.value]}: keep one"
        if isinstance(key, yaml.ScalarNode):
            lines.setdefault(key.value, line)
        yield from _duplicates(value, place, seen)


def _find_line(node: yaml.Node | None, key: list[str]) -> int:
    """The line of a key, or of the section that holds it."""
    line = 1
    for part in key:
        if not isinstance(node, yaml.MappingNode) or part not in (entries := dict(_entries(node))):
            break
        line, node = entries[part]
    return line


def _line_of(error: yaml.MarkedYAMLError) -> str:
    return f":{error.problem_mark.line + 1}" if error.problem_mark else ""


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or error.context or "unknown").removeprefix("but ")
    if "'\\t'" in problem:
        return "indented with a tab; YAML takes spaces"
    return f"{problem}; inside braces write '???' in quotes" if "'?'" in problem else problem


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
