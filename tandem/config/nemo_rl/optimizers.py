"""The table for optimizers and learning rates: torch's classes by name, and Megatron's own.

NeMo-RL moves the learning rate on once in each pass over a step's samples; ours counts optimizer steps. So lengths are
multiplied by the mini-batches of a pass.
"""

from __future__ import annotations

from tandem.config.nemo_rl.entry import Entry, Outcome, by, implied, lacking, mapped, nothing, refused, renamed
from tandem.config.nemo_rl.models import trained_by_megatron
from tandem.config.nemo_rl.source import Source
from tandem.config.schema import Plain

TORCH, INNER = "MODEL.optimizer", "MODEL.megatron_cfg.optimizer"
PARTS = "MODEL.scheduler.*"
ADAMW = ("torch.optim.AdamW", "adam", "adamw")
STYLES = ("constant", "linear", "cosine")


def _inner_of(model: str) -> str:
    return f"{model}.megatron_cfg.optimizer"


def mini_batches(source: Source) -> int:
    """Optimizer steps of one pass over the samples of a step."""
    algorithm = source.algorithm
    prompts = source.get(f"{algorithm}.num_prompts_per_step", 1)
    samples = prompts * source.get(f"{algorithm}.num_generations_per_prompt", 1)
    return max(1, samples // max(1, source.get("policy.train_global_batch_size", samples)))


def defaults_of(source: Source, model: str) -> dict[str, Plain]:
    """What torch and Megatron take for AdamW where a file says nothing, and our default is another."""
    section = _inner_of(model) if trained_by_megatron(source, model) else f"{model}.optimizer"
    if not source.get(section) or not is_adamw(source, model):
        return {}
    if trained_by_megatron(source, model):
        return {f"{_inner_of(model)}.weight_decay": 0.01, f"{_inner_of(model)}.adam_beta2": 0.999}
    arguments = f"{model}.optimizer.kwargs"
    return {f"{arguments}.weight_decay": 0.01, f"{arguments}.betas": [0.9, 0.999]}


def is_adamw(source: Source, model: str) -> bool:
    name = f"{_inner_of(model)}.optimizer" if trained_by_megatron(source, model) else f"{model}.optimizer.name"
    return source.get(name, "adamw") in ADAMW


def of_adamw(entry: Entry) -> Entry:
    """An entry that says something of AdamW alone: a rate for another optimizer is none for it."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if not is_adamw(source, key.split(".")[0]):
            return refused("of an optimizer that is not there: choose lr and weight_decay for AdamW")
        return entry.rule(source, key, value)

    return Entry(entry.keys, entry.fate, entry.text, rule)


def outside_megatron(entry: Entry) -> Entry:
    """An entry of the torch optimizers, which NeMo-RL does not read where Megatron trains the model."""

    def rule(source: Source, key: str, value: Plain) -> Outcome:
        if trained_by_megatron(source, key.split(".")[0]):
            return nothing("megatron_cfg has its own")
        return entry.rule(source, key, value)

    return Entry(entry.keys, entry.fate, entry.text, rule)


def _class(source: Source, key: str, value: Plain) -> Outcome:
    if value in ADAMW:
        return mapped({"MODEL.optimizer.name": "adamw"})
    return refused("AdamW is the only optimizer", {"MODEL.optimizer.name": "adamw"})


def _betas(source: Source, key: str, value: Plain) -> Outcome:
    optimizer = key.rpartition(".")[0]
    pair = [source.get(f"{optimizer}.adam_beta1", 0.9), source.get(f"{optimizer}.adam_beta2", 0.999)]
    return mapped({"MODEL.optimizer.betas": pair})


def _min_lr(source: Source, key: str, value: Plain) -> Outcome:
    model = key.split(".")[0]
    if source.get(f"{model}.megatron_cfg.scheduler.lr_decay_style", "constant") not in STYLES[1:]:
        return nothing("a constant rate has no floor")
    return mapped({"MODEL.scheduler.min_lr_ratio": _share(value, source.get(f"{_inner_of(model)}.lr", 0.0))})


def _share(value: Plain, lr: Plain) -> float:
    """A floor as a part of the rate; the last digits of a quotient of decimals say nothing."""
    return float(f"{value / lr:.6g}") if isinstance(value, int | float) and lr else 0.0


def _style(source: Source, key: str, value: Plain) -> Outcome:
    if value in STYLES:
        return mapped({"MODEL.scheduler.name": value})
    return refused(f"known are {', '.join(STYLES)}")


def _warmup(source: Source, value: Plain) -> Outcome:
    if not isinstance(value, int) or value == 0:
        return nothing("no warm-up")
    count = mini_batches(source)
    why = f"{value} passes x {count} mini-batches" if count > 1 else ""
    return mapped({"MODEL.scheduler.warmup_steps": value * count}, why)


def _part(source: Source, key: str) -> tuple[str, Plain]:
    """The class of the scheduler that a key belongs to, without its module, and its arguments."""
    place = key.partition(".kwargs")[0].removesuffix(".name")
    return str(source.get(f"{place}.name", "")).rpartition(".")[2], source.get(f"{place}.kwargs", {})


def _rises(arguments: Plain) -> bool:
    return arguments.get("end_factor", 1.0) >= arguments.get("start_factor", 1 / 3)


def _scheduler(source: Source, key: str, value: Plain) -> Outcome:
    name, arguments = _part(source, key)
    match name:
        case "LinearLR" if _rises(arguments):
            return nothing("the warm-up: its length is total_iters")
        case "LinearLR":
            return mapped({"MODEL.scheduler.name": "linear"}, "down to the end of the run")
        case "ConstantLR" if arguments.get("factor", 1 / 3) == 1:
            return mapped({"MODEL.scheduler.name": "constant"})
        case "CosineAnnealingLR":
            return mapped({"MODEL.scheduler.name": "cosine"}, "down to the end of the run")
    return refused("a linear warm-up, then constant, linear or cosine, is there")


def _scheduler_argument(source: Source, key: str, value: Plain) -> Outcome:
    (name, arguments), argument = _part(source, key), key.rpartition(".")[2]
    lr = source.get(f"{key.split('.')[0]}.optimizer.kwargs.lr", 0.0)
    match name, argument:
        case "LinearLR", "total_iters" if _rises(arguments):
            return _warmup(source, value)
        case "LinearLR", "end_factor" if not _rises(arguments):
            return mapped({"MODEL.scheduler.min_lr_ratio": value})
        case "LinearLR", "start_factor" | "end_factor" | "total_iters":
            return nothing("from near 0 up to lr" if _rises(arguments) else "from lr, over the whole run")
        case "ConstantLR", "factor" | "total_iters":
            return nothing("constant") if argument != "factor" or value == 1 else refused("lr itself is the rate")
        case "CosineAnnealingLR", "eta_min":
            return mapped({"MODEL.scheduler.min_lr_ratio": _share(value, lr)})
        case "CosineAnnealingLR", "T_max":
            return nothing("over the whole run")
    return refused("no such argument")


def _milestones(source: Source, key: str, value: Plain) -> Outcome:
    return nothing("the schedule follows on the warm-up")


TORCH_ENTRIES = tuple(
    outside_megatron(entry)
    for entry in (
        by(f"{TORCH}.name", "MODEL.optimizer.name", "torch.optim.AdamW; others are not supported", _class),
        of_adamw(
            renamed(
                f"{TORCH}.kwargs.lr {TORCH}.kwargs.weight_decay {TORCH}.kwargs.betas {TORCH}.kwargs.eps",
                "MODEL.optimizer.*",
            )
        ),
        implied(f"{TORCH}.kwargs.foreach {TORCH}.kwargs.fused", "how torch computes it, not what"),
        lacking(f"{TORCH}.kwargs.*", "AdamW is the only optimizer, with lr, weight_decay, betas and eps"),
        by(
            f"{PARTS}.name MODEL.scheduler.name",
            "MODEL.scheduler.name",
            "ConstantLR, CosineAnnealingLR and LinearLR, which is a warm-up where it rises; others are not supported",
            _scheduler,
        ),
        by(
            f"{PARTS}.kwargs.* MODEL.scheduler.kwargs.*",
            "MODEL.scheduler.warmup_steps MODEL.scheduler.min_lr_ratio",
            "in optimizer steps: NeMo-RL counts passes over a step. A decay ends with the run",
            _scheduler_argument,
        ),
        Entry(
            (f"{PARTS}.milestones", "MODEL.scheduler.milestones"),
            "implied",
            "the schedule follows on the warm-up",
            _milestones,
        ),
    )
)

MEGATRON_ENTRIES = (
    by(f"{INNER}.optimizer", "MODEL.optimizer.name", "adam, which is AdamW; others are not supported", _class),
    of_adamw(renamed(f"{INNER}.lr {INNER}.weight_decay", "MODEL.optimizer.*")),
    by(f"{INNER}.adam_beta1 {INNER}.adam_beta2", "MODEL.optimizer.betas", "", _betas),
    renamed(f"{INNER}.adam_eps", "MODEL.optimizer.eps"),
    by(f"{INNER}.min_lr", "MODEL.scheduler.min_lr_ratio", "min_lr / lr; implied for a constant rate", _min_lr),
    lacking(
        f"{INNER}.optimizer_cpu_offload {INNER}.optimizer_offload_fraction {INNER}.overlap_cpu_optimizer_d2h_h2d",
        "the optimizer steps on the GPU; `MODEL.offload: optimizer` parks its moments meanwhile",
    ),
    implied(
        f"{INNER}.bf16 {INNER}.fp16 {INNER}.params_dtype {INNER}.use_distributed_optimizer "
        f"{INNER}.use_precision_aware_optimizer {INNER}.exp_avg_dtype {INNER}.exp_avg_sq_dtype {INNER}.*_dtype",
        "weights and moments are float32, sharded over the data-parallel ranks",
    ),
    implied(f"{INNER}.sgd_momentum", "is for SGD"),
    by("MODEL.megatron_cfg.scheduler.lr_decay_style", "MODEL.scheduler.name", ", ".join(STYLES), _style),
    by(
        "MODEL.megatron_cfg.scheduler.lr_warmup_iters",
        "MODEL.scheduler.warmup_steps",
        "in optimizer steps: NeMo-RL counts passes over a step",
        lambda source, key, value: _warmup(source, value),
    ),
    implied("MODEL.megatron_cfg.scheduler.lr_warmup_init", "a warm-up begins near 0"),
    implied("MODEL.megatron_cfg.scheduler.lr_decay_iters", "a decay ends with the run"),
)

ENTRIES: tuple[Entry, ...] = (*TORCH_ENTRIES, *MEGATRON_ENTRIES)
