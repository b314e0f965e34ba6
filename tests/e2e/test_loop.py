"""The real loop on the quickstart model: equal to a plain for-loop, to itself, and to itself resumed, bit for bit."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tandem.config import Config
from tandem.control.steps import rollout_metrics, staleness_metrics
from tandem.fingerprint import fingerprint
from tandem.launch.build import build_controller, build_house
from tandem.launch.local import LocalMachinery
from tandem.metrics.reduce import flatten
from tandem.metrics.timing import Timeline
from tandem.types import Batch, merge
from tests.e2e.runs import Memory, Ran, run, short_config


async def one_chunk(batch: Batch) -> AsyncIterator[Batch]:
    yield batch


def plain_loop(config: Config, run_dir: Path) -> Ran:
    """PPO without controller, buffer or tickets: generate a step, learn it, publish, repeat."""

    async def loop() -> Ran:
        machinery = LocalMachinery(config)
        house = await build_house(config, machinery)
        controller, _ = await build_controller(config, house, run_dir=run_dir, timeline=Timeline(), sinks=[Memory()])
        algorithm, roll_out, sync = controller.algorithm, controller.producer._roll_out, controller._sync
        await sync.publish(0)
        kept = Memory()
        groups_per_step = config.algorithm.num_prompts_per_step
        for step in range(config.algorithm.max_num_steps):
            indexes = range(step * groups_per_step, (step + 1) * groups_per_step)
            groups = [await roll_out(house.train_set.prompt(index), attempt=0) for index in indexes]
            learned = await algorithm.step(one_chunk(Batch.of(groups)), step=step, train_policy=True)
            kept.write(step, flatten(merge(rollout_metrics(groups), staleness_metrics(groups, step), learned)))
            await sync.publish(step + 1)
        weights = {name: fingerprint(worker.export_weights()) for name, worker in machinery.workers.items()}
        await machinery.close()
        return Ran(kept.records, weights)

    return asyncio.run(loop())


def test_lead_0_equals_a_plain_for_loop_bit_for_bit(tmp_path: Path):
    config = short_config()
    ours, plain = run(config, tmp_path / "a"), plain_loop(config, tmp_path / "b")
    assert ours.weights == plain.weights
    for mine, theirs in zip(ours.records, plain.records, strict=True):
        assert theirs.items() <= mine.items()


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_grpo"])
def test_two_runs_with_one_seed_are_bit_equal_and_another_seed_differs(tmp_path: Path, recipe: str):
    configs = [short_config(f"seed={seed}", recipe=recipe) for seed in (1, 1, 2)]
    first, again, other = (run(config, tmp_path / str(i)) for i, config in enumerate(configs))
    assert first == again
    assert first.weights != other.weights


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path):
    config = short_config()
    one = run(config, tmp_path / "one")
    torch.set_num_threads(2)
    assert run(config, tmp_path / "two") == one


def test_results_do_not_depend_on_the_cut_into_micro_batches(tmp_path: Path):
    budgets = [f"{model}.sequence_packing.train_mb_tokens" for model in ("policy", "value")]
    whole = run(short_config(*(f"{budget}=8192" for budget in budgets)), tmp_path / "whole")
    cut = run(short_config(*(f"{budget}=128" for budget in budgets)), tmp_path / "cut")
    for a, b in zip(whole.records, cut.records, strict=True):
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "rollout/reward"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("warmup", [0, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, stop: int, warmup: int):
    changes = (f"ppo.policy_training_start_step={warmup}", "ppo.ppo_epochs=2")
    whole = run(short_config(*changes), tmp_path / "whole")
    run(short_config(*changes), tmp_path / "part")
    for step in range(stop + 1, 4):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / f"step_{step:06d}", ignore_errors=True)
    resumed = run(short_config(*changes), tmp_path / "part", resume=True)
    assert resumed.weights == whole.weights
    assert resumed.records == whole.records[stop:]


def test_the_first_ratio_is_exactly_1(tmp_path: Path):
    config = short_config("policy.train_global_batch_size=8", "policy.generation.temperature=0.7")
    for record in run(config, tmp_path).records:
        assert (record["actor/ratio_min"], record["actor/ratio_max"], record["actor/approx_kl"]) == (1.0, 1.0, 0.0)


def test_async_trains_every_prompt_once_and_stays_within_its_lead(tmp_path: Path):
    ran = run(short_config("async_rl.sampler.max_lookahead_versions=2", "ppo.max_num_steps=6"), tmp_path)
    assert len(ran.records) == 6
    assert max(record["staleness/max"] for record in ran.records) <= 2
    assert ran.records[-1]["run/version"] == 6
