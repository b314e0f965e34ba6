"""What keys exist and what each wants, read off the section classes: for merging, for defaults and for errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.run import Config
from tandem.config.section import Section

# A value as YAML knows it.
Plain = Any


class Named:
    """A mapping of names, which the user chooses, to sections of one kind: `field` is what stands at each name."""

    def __init__(self, annotation: object) -> None:
        self.field = FieldInfo.from_annotation(get_args(annotation)[1])


# What a mapping of the config is: a section, or sections by name.
Shape = type[Section] | Named


def sections_of(annotation: object) -> tuple[type[Section], ...]:
    """The section classes a field may hold; more than one is a union chosen by `name`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def shape_of(field: FieldInfo) -> Named | None:
    """The sections by name that a field holds, if that is what it holds."""
    named = get_origin(field.annotation) is dict and sections_of(field.annotation)
    return Named(field.annotation) if named else None


def field_of(shape: Shape | None, key: str) -> FieldInfo | None:
    """What stands at a key of a mapping; None where the mapping has no such key."""
    if isinstance(shape, Named):
        return shape.field
    return shape.model_fields.get(key) if shape is not None else None


def names_of(section: type[Section]) -> tuple[str, ...]:
    """The values of `name` that choose this variant."""
    return get_args(section.model_fields["name"].annotation) if "name" in section.model_fields else ()


def chosen(field: FieldInfo, name: Plain) -> Shape | None:
    """What a mapping with this `name` (or none) is, or None where there is no such variant.

    None: the field's default, or the variant whose `name` has one.
    """
    if (named := shape_of(field)) is not None:
        return named
    sections = sections_of(field.annotation)
    if len(sections) == 1:
        return sections[0]
    if name is None:
        if isinstance(field.default, Section):
            return type(field.default)
        return next((s for s in sections if not s.model_fields["name"].is_required()), None)
    return next((section for section in sections if name in names_of(section)), None)


def shape_at(key: Sequence[str], values: Mapping[str, Plain]) -> Shape | None:
    """What the mapping at a place of a tree of values is; None where the place holds no section."""
    shape: Shape | None = Config
    for part in key:
        field = field_of(shape, part)
        if field is None:
            return None
        inner = values.get(part)
        values = inner if isinstance(inner, Mapping) else {}
        shape = chosen(field, values.get("name"))
    return shape


def completed(values: Mapping[str, Plain], section: Shape) -> dict[str, Plain]:
    """The values with every default written out; keys the section does not know stay as they are."""
    whole: dict[str, Plain] = {}
    if isinstance(section, Named):
        inners = {name: chosen(section.field, v.get("name")) for name, v in values.items() if isinstance(v, Mapping)}
        return {name: completed(v, inner) if (inner := inners.get(name)) else v for name, v in values.items()}
    for name, field in section.model_fields.items():
        if name not in values:
            if not field.is_required():
                whole[name] = plain(field.get_default(call_default_factory=True))
            continue
        value = values[name]
        inner = chosen(field, value.get("name")) if isinstance(value, Mapping) else None
        whole[name] = completed(value, inner) if inner else value
    return whole | {name: value for name, value in values.items() if name not in section.model_fields}


def plain(value: Plain) -> Plain:
    """A default as YAML would hold it."""
    if isinstance(value, BaseModel):
        return {name: plain(inner) for name, inner in value}
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def frozen(value: Plain) -> Plain:
    """Lists as tuples: strict pydantic takes nothing else for a tuple field."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def all_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key there is, over all variants of all unions."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = f"{prefix}{name}.NAME." if shape_of(field) else f"{prefix}{name}."
        for inner in sections_of(field.annotation):
            yield from all_keys(inner, below)


def wanted(field: FieldInfo) -> str:
    """What a field takes, in words."""
    return _words(field.annotation, field.metadata)


def choices(annotation: object) -> tuple[str, ...]:
    """The texts that a field takes, where it is a choice."""
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return tuple(choice for part in get_args(annotation) for choice in choices(part))
    return ()


_SIMPLE = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _words(annotation: object, metadata: Sequence[object] = ()) -> str:
    sections = sections_of(annotation) if get_origin(annotation) is not dict else ()
    optional = " or null" if NoneType in get_args(annotation) else ""
    if len(sections) > 1:
        names = ", ".join(name for section in sections for name in names_of(section))
        return f"a section with name: one of {names}{optional}"
    if sections:
        return f"a section{optional}"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0], [limit for field in parts[1:] for limit in field.metadata])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else f"{parts[0]} (the only choice)"
    if origin in (Union, UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin is tuple:
        return f"a list{'' if parts[-1] is ... else f' of {len(parts)}'}, each {_words(parts[0])}"
    if origin is dict:
        return f"a mapping of names to {_words(parts[1])}"
    assert isinstance(annotation, type)
    return " ".join([_SIMPLE[annotation], _limits(metadata)]).strip()


def _limits(metadata: Sequence[object]) -> str:
    """`>= 0 and < 1` for the limits that pydantic keeps beside a number's type."""
    found: list[str] = []
    for limit in metadata:
        match limit:
            case Ge(bound):
                found.append(f">= {bound}")
            case Gt(bound):
                found.append(f"> {bound}")
            case Le(bound):
                found.append(f"<= {bound}")
            case Lt(bound):
                found.append(f"< {bound}")
    return " and ".join(found)
