"""Rules of data and validation: prompts that hold a question and no answer, sets that are apart and looked at."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.data import ArithmeticData, Gsm8kData, MixtureData, ReasoningGymData, RowsData, Source, own_template
from tandem.config.loaded import Loaded

MEASURED = ("accuracy", "reward", "length", "truncated", "failed")  # by every validation
HELD_OUT = {"arithmetic": "validation", "gsm8k": "test"}


def prompt_template(loaded: Loaded) -> Iterator[str]:
    """The prompt holds the question."""
    own = (f"{key}.prompt_template" for key, source in loaded.config.data.sources() if own_template(source))
    for key in ("data.prompt_template", *own):
        if "{question}" not in loaded.values[key]:
            source = key.removesuffix(".prompt_template")
            yield (
                f"{loaded.at(key)} has no {{question}}, so that every prompt would be the same text: "
                f"put {{question}} where {loaded.at('data.train' if source == 'data' else source)} goes in"
            )


def answer_in_prompt(loaded: Loaded) -> Iterator[str]:
    """The prompt does not hold the answer."""
    for key, source in loaded.config.data.sources():
        if isinstance(source, RowsData) and source.prompt_field == source.answer_field:
            prompt, answer = loaded.at(f"{key}.prompt_field"), loaded.at(f"{key}.answer_field")
            yield f"{prompt} and {answer} are one field: name the two fields of a row"


def validation_split(loaded: Loaded) -> Iterator[str]:
    """Validation does not score what was trained on."""
    splits = {key: split for key, source in loaded.config.data.sources() if (split := split_of(source)) is not None}
    train = [key for key in splits if key.startswith("data.train")]
    for key in splits:
        for trained in train:
            if key not in train and splits[key] == splits[trained]:
                other = "train" if splits[key][1] != "train" else HELD_OUT[splits[key][0]]
                yield (
                    f"{loaded.at(f'{key}.split')} is the stream of {loaded.at(f'{trained}.split')}: "
                    f"set {key}.split={other}"
                )


def split_of(source: Source) -> tuple[str, str] | None:
    """Name and split of a set that has a held-out split beside the one to train on."""
    match source:
        case ArithmeticData():
            return source.name, source.split
        case Gsm8kData(path=None):
            return source.name, source.split
    return None


def same_problems(loaded: Loaded) -> Iterator[str]:
    """Validation has other problems of reasoning-gym than training: problem i of seed s is problem 0 of seed s + i."""
    sources = [(key, one) for key, one in loaded.config.data.sources() if isinstance(one, ReasoningGymData)]
    training = [(key, one) for key, one in sources if key.startswith("data.train")]
    for key, held_out in sources:
        for trained_key, trained in training:
            apart = max(held_out.seed, trained.seed) - min(held_out.seed, trained.seed)
            first = trained if trained.seed <= held_out.seed else held_out
            if key not in dict(training) and set(held_out.tasks) & set(trained.tasks) and apart < first.size:
                yield (
                    f"{loaded.at(f'{key}.seed')} and {loaded.at(f'{trained_key}.seed')} give some of the same problems,"
                    f" for each problem takes one seed: set {key}.seed={trained.seed + trained.size} or more"
                )


def mixture_weights(loaded: Loaded) -> Iterator[str]:
    """Weights are of the sources that there are, and of all of them."""
    train, key = loaded.config.data.train, "data.train.weights"
    if not isinstance(train, MixtureData) or train.weights is None:
        return
    if len(train.sources) == 1:
        yield f"{loaded.at(key)} has no effect with one source alone: take it out, or add a source"
        return
    names = ", ".join(train.sources)
    if unknown := [name for name in train.weights if name not in train.sources]:
        yield f"{loaded.at(key)} names {', '.join(unknown)}, but the sources are {names}: take it out"
    if missing := [name for name in train.sources if name not in train.weights]:
        yield f"{loaded.at(key)} has no weight for {', '.join(missing)}: give one for each of {names}"


def never_validates(loaded: Loaded) -> Iterator[str]:
    """Validation data are looked at."""
    algorithm, section = loaded.config.algorithm, loaded.algorithm
    if loaded.config.data.validation and not (algorithm.val_period or algorithm.val_at_start or algorithm.val_at_end):
        times = ", ".join(loaded.at(f"{section}.{name}") for name in ("val_period", "val_at_start", "val_at_end"))
        yield (
            f"{loaded.at('data.validation')} is never used, with {times}: "
            f"set {section}.val_at_end=true, or remove it (data.validation=null)"
        )


def equal_answers(loaded: Loaded) -> Iterator[str]:
    """Several answers to a validation prompt are drawn, not the same greedy one again."""
    key = f"{loaded.algorithm}.num_val_generations_per_prompt"
    validates = loaded.config.data.validation is not None
    if validates and loaded.values[key] > 1 and not loaded.config.policy.generation.val_temperature:
        yield (
            f"{loaded.at(key)} would write the same answer as often, greedily, with "
            f"{loaded.at('policy.generation.val_temperature')}: set that above 0, or {key}=1"
        )


def validation_metric(loaded: Loaded) -> Iterator[str]:
    """Checkpoints are ranked by a metric that validation measures."""
    key, kind = "checkpointing.metric_name", "val:"
    metric, sets = loaded.values[key], [name for name in loaded.config.data.validation_sets if name]
    if not metric.startswith(kind) or loaded.config.data.validation is None:
        return
    count = loaded.values[f"{loaded.algorithm}.num_val_generations_per_prompt"]
    several = [f"pass@{k}" for k in range(2, count + 1) if k == count or k & (k - 1) == 0]
    known = [*MEASURED, *several, *([f"mean@{count}"] if several else [])]
    name = metric.removeprefix(kind)
    head, _, rest = name.partition("/")
    if head in sets:
        name = rest
    if name not in known and not name.startswith("reward/"):
        of_sets = f", or {kind}SET/X, SET one of {', '.join(sets)}" if sets else ""
        yield f"{loaded.at(key)} is not measured: give {kind}X, X one of {', '.join(known)} or reward/PART{of_sets}"


DATA_RULES = (
    prompt_template,
    answer_in_prompt,
    validation_split,
    same_problems,
    mixture_weights,
    never_validates,
    equal_answers,
    validation_metric,
)
