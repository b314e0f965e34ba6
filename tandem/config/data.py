"""The knobs of data: where prompts and their reference answers come from, and how they are put to the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, Positive
from tandem.config.section import Section

NAME = r"^[A-Za-z0-9_-]+$"  # of a source in a mixture and of a validation set: a part of dotted keys and of metrics


class ArithmeticData(Section):
    """The built-in word problems: endless, split into disjoint streams."""

    name: Literal["arithmetic"]
    size: Count = 4096  # prompts of one epoch
    split: Literal["train", "validation"] = "train"


class RowsData(Section):
    """Rows with fields that the recipe names; a dotted name such as `reward_model.ground_truth` goes into objects."""

    name: str
    prompt_field: str = "question"  # a text, or a list of messages
    answer_field: str = "answer"
    id_field: str | None = None  # None: the field `id` where rows have one, else file and line
    prompt_template: str | None = None  # None: data.prompt_template
    drop_repeats: bool = False  # take a row once that comes again with the same prompt and answer
    max_rows: Count | None = None  # take these first ones only


class FileData(RowsData):
    """A local file: JSON lines (.jsonl, .ndjson, .json), .csv or .parquet; or a folder of files of one kind."""

    name: Literal["file"]
    path: Annotated[str, Field(examples=[".../train.jsonl"])]


class HubData(RowsData):
    """A data set that the library `datasets` loads: by its hub name, or a local folder. Needs the extra `datasets`."""

    name: Literal["hub"]
    dataset: Annotated[str, Field(examples=["openai/gsm8k"])]
    subset: str | None = None  # the data set's configuration, as `main` of openai/gsm8k
    split: str = "train"
    revision: str | None = None  # a commit or tag of the data set


class Preset(Section):
    """A public data set by name: its fields and the form of its answers are known. `path`: a local copy of its rows."""

    name: str
    path: str | None = None  # a file or folder, as of `file`; None: the hub
    revision: str | None = None  # a commit or tag of the data set on the hub
    prompt_template: str | None = None  # None: data.prompt_template
    max_rows: Count | None = None  # take these first ones only


class Gsm8kData(Preset):
    """Grade-school word problems, openai/gsm8k. The answer is the number after `####`."""

    name: Literal["gsm8k"]
    split: Literal["train", "test"] = "train"


class DapoMath17kData(Preset):
    """Competition maths with whole numbers as answers, BytedTsinghua-SIA/DAPO-Math-17k.

    Its prompts ask for a last line `Answer: ...` themselves. The set holds every problem 100 times: each is taken once.
    """

    name: Literal["dapo_math_17k"]


class Aime2024Data(Preset):
    """The 30 problems of both AIME 2024 papers, HuggingFaceH4/aime_2024."""

    name: Literal["aime_2024"]


class Math500Data(Preset):
    """500 test problems of MATH, HuggingFaceH4/MATH-500. Answers are LaTeX."""

    name: Literal["math_500"]


class OpenMathInstruct2Data(Preset):
    """Problems made from GSM8K and MATH, nvidia/OpenMathInstruct-2; of several solutions of one, one is taken."""

    name: Literal["openmathinstruct2"]
    split: Literal["train_1M", "train_2M", "train_5M", "train"] = "train_1M"


class ReasoningGymData(Section):
    """Problems that the library reasoning-gym makes, each task in its own settings. Needs the extra `reasoning-gym`."""

    name: Literal["reasoning_gym"]
    tasks: Annotated[tuple[str, ...], Field(min_length=1, examples=["[chain_sum, leg_counting]"])]
    size: Count = 1000  # problems of each task
    seed: Annotated[int, Field(ge=0)] = 0  # of the first problem; the next has the next seed
    prompt_template: str | None = None  # None: data.prompt_template


Source = (
    ArithmeticData
    | FileData
    | HubData
    | Gsm8kData
    | DapoMath17kData
    | Aime2024Data
    | Math500Data
    | OpenMathInstruct2Data
    | ReasoningGymData
)
NamedSources = Annotated[
    dict[Annotated[str, Field(pattern=NAME)], Annotated[Source, Field(discriminator="name")]], Field(min_length=1)
]


class MixtureData(Section):
    """Several sources as one."""

    name: Literal["mixture"]
    sources: NamedSources
    # Prompts of each source in an epoch, as shares. None: every row of every source once.
    weights: dict[str, Positive] | None = None


class ValidationSets(Section):
    """Several validation sets, each with metrics of its own: `val/NAME/accuracy`."""

    name: Literal["sets"]
    sets: NamedSources


class Data(Section):
    """Where prompts come from and how they are put to the model."""

    train: Annotated[Source | MixtureData, Field(discriminator="name")]
    validation: Annotated[Source | ValidationSets, Field(discriminator="name")] | None = None
    shuffle: bool = True
    prompt_template: str = "{question}"
    system_prompt: str | None = None
    on_too_long: Literal["error", "skip"] = "error"  # a prompt that leaves no room for max_new_tokens
    on_bad_row: Literal["error", "skip"] = "error"  # fields that are missing or of a wrong type, an id used twice

    @property
    def train_template(self) -> str:
        """What training prompts are put into; in a mixture, those of sources without a template of their own."""
        own = None if isinstance(self.train, MixtureData) else own_template(self.train)
        return own or self.prompt_template

    @property
    def validation_sets(self) -> dict[str, Source]:
        """Each set by its name; one alone has the name ''."""
        match self.validation:
            case None:
                return {}
            case ValidationSets(sets=sets):
                return sets
            case source:
                return {"": source}

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Every source with its key."""
        if isinstance(self.train, MixtureData):
            yield from ((f"data.train.sources.{name}", source) for name, source in self.train.sources.items())
        else:
            yield "data.train", self.train
        for name, source in self.validation_sets.items():
            yield f"data.validation.sets.{name}" if name else "data.validation", source


def own_template(source: Source) -> str | None:
    """The template that a source has beside data.prompt_template."""
    return None if isinstance(source, ArithmeticData) else source.prompt_template
