"""Prompts by index: `prompt(i)` is a pure function of (seed, i), so that a position is all a checkpoint stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from tandem.config.run import ArithmeticData, DataSource, JsonlData
from tandem.data.arithmetic import problem
from tandem.data.jsonl import Row, read_jsonl
from tandem.types import Prompt

log = logging.getLogger(__name__)

PLACE = "{question}"
KEPT_EPOCHS = 2  # a run that generates ahead reads from the end of one epoch and the start of the next


def rows_of(source: DataSource, seed: int) -> Sequence[Row]:
    """The rows of a source. Only the built-in problems depend on the seed."""
    match source:
        case ArithmeticData():
            drawn = [problem(seed, index, source.split) for index in range(source.size)]
            return [Row(f"{source.split}:{index}", one.question, str(one.answer)) for index, one in enumerate(drawn)]
        case JsonlData():
            return read_jsonl(source)


class Prompts:
    """The prompts of a run: rows put into `template`, encoded, and dealt in a new order each epoch if `shuffle`.

    Every row is encoded once here, so that a prompt that is too long is found before the run starts, not in its middle.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        encode: Callable[[str], tuple[int, ...]],
        *,
        template: str,
        shuffle: bool,
        seed: int,
        max_prompt_tokens: int,
        on_too_long: Literal["error", "skip"],
    ) -> None:
        if PLACE not in template:
            raise ValueError(
                f"data.prompt_template={template!r} has no {PLACE}: the model would never see the question"
            )
        if not rows:
            raise ValueError("the data set is empty: it needs at least one prompt")
        self._encode = encode
        self._template = template
        self._shuffle = shuffle
        self._seed = seed
        self._orders: dict[int, list[int]] = {}
        self._rows = self._that_fit(rows, max_prompt_tokens, on_too_long)

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._rows))
        row = self._rows[self._order(epoch)[place] if self._shuffle else place]
        return Prompt(index, row.id, row.question, row.answer, self._tokens(row))

    def _tokens(self, row: Row) -> tuple[int, ...]:
        return self._encode(self._template.replace(PLACE, row.question))  # not str.format: templates hold \boxed{}

    def _order(self, epoch: int) -> list[int]:
        """The permutation of an epoch. Seeding with a text is stable across Python versions and machines."""
        if epoch not in self._orders:
            order = list(range(len(self._rows)))
            Random(f"{self._seed}/{epoch}").shuffle(order)
            while len(self._orders) >= KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return self._orders[epoch]

    def _that_fit(self, rows: Sequence[Row], limit: int, on_too_long: Literal["error", "skip"]) -> list[Row]:
        lengths = [len(self._tokens(row)) for row in rows]
        fits = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        too_long = [(row.id, length) for row, length in zip(rows, lengths, strict=True) if length > limit]
        if not too_long:
            return fits
        first, length = too_long[0]
        what = (
            f"{len(too_long)} of {len(rows)} prompts are longer than the {limit} tokens that"
            " policy.max_total_sequence_length - policy.generation.max_new_tokens leaves for a prompt:"
            f" first {first!r} with {length}, longest {max(length for _, length in too_long)}"
        )
        if on_too_long == "error" or not fits:
            raise ValueError(
                f"{what}. Raise policy.max_total_sequence_length, lower policy.generation.max_new_tokens,"
                + (" or set data.on_too_long=skip" if fits else " or use shorter prompts: none fits")
            )
        log.warning("%s. Skipped, as data.on_too_long=skip says", what)
        return fits
