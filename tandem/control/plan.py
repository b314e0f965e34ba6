"""The sizes of a run, and how far generation may run ahead at each step."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.algorithm import InOrder


@dataclass(frozen=True)
class Plan:
    """The sizes of a run, derived from the config."""

    groups_per_step: int
    max_num_steps: int
    max_num_prompts: int
    policy_training_start_step: int
    sampler: InOrder
    max_rollout_failures: int
    dynamic_sampling_max_gen_batches: int
    val_period: int
    val_at_start: bool
    val_at_end: bool
    save_period: int
    save_at_end: bool

    def trains_policy(self, step: int) -> bool:
        return step >= self.policy_training_start_step

    def lead(self, step: int) -> int:
        """How many steps generation may run ahead of this one.

        In warm-up the version stands still, so batches may be banked; the bound shrinks towards the first policy
        step such that from there on no sample is older than the normal lead.
        """
        lead, start, warmup = (
            self.sampler.max_lookahead_versions,
            self.policy_training_start_step,
            self.sampler.warmup_lookahead_versions,
        )
        if step >= start or warmup is None:
            return lead
        return min(warmup, start - step + lead)

    def tickets(self, step: int) -> int:
        """Prompts that may be in the house at this step; never more than the steps that are left can use."""
        return min(self.lead(step) + 1, self.max_num_steps - step) * self.groups_per_step
