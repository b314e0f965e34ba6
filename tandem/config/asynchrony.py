"""The knobs of how generation and training overlap: samplers, weight updates, streaming, failures, the watchdog."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, Fraction, NotNegative, Positive
from tandem.config.section import Section

Versions = Annotated[int, Field(ge=0)]


def ahead(lead: int, warmup: int | None, warmup_steps_left: int) -> int:
    """Steps whose prompts may be in the house: the current one and those that generation may run ahead.

    In critic warm-up the version stands still, so more batches may be banked; the bound shrinks towards the first
    policy step, min(warmup, steps left + lead), such that from there on no sample is older than the normal lead.
    """
    if warmup is None or warmup_steps_left <= 0:
        return lead + 1
    return min(warmup, warmup_steps_left + lead) + 1


class Lookahead(Section):
    """A bound on how many steps of prompts may be in the house."""

    max_lookahead_versions: Versions = 0
    warmup_lookahead_versions: Versions | None = None  # None: max_lookahead_versions

    def tickets(self, groups_per_step: int, warmup_steps_left: int) -> int:
        """Prompts that may have a ticket now."""
        return ahead(self.max_lookahead_versions, self.warmup_lookahead_versions, warmup_steps_left) * groups_per_step

    @property
    def stale(self) -> bool:
        """Whether it may train on samples of an older version."""
        return self.max_lookahead_versions > 0


class InOrder(Lookahead):
    """Steps train on the prompts in their order; generation may run this many versions ahead (0: synchronous)."""

    name: Literal["in_order"] = "in_order"


class ReadyFirst(Lookahead):
    """Whatever has finished first, under the same bound on what is started. Nothing is discarded."""

    name: Literal["ready_first"]


class WeightFifo(Section):
    """The oldest version first; a group older than `max_staleness_versions` is dropped and counted."""

    name: Literal["weight_fifo"]
    max_staleness_versions: Versions = 1
    warmup_lookahead_versions: Versions | None = None  # None: max_staleness_versions

    def tickets(self, groups_per_step: int, warmup_steps_left: int) -> int:
        """Prompts that may have a ticket now."""
        return ahead(self.max_staleness_versions, self.warmup_lookahead_versions, warmup_steps_left) * groups_per_step

    @property
    def stale(self) -> bool:
        return self.max_staleness_versions > 0


class Windowed(Section):
    """Any group of the last versions. Only the buffer's capacity bounds what is started."""

    name: Literal["windowed"]
    buffer_capacity_groups: Count  # prompts in flight, finished or being trained on
    max_staleness_versions: Versions = 1
    sample_freshest_first: bool = False

    def tickets(self, groups_per_step: int, warmup_steps_left: int) -> int:
        return self.buffer_capacity_groups

    @property
    def stale(self) -> bool:
        return self.max_staleness_versions > 0


class Custom(Lookahead):
    """Your own function, `module:name`: (entries, version, want) -> Choice or None; see control/samplers.py."""

    name: Literal["custom"]
    target: str = Field(examples=["my_module:my_sampler"])
    max_lookahead_versions: Versions = 1

    @property
    def stale(self) -> bool:
        """What it takes is its own affair."""
        return True


Sampler = Annotated[InOrder | ReadyFirst | WeightFifo | Windowed | Custom, Field(discriminator="name")]


class AsyncRl(Section):
    """How generation and training overlap."""

    sampler: Sampler = InOrder()
    # What becomes of responses being written. in_flight: they go on with the new weights, from where they stand.
    weight_update: Literal["drain", "in_flight", "abort_and_reissue"] = "drain"
    recompute_kv_cache_after_weight_updates: bool = True  # in_flight
    discard_partial_rollouts: bool = (
        False  # abort_and_reissue: issued from the prompt again, not with the tokens so far
    )
    min_groups_for_streaming_train: Count | None = None  # None: a step begins when it is whole
    min_step_batch_fraction: Fraction = 0.0  # the last step, at the end of the data, needs this much of a whole one
    stall_timeout_s: Positive = 1800.0  # no group finished and no step trained for so long: the run is stuck
    on_stall: Literal["end", "warn"] = "end"

    @property
    def pause(self) -> Literal["drain", "stand", "reissue", "rewrite"]:
        """How engines pause for new weights, in the words of their role."""
        match self.weight_update:
            case "drain":
                return "drain"
            case "in_flight":
                return "stand"
            case "abort_and_reissue":
                return "rewrite" if self.discard_partial_rollouts else "reissue"

    @property
    def mixes_versions(self) -> bool:
        """Whether one response may have tokens of several versions."""
        return self.pause in ("stand", "reissue")


class Failures(Section):
    """What a run survives. Infrastructure: an engine, a timeout. Data: the prompt or its score is at fault."""

    max_infra_attempts_per_prompt: Count = 3
    max_data_attempts_per_prompt: Count = 1
    backoff_base_s: NotNegative = 1.0  # doubles with each attempt
    max_backoff_s: NotNegative = 60.0
    max_skipped_prompts: Annotated[int, Field(ge=0)] = 16  # by data failures, in the whole run
    max_consecutive_dropped_prompts: Annotated[int, Field(ge=0)] = 16  # by infrastructure; any success resets it
