"""The worker: metrics, refusals, the event loop, disk."""

import asyncio
import logging
import math

import pytest
import torch

from tandem.config.algorithm import MseValueLoss, PolicyLoss
from tandem.config.models import SequencePacking
from tandem.plane.memory import MemoryPlane
from tandem.train.objectives import PolicyObjective, ValueObjective
from tandem.types import Max, Mean, Min, Sum, merge
from tests.train.small_models import (
    actor_backend,
    batch_of,
    critic_backend,
    lengths_of,
    rows,
    settings,
    worker,
)

LENGTHS = lengths_of(6, low=12)
BATCH = batch_of(LENGTHS)


async def plane_with(columns):
    plane = MemoryPlane()
    await plane.put(BATCH.keys, columns)
    return plane


def test_an_update_reports_what_it_did():
    async def run():
        plane = await plane_with(rows(LENGTHS))
        actor = worker(actor_backend(), plane, PolicyObjective(PolicyLoss()), name="actor")
        critic = worker(critic_backend(), plane, ValueObjective(MseValueLoss()), name="critic")
        found = {}
        for model in (actor, critic):
            found |= await model.forward_backward(BATCH, {}) | await model.optim_step(90.0)
            await model.close()
        return found

    metrics = asyncio.run(run())
    kinds = {name: type(metric) for name, metric in metrics.items()}
    actor = {"loss": Mean, "ratio_mean": Mean, "ratio_min": Min, "ratio_max": Max, "clip_fraction": Mean}
    actor |= {"approx_kl": Mean, "entropy": Mean}
    critic = {"loss": Mean, "clip_fraction": Mean, "value_min": Min, "value_max": Max}
    both = {"tokens": Sum, "bytes_read": Sum, "pad_fraction": Mean, "tflops": Mean}
    both |= {"grad_norm": Mean, "lr": Mean, "steps_skipped": Sum}
    wanted = {f"actor/{name}": kind for name, kind in (actor | both).items()}
    wanted |= {f"critic/{name}": kind for name, kind in (critic | both).items()}
    assert kinds == wanted
    assert metrics["actor/tokens"].value == sum(LENGTHS)
    assert (
        metrics["actor/bytes_read"].value == metrics["critic/bytes_read"].value == 21 * sum(LENGTHS)
    )  # own columns only
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    assert 0 < metrics["actor/entropy"].value < math.log(96)


def test_metrics_of_chunks_merge_to_those_of_the_whole():
    async def run(parts):
        plane = await plane_with(rows(LENGTHS))
        actor = worker(actor_backend(), plane, PolicyObjective(PolicyLoss()))
        found = merge(*[await actor.forward_backward(BATCH.pick(part), {}) for part in parts])
        await actor.close()
        return found

    whole, cut = asyncio.run(run([range(6)])), asyncio.run(run([[0, 1], [2], [3, 4, 5]]))
    for name in set(whole) - {"actor/pad_fraction", "actor/tflops"}:
        assert cut[name].value == pytest.approx(whole[name].value, rel=1e-5, abs=1e-7)


def test_the_padding_of_one_batch_does_not_reach_the_next():
    async def pad_fractions(parts, **packing):
        plane = await plane_with(rows(LENGTHS))
        actor = worker(actor_backend(), plane, PolicyObjective(PolicyLoss()), **packing)
        found = [(await actor.forward_backward(BATCH.pick(part), {}))["actor/pad_fraction"] for part in parts]
        await actor.close()
        return found

    short = [0]
    for packing in ({}, {"enabled": False}, {"make_sequence_length_divisible_by": 48}):
        _, after = asyncio.run(pad_fractions([range(6), short], **packing))
        multiple = SequencePacking(**packing).multiple
        slots = -(-LENGTHS[0] // multiple) * multiple
        assert after == Mean(slots - LENGTHS[0], slots), packing


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_refuses_the_step_and_names_its_samples(value, caplog):
    columns = rows(LENGTHS)
    columns["advantages"][3] = torch.where(columns["mask"][3], value, 0.0)

    async def run():
        plane = await plane_with(columns)
        backend = actor_backend(config=settings(max_skipped_optimizer_steps=1))
        actor = worker(backend, plane, PolicyObjective(PolicyLoss()), budget=1)
        before = {name: tensor.clone() for name, tensor in backend.export_weights()}
        learned = await actor.forward_backward(BATCH, {})
        assert all(math.isfinite(metric.value) for metric in learned.values())
        stepped = await actor.optim_step(90.0)
        same = all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())
        good = BATCH.pick([0, 1])
        await actor.forward_backward(good, {})
        healed = await actor.optim_step(30.0)
        await actor.forward_backward(BATCH, {})
        with pytest.raises(RuntimeError, match=r"once more than max_skipped_optimizer_steps .* samples \[3\]"):
            await actor.optim_step(90.0)
        await actor.close()
        return stepped, same, healed

    with caplog.at_level(logging.WARNING):
        stepped, same, healed = asyncio.run(run())
    assert stepped["actor/steps_skipped"].value == 1
    assert "actor/grad_norm" not in stepped
    assert same
    assert healed["actor/steps_skipped"].value == 0
    assert "NaN or Inf in the loss; samples [3]" in caplog.text


def test_a_gradient_that_is_not_finite_names_every_sample_in_it(caplog):
    async def run():
        plane = await plane_with(rows(LENGTHS))
        backend = actor_backend()
        actor = worker(backend, plane, PolicyObjective(PolicyLoss()))
        await actor.forward_backward(BATCH.pick([4, 1]), {})
        next(iter(backend.parameters.values())).grad[0, 0] = math.inf
        found = await actor.optim_step(30.0)
        await actor.close()
        return found

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run())["actor/steps_skipped"].value == 1
    assert "NaN or Inf in the gradient; samples [4, 1]" in caplog.text


def test_the_event_loop_is_free_while_a_model_computes():
    async def run():
        plane = await plane_with(rows(LENGTHS))
        actor = worker(actor_backend(), plane, PolicyObjective(PolicyLoss()), budget=1)
        turns = 0

        async def count():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        await actor.infer(BATCH, "old_logprobs")
        counting.cancel()
        await actor.close()
        return turns

    assert asyncio.run(run()) > 10


def test_a_missing_column_is_a_key_error():
    async def run():
        columns = rows(LENGTHS)
        del columns["advantages"]
        actor = worker(actor_backend(), await plane_with(columns), PolicyObjective(PolicyLoss()))
        with pytest.raises(KeyError, match="advantages"):
            await actor.forward_backward(BATCH, {})
        await actor.close()

    asyncio.run(run())


def test_a_model_without_an_objective_refuses_to_learn():
    async def run():
        reference = worker(actor_backend(), await plane_with(rows(LENGTHS)), None, name="reference")
        with pytest.raises(RuntimeError, match="reference has no objective"):
            await reference.forward_backward(BATCH, {})
        await reference.close()

    asyncio.run(run())


def test_save_and_load_continue_to_the_bit(tmp_path):
    async def update(actor):
        await actor.infer(BATCH, "old_logprobs")
        learned = await actor.forward_backward(BATCH, {})
        return learned | await actor.optim_step(90.0)

    async def run():
        plane = await plane_with(rows(LENGTHS))
        schedule = settings(scheduler={"name": "linear", "warmup_steps": 2})
        actor, other = (worker(actor_backend(config=schedule), plane, PolicyObjective(PolicyLoss())) for _ in range(2))
        await update(actor)
        await update(actor)
        (await actor.snapshot(copy=False))(tmp_path)
        expected = [await update(actor), await update(actor)]
        await other.load(tmp_path)
        assert [await update(other), await update(other)] == expected
        for (name, ours), (_, theirs) in zip(actor.export_weights(), other.export_weights(), strict=True):
            assert torch.equal(ours, theirs), name
        await actor.close()
        await other.close()

    asyncio.run(run())
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
