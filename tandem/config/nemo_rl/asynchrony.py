"""The table for `async_rl` and `data_plane` of NeMo-RL's single controller, whose names ours follow."""

from __future__ import annotations

from tandem.config.nemo_rl.entry import (
    Entry,
    Outcome,
    by,
    implied,
    implied_by,
    lacking,
    mapped,
    nothing,
    refused,
    renamed,
    same,
)
from tandem.config.nemo_rl.source import Source
from tandem.config.nemo_rl.surroundings import under_ray
from tandem.config.schema import Plain

SAMPLER, FAILURE = "async_rl.sampler", "async_rl.rollout_failure"
GATED = ("in_order", "ready_first", "weight_fifo")


def sampler_of(source: Source) -> str:
    return source.get(f"{SAMPLER}.name", "in_order")


def _sampler(source: Source, key: str, value: Plain) -> Outcome:
    if value not in (*GATED, "windowed"):
        return refused("a sampler of your own is a function here (`async_rl.sampler: {name: custom, target: ...}`)")
    lead = max(source.get(f"{SAMPLER}.{name}", 0) for name in ("max_lookahead_versions", "max_staleness_versions"))
    in_flight = {"async_rl.weight_update": "in_flight"} if lead else {}
    return mapped({f"{SAMPLER}.name": value, **in_flight}, "running generations go on with new weights" if lead else "")


def _staleness(source: Source, key: str, value: Plain) -> Outcome:
    """`ready_first` discards nothing: its bound is on what is started."""
    name = "max_lookahead_versions" if sampler_of(source) == "ready_first" else "max_staleness_versions"
    return mapped({f"{SAMPLER}.{name}": value})


def _chunk(source: Source, key: str, value: Plain) -> Outcome:
    if value in (None, source.get(f"{source.algorithm}.num_prompts_per_step")):
        return nothing("a step begins when it is whole")
    return mapped({key: value})


def _buffer(source: Source, key: str, value: Plain) -> Outcome:
    if sampler_of(source) != "windowed":
        return nothing("the lead bounds what is started, and so what waits")
    return mapped({f"{SAMPLER}.buffer_capacity_groups": value})


def _stall(source: Source, key: str, value: Plain) -> Outcome:
    return mapped({"async_rl.on_stall": "end" if value == "abort" else "warn"})


def _plane(source: Source, key: str, value: Plain) -> Outcome:
    if not value:
        return nothing("samples wait in the one process, or in a Ray actor")
    if not under_ray(source):
        return nothing("one process keeps its samples in memory")
    return mapped({"data_plane.name": "transfer_queue"}, "needs the extras transferqueue and ray")


def _units(source: Source, key: str, value: Plain) -> Outcome:
    if not under_ray(source):
        return nothing("one process keeps its samples in memory")
    return nothing("null") if value is None else mapped({"data_plane.num_storage_units": value})


ENTRIES: tuple[Entry, ...] = (
    by(f"{SAMPLER}.name", f"{SAMPLER}.name async_rl.weight_update", "in_flight above a lead of 0", _sampler),
    same(
        f"{SAMPLER}.max_lookahead_versions {SAMPLER}.warmup_lookahead_versions {SAMPLER}.sample_freshest_first "
        "async_rl.recompute_kv_cache_after_weight_updates"
    ),
    lacking(f"{SAMPLER}.target", "a function of entries, version and how many: see docs/staleness.md"),
    by(
        f"{SAMPLER}.max_staleness_versions",
        f"{SAMPLER}.max_staleness_versions",
        "`max_lookahead_versions` for ready_first",
        _staleness,
    ),
    by(
        "async_rl.min_groups_for_streaming_train",
        "async_rl.min_groups_for_streaming_train",
        "implied where it is the whole step",
        _chunk,
    ),
    implied("async_rl.max_inflight_prompts", "the lead bounds what is started"),
    by(
        "async_rl.max_buffered_rollouts",
        f"{SAMPLER}.buffer_capacity_groups",
        "of windowed; the others are bound by their lead",
        _buffer,
    ),
    implied("async_rl.diagnostics async_rl.log_full_train_data", "answers are in the run's directory"),
    renamed(
        " ".join(
            f"{FAILURE}.{name}"
            for name in (
                *("max_infra_attempts_per_prompt", "max_data_attempts_per_prompt", "backoff_base_s", "max_backoff_s"),
                *("max_skipped_prompts", "max_consecutive_dropped_prompts"),
            )
        ),
        "failures.*",
    ),
    implied(
        f"{FAILURE}.min_step_batch_fraction {FAILURE}.on_dropped_prompt {FAILURE}.max_replacement_attempts "
        f"{FAILURE}.replacement_reserve_prompts",
        "the next prompt takes a dropped one's place, so that a step is whole",
    ),
    renamed(f"{FAILURE}.native.generation_timeout_s", "policy.generation.timeout_s"),
    renamed(f"{FAILURE}.native.env_timeout_s", "env.score_timeout_s"),
    implied(f"{FAILURE}.nemo_gym.**", "is for NeMo-Gym"),
    renamed("async_rl.stall_watchdog.stall_timeout_s", "async_rl.stall_timeout_s"),
    by("async_rl.stall_watchdog.stall_action", "async_rl.on_stall", "warn, or end for abort", _stall),
    implied("async_rl.stall_watchdog.*", "the watchdog wakes when it is due"),
    implied(
        "async_rl.generation_fleet_health.**",
        "an engine that dies leaves, its requests are written by another; with none left the run saves and ends",
    ),
    implied("async_rl.generation_router.**", "is for NeMo-Gym"),
    by("data_plane.enabled", "data_plane.name", "transfer_queue, where several processes are", _plane),
    lacking("data_plane.backend", "TransferQueue keeps samples in its own storage units", (None, "simple")),
    by("data_plane.simple.num_storage_units data_plane.num_storage_units", "data_plane.num_storage_units", "", _units),
    implied(
        "data_plane.impl data_plane.claim_meta_poll_interval_s data_plane.simple.* data_plane.storage_capacity "
        "data_plane.mooncake_cpu.** data_plane.observability.**",
        "`data_plane.max_bytes` bounds what waits",
    ),
    implied_by(
        "rollout_checkpointing.**",
        "a checkpoint holds what a resumed run needs; unfinished prompts are generated again",
        lambda source, key, value: nothing("unfinished prompts are generated again"),
    ),
    lacking(
        "token_capture.** rollout_recovery.**", "NeMo-Gym is not there", (None, False, {}, "rollout_staging", "sibling")
    ),
)
