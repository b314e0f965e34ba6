"""Streaming and the samplers on the real house."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import run, short_config

ONE_UPDATE = ("policy.train_global_batch_size=8",)


@pytest.mark.parametrize("changes", [ONE_UPDATE, ()], ids=["one update", "two mini-batches"])
def test_a_streaming_step_gives_the_numbers_of_a_whole_one(tmp_path: Path, changes: tuple[str, ...]):
    whole = run(short_config(*changes), tmp_path / "whole")
    streamed = run(short_config(*changes, "async_rl.min_groups_for_streaming_train=1"), tmp_path / "streamed")
    for a, b in zip(whole.records, streamed.records, strict=True):
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "critic/explained_variance"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    "sampler",
    [
        "{name: ready_first, max_lookahead_versions: 1}",
        "{name: weight_fifo, max_staleness_versions: 1}",
        "{name: windowed, buffer_capacity_groups: 12, max_staleness_versions: 1, sample_freshest_first: true}",
        "{name: custom, target: 'tests.control.test_samplers:take_newest_prompt'}",
    ],
)
@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_grpo"])
def test_every_sampler_trains_with_and_without_a_critic(tmp_path: Path, sampler: str, recipe: str):
    ran = run(short_config(f"async_rl.sampler={sampler}", recipe=recipe), tmp_path)
    assert [record["rollout/samples"] for record in ran.records] == [8, 8, 8]
    assert ran.records[-1]["run/version"] == 3


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_weights_may_change_while_a_response_is_written(tmp_path: Path, recompute: str):
    changes = (
        "async_rl.sampler.max_lookahead_versions=2",
        "async_rl.weight_update=in_flight",
        f"async_rl.recompute_kv_cache_after_weight_updates={recompute}",
        "ppo.max_num_steps=5",
    )
    ran = run(short_config(*changes), tmp_path)
    assert [record["rollout/samples"] for record in ran.records] == [8] * 5
    assert max(record["staleness/max"] for record in ran.records) <= 2


@pytest.mark.parametrize("discard", ["false", "true"])
def test_responses_may_be_aborted_for_new_weights_and_issued_again(tmp_path: Path, discard: str):
    """All 64 samples may be written from the start, one after the other: at most syncs one is being written."""
    changes = (
        "async_rl.sampler={name: windowed, buffer_capacity_groups: 32, max_staleness_versions: 8}",
        "async_rl.weight_update=abort_and_reissue",
        f"async_rl.discard_partial_rollouts={discard}",
        "policy.generation.engine.max_concurrent_samples=1",
        "ppo.max_num_steps=8",
    )
    ran = run(short_config(*changes), tmp_path)
    assert [record["rollout/samples"] for record in ran.records] == [8] * 8
    tokens = "weights/discarded_tokens" if discard == "true" else "weights/kept_tokens"
    assert all(record[tokens] >= 0 for record in ran.records)
    assert sum(record["weights/reissued_requests"] for record in ran.records) > 0
