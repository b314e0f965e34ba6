"""Public data sets by name: where they are, where their rows keep what is wanted, and what their answers look like."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.data import (
    Aime2024Data,
    DapoMath17kData,
    Gsm8kData,
    HubData,
    Math500Data,
    OpenMathInstruct2Data,
    Preset,
)
from tandem.data.rows import BadRow, Fields

GSM8K_MARK = "####"


@dataclass(frozen=True)
class PublicSet:
    """What is known of one. `drop_repeats`: it holds problems several times, and each is wanted once."""

    dataset: str
    split: str
    fields: Fields
    subset: str | None = None
    drop_repeats: bool = False

    def on_hub(self, revision: str | None) -> HubData:
        """The source that reads it."""
        return HubData(name="hub", dataset=self.dataset, subset=self.subset, split=self.split, revision=revision)


def public_set(config: Preset) -> PublicSet:
    """What is known of the data set that this preset names."""
    match config:
        case Gsm8kData():
            fields = Fields("question", "answer", needs_id=False, answer_of=after_mark)
            return PublicSet("openai/gsm8k", config.split, fields, subset="main")
        case DapoMath17kData():
            fields = Fields("prompt", "reward_model.ground_truth", "extra_info.index", needs_id=False)
            return PublicSet("BytedTsinghua-SIA/DAPO-Math-17k", "train", fields, drop_repeats=True)
        case Aime2024Data():
            fields = Fields("problem", "answer", "id", needs_id=False, answer_of=whole_number)
            return PublicSet("HuggingFaceH4/aime_2024", "train", fields)
        case Math500Data():
            return PublicSet("HuggingFaceH4/MATH-500", "test", Fields("problem", "answer", "unique_id", needs_id=False))
        case OpenMathInstruct2Data():
            fields = Fields("problem", "expected_answer", needs_id=False)
            return PublicSet("nvidia/OpenMathInstruct-2", config.split, fields, drop_repeats=True)
    raise AssertionError(f"a preset without its facts: {type(config).__name__}")


def after_mark(answer: str) -> str:
    """`... #### 1,234` -> `1234`: GSM8K writes the worked solution before the mark and the answer after it."""
    _, mark, last = answer.rpartition(GSM8K_MARK)
    if not mark or not last.strip():
        raise BadRow(f"ends in {answer[-40:]!r}; an answer of GSM8K ends with `{GSM8K_MARK}` and a number")
    return last.strip().replace(",", "")


def whole_number(answer: str) -> str:
    """`025` -> `25`: an answer of the AIME is a whole number of up to three digits."""
    if not answer.strip().isdecimal():
        raise BadRow(f"is {answer[-40:]!r}; an answer of the AIME is a whole number")
    return str(int(answer))
