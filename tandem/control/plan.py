"""The sizes of a run, derived from its config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.config.asynchrony import AsyncRl, Failures


@dataclass(frozen=True)
class Plan:
    """What the controller counts against."""

    groups_per_step: int
    max_num_steps: int
    max_num_prompts: int
    policy_training_start_step: int
    async_rl: AsyncRl
    failures: Failures
    dynamic_sampling_max_gen_batches: int
    val_period: int
    val_at_start: bool
    val_at_end: bool
    save_period: int
    save_at_end: bool

    def trains_policy(self, step: int) -> bool:
        return step >= self.policy_training_start_step

    def tickets(self, step: int) -> int:
        """Prompts that may be in the house at this step; never more than the steps that are left can use."""
        allowed = self.async_rl.sampler.tickets(self.groups_per_step, self.policy_training_start_step - step)
        return min(allowed, (self.max_num_steps - step) * self.groups_per_step)

    @property
    def groups_per_chunk(self) -> int:
        """Groups that training takes at one time: the whole step, or less when it streams."""
        return self.async_rl.min_groups_for_streaming_train or self.groups_per_step

    @property
    def min_groups(self) -> int:
        """Groups that a step needs at the end of the data."""
        return max(1, math.ceil(self.async_rl.min_step_batch_fraction * self.groups_per_step))
