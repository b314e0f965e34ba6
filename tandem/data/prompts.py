"""Prompts by index: `prompt(i)` is a pure function of (seed, i), so that a position is all a checkpoint stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tandem.data.order import Order, Permutation, Weighted
from tandem.data.rows import Message, Row
from tandem.types import Prompt

log = logging.getLogger(__name__)

PLACE = "{question}"
Encode = Callable[[Sequence[Message]], tuple[int, ...]]


class Prompts:
    """The prompts of a run: rows put into `template`, encoded, and dealt in a new order each epoch if `shuffle`.

    With `weights` rows are dealt by the weight of their source, else each comes once an epoch. Every row is encoded
    once here, so that a prompt that is too long is found before the run starts, not in its middle.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        encode: Encode,
        *,
        template: str,
        shuffle: bool,
        seed: int,
        max_prompt_tokens: int,
        on_too_long: Literal["error", "skip"],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        for used in {row.template or template for row in rows} or {template}:
            if PLACE not in used:
                raise ValueError(f"prompt_template={used!r} has no {PLACE}: the model would never see the question")
        if not rows:
            raise ValueError("the data set is empty: it needs at least one prompt")
        self._encode = encode
        self._template = template
        self._rows = self._that_fit(rows, max_prompt_tokens, on_too_long)
        self._order: Order = Permutation(len(self._rows), seed=seed, shuffle=shuffle)
        if weights is not None:
            self._order = Weighted(self._by_source(weights), weights, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        row = self._rows[self._order.at(index)]
        return Prompt(index, row.id, row.question, row.answer, self._tokens(row))

    def _tokens(self, row: Row) -> tuple[int, ...]:
        asked = (row.template or self._template).replace(PLACE, row.question)  # not str.format: templates hold \boxed{}
        try:
            return self._encode((*row.before, Message("user", asked)))
        except ValueError as error:
            raise ValueError(f"prompt {row.shown}: {error}") from error

    def _by_source(self, weights: Mapping[str, float]) -> dict[str, list[int]]:
        """The row numbers of each source."""
        numbers: dict[str, list[int]] = {name: [] for name in weights}
        for number, row in enumerate(self._rows):
            numbers[row.source].append(number)
        if empty := [name for name, own in numbers.items() if not own]:
            raise ValueError(
                f"none of the prompts of data.train.sources.{empty[0]} fits: use shorter ones, or take it out"
            )
        return numbers

    def _that_fit(self, rows: Sequence[Row], limit: int, on_too_long: Literal["error", "skip"]) -> list[Row]:
        lengths = [len(self._tokens(row)) for row in rows]
        fits = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        too_long = [(row, length) for row, length in zip(rows, lengths, strict=True) if length > limit]
        if not too_long:
            return fits
        first, length = too_long[0]
        what = (
            f"{len(too_long)} of {len(rows)} prompts are longer than the {limit} tokens that"
            " policy.max_total_sequence_length - policy.generation.max_new_tokens leaves for a prompt:"
            f" first {first.shown} with {length}, longest {max(length for _, length in too_long)}"
        )
        if on_too_long == "error" or not fits:
            raise ValueError(
                f"{what}. Raise policy.max_total_sequence_length, lower policy.generation.max_new_tokens,"
                + (" or set data.on_too_long=skip" if fits else " or use shorter prompts: none fits")
            )
        log.warning("%s. Skipped, as data.on_too_long=skip says", what)
        return fits
