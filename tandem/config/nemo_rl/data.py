"""The table for `data` and `env`: public sets, files and the hub, several sets of each kind, and who scores.

NeMo-RL has a section for each set, a list of them for several, a section `default` for what they share, and in its
first form all of that flat in `data`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from tandem.config.nemo_rl.entry import Entry, Outcome, by, implied, implied_by, lacking, mapped, nothing, refused, same
from tandem.config.nemo_rl.source import MISSING, Source
from tandem.config.schema import Plain

ROWS = "name the file of its rows, and their two fields"
KNOWN = "the fields of a public set are known"
FILES = (".jsonl", ".json", ".csv", ".parquet")
# Public sets that both know; and how math is compared.
PRESETS = {
    "gsm8k": "gsm8k",
    "GSM8K": "gsm8k",
    "DAPOMath17K": "dapo_math_17k",
    "DAPOMathAIME2024": "aime_2024",
    "AIME2024": "aime_2024",
    "math500": "math_500",
    "OpenMathInstruct-2": "openmathinstruct2",
}
SPLITS = ("gsm8k", "openmathinstruct2")  # sets of ours that have some
VERIFIERS = {"hf_math_verify": "math_verify", "dapo_math_verify": "dapo_math"}
FLAT = {"train_data_path": "train", "val_data_path": "validation", "train_split": "train", "val_split": "validation"}


def base_of(source: Source) -> dict[str, Plain]:
    """What a recipe needs and no single key says: a model, rows to train on, and a verifier."""
    base: dict[str, Plain] = {"policy.model_name": MISSING}
    for which, kind in (("train", "mixture"), ("validation", "sets")):
        if isinstance(source.get(f"data.{which}"), list):
            base[f"data.{which}.name"] = kind
    for theirs, ours in places_of(source).items():
        base |= rows_of(source, theirs, ours)
    if verifier := verifier_of(source):
        return base | {"env.verifier.name": verifier}
    return base | {"env.verifier.name": "python", "env.verifier.target": MISSING}


def places_of(source: Source) -> dict[str, str]:
    """Each set of NeMo-RL's `data` and where ours is: `train` and data.train, `train.1` and data.train.sources.NAME."""
    places: dict[str, str] = {}
    validates = bool(source.get("data.validation", {}) or source.get("data.val_data_path"))
    for which, kind in (("train", "sources"), *[("validation", "sets")] * validates):
        listed = source.get(f"data.{which}")
        if not isinstance(listed, list):
            places[which] = f"data.{which}"
            continue
        for i in range(len(listed)):
            place = f"data.{which}.{kind}.{_name_of(source, f'{which}.{i}')}"
            places[f"{which}.{i}"] = f"{place}_{i}" if place in places.values() else place
    return places


def _name_of(source: Source, theirs: str) -> str:
    """A name for one of several sets, of letters that a key may have."""
    path = path_of(source, theirs)
    name = PurePosixPath(path).stem if isinstance(path, str) else str(dataset_of(source, theirs))
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name)


def dataset_of(source: Source, theirs: str) -> Plain:
    """The name of a set: its own, the default, or that of the flat form."""
    own = source.get(f"data.{theirs}.dataset_name")
    return own or source.get("data.default.dataset_name") or source.get("data.dataset_name")


def path_of(source: Source, theirs: str) -> Plain:
    """The file or hub name of a set of the user's own."""
    flat = {"train": "data.train_data_path", "validation": "data.val_data_path"}.get(theirs, "data.default.data_path")
    return source.get(f"data.{theirs}.data_path") or source.get("data.default.data_path") or source.get(flat)


def rows_of(source: Source, theirs: str, ours: str) -> dict[str, Plain]:
    """Where the rows of a set come from: a public set, the hub, or a file, which may still have to be named."""
    preset, path = PRESETS.get(dataset_of(source, theirs)), path_of(source, theirs)
    if preset:
        return {f"{ours}.name": preset}
    if path is None or str(path).endswith(FILES):
        return {f"{ours}.name": "file", f"{ours}.path": MISSING if path is None else path}
    return {f"{ours}.name": "hub", f"{ours}.dataset": path}


def verifier_of(source: Source) -> str | None:
    """The verifier of ours that scores as the environment does, if there is one."""
    return VERIFIERS.get(source.get("env.math.math_verify_impl", "hf_math_verify")) if _users(source, "math") else None


def sets_of(source: Source, key: str) -> dict[str, str]:
    """The sets that a key speaks of: its own, or all those that do not say it themselves."""
    places, parts = places_of(source), key.split(".")[1:]
    for theirs in places:
        if parts[: theirs.count(".") + 1] == theirs.split("."):
            return {theirs: places[theirs]}
    if parts[0] in FLAT:
        return {theirs: ours for theirs, ours in places.items() if theirs == FLAT[parts[0]]}
    return {theirs: ours for theirs, ours in places.items() if not source.has(f"data.{theirs}.{parts[-1]}")}


Part = Callable[[Source, str, str, Plain], Mapping[str, Plain]]


def of_sets(keys: str, ours: str, text: str, part: Part, otherwise: str) -> Entry:
    """A key of a set, of one of several, of the default, or of the flat form. `part` says what it is of one set."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if value is None:
            return nothing("null")
        writes: dict[str, Plain] = {}
        for theirs, place in sets_of(source, key).items():
            writes |= part(source, theirs, place, value)
        return mapped(writes, ROWS if MISSING in writes.values() else "") if writes else nothing(otherwise)

    return by(in_sets(keys), ours, text, rule)


def in_sets(keys: str) -> str:
    """Patterns for names of a set: alone, in a list, and flat."""
    return " ".join(f"data.SET.{key} data.SET.*.{key} data.{key}" for key in keys.split())


def _dataset(source: Source, theirs: str, ours: str, value: Plain) -> Mapping[str, Plain]:
    if value == "ResponseDataset" or (value not in PRESETS and path_of(source, theirs) is not None):
        return {}
    return rows_of(source, theirs, ours)


def _path(source: Source, theirs: str, ours: str, value: Plain) -> Mapping[str, Plain]:
    copy = dataset_of(source, theirs) in PRESETS
    return {f"{ours}.path": value} if copy else rows_of(source, theirs, ours)


def _split(name: str) -> Part:
    def part(source: Source, theirs: str, ours: str, value: Plain) -> Mapping[str, Plain]:
        rows = rows_of(source, theirs, ours)[f"{ours}.name"]
        local = source.has(f"data.{theirs}.data_path") and rows != "hub"
        known = rows == "hub" or (name == "split" and rows in SPLITS and not local)
        return {f"{ours}.{name}": value} if known else {}

    return part


def _field(name: str) -> Part:
    def part(source: Source, theirs: str, ours: str, value: Plain) -> Mapping[str, Plain]:
        return {} if dataset_of(source, theirs) in PRESETS else {f"{ours}.{name}": value}

    return part


def _text_of(ours: str, brackets: str) -> Callable[[Source, str, Plain], Outcome]:
    def rule(source: Source, key: str, value: Plain) -> Outcome:
        return nothing("none") if value is None else mapped({ours: MISSING}, f"the text of {value}{brackets}")

    return rule


def _too_long(source: Source, key: str, value: Plain) -> Outcome:
    if value is None:
        return nothing("null")
    return mapped({"data.on_too_long": "skip"}, "NeMo-RL leaves them out of the loss")


def _split_off(source: Source, key: str, value: Plain) -> Outcome:
    if not value:
        return nothing("nothing is split off")
    return refused("put the rows for validation into a file of their own (data.validation)")


def _users(source: Source, name: str) -> bool:
    """Whether a data set names this environment; where none is named it is math."""
    named = [source.get(f"data.{theirs}.env_name") for theirs in (*places_of(source), "default")]
    return name in named or (name == "math" and not any(named))


def _verifier(source: Source, key: str, value: Plain) -> Outcome:
    if not _users(source, "math"):
        return nothing("no data set names it")
    if (verifier := verifier_of(source)) is None:
        return mapped({"env.verifier.target": MISSING}, f"a function of yours that scores as {value} does")
    return mapped({"env.verifier.name": verifier})


def _verifier_workers(source: Source, key: str, value: Plain) -> Outcome:
    if verifier_of(source) != "math_verify" or value is None:
        return nothing("verifiers run beside training, with a deadline")
    return mapped({"env.verifier.num_workers": value})


def _other_environment(source: Source, key: str, value: Plain) -> Outcome:
    name = key.split(".")[1]
    if not _users(source, name):
        return nothing("no data set names it")
    return refused(f"environment {name}: its score is a verifier of yours here (`env.verifier.name: python`)")


ENTRIES: tuple[Entry, ...] = (
    of_sets(
        "dataset_name",
        "data.train.name data.validation.name",
        f"{', '.join(dict.fromkeys(PRESETS.values()))}; of others {ROWS}. A list becomes a mixture, or sets",
        _dataset,
        "rows of your own",
    ),
    of_sets(
        "data_path train_data_path val_data_path",
        "data.train.path data.validation.path",
        "a file; `data.train.dataset` with `data.train.name: hub` for what is none",
        _path,
        "no set reads it",
    ),
    of_sets("input_key", "data.train.prompt_field data.validation.prompt_field", "", _field("prompt_field"), KNOWN),
    of_sets("output_key", "data.train.answer_field data.validation.answer_field", "", _field("answer_field"), KNOWN),
    of_sets(
        "split train_split val_split",
        "data.train.split data.validation.split",
        "of the hub, gsm8k and openmathinstruct2; implied else",
        _split("split"),
        "the set, or the file, is one split",
    ),
    of_sets(
        "subset",
        "data.train.subset data.validation.subset",
        "of the hub",
        _split("subset"),
        "only sets of the hub have some",
    ),
    by(
        in_sets("prompt_file"),
        "data.prompt_template",
        "the text of the file, {question} for {}",
        _text_of("data.prompt_template", ", with {question} for {}"),
    ),
    by(
        in_sets("system_prompt_file"),
        "data.system_prompt",
        "the text of the file",
        _text_of("data.system_prompt", ""),
    ),
    implied_by(
        in_sets("split_validation_size"), "0; else put the rows for validation into a file of their own", _split_off
    ),
    implied(in_sets("seed processor env_name extract_answer task_name"), "a row is a question and an answer"),
    lacking("data.SET.repeat data.SET.*.repeat", "`ALGO.num_val_generations_per_prompt` answers a prompt so often"),
    lacking("data.use_multiple_dataloader", "a mixture with `data.train.weights`"),
    by("data.max_input_seq_length", "data.on_too_long", "skip; it is also the room of a prompt", _too_long),
    same("data.shuffle"),
    implied("data.num_workers data.num_prompts_per_dataloader", "prompts are rendered as they are asked for"),
    by("env.math.math_verify_impl", "env.verifier.name", "math_verify, dapo_math; else a function of yours", _verifier),
    by("env.math.num_workers", "env.verifier.num_workers", "of math_verify; implied else", _verifier_workers),
    Entry(
        ("env.**",),
        "not supported",
        "a verifier of your own (`env.verifier.name: python`); implied where no data set names it",
        _other_environment,
    ),
)
