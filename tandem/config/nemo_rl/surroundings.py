"""The table for what surrounds training: data, environment, checkpoints, logs, machines."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.config.nemo_rl.entry import (
    Entry,
    Outcome,
    by,
    implied,
    implied_by,
    lacking,
    mapped,
    nothing,
    refused,
    renamed,
    same,
)
from tandem.config.nemo_rl.source import MISSING, Source
from tandem.config.schema import Plain

DATA = "data.SET"
SINKS = ("wandb", "mlflow", "swanlab", "tensorboard", "gpu_monitoring")
ROWS = "name the file of its rows, and their two fields"
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


def base_of(source: Source) -> dict[str, Plain]:
    """What a recipe needs and no single key says: a model, rows to train on, and a verifier."""
    base: dict[str, Plain] = {"policy.model_name": MISSING, **_rows(source, "train")}
    if validates(source):
        base |= _rows(source, "validation")
    if verifier := verifier_of(source):
        return base | {"env.verifier.name": verifier}
    return base | {"env.verifier.name": "python", "env.verifier.target": MISSING}


def verifier_of(source: Source) -> str | None:
    """The verifier of ours that scores as the environment does, if there is one."""
    return VERIFIERS.get(source.get("env.math.math_verify_impl", "hf_math_verify")) if _users(source, "math") else None


def _rows(source: Source, which: str) -> dict[str, Plain]:
    """Where the rows of a set come from: a public set, the hub, or a file that is still to be named."""
    preset, path = PRESETS.get(dataset_of(source, which)), path_of(source, which)
    if preset:
        return {f"data.{which}.name": preset}
    if path is None or str(path).endswith(FILES):
        return {f"data.{which}.name": "file", f"data.{which}.path": MISSING if path is None else path}
    return {f"data.{which}.name": "hub", f"data.{which}.dataset": path}


def path_of(source: Source, which: str) -> Plain:
    """The file or hub name of a set of the user's own."""
    flat = {"train": "train_data_path", "validation": "val_data_path"}[which]
    section = source.get(f"data.{which}", {})
    own = section.get("data_path") if isinstance(section, Mapping) else None
    return own or source.get("data.default.data_path") or source.get(f"data.{flat}")


def validates(source: Source) -> bool:
    """Whether the file names rows of their own for validation."""
    return bool(source.get("data.validation", {}) or source.get("data.val_data_path"))


def dataset_of(source: Source, which: str) -> Plain:
    """The name of a data set: of its own section, of the default for all, or of the flat form of older files."""
    section = source.get(f"data.{which}", {})
    own = section.get("dataset_name") if isinstance(section, Mapping) else None
    return own or source.get("data.default.dataset_name") or source.get("data.dataset_name")


def under_ray(source: Source) -> bool:
    """Whether the run has more than one process."""
    places = [source.get(f"cluster.{name}", 1) for name in ("num_nodes", "gpus_per_node")]
    return places != [1, 1] or not source.get("policy.generation.colocated.enabled", True)


def which_of(key: str) -> str:
    """Our section for a key of `data`: train for the flat form too."""
    name = key.split(".")[1]
    return "validation" if name == "validation" or name.startswith("val_") else "train"


def _several(source: Source, key: str) -> bool:
    return isinstance(source.get(".".join(key.split(".")[:2])), list)


def one_source(rule: Entry) -> Entry:
    """Of a list of data sets nothing is taken over."""

    def decide(source: Source, key: str, value: Plain) -> Outcome:
        if _several(source, key):
            return refused("several sources: write a mixture, or sets (docs/data.md)")
        return rule.rule(source, key, value)

    return Entry(rule.keys, rule.fate, rule.text, decide)


def _is_preset(source: Source, key: str) -> bool:
    return dataset_of(source, which_of(key)) in PRESETS


def _dataset(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, "ResponseDataset"):
        return nothing("rows of your own")
    if value in PRESETS:
        return mapped({f"data.{which_of(key)}.name": PRESETS[value]})
    if path_of(source, which_of(key)) is not None:
        return nothing("its rows are where data_path says")
    return mapped({f"data.{which_of(key)}.path": MISSING}, ROWS)


def _path(source: Source, key: str, value: Plain) -> Outcome:
    if value is None:
        return nothing("null")
    if _is_preset(source, key):
        return mapped({f"data.{which_of(key)}.path": value}, "a local copy")
    return mapped(_rows(source, which_of(key)))


def _split(source: Source, key: str, value: Plain) -> Outcome:
    which, name = which_of(key), key.rpartition(".")[2].replace("train_split", "split").replace("val_split", "split")
    rows = _rows(source, which)
    if value is None:
        return nothing("null")
    if rows[f"data.{which}.name"] == "hub" or (name == "split" and rows[f"data.{which}.name"] in SPLITS):
        return mapped({f"data.{which}.{name}": value})
    return nothing("the set, or the file, is one split")


def _field(ours: str) -> Entry:
    theirs = {"prompt_field": "input_key", "answer_field": "output_key"}[ours]

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        sets = ["train", *["validation"] * validates(source)]
        chosen = sets if key.split(".")[1] in ("default", theirs) else [which_of(key)]
        overridden = [name for name in sets if source.has(f"data.{name}.{theirs}")]
        if key.split(".")[1] in ("default", theirs):
            chosen = [name for name in sets if name not in overridden]
        chosen = [name for name in chosen if dataset_of(source, name) not in PRESETS]
        if value is None or not chosen:
            return nothing("null" if value is None else "the fields of a public set are known")
        return mapped({f"data.{name}.{ours}": value for name in chosen})

    return by(f"{DATA}.{theirs} data.{theirs}", f"data.train.{ours} data.validation.{ours}", "", rule)


def _prompt_file(source: Source, key: str, value: Plain) -> Outcome:
    if value is None:
        return nothing("the question alone")
    return mapped({"data.prompt_template": MISSING}, f"the text of {value}, with {{question}} for {{}}")


def _system_prompt(source: Source, key: str, value: Plain) -> Outcome:
    if value is None:
        return nothing("none")
    return mapped({"data.system_prompt": MISSING}, f"the text of {value}")


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
    named = [source.get(f"data.{which}.env_name") for which in ("train", "validation", "default")]
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


def _metric(source: Source, key: str, value: Plain) -> Outcome:
    match value:
        case None:
            return nothing("null")
        case "val_reward" | "val:accuracy" | "val:reward":
            return mapped({key: "val:accuracy"})
        case "train:reward" | "train_reward":
            return mapped({key: "train:rollout/reward"})
    return refused("known are val:accuracy and train:reward; ours are `val:` or `train:` and a name of metrics.jsonl")


def _directory(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("null") if value is None else mapped({"run_dir": value})


def _sink(name: str, section: str, target: str) -> Entry:
    """A key of a log that is written only where it is switched on."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if not source.get(f"logger.{section}_enabled", False):
            return nothing(f"{section}_enabled is not set")
        return nothing("null") if value is None else mapped({target: value})

    return by(f"logger.{section}.{name}", target, f"where `{section}_enabled` is true", rule)


def _unused_sink(source: Source, key: str, value: Plain) -> Outcome:
    section = key.split(".")[1].removesuffix("_monitoring")
    switch = {"gpu": "monitor_gpus"}.get(section, f"{section}_enabled")
    if not source.get(f"logger.{switch}", False) or value in ({}, None, False):
        return nothing(f"{switch} is not set")
    return refused("no such setting")


def _processes(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({key: value} | ({"cluster.launch": "ray"} if under_ray(source) else {}))


DATA_ENTRIES = (
    *(
        one_source(entry)
        for entry in (
            by(
                f"{DATA}.dataset_name {DATA}.*.dataset_name data.dataset_name",
                "data.train.name data.validation.name",
                f"{', '.join(dict.fromkeys(PRESETS.values()))}; of others {ROWS}",
                _dataset,
            ),
            by(
                f"{DATA}.data_path data.train_data_path data.val_data_path",
                "data.train.path data.validation.path",
                "a file; `data.train.dataset` with `data.train.name: hub` for what is none",
                _path,
            ),
            _field("prompt_field"),
            _field("answer_field"),
            by(
                f"{DATA}.prompt_file data.prompt_file",
                "data.prompt_template",
                "the text of the file, {question} for {}",
                _prompt_file,
            ),
            by(
                f"{DATA}.system_prompt_file data.system_prompt_file",
                "data.system_prompt",
                "the text of the file",
                _system_prompt,
            ),
            implied_by(
                f"{DATA}.split_validation_size data.split_validation_size",
                "0; else put the rows for validation into a file of their own",
                _split_off,
            ),
            by(
                f"{DATA}.split {DATA}.subset data.train_split data.val_split",
                "data.train.split data.train.subset",
                "of the hub, gsm8k and openmathinstruct2; implied else",
                _split,
            ),
            implied(
                f"{DATA}.seed {DATA}.processor {DATA}.env_name {DATA}.extract_answer "
                f"{DATA}.task_name {DATA}.*.split {DATA}.*.seed data.task_name "
                "data.processor",
                "a row is a question and an answer",
            ),
            lacking(
                f"{DATA}.*.** {DATA}.repeat data.use_multiple_dataloader",
                "one source a set; more by hand: docs/data.md",
            ),
        )
    ),
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

RUN_ENTRIES = (
    same(
        "checkpointing.enabled checkpointing.save_period checkpointing.keep_top_k checkpointing.higher_is_better "
        "checkpointing.checkpoint_must_save_by logger.num_val_samples_to_print"
    ),
    by("checkpointing.checkpoint_dir", "run_dir", "a run keeps all that it writes in one directory", _directory),
    by("checkpointing.metric_name", "checkpointing.metric_name", "val:accuracy, train:rollout/reward", _metric),
    implied(
        "checkpointing.model_save_format checkpointing.save_consolidated checkpointing.save_data_plane "
        "checkpointing.is_async checkpointing.model_cache_dir checkpointing.model_repo_id "
        "checkpointing.resume_if_exists",
        "a checkpoint is whole, in safetensors; a run in its directory goes on from the newest",
    ),
    lacking("checkpointing.save_optimizer", "a checkpoint holds the optimizer", (None, True)),
    implied("logger.log_dir", "logs are in `run_dir`"),
    implied_by(
        "logger.wandb_enabled logger.mlflow_enabled",
        "the section `logger.wandb` or `logger.mlflow` is there, or it is not",
        lambda source, key, value: nothing("by its section"),
    ),
    renamed("logger.tensorboard_enabled", "logger.tensorboard"),
    _sink("project", "wandb", "logger.wandb.project"),
    _sink("name", "wandb", "logger.wandb.name"),
    _sink("experiment_name", "mlflow", "logger.mlflow.experiment_name"),
    _sink("tracking_uri", "mlflow", "logger.mlflow.tracking_uri"),
    lacking(
        "logger.swanlab_enabled logger.monitor_gpus", "TensorBoard, W&B and MLflow are there; GPUs are not watched"
    ),
    Entry(
        (*(f"logger.{name}.**" for name in SINKS), "logger.tensorboard"),
        "not supported",
        "implied where it is switched off",
        _unused_sink,
    ),
    by(
        "cluster.num_nodes cluster.gpus_per_node",
        "cluster",
        "the same, with `launch: ray` for more than one GPU",
        _processes,
    ),
    implied(
        "cluster.master_port_range_low cluster.master_port_range_high cluster.segment_size",
        "Ray chooses ports and places",
    ),
    implied("defaults *._override_", "read: the table shows what is inherited too"),
)

ENTRIES: tuple[Entry, ...] = (*DATA_ENTRIES, *RUN_ENTRIES)
