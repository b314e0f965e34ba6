"""What pydantic found wrong, in the words of the house: what came, what was wanted, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tandem.config.run import Config
from tandem.config.schema import (
    Plain,
    Shape,
    all_keys,
    choices,
    chosen,
    field_of,
    names_of,
    sections_of,
    shape_at,
    shape_of,
    wanted,
)
from tandem.config.section import Section
from tandem.config.show import shown

Place = Callable[[Sequence[str]], str]  # key -> "a.b (recipes/x.yaml:3)"
Key = tuple[str, ...]
# Names that Megatron-Core's users know and this backend does not have: said by name, not taken for a typing error.
NOT_YET = {
    "virtual_pipeline_model_parallel_size": "the interleaved pipeline schedule",
    "expert_model_parallel_size": "expert parallel",
    "expert_tensor_parallel_size": "expert parallel",
    "num_moe_experts": "models with experts (MoE)",
    "moe_router_replay": "models with experts (MoE)",
    "fp8": "FP8",
    "fp8_recipe": "FP8",
    "transformer_impl": "a choice of layers (Megatron-Core's own, without TransformerEngine)",
}
# Names of other systems for what is said by another key here.
OTHERWISE = {
    "offload_optimizer_for_logprob": ("offload", "optimizer, which keeps the moments away while the model infers"),
}
# Environments of other projects, and how to use them here.
ELSEWHERE = {
    "verifiers": "environments of the package verifiers ask an endpoint over HTTP for what the policy writes, and the"
    " engines here have none: write the task as env.name=tools or env.name=python",
    "openenv": "an OpenEnv server is called from a class of your own, env.name=python: docs/environments.md has one",
}
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)


def mistakes(error: ValidationError, values: Mapping[str, Plain], place: Place) -> dict[Key, str]:
    """One message for each wrong key. `values` are what was validated."""
    found: dict[Key, str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        key, field, inside = _locate(detail["loc"])
        if inside:
            assert field is not None
            found.setdefault(key, _wrong_value(key, field, values, place))
        else:
            found.setdefault(key, _message(detail, key, field, values, place))
    return found


def must_be_given(key: Sequence[str], field: FieldInfo | None) -> str:
    """The message for a required key that nobody set."""
    dotted = ".".join(key)
    if field is None:
        return f"{dotted} must be given"
    if field.examples:
        return f"{dotted} must be given, e.g. {dotted}={field.examples[0]}"
    sections = sections_of(field.annotation)
    if len(sections) == 1:
        required = [name for name, inner in sections[0].model_fields.items() if inner.is_required()]
        return f"{dotted} must be given: a section with {', '.join(required)}"
    return f"{dotted} must be given: {wanted(field)}"


def unknown_key(key: Sequence[str], values: Mapping[str, Plain], place: Place) -> str:
    """The message for a key that its section does not have, with the nearest that there is."""
    *parents, last = key
    if last in NOT_YET:
        return f"{place(key)}: {NOT_YET[last]} is not supported yet; take the key out"
    if last in OTHERWISE:
        name, value = OTHERWISE[last]
        return f"{place(key)}: unknown key; write {'.'.join([*parents, name])}={value}"
    section = shape_at(parents, values)
    assert isinstance(section, type), "a mapping by names knows every name"
    same = list(dict.fromkeys(known for known in all_keys() if known.split(".")[-1] == last.split(".")[-1]))
    siblings = [variant for variant in _variants(parents, values) if last in variant.model_fields]
    same = [known for known in same if _is_set(known.split(".")[:-1], values)] or same
    near = get_close_matches(last, section.model_fields, n=1, cutoff=0.6)
    if near:  # a key of a variant that is not chosen is further off than a sibling
        same = [known for known in same if field_of(shape_at(known.split(".")[:-1], values), last) is not None]
    if siblings:
        name = names_of(siblings[0])[0]
        hint = f"it belongs to {'.'.join(parents)}.name = {name}, here the name is {names_of(section)[0]}"
    elif same and not get_close_matches(last, near, cutoff=0.9):
        hint = f"did you mean {' or '.join(same[:3])}?"
    elif near:
        hint = f"did you mean {'.'.join([*parents, near[0]])}?"
    elif far := get_close_matches(last, {known.split(".")[-1] for known in all_keys()}, n=1, cutoff=0.8):
        hint = f"did you mean {next(known for known in all_keys() if known.split('.')[-1] == far[0])}?"
    else:
        hint = f"{'.'.join(parents) or 'a recipe'} knows {', '.join(section.model_fields)}"
    return f"{place(key)}: unknown key; {hint}"


def _locate(loc: tuple[int | str, ...]) -> tuple[Key, FieldInfo | None, bool]:
    """The key of an error, without the variant names that pydantic puts in between; its field if there is one.

    True if the error is inside a list or a mapping: then the key is that of the whole.
    """
    key: list[str] = []
    shape: Shape | None = Config
    field: FieldInfo | None = None
    for part in loc:
        if part == "[key]":  # the name itself is wrong, not what stands there
            break
        if field is not None and len(sections_of(field.annotation)) > 1 and shape is None:
            shape = chosen(field, part)
            continue
        if shape is None and key:
            return tuple(key), field, True
        key.append(str(part))
        field = field_of(shape, str(part))
        inner = sections_of(field.annotation) if field is not None else ()
        only = inner[0] if len(inner) == 1 else None
        shape = (shape_of(field) if field is not None else None) or only
    return tuple(key), field, False


def _message(detail: ErrorDetails, key: Key, field: FieldInfo | None, values: Mapping[str, Plain], place: Place) -> str:
    if detail["loc"][-1] == "[key]":
        return f"{place(key)}: {shown(key[-1])} is no name: use letters, digits, _ and -"
    match detail["type"]:
        case "extra_forbidden":
            return unknown_key(key, values, place)
        case "missing":
            return must_be_given(key, field)
        case "union_tag_not_found":
            assert field is not None
            names = [name for section in sections_of(field.annotation) for name in names_of(section)]
            return f"{'.'.join((*key, 'name'))} must be given: one of {', '.join(names)}"
        case "union_tag_invalid":
            assert field is not None
            name = detail["input"]["name"]
            if key == ("env",) and name in ELSEWHERE:
                return f"{place((*key, 'name'))}: {ELSEWHERE[name]}"
            names = [name for section in sections_of(field.annotation) for name in names_of(section)]
            return f"{place((*key, 'name'))}: no {key[-1]} is named {shown(name)}{_nearest(name, names)}"
        case _:
            assert field is not None
            return _wrong_value(key, field, values, place)


def _wrong_value(key: Key, field: FieldInfo, values: Mapping[str, Plain], place: Place) -> str:
    whole: Plain = values
    for part in key:
        whole = whole[part]
    named = choices(field.annotation)
    if named and isinstance(whole, str):
        return f"{place(key)}: got {shown(whole)}{_nearest(whole, named)}"
    want = wanted(field)
    do = ""
    if shape_of(field) is None and sections_of(field.annotation):
        do = "; write {} for its defaults" if whole is not None else "; leave it out for its defaults"
    elif isinstance(whole, str) and "number" in want and _NUMBER.fullmatch(whole):
        do = "; without quotes"
    elif isinstance(whole, float) and whole.is_integer() and want.startswith("a whole number"):
        do = f"; write {whole:.0f}"
    elif want.startswith("text") and whole is not None:
        do = "; put it in quotes"
    return f"{place(key)}: got {shown(whole)}, wanted {want}{do}"


def _nearest(name: Plain, names: Sequence[str]) -> str:
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"{f'; did you mean {near[0]}?' if near else ';'} Known: {', '.join(names)}"


def _is_set(key: Sequence[str], values: Mapping[str, Plain]) -> bool:
    """Whether a section is there: neither left out nor null."""
    value: Plain = values
    for part in key:
        value = value.get(part) if isinstance(value, Mapping) else None
    return isinstance(value, Mapping)


def _variants(key: Sequence[str], values: Mapping[str, Plain]) -> tuple[type[Section], ...]:
    field = field_of(shape_at(key[:-1], values), key[-1]) if key else None
    return sections_of(field.annotation) if field is not None else ()
