"""The slot cache: keys and values of every running row in one buffer, and the two ways a model writes to it.

A row's state lives at positions 0..len-1 of its slot. `PrefillView` and `DecodeView` are what the model is given as its
transformers cache: they answer `update`, the one method that attention calls when the mask is already four-dimensional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LENGTH_STEP = 16  # attention sees a multiple of this: one order of summation (tests/rollout/test_attention.py)
ROW_STEP = 16  # rows of a decode batch: MKL's float32 products are bit-equal a row for every multiple of 16


class SlotCache:
    """One tensor [layers, key or value, slots, heads, positions, head size], allocated at first use, grown in steps.

    Never uninitialised and never NaN: masked positions are multiplied by exact zeros, which needs finite numbers.
    """

    def __init__(self, layers: int, max_slots: int, max_length: int) -> None:
        self._layers = layers
        self._max_slots = round_up(max_slots, ROW_STEP)
        self._max_length = round_up(max_length, LENGTH_STEP)
        self._slots = 0
        self._length = 0
        self._state: torch.Tensor | None = None
        self._by_layer: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots and positions; doubles, up to the bounds, so that growing is rare."""
        if slots > self._max_slots or length > self._max_length:
            raise RuntimeError(f"{slots} slots x {length} positions, bounds {self._max_slots} x {self._max_length}")
        if slots <= self._slots and length <= self._length:
            return
        if slots > self._slots:
            self._slots = min(self._max_slots, max(round_up(slots, ROW_STEP), 2 * self._slots))
        if length > self._length:
            self._length = min(self._max_length, max(round_up(length, LENGTH_STEP), 2 * self._length))
        if self._state is not None:
            self._allocate(self._state.shape[3], self._state.shape[5], self._state)

    def _allocate(self, heads: int, size: int, like: torch.Tensor) -> None:
        old = self._state
        self._state = like.new_zeros(self._layers, 2, self._slots, heads, self._length, size)
        if old is not None:
            self._state[:, :, : old.shape[2], :, : old.shape[4]] = old
        self._by_layer = [(layer[0], layer[1]) for layer in self._state]

    def layer(self, index: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, heads, positions, head size]; the first keys seen say shape and type."""
        if self._state is None:
            self._allocate(keys.shape[1], keys.shape[3], keys)
        return self._by_layer[index]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first positions of slots to other slots."""
        if self._state is None:
            return
        source = torch.tensor(sources, device=self._state.device)
        target = torch.tensor(targets, device=self._state.device)
        self._state[:, :, target, :, :length] = self._state[:, :, source, :, :length]

    def wipe(self, slot: int) -> None:
        """Forget a slot that holds NaN: its next owner must never meet it."""
        if self._state is not None:
            self._state[:, :, slot] = 0


@dataclass(frozen=True)
class PrefillView:
    """Whole prompts from position 0: attention sees only them, the slots take a copy."""

    cache: SlotCache
    slots: torch.Tensor  # [prompts]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *ignored: object, **also_ignored: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cached_keys, cached_values = self.cache.layer(layer_idx, keys)
        cached_keys[self.slots, :, : keys.shape[2]] = keys
        cached_values[self.slots, :, : keys.shape[2]] = values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class DecodeView:
    """One token in each of the first slots, at its own position: attention sees the first `length` positions."""

    cache: SlotCache
    slots: torch.Tensor  # [N]: 0, 1, ..., N - 1
    positions: torch.Tensor  # [N]
    length: int

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *ignored: object, **also_ignored: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cached_keys, cached_values = self.cache.layer(layer_idx, keys)
        cached_keys[self.slots, :, self.positions] = keys[:, :, 0]
        cached_values[self.slots, :, self.positions] = values[:, :, 0]
        count = keys.shape[0]
        return cached_keys[:count, :, : self.length], cached_values[:count, :, : self.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def round_up(number: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step
