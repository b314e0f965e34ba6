"""A NeMo-RL config to a recipe, with a row for every key: mapped, implied, not supported, or unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from tandem.config.idle import idle_keys
from tandem.config.loaded import Loaded
from tandem.config.nemo_rl import algorithm, asynchrony, data, generation, loss, models, optimizers, surroundings
from tandem.config.nemo_rl.entry import Entry, Fate, Outcome, nothing, refused, target_key, types_of
from tandem.config.nemo_rl.recipe import differences, filled, open_keys, tree_of
from tandem.config.nemo_rl.source import MISSING, Leaf, Source, read
from tandem.config.run import Config
from tandem.config.schema import Plain, completed, frozen
from tandem.config.show import shown

# The table, by the headings of docs/migrate.md. The first entry that speaks of a key decides.
TABLE: Mapping[str, tuple[Entry, ...]] = {
    "The algorithm": algorithm.ENTRIES,
    "The losses": loss.ENTRIES,
    "Policy and value": models.ENTRIES,
    "Optimizers": optimizers.ENTRIES,
    "Generation": generation.ENTRIES,
    "Asynchronous training": asynchrony.ENTRIES,
    "Data and environments": data.ENTRIES,
    "Checkpoints, logs, machines": surroundings.ENTRIES,
}


@dataclass(frozen=True)
class Row:
    """What became of one key. `text` names our keys with their values, or says why there are none."""

    key: str
    value: Plain
    fate: Fate | Literal["unknown"]
    text: str
    ours: Mapping[str, Plain] = field(default_factory=dict)  # keys of ours that it writes
    given: bool = True  # false: not in the file, NeMo-RL's own default


@dataclass(frozen=True)
class Imported:
    """`recipe` holds only what differs from our defaults; `open` are its keys that the user has to fill in."""

    recipe: Mapping[str, Plain]
    rows: tuple[Row, ...]
    open: tuple[str, ...]


def import_config(path: Path) -> Imported:
    """Read a PPO or GRPO config of NeMo-RL. Every leaf of it is one row, and no other leaf is written.

    ConfigError where the file, or one that it inherits from, is not to be had or is no such config.
    """
    source = read(path)
    writes: dict[str, Plain] = {"name": source.name, source.algorithm: {}, **data.base_of(source)}
    if algorithm.has_critic(source):
        writes |= {"value": {}, "value_loss_fn.name": "mse"}
    rows: list[Row] = []
    for leaf, given in [*((leaf, True) for leaf in source.leaves), *((leaf, False) for leaf in _defaults(source))]:
        outcome = _decide(source, leaf)
        written = {target_key(key, source, leaf.key): value for key, value in outcome.writes.items()} if outcome else {}
        written = {key: _whole(key, value) for key, value in written.items()}
        writes |= {key: value for key, value in written.items() if value != MISSING or key not in writes}
        rows.append(_row(source, leaf, outcome, written, given))
    idle = _without_effect(writes)
    rows = [_idle_row(_overruled(row, writes), idle) for row in rows]
    tree = tree_of({key: value for key, value in writes.items() if key not in idle})
    recipe = differences(tree)
    return Imported(recipe, tuple(rows), tuple(open_keys(recipe)))


def _decide(source: Source, leaf: Leaf) -> Outcome | None:
    """None: no entry speaks of this key."""
    entry = next((entry for entries in TABLE.values() for entry in entries if entry.matches(leaf.key)), None)
    if off := _switched_off(source, leaf.key):
        return nothing(f"{off} is false")
    if leaf.key.split(".")[0] in ("value", "value_loss_fn") and not algorithm.has_critic(source):
        return nothing(f"{algorithm.estimator_of(source)} has no critic")
    if entry is None and leaf.value in (None, {}, []) and _is_section(leaf.key):
        return nothing("nothing is set")
    if entry is None:
        return None
    if leaf.problem:
        return refused(leaf.problem)
    return entry.rule(source, leaf.key, leaf.value)


def _switched_off(source: Source, key: str) -> str | None:
    """The nearest `enabled: false` of a section around a key. `colocated` means the opposite: then it has its own."""
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        section = ".".join(parts[:depth])
        switch = f"{section}.enabled"
        if switch != key and not section.endswith(".colocated") and source.get(switch) is False:
            return switch
    return None


def _is_section(key: str) -> bool:
    return any(entry.is_below(key) for entries in TABLE.values() for entry in entries)


def _defaults(source: Source) -> Iterator[Leaf]:
    """What NeMo-RL takes where a file says nothing, and our default is another."""
    name = source.algorithm
    given: dict[str, Plain] = {
        "loss_fn.reference_policy_kl_penalty": 0.01,
        "policy.generation.val_temperature": source.get("policy.generation.temperature", 1.0),
        f"{name}.val_at_start": False,
        f"{name}.val_at_end": False,
    }
    if name == "grpo":
        given |= {"grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16, "grpo.max_num_epochs": 1}
        own = "adv_estimator." if source.has("grpo.adv_estimator.name") else ""
        given[f"grpo.{own}use_leave_one_out_baseline"] = True
    if source.get(f"{name}.async_{name}.enabled", False):
        given[f"{name}.async_{name}.max_trajectory_age_steps"] = 1
        given[f"{name}.async_{name}.recompute_kv_cache_after_weight_updates"] = False
    if source.get("async_rl"):
        given["async_rl.recompute_kv_cache_after_weight_updates"] = False
    if algorithm.has_critic(source):
        given["value_loss_fn.cliprange"] = None
    for model in ("policy", *["value"] * algorithm.has_critic(source)):
        given |= optimizers.defaults_of(source, model)
    for key, value in given.items():
        if not source.has(key):
            yield Leaf(tuple(key.split(".")), value, source.leaves[0].origin)


def _whole(key: str, value: Plain) -> Plain:
    """`${div:...}` gives 512.0 where NeMo-RL counts with it; ours wants 512."""
    takes_float = any("float" in str(annotation) for annotation in types_of(key))
    return int(value) if isinstance(value, float) and value.is_integer() and not takes_float else value


def _row(source: Source, leaf: Leaf, outcome: Outcome | None, written: Mapping[str, Plain], given: bool) -> Row:
    if outcome is None:
        return Row(leaf.key, leaf.value, "unknown", "no such key is known; it is not taken over", {}, given)
    why = target_key(outcome.why, source, leaf.key)
    parts = [f"{key} = {shown(value)}" if value != {} else key for key, value in written.items()]
    said = "the same" if list(written.items()) == [(leaf.key, leaf.value)] else ", ".join(parts)
    return Row(leaf.key, leaf.value, outcome.fate, "; ".join(filter(None, (said, why))), written, given)


def _without_effect(writes: Mapping[str, Plain]) -> dict[str, str]:
    """What would be refused because it has no effect in this run, and why. None of it where the values do not fit."""
    whole = completed(filled(tree_of(writes)), Config)
    try:
        config = Config.model_validate(frozen(whole), strict=True)
    except ValidationError:
        return {}  # the check of the recipe says what is wrong with which value
    if bool(config.ppo) == bool(config.grpo):
        return {}
    return {key: why for key, why in idle_keys(Loaded(config, {})).items() if key in writes}


def _overruled(row: Row, writes: Mapping[str, Plain]) -> Row:
    """A key that says one thing where a later key of the file says another of the same key of ours."""
    lost = [key for key, value in row.ours.items() if value not in (MISSING, {}) and value != writes[key]]
    if not lost:
        return row
    return replace(row, fate="not supported", text=f"another key says {lost[0]} = {shown(writes[lost[0]])}", ours={})


def _idle_row(row: Row, idle: Mapping[str, str]) -> Row:
    """A key of which nothing is left in the recipe."""
    if row.fate != "mapped" or not row.ours or not all(key in idle for key in row.ours):
        return row
    return replace(row, fate="implied", text=f"no effect here: {idle[next(iter(row.ours))]}", ours={})
