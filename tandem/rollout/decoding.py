"""The decode batch: rows that a model writes together, one token a step. Synchronous; owned by the engine's thread.

A row's bits do not depend on its company (float32 on a CPU, tests/rollout/test_batch_invariance.py):
- matrix products see a multiple of 16 rows, prompts are padded to a multiple of 16 tokens;
- attention sees a multiple of 16 positions; what lies beyond a row's length is masked with -inf: exact zeros;
- randomness is a function of (seed, position) alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from tandem.fingerprint import fingerprint
from tandem.roles import Fingerprint, NamedTensors
from tandem.rollout.forward import forward_of
from tandem.rollout.kv_cache import LENGTH_STEP, ROW_STEP, DecodeView, PrefillView, SlotCache, round_up
from tandem.rollout.law import Law, draw
from tandem.rollout.loading import load_weights
from tandem.rollout.rows import Finished, Row, ending
from tandem.types import Metrics, RolloutFailed

PREFILL_TOKENS = 8192  # padded tokens of one prefill forward pass (one prompt may exceed it): bounds its memory


class DecodeBatch:
    """Plays the Decoder: up to `max_rows` rows in slots. Slots that fall free are padding until a row takes them."""

    def __init__(self, model: PreTrainedModel, *, max_rows: int, max_length: int, pad_token_id: int) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._device = model.device
        self.vocabulary: int = config.vocab_size
        self.max_length = max_length
        self._pad = pad_token_id
        self._cache = SlotCache(config.num_hidden_layers, max_rows, max_length)
        with torch.no_grad():
            self._forward = forward_of(model, round_up(max_length, ROW_STEP))
        self._max_rows = max_rows
        self._slots: list[Row | None] = [None] * round_up(max_rows, ROW_STEP)
        # What a new row may copy: the text that one prefill under the present weights cached. Bytes keep their hash.
        self._prefilled: dict[Row, bytes] = {}
        self._width = 0  # slots that take part in a step, a multiple of ROW_STEP
        self._length = 0  # positions in use: the longest row's
        self._is_changed = True  # rows came, or so many went that the batch can narrow: the vectors below are stale
        self._token_N = self._position_N = self._slot_N = self._arange(0)
        self._law = Law.of([], self.vocabulary, self._device)

    def __len__(self) -> int:
        return sum(row is not None for row in self._slots)

    def __iter__(self) -> Iterator[Row]:
        return iter([row for row in self._slots if row is not None])

    @property
    def free(self) -> int:
        """Rows that `admit` may bring."""
        return self._max_rows - len(self)

    @torch.inference_mode()
    def remove(self, row: Row) -> None:
        slot = self._slots.index(row)
        self._cache.wipe(slot)  # what recompute() cached was not yet proven finite by a step
        self._slots[slot] = None
        self._is_changed = True

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Give rows their slots and prefill them: equal prompts once, and none that a running row has."""
        free = [slot for slot, row in enumerate(self._slots) if row is None][: len(rows)]
        self._prefilled = {row: text for row in self if (text := self._prefilled.get(row)) is not None}
        holders = {text: self._slots.index(row) for row, text in self._prefilled.items()}
        for slot, row in zip(free, rows, strict=True):
            self._slots[slot] = row
        self._fill(free, holders)
        self._is_changed = True

    def load_weights(self, weights: NamedTensors) -> None:
        """Copies in place, see loading.load_weights. No new row copies what the old weights cached."""
        load_weights(self._model, weights)
        self._prefilled.clear()

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._model.named_parameters())

    def close(self) -> None:
        """Nothing but memory, which goes with this object."""

    def sleep(self, *, keep_weights: bool) -> Metrics:
        """Nothing leaves: the cache grows with the rows that run, and weights stay where they are."""
        return {}

    def wake(self) -> Metrics:
        """Nothing had left."""
        return {}

    def wake_cache(self) -> None:
        """It was empty."""

    @torch.inference_mode()
    def recompute(self) -> None:
        """Cache every row's text anew, in the way of a row that comes with this text as its prompt: to the last bit."""
        self._fill([slot for slot, row in enumerate(self._slots) if row is not None], {})

    def _fill(self, slots: Sequence[int], holders: dict[bytes, int]) -> None:
        """Cache the texts of these slots' rows: equal ones once, and those of `holders` (text -> slot) by copying."""
        fresh: dict[int, list[tuple[int, list[int]]]] = {}  # by padded length
        copies: dict[int, list[tuple[int, int]]] = {}
        for slot in slots:
            row = self._slots[slot]
            assert row is not None
            text = row.cached_text()
            cached = self._prefilled[row] = array("q", text).tobytes()
            padded = round_up(len(text), ROW_STEP)
            if cached in holders:
                copies.setdefault(padded, []).append((holders[cached], slot))
            else:
                holders[cached] = slot
                fresh.setdefault(padded, []).append((slot, text))
        self._cache.reserve(max(slots, default=-1) + 1, max(fresh, default=0))
        for padded, entries in fresh.items():
            self._prefill(padded, entries)
        for padded, pairs in copies.items():
            self._cache.copy([source for source, _ in pairs], [target for _, target in pairs], padded)

    def _prefill(self, padded: int, entries: Sequence[tuple[int, list[int]]]) -> None:
        """Forward passes over texts of one padded length, each into its slot."""
        if padded == 0:
            return
        positions = self._arange(padded)
        mask = torch.full((padded, padded), -torch.inf, dtype=self._model.dtype, device=self._device).triu(1)
        at_once = max(1, PREFILL_TOKENS // padded)
        for start in range(0, len(entries), at_once):
            part = entries[start : start + at_once]
            texts = [[*text, *[self._pad] * (padded - len(text))] for _, text in part]
            slots = torch.tensor([slot for slot, _ in part], device=self._device)
            view = PrefillView(self._cache, slots)
            tokens = torch.tensor(texts, device=self._device)
            self._forward(tokens, positions.expand(len(part), -1), mask[None, None], view)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Write one token in every row. Rows that end leave."""
        if self._is_changed:
            self._arrange()
        length = round_up(self._length, LENGTH_STEP)
        self._cache.reserve(self._width, length)
        mask_NT = torch.where(self._arange(length) <= self._position_N[:, None], 0.0, -torch.inf).to(self._model.dtype)
        view = DecodeView(self._cache, self._slot_N, self._position_N, length)
        logits_NV = self._forward(self._token_N[:, None], self._position_N[:, None], mask_NT[:, None, None], view)
        self._position_N = self._position_N + 1
        self._length += 1
        self._token_N, logprob_N = draw(logits_NV, self._law, self._position_N)
        # One transfer a step: float64 holds token ids and float32 log-probs exactly.
        written = torch.stack((self._token_N.double(), logprob_N.double())).cpu()
        return self._take(written[0].long().tolist(), written[1].tolist())

    def _arrange(self) -> None:
        """Narrow the batch if rows went, and lay the running rows out as vectors."""
        self._length = self._longest()
        self._compact()
        rows = self._slots[: self._width]
        tokens = [self._pad if row is None else row.next_input() for row in rows]
        self._token_N = torch.tensor(tokens, device=self._device)
        self._position_N = torch.tensor([0 if row is None else row.position() for row in rows], device=self._device)
        self._slot_N = self._arange(self._width)
        self._law = Law.of([None if row is None else row.sampling for row in rows], self.vocabulary, self._device)
        self._is_changed = False

    def _compact(self) -> None:
        """Move rows from the end into free slots when that makes the batch narrower by a whole step."""
        width = round_up(len(self), ROW_STEP)
        strays = [slot for slot in range(width, len(self._slots)) if self._slots[slot] is not None]
        free = [slot for slot in range(width) if self._slots[slot] is None][: len(strays)]
        if strays:
            self._cache.copy(strays, free, self._length)
        for source, target in zip(strays, free, strict=True):
            self._slots[target], self._slots[source] = self._slots[source], None
        self._width = width

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Finished]:
        finished: list[Finished] = []
        freed: list[int] = []
        for slot, row in enumerate(self._slots[: self._width]):
            if row is None:
                continue
            row.tokens.append(tokens[slot])
            row.logprobs.append(logprobs[slot])
            outcome = ending(row)
            if outcome is None:
                continue
            if isinstance(outcome, RolloutFailed):
                self._cache.wipe(slot)
            self._slots[slot] = None
            freed.append(slot)
            finished.append((row, outcome))
        if freed:
            # Padding from here on: neither its position nor its length may outgrow the cache.
            self._position_N[freed] = 0
            self._length = self._longest()
            self._is_changed |= round_up(len(self), ROW_STEP) < self._width
        return finished

    def _longest(self) -> int:
        return max((row.position() + 1 for row in self), default=0)

    def _arange(self, length: int) -> torch.Tensor:
        return torch.arange(length, device=self._device)
